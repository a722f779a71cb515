#!/usr/bin/env bash
# RL on a real language model, for a person to watch: SmolLM2-135M learns to add numbers of two digits (`pare train
# smollm2-sums`); then its answers before and after are shown side by side.
#
#   tools/real.sh [key=value...]     keys of `pare train`, such as trainer.seed=2; on a GPU
#   PARE=build/cuda/pare tools/real.sh trainer.device=cuda
#   MODEL (build/smollm2) is the model's folder, OUT (runs/real) that of the results
set -euo pipefail
cd "$(dirname "$0")/.."
pare=${PARE:-build/pare} out=${OUT:-runs/real} model=${MODEL:-build/smollm2}
[ -e "$model/config.json" ] || tools/get_smollm2.sh "$model"
tools/smollm2_rows.py sums "$out"
set -- data.train_files="$out/train.jsonl" data.val_files="$out/val.jsonl" "$@"
answers() {  # NAME MODEL KEYS...
  local name=$1 of=$2
  shift 2
  "$pare" eval smollm2-sums --model "$of" "$@" --greedy --out "$out/$name.jsonl" --force
}
answers before "$model" "$@"
"$pare" train smollm2-sums model.path="$model" "$@" --out "$out/run" --force
answers after "$out/run/model" "$@"
"$pare" report "$out/run" --out "$out/report.html"
python3 - "$out" <<'END'
import json, sys
before, after = ([json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")] for name in ("before", "after"))
def show(row):
    response = row["responses"][0]
    return f"{response['text'].strip()[:10]:>10} {'right' if response['score'] else 'wrong'}"
print(f"\n{'problem':>10}{'before':>18}{'after':>18}")
for x, y in list(zip(before, after))[:12]:
    print(f"{x['prompt'].splitlines()[-1]:>10}{show(x):>18}{show(y):>18}")
right = [sum(row["responses"][0]["score"] > 0 for row in rows) for rows in (before, after)]
print(f"\nright: {right[0]} of {len(before)} before, {right[1]} of {len(after)} after; {sys.argv[1]}/report.html has the curves")
END
