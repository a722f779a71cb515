#!/bin/sh
# SFT-M (DASH, section 4.2): a model learns the right ones of a teacher's responses.  With TEACHER and STUDENT the same
# folder it is rejection sampling; again from OUT/run/model, its next round.
#
#   tools/sft_m.sh TEACHER STUDENT DATA.jsonl VERIFIER OUT [group.key=value]...
#
# One response at temperature 0.7 to each problem of DATA; those that are right go to OUT/right.jsonl, on which `pare sft
# dash-sft` trains for 3 epochs into OUT/run.  Keys hold for both; PARE is the program, build/pare if it is not set.
set -eu
[ $# -ge 5 ] || { sed -n '/^#   /s/^# *//p' "$0" >&2; exit 2; }
teacher=$1 student=$2 data=$3 verifier=$4 out=$5
shift 5
pare=${PARE:-build/pare}
mkdir -p "$out"
"$pare" eval --model "$teacher" --data "$data" --verifier "$verifier" --temperature 0.7 --keep "$out/right.jsonl" "$@"
rows=$(wc -l < "$out/right.jsonl")
[ "$rows" -gt 0 ] || { echo "sft_m.sh: the teacher has no right response to $data" >&2; exit 1; }
"$pare" sft dash-sft model.path="$student" data.train_files="$out/right.jsonl" \
  trainer.total_training_steps=$(((3 * rows + 31) / 32)) "$@" --out "$out/run"
