#!/usr/bin/env bash
# Where the time of a program goes on the GPU: Nsight Systems, with the ranges of phases, layers and ops.
usage="usage: tools/nsys.sh [-o DIR] COMMAND [ARGUMENT...]
  tools/nsys.sh build/cuda/pare train quickstart --device cuda trainer.total_training_steps=3 --out runs/profile --force
Writes DIR/profile.nsys-rep (default build/nsys) for the viewer, and prints the time of kernels by range and by name."
set -euo pipefail
out=build/nsys
while getopts "o:h" option; do
  case $option in
    o) out=$OPTARG ;;
    *) echo "$usage"; exit $([ "$option" = h ] && echo 0 || echo 2) ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
command -v nsys >/dev/null || { echo "nsys.sh: no nsys on the PATH: install Nsight Systems" >&2; exit 1; }
mkdir -p "$out"
export PARE_GRAPHS=0  # every kernel in the range of its op
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --force-overwrite=true -o "$out/profile" "$@"
nsys stats --force-export=true --report nvtx_gpu_proj_sum,cuda_gpu_kern_sum "$out/profile.nsys-rep"
