#!/usr/bin/env bash
# Checks that need a machine with several GPUs, in at most nine minutes.
usage="usage: tools/node_check.sh [-d cuda|emu] [-o DIR] [-b BUILD] [-m MACHINE] [-n]
  machine         GPUs, links, limits of this shell, NCCL: what ranks meet
  ranks connect   two ranks, then all: by which way, and how much memory NCCL takes
  links           all-to-all and all-gather over what the link can do
  bits of N       the same run on 1, 2, 4 and 8 ranks: certificates and the model's file
  0.5B            a model of several pieces, on 1 rank, then on all, saved and resumed: certificates, MB/s
  1.5B and 7B     steps of 256 responses, random weights: seconds against \`pare plan\`, the share of communication
  killed, frozen  a rank that dies or stops: seconds until all are gone
  -d  device (default cuda; emu rehearses this script on two ranks and sizes that say nothing)
  -o  folder of what comes out: log.txt, summary.json, table.md (default \$OUT, else build/node-check)
  -b  folder of the program, which is BUILD/cuda/pare (default build)
  -m  machine that is planned for: one of data/machines, or a file (default: by the name of the GPU).  Of a file that \`pare
      bench --device cuda --machine FILE\` wrote here the seconds are measured; it needs a line \`link\` more
  -n  lists the stages and their limits in seconds, and runs none
Ranks are the GPUs that there are, 8 at most, a power of two; the program starts them itself.  Each stage is a process with
a limit of its own: one that fails or hangs is noted and the next one runs.  What there is so far is always in DIR.  Exit
code 0: every stage passed, or cannot run on this machine.
PARE_CHECK_FAIL, PARE_CHECK_HANG: patterns of names of stages that are to fail or hang, to see what follows."
set -uo pipefail
cd "$(dirname "$0")/.." && . tools/stages.sh || exit
read_options m: "$@"
[ ${#rest[@]} = 0 ] || { echo "$usage" >&2; exit 2; }

# ---- the stages: name, seconds at most, command.  What is worth most comes first.
# The limit of a stage that may use the time which earlier stages left, until so many seconds after the start.
till() { local left=$(($1 - SECONDS)); [ -z "$list" ] && [ $left -gt 75 ] && echo $left || echo 75; }
check() {
  stage "machine" 30 machine_facts
  stage "ranks connect" 35 connect
  stage "links" 55 links
  for n in $counts; do stage "bits of $n" 15 bits "$n"; done
  stage "0.5B on 1" 35 pieces_alone
  stage "0.5B, saved and resumed" 50 pieces_resumed
  stage "killed" 15 struck KILL
  stage "frozen" 25 struck STOP
  stage "1.5B, 256 responses" 45 steps qwen2.5-1.5b 256 3
  stage "7B, 256 responses" "$(till 500)" steps qwen2.5-7b 256 3
}
counts="1 2 4 8" few="data.train_batch_size=16"
if [ "$device" = emu ]; then counts="1 2" few="data.train_batch_size=2 rollout.n=2 data.max_response_length=12"; fi

# ---- what they run, each in a shell of its own
summary() { tools/bench/node.py summary "$work" "$out"; }
# COMMAND RANKS ARGUMENTS...
on_ranks() { local command=$1 n=$2; shift 2; env "$libraries" "$pare" "$command" "$@" --ranks "$n"; }

# The first call wakes GPUs without persistence mode, which takes eight of them half a minute.
machine_facts() {
  on_gpu || return
  nvidia-smi -pm 1 >/dev/null 2>&1
  driver || return
  nvidia-smi topo -m; nvidia-smi nvlink -s
  df -h /dev/shm "$work"
  fact shm "$(df -h --output=size /dev/shm | tail -n 1 | tr -d ' ')"
  fact memlock "$(ulimit -l)"
  fact cores "$(nproc) of $(getconf _NPROCESSORS_ONLN)"
  { ldconfig -p | grep libnccl; ls -d $(tr : ' ' <<<"${libraries#*=}" | sed 's,[^ ]*,&/libnccl*,g') 2>/dev/null; } || true
}

# Whether ranks start, find a device each and reach one another.
connect() {
  local n at="$work/nccl.log"
  [ "$gpus" -ge 2 ] || { echo "GPUs here: $gpus; this needs two at least"; return $no_more; }
  for n in 2 "$ranks"; do
    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,P2P,SHM,NET NCCL_DEBUG_FILE=$at.$n.%p on_ranks bench "$n" --links 4096 --json --device "$device" | tee "$work/connect.$n" ||
      { echo "ranks do not start or do not reach one another"; return $no_more; }
  done
  fact "memory of NCCL" "$(sed -n '1s/.*"memory":\([0-9]*\).*/\1/p' "$work/connect.$ranks") bytes of a GPU, $ranks ranks"
  cat "$at.$ranks".* >"$at" 2>/dev/null || return 0
  fact connections "$(for way in P2P SHM NET; do echo "$(grep -c "via $way" "$at") by $way"; done | paste -sd,)"
  grep -m 1 'NCCL version' "$at"; grep -m 8 'via ' "$at"
  true
}

# 64 MiB is what a piece of a gradient is; one size more puts parts on addresses that are no multiples of 16 bytes.
links() {
  local sizes=1048576,8388608,67108864,$((67108864 + 4 * ranks)),268435456,1073741824
  [ "$device" = cuda ] || sizes=65536,$((65536 + 4 * ranks))
  on_ranks bench "$ranks" --links $sizes --json --device "$device" | tee "$work/links.jsonl"
}

# RANKS FOLDER KEYS...
train() {
  local n=$1 folder=$2
  shift 2
  on_ranks train "$n" quickstart --device "$device" $bare "$@" --out "$folder" --quiet
}

# Three steps: the log-probs of all tokens and the weights are those of the first number of ranks that there is.
bits() {
  local n=$1 first
  [ "$n" -le "$gpus" ] || { echo "GPUs here: $gpus"; return $not_here; }
  train "$n" "$work/bits-$n" model.config=data/presets/tiny-ssa.json $few learner.shards=8 trainer.total_training_steps=3 || return
  first=$(ls "$work"/bits-?/model/model.safetensors | head -n 1) first=${first%/model/*}
  echo "compared with the run of ${first##*-} ranks"
  tools/bench/node.py same "$first" "$work/bits-$n" && cmp "$first/model/model.safetensors" "$work/bits-$n/model/model.safetensors"
}

# A gradient of 64 MiB and more travels in pieces, on every rank.  Two steps on one rank, then one step, a checkpoint, and
# one after it on all of them.
pieces() {  # RANKS FOLDER KEYS...
  local n=$1 folder=$2 shape=qwen2.5-0.5b
  shift 2
  [ "$device" = cuda ] || shape=data/presets/tiny-ssa.json
  train "$n" "$work/$folder" model.config=$shape data.max_response_length=64 $few learner.shards=8 trainer.save_model=false \
    trainer.total_training_steps=2 "$@"
}
pieces_alone() { pieces 1 pieces-1; }
pieces_resumed() {
  pieces "$ranks" "pieces-$ranks" trainer.total_training_steps=1 trainer.save_freq=1 || return
  fact saved "$(tools/bench/node.py saved "$work/pieces-$ranks")"
  local start=$SECONDS
  pieces "$ranks" "pieces-$ranks" --resume || return
  fact resumed "$((SECONDS - start)) s, a step and a start"
  rm -r "$work/pieces-$ranks/checkpoints"
  [ ! -e "$work/pieces-1/metrics.jsonl" ] || tools/bench/node.py same "$work/pieces-1" "$work/pieces-$ranks"
}

# SIGNAL: what becomes of a job whose second rank gets it within a step.
struck() {
  local folder=$work/struck-$1 job pid start
  PARE_SILENCE=10 train "$ranks" "$folder" model.config=data/presets/tiny-ssa.json $few learner.shards=8 \
    trainer.total_training_steps=100000 >"$folder.log" 2>&1 &
  job=$!
  until [ -s "$folder/metrics.jsonl" ]; do
    kill -0 $job 2>/dev/null || { cat "$folder.log"; return 1; }
    sleep 0.1
  done
  pid=$(comm -12 <(pgrep -x 'pare rank 1' | sort) <(pgrep -f -- "--out $folder" | sort))
  [ -n "$pid" ] || { echo "there is no rank 1"; kill $job; return 1; }
  start=$SECONDS
  kill -"$1" "$pid"
  wait $job && { echo "the job ended as if nothing had happened"; return 1; }
  fact "rank 1 gets SIG$1" "all ended after $((SECONDS - start)) s"
  cat "$folder.log"
  grep -q '^pare: rank 1 ' "$folder.log" || { echo "the message names another rank"; return 1; }
  ! pgrep -af -- "--out $folder" || { echo "these still run"; return 1; }
}

# SHAPE RESPONSES STEPS: a run that is measured, and its plan at its own lengths.
steps() {
  local shape=$1 responses=$2 count=$3 at="$work/$stage"
  local keys="model.config=$shape data.train_batch_size=$((responses / 8)) rollout.n=8 data.max_response_length=256
    rollout.max_num_seqs=256 actor.ppo_max_token_len=8192"
  [ "$device" = cuda ] || { keys="model.config=data/presets/tiny-ssa.json $few" count=2; }
  keys+=" learner.shards=$ranks trainer.n_gpus_per_node=$ranks trainer.total_training_steps=$count trainer.save_model=false"
  plan() { "$pare" plan quickstart --device "$device" $bare $keys --machine "$machine" --json "$@"; }
  plan >"$at.fits" && tools/bench/node.py fits "$at.fits" && train "$ranks" "$at" $keys && plan --lengths "$at" >"$at.plan" &&
    tools/bench/node.py run "$work" "${stage//-/ }" "$at" "$at.plan"
}

# ---- running them
[ -z "$list" ] || { list_stages check; exit; }

out=$(realpath -m "${out:-build/node-check}")
of_gpus() { timeout 60 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null; }
pare=$build/$device/pare
case $device in
  cuda) gpus=$(of_gpus | wc -l) ;;
  emu) gpus=2 ;;
esac
[ -x "$pare" ] || { echo "node_check: there is no $pare:  make $device" >&2; exit 2; }
pare=$(realpath "$pare")
ranks=2
while [ $((2 * ranks)) -le "$gpus" ] && [ $ranks -lt 8 ]; do ranks=$((2 * ranks)); done
if [ -z "$machine" ]; then
  case $device$(of_gpus | head -n 1) in
    emu* | cuda) machine=h200 ;;  # it means nothing; without a driver the first stages say so
    *NVL* | *PCIe*) ;;            # their links are others than those of data/machines
    *H200*) machine=h200 ;;
    *H100*) machine=h100 ;;
    *A100*80GB*) machine=a100-80gb ;;
  esac
  [ -n "$machine" ] || { echo "node_check: name the machine that is planned for: -m MACHINE" >&2; exit 2; }
fi
work=$(mktemp -d)
"$pare" plan quickstart $bare model.config=tiny-ssa learner.shards=2 trainer.n_gpus_per_node=2 --machine "$machine" --json \
  >"$work/machine.json" || { rm -r "$work"; exit 2; }
ulimit -s 8192  # NCCL before 2.28 cannot start without such a limit
export pare machine gpus ranks counts few
fact gpus "$gpus"
fact ranks "$ranks"
begin_stages "tools/node_check.sh -d $device -m $machine"
check
exit $failed
