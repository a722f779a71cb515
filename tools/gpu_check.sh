#!/usr/bin/env bash
# Everything that only a GPU can show, in one call of at most nine minutes.
usage="usage: tools/gpu_check.sh [-d cuda|emu|cpu] [-o DIR] [-t SECONDS] [-p]
  -d  device (default cuda; the others try this script, not the kernels' speed)
  -o  where everything is kept (default \$OUT, else build/gpu-check)
  -t  seconds for all of it (default 530)
  -p  only packs the programs and the libraries that they need into build/gpu-pack.tar.gz: for a machine on which they
      cannot be built; this script takes them from there when they were built from the sources that are there
Stages: device, build, op tests, the whole model bitwise, baselines of PyTorch, the goals of tools/bench/goals.json,
tokens a second with exact linear layers and with --exact=off, one profile of the three worst ops.  A stage that fails or
runs out of time is noted and the next one runs.  What there is so far is always in DIR: log.txt, summary.json, table.md.
Commit summary.json as tools/bench/results/NAME.json."
set -uo pipefail
cd "$(dirname "$0")/.."
command="tools/gpu_check.sh $*"
device=cuda dir=${OUT:-build/gpu-check} seconds=530 pack=build/gpu-pack.tar.gz only_pack=""
while getopts "d:o:t:ph" option; do
  case $option in
    d) device=$OPTARG ;;
    o) dir=$OPTARG ;;
    t) seconds=$OPTARG ;;
    p) only_pack=1 ;;
    *) echo "$usage"; exit $([ "$option" = h ] && echo 0 || echo 2) ;;
  esac
done

sources() { find Makefile src cuda model data tokenizer tests -type f | LC_ALL=C sort | xargs cat | sha256sum; }

# ---- programs to carry
if [ -n "$only_pack" ]; then
  set -e
  make cuda cuda-tests
  folder=build/gpu-pack
  rm -rf $folder && mkdir -p $folder/lib $folder/bin
  for program in pare pare_cuda_tests; do
    strip -o "$folder/bin/$program" "build/cuda/$program"
    # What every machine with a compiler has stays out: the C and C++ libraries.
    ldd "build/cuda/$program" | awk '$3 ~ /^\// && $1 !~ /^lib(c|m|dl|pthread|rt|resolv|gcc_s|stdc\+\+)\.so/ {print $3}' |
      xargs -r -I{} cp -uL {} $folder/lib/
    printf '#!/bin/sh\nhere=$(dirname "$0")\nLD_LIBRARY_PATH=$here/lib:$LD_LIBRARY_PATH exec "$here/bin/%s" "$@"\n' \
      "$program" >"$folder/$program"
    chmod +x "$folder/$program"
  done
  sources >$folder/sources
  echo "$(git rev-parse HEAD)$(git diff --quiet HEAD || echo ' and changes')" >$folder/commit
  tar -C build -czf $pack gpu-pack
  rm -rf $folder
  ls -l $pack
  exit 0
fi

# ---- stages
case $device in
  cuda) pare=build/cuda/pare targets="cuda cuda-tests" ;;
  emu) pare=build/emu/pare targets="emu" ;;
  cpu) pare=build/pare targets="all" ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
tests=build/cuda/pare_cuda_tests
mkdir -p "$dir" && rm -f "$dir"/{log.txt,facts.tsv,stages.tsv,rows.json,baselines.json,summary.json,table.md,exact.txt,ncu.txt}
scratch=$(mktemp -d)
start=$SECONDS failed=0
left() { echo $((seconds - (SECONDS - start))); }
fact() { printf '%s\t%s\n' "$1" "$2" >>"$dir/facts.tsv"; }
report() { python3 tools/bench/gpu.py summary "$dir" 2>>"$dir/log.txt"; }
finish() {
  report
  rm -rf "$scratch"
  [ -e "$dir/table.md" ] && cat "$dir/table.md"
}
trap finish EXIT
trap 'exit 143' TERM INT

# stage NAME LIMIT COMMAND...: its output in log.txt, what became of it in stages.tsv.
stage() {
  local name=$1 limit=$2 begin=$SECONDS rc result
  shift 2
  [ "$(left)" -lt "$limit" ] && limit=$(left)
  if [ "$limit" -lt 5 ]; then
    printf '%s\t%s\t%s\n' "$name" "no time was left" 0 >>"$dir/stages.tsv"
    failed=1
    return 1
  fi
  printf '\n==== %s: %s\n' "$name" "$*" >>"$dir/log.txt"
  # Its own shell, so that functions can be stages; timeout ends all that it started.
  timeout -k 5 "$limit" bash -c "$functions"'; "$@"' stage "$@" >>"$dir/log.txt" 2>&1 </dev/null
  rc=$?
  case $rc in
    0) result=passed ;;
    3) result="not possible here" ;;
    124 | 137) result="stopped after $limit s" ;;
    *) result="failed ($rc)" ;;
  esac
  [ "$rc" = 0 ] || [ "$rc" = 3 ] || failed=1
  printf '%s\t%s\t%s\n' "$name" "$result" $((SECONDS - begin)) >>"$dir/stages.tsv"
  echo "gpu_check: $name: $result, $((SECONDS - begin)) s; $(left) s left"
  report
  return $rc
}

the_device() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu \
    --format=csv
}

# Three steps of a small model with random weights: sampler and learner have the same bits, and so have two runs.
whole_model() {
  local i name=$1
  shift
  for i in 1 2; do
    rm -rf "$scratch/$name-$i"
    "$pare" train "$@" --device "$device" model.path= model.config=data/presets/tiny-ssa.json trainer.test_freq=0 \
      trainer.val_before_train=false trainer.save_freq=0 algorithm.adv_filter_threshold=0 \
      actor.entropy_coeff=0.01 $small --out "$scratch/$name-$i" --force || return 1
  done
  "$pare" compare "$scratch/$name-1" "$scratch/$name-2" | tee "$scratch/$name.txt"
  grep -q "have the same log-probs, bit for bit, in all" "$scratch/$name.txt" || { echo "two runs differ"; return 1; }
  awk '/^log-probs checked/ {checked = $3 + 0 > 0}
       /^of these different/ {same = ($4 == "0" && $5 == "0")}
       END {if (!checked) print "no log-prob was checked"; if (!same) print "sampler and learner differ"
            exit !(checked && same)}' "$scratch/$name.txt"
}

# Rollout and learner with exact linear layers and with those of cuBLASLt, tokens a second: a model of some width with
# random weights, the medians of all steps but the first.
exact_and_fast() {
  local exact width=1024 ffn=3072 layers=8 vocab=32000 steps="trainer.total_training_steps=5 data.train_batch_size=16 rollout.n=8"
  [ "$device" = cuda ] || { width=64 ffn=96 layers=2 vocab=48 steps=$small; }
  cat >"$scratch/wide.json" <<END
{"model_type": "qwen3", "hidden_size": $width, "intermediate_size": $ffn, "num_hidden_layers": $layers,
 "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": $((width / 8)), "vocab_size": $vocab,
 "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "eos_token_id": 2}
END
  for exact in on off; do
    env "$cublas" "$pare" train quickstart --device "$device" --exact=$exact model.path= model.config="$scratch/wide.json" \
      trainer.test_freq=0 trainer.val_before_train=false trainer.save_freq=0 algorithm.adv_filter_threshold=0 \
      actor.entropy_coeff=0.01 model.init=fan_in $steps --out "$scratch/exact-$exact" --force || return 1
  done
  python3 - "$scratch"/exact-{on,off} >"$dir/exact.txt" <<'END' || return 1
import json, statistics, sys
for path in sys.argv[1:]:
    steps = [json.loads(line) for line in open(path + "/metrics.jsonl")]
    rate = lambda tokens, time: statistics.median(s[tokens] / s[time] for s in steps[1:] or steps)
    differ, checked = (sum(s.get("exact/" + name) or 0 for s in steps) for name in ("mismatch_tokens", "checked_tokens"))
    print(f"{path.rsplit('/', 1)[1]}: rollout {rate('tokens/generated', 'timing_s/gen'):.0f} tokens/s, learner "
          f"{rate('tokens/trained', 'timing_s/update_actor'):.0f} tokens/s; {differ} of {checked} checked tokens differ")
END
  cat "$dir/exact.txt"
}

baselines() { tools/bench/torch_baselines.py --out "$dir/baselines.json" $(tools/bench/gpu.py baselines); }

profile() {
  command -v ncu || { echo "no ncu here"; return 3; }
  tools/bench/gpu.py worst "$dir" | while read -r op shape; do
    env "$cublas" "$pare" bench --device cuda --op "$op" --shape "$shape" --json >"$scratch/bench.json"
    echo "$op $shape"
    timeout 40 tools/ncu.sh -r "$op" -b "$scratch/bench.json" -o "$scratch/ncu.csv" \
      "$pare" bench --device cuda --op "$op" --shape "$shape"
    echo
  done | tee -a "$dir/ncu.txt"
  grep -q launches "$dir/ncu.txt"
}

# ---- the run
fact date "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
fact command "$command"
fact host "$(uname -srm), $(nproc) cores"
fact nvcc "$(nvcc --version 2>/dev/null | sed -n 's/.*release //p')"
if [ "$device" = cuda ]; then
  if ! command -v nvidia-smi >/dev/null; then
    gpu="there is no nvidia-smi"
  elif gpu=$(timeout 30 nvidia-smi --query-gpu=name --format=csv,noheader 2>&1) && [ -n "$gpu" ]; then
    fact gpu "$gpu"
    fact driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader)"
    gpu=""
  else
    gpu="nvidia-smi says: ${gpu:-nothing}"
  fi
  if [ -n "$gpu" ]; then
    echo "gpu_check: no GPU: $gpu" >&2
    rm -rf "$scratch"
    trap - EXIT
    exit 1
  fi
fi

small="trainer.total_training_steps=3"
[ "$device" = cuda ] || small="trainer.total_training_steps=1 data.train_batch_size=2 rollout.n=2 data.max_response_length=48"
if [ "$device" = cuda ] && [ -e $pack ] && tar -C "$scratch" -xzf $pack; then
  unpacked=$scratch/gpu-pack
  if [ "$(cat "$unpacked/sources")" != "$(sources)" ]; then
    echo "gpu_check: $pack is of other sources: left alone"
  elif "$unpacked/pare" --help >/dev/null; then
    pare=$unpacked/pare tests=$unpacked/pare_cuda_tests targets="" commit="$(cat "$unpacked/commit"), programs of $pack"
  fi
fi
if [ -n "$targets" ]; then
  commit=$(git rev-parse HEAD 2>/dev/null) && { git diff --quiet HEAD || commit+=" and changes"; }
fi
fact commit "$commit"
# cuBLAS, for the ceiling, lies in the toolkit or came with PyTorch; PyTorch itself must not see the other one.
cublas=LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64:$(python3 -c '
import glob, nvidia
print(":".join(lib for place in nvidia.__path__ for lib in glob.glob(place + "/*/lib")))' 2>/dev/null)
export pare device dir scratch small cublas
functions=$(declare -f the_device whole_model exact_and_fast baselines profile)

[ "$device" = cuda ] && stage device 30 the_device
[ -n "$targets" ] && stage build 240 make JOBS="$(nproc)" ${ARCH:+ARCH="$ARCH"} $targets
[ -x "$pare" ] || { echo "gpu_check: there is no $pare: see build in $dir/log.txt" >&2; exit 1; }
[ "$device" = cuda ] && stage "op tests" 120 "$tests" --gtest_brief=1
# What matters most comes first: the time may run out.
stage "whole model" 60 whole_model dense quickstart
[ "$device" = cuda ] && stage baselines 100 baselines
goal_seconds=$(($(left) - 60 < 210 ? $(left) - 60 : 210))
[ "$device" = cuda ] || goal_seconds=40
stage goals $((goal_seconds + 10)) env "$cublas" tools/bench/gpu.py rows "$dir" --pare "$pare" --device "$device" \
  --seconds $goal_seconds
[ "$device" = cpu ] || stage "exact and fast" 60 exact_and_fast
replayed="learner.attention=replay"
stage "whole model, f32" 30 whole_model f32 quickstart model.dtype=f32
stage "whole model, R-KV" 30 whole_model rkv quickstart-rkv $replayed
stage "whole model, Quest" 30 whole_model quest quickstart-quest $replayed
[ "$device" = cuda ] && stage profile 100 profile
exit $failed
