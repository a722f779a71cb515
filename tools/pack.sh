#!/usr/bin/env bash
# BUILD/pare-gpu.tar.gz: the static programs of `make pack` and what tools/gpu_check.sh needs beside them, laid out as in a
# checkout.  First in it is the hash of the sources, which a checkout compares with its own.
# NCCL=FILE: with that library, libnccl.so.2 of version 2.30 or later, for call f of the check.
usage="usage: tools/pack.sh BUILD, by \`make pack [NCCL=FILE]\`"
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 1 ] || { echo "$usage" >&2; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pack=$scratch/pare-gpu
mkdir -p "$pack/build/cuda" "$pack/tests" "$pack/data"
tools/sources.sh >"$pack/sources"
git describe --always --dirty --abbrev=40 >"$pack/commit" 2>/dev/null || echo "unknown" >"$pack/commit"
for program in pare pare_cuda_tests; do
  strip -o "$pack/build/cuda/$program" "$1/cuda/static/$program"
  if ldd "$1/cuda/static/$program" | grep -vE 'linux-vdso|ld-linux|lib(c|m|dl|rt|pthread)\.so'; then
    echo "pack.sh: $program needs these libraries, which another machine may not have: make cuda cuda-tests STATIC=1" >&2
    exit 1
  fi
done
if [ -n "${NCCL:-}" ]; then
  mkdir "$pack/nccl" && cp -L "$NCCL" "$pack/nccl/libnccl.so.2"
fi
cp -r tests/golden "$pack/tests"
cp -r data/presets "$pack/data"
cp -r tools "$pack"
find "$pack" -name __pycache__ -prune -exec rm -r {} +
tar -C "$scratch" -czf "$1/pare-gpu.tar.gz" pare-gpu/sources --exclude=pare-gpu/sources pare-gpu
ls -l "$1/pare-gpu.tar.gz"
