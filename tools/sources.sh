#!/usr/bin/env bash
# A hash of all that the programs are made of, and of the scripts: two trees with the same one make the same pack.
set -euo pipefail
cd "$(dirname "$0")/.."
find Makefile src cuda model data tokenizer tests tools -type f ! -path 'tools/bench/results/*' ! -name '*.pyc' |
  LC_ALL=C sort | xargs sha256sum | sha256sum
