#!/usr/bin/env bash
# Hardware counters of some kernels: Nsight Compute, as a table.
usage="usage: tools/ncu.sh [-k REGEX] [-r RANGE] [-s SKIP] [-c COUNT] [-b BENCH.json] [-o FILE.csv] COMMAND [ARGUMENT...]
  -k  kernels whose name matches            -s  launches to skip, after -k and -r (default 10)
  -r  kernels within this range: an op,     -c  launches to profile (default 5)
      'layer 3' or a phase                  -o  counters (default build/ncu.csv)
  -b  output of \`pare bench --json\` for the same op and shape: bytes and bound of its ledger beside the counters
  tools/ncu.sh -r attn_fwd build/cuda/pare bench --device cuda --op attn_fwd --shape L=4096
  tools/ncu.sh -r 'layer 0' -s 0 -c 30 build/cuda/pare train quickstart --device cuda --out runs/profile --force"
set -euo pipefail
kernel="" range="" skip=10 count=5 bench="" out=build/ncu.csv
while getopts "+k:r:s:c:b:o:h" option; do
  case $option in
    k) kernel=$OPTARG ;;
    r) range=$OPTARG ;;
    s) skip=$OPTARG ;;
    c) count=$OPTARG ;;
    b) bench=$OPTARG ;;
    o) out=$OPTARG ;;
    *) echo "$usage"; exit $([ "$option" = h ] && echo 0 || echo 2) ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
command -v ncu >/dev/null || { echo "ncu.sh: no ncu on the PATH: install Nsight Compute" >&2; exit 1; }
mkdir -p "$(dirname "$out")"
filter=(--launch-skip "$skip" --launch-count "$count")
if [ -n "$kernel" ]; then filter+=(--kernel-name "regex:$kernel"); fi
if [ -n "$range" ]; then filter+=(--nvtx --nvtx-include "$range/"); fi
wanted="gpu__time_duration.sum dram__bytes_read.sum dram__bytes_write.sum launch__registers_per_thread
sm__throughput.avg.pct_of_peak_sustained_elapsed sm__warps_active.avg.pct_of_peak_sustained_active
sm__inst_issued.avg.pct_of_peak_sustained_active sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active
lts__t_requests_srcunit_tex.sum lts__t_sectors_srcunit_tex.sum"
# One that this device does not have would end it all; those of a launch are in no list.
known=$(ncu --query-metrics 2>/dev/null | awk '{print $1}') || known=""
metrics=""
for metric in $wanted; do
  if [ -z "$known" ] || [[ $metric == launch__* ]] || grep -qx "${metric%%.*}" <<<"$known"; then
    metrics+=${metrics:+,}$metric
  else
    echo "ncu.sh: this device has no $metric" >&2
  fi
done
export PARE_GRAPHS=0  # every kernel in the range of its op
# The clocks stay as they are: they belong to the machine.  --kill: what comes after the last launch is of no interest.
ncu --csv --print-units base --target-processes all --clock-control none --kill yes --metrics "$metrics" "${filter[@]}" --log-file "$out" "$@" \
  >"$out.program" 2>&1 || echo "ncu.sh: ncu ended with $?" >&2
"$(dirname "$0")/ncu_table.py" "$out" ${bench:+--bench "$bench"} || { tail -n 5 "$out" "$out.program" >&2; exit 1; }
