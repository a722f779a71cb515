#!/usr/bin/env bash
# What only a machine with several GPUs can show, in nine minutes at most.
usage="usage: tools/node_check.sh [-d cuda|emu] [-o DIR] [-b BUILD] [-m MACHINE] [-n]
  links           all-to-all, all-gather and reduce-scatter over what the link can do
  bits of N       the same run on 1, 2, 4 and 8 ranks: certificates and the model's file
  1.5B and 7B     steps of 256 and 1024 responses, random weights: seconds against \`pare plan\`, the share of communication
  price           learner.reduce=ordered over reduce_scatter_bf16
  -d  device (default cuda; emu rehearses this script on two ranks and sizes that say nothing)
  -o  folder of what comes out: log.txt, summary.json, table.md (default \$OUT, else build/node-check)
  -b  folder of the programs (default build)
  -m  machine that is planned for: one of data/machines, or a file (default: by the name of the GPU).  Of a file that \`pare
      bench --device cuda --machine FILE\` wrote here the seconds are measured; it needs a line \`link\` more
  -n  lists the stages and their limits in seconds, and runs none
Ranks are the GPUs that there are, 8 at most, a power of two.  PARE_MPIRUN is what starts them (default mpirun).  Each stage
is a process with a limit of its own: one that fails or hangs is noted and the next one runs.  What there is so far is
always in DIR.  Exit code 0: every stage passed, or cannot run on this machine.
PARE_CHECK_FAIL, PARE_CHECK_HANG: patterns of names of stages that are to fail or hang, to see what follows."
set -uo pipefail
cd "$(dirname "$0")/.." && . tools/stages.sh || exit
device=cuda out=${OUT:-} build=build machine="" list=""
while getopts "d:o:b:m:nh" option; do
  case $option in
    d) device=$OPTARG ;;
    o) out=$OPTARG ;;
    b) build=$OPTARG ;;
    m) machine=$OPTARG ;;
    n) list=1 ;;
    h) echo "$usage"; exit 0 ;;
    *) echo "$usage" >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[[ $# = 0 && $device =~ ^(cuda|emu)$ ]] || { echo "$usage" >&2; exit 2; }

# ---- the stages: name, seconds at most, command.  What is worth most comes first.
# Of a stage that may take what those before it left, until so many seconds after the start.  Every rank draws all random
# weights: of a 7B that is most of the time where it has few cores.
till() { local left=$(($1 - SECONDS)); [ -z "$list" ] && [ $left -gt 85 ] && echo $left || echo 85; }
check() {
  stage "driver" 10 topology
  stage "loader" 20 loader
  stage "links" 45 links
  for n in $counts; do stage "bits of $n" 20 bits "$n"; done
  stage "1.5B, 256 responses" 45 steps qwen2.5-1.5b 256 3
  stage "price" 75 price
  stage "7B, 256 responses" "$(till 360)" steps qwen2.5-7b 256 3
  stage "1.5B, 1024 responses" 50 steps qwen2.5-1.5b 1024 2
  stage "7B, 1024 responses" "$(till 495)" steps qwen2.5-7b 1024 2
}
counts="1 2 4 8" sizes=1048576,33554432,1073741824
few="data.train_batch_size=16"
if [ "$device" = emu ]; then counts="1 2" sizes=65536 few="data.train_batch_size=2 rollout.n=2 data.max_response_length=12"; fi

# ---- what they run, each in a shell of its own
summary() { tools/bench/node.py summary "$work" "$out"; }
topology() { driver && nvidia-smi topo -m; }
on_ranks() { env "$libraries" "$mpirun" -n "$@"; }

# Whether ranks start, find a device each and reach one another.
loader() {
  [ "$gpus" -ge 2 ] || { echo "GPUs here: $gpus; this needs two at least"; return $no_more; }
  on_ranks 2 "$speeds" 4096 trainer.device="$device" || { echo "ranks do not start or do not reach one another"; return $no_more; }
}

links() { on_ranks "$ranks" "$speeds" "$sizes" trainer.device="$device" | tee "$work/links.jsonl"; }

# RANKS FOLDER KEYS...
train() {
  local n=$1 folder=$2
  shift 2
  on_ranks "$n" "$pare" train quickstart --device "$device" $bare "$@" --out "$folder" --force --quiet
}

# Three steps: the log-probs of all tokens and the weights are those of the first number of ranks that there is.
bits() {
  local n=$1 first
  [ "$n" -le "$gpus" ] || { echo "GPUs here: $gpus"; return $not_here; }
  train "$n" "$work/bits-$n" model.config=data/presets/tiny-ssa.json $few learner.slots=8 trainer.total_training_steps=3 || return
  first=$(ls "$work"/bits-?/model/model.safetensors | head -n 1) first=${first%/model/*}
  echo "compared with the run of ${first##*-} ranks"
  tools/bench/node.py same "$first" "$work/bits-$n" && cmp "$first/model/model.safetensors" "$work/bits-$n/model/model.safetensors"
}

# SHAPE RESPONSES STEPS KEYS...: a run that is measured, and its plan at its own lengths.
steps() {
  local shape=$1 responses=$2 count=$3
  shift 3
  local more=$*
  local at="$work/$stage${more:+-${more//[^a-z0-9]/-}}"
  local keys="model.config=$shape data.train_batch_size=$((responses / 8)) rollout.n=8 data.max_response_length=256
    rollout.max_num_seqs=256 actor.ppo_max_token_len=8192"
  [ "$device" = cuda ] || { keys="model.config=data/presets/tiny-ssa.json $few" count=2; }
  keys+=" learner.slots=$ranks trainer.n_gpus_per_node=$ranks trainer.total_training_steps=$count $more"
  plan() { "$pare" plan quickstart --device "$device" $bare $keys --machine "$machine" --json "$@"; }
  plan >"$at.fits" && tools/bench/node.py fits "$at.fits" && train "$ranks" "$at" $keys && plan --lengths "$at" >"$at.plan" &&
    tools/bench/node.py run "$work" "${stage//-/ }" "$at" "$at.plan" "$more" && rm -r "$at/model"
}

# Both without exact linear layers, which the library's sum does without: the sum is what differs.
price() {
  local reduce
  [ -n "$library" ] || { echo "no cuBLASLt is found here"; return $not_here; }
  for reduce in ordered reduce_scatter_bf16; do
    steps qwen2.5-1.5b 256 3 trainer.exact=false learner.reduce=$reduce || return
  done
}

# ---- running them
[ -z "$list" ] || { list_stages check; exit; }

out=$(realpath -m "${out:-build/node-check}")
of_gpus() { timeout 10 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null; }
case $device in
  cuda) build+=/mpi-cuda how="make mpi-cuda" gpus=$(of_gpus | wc -l) ;;
  emu) build+=/mpi how="make mpi" gpus=2 ;;
esac
pare=$build/pare speeds=$build/links mpirun=${PARE_MPIRUN:-mpirun}
for program in "$pare" "$speeds"; do
  [ -x "$program" ] || { echo "node_check: there is no $program:  $how" >&2; exit 2; }
done
command -v "$mpirun" >/dev/null || { echo "node_check: there is no $mpirun, which starts ranks" >&2; exit 2; }
pare=$(realpath "$pare") speeds=$(realpath "$speeds")
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
library=$(find_cublas_lt) work=$(mktemp -d)
"$pare" plan quickstart $bare model.config=tiny-ssa learner.slots=2 trainer.n_gpus_per_node=2 --machine "$machine" --json \
  >"$work/machine.json" || { rm -r "$work"; exit 2; }
# Open MPI: by anyone, more ranks than cores, and threads of a rank on all cores that are its share.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
  OMPI_MCA_hwloc_base_binding_policy=none
export library pare speeds mpirun machine gpus ranks counts sizes few
fact gpus "$gpus"
fact ranks "$ranks"
begin_stages "tools/node_check.sh -d $device -m $machine"
check
exit $failed
