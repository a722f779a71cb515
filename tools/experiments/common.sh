# Shared code of the experiments; each sources this file from the root of the repository, defines `plan` and calls `run_all`.
# A run is a line of `plan`: its name, NAME-sSEED, then the arguments of `pare train`.  $(common SEED) are those that
# every run of a seed has: a model of its own (`pare sft`, run_sft), the seed, one thread.
#
# Resumable: a run that is done is left alone, one that was stopped goes on.  Runs lie in OUT; JOBS (default: one per
# core) of them run at a time, on one thread each; SEEDS; STEPS is the length of a run; ONLY (a pattern of names)
# restricts what is run.  PLAN=1 prints the plan and runs nothing.  At the end a report and the tables of the results
# page (rows.py, table.py).
shopt -s extglob
JOBS=${JOBS:-$(nproc)} STEPS=${STEPS:-200} ONLY=${ONLY:-*} SEEDS=${SEEDS:-1 2 3 4 5 6 7 8} PARE=${PARE:-build/pare}
mkdir -p "$OUT"
export OUT PARE

common() { echo "model.path=$OUT/sft-s$1/model trainer.seed=$1 trainer.threads=1 trainer.total_training_steps=$STEPS trainer.save_freq=50"; }
resume() { [ ! -f "$OUT/$1/config.toml" ] || echo --resume; }
one() {
  local name=$1
  shift
  [ -d "$OUT/$name/model" ] && return 0
  # shellcheck disable=SC2046
  "$PARE" train "$@" --out "$OUT/$name" $(resume "$name") --quiet >"$OUT/$name.log" 2>&1 || echo "failed: $name ($(tail -n 1 "$OUT/$name.log"))"
}
export -f one resume

print_plan() { [ -z "${PLAN:-}" ] || { plan && exit; }; }
run_sft() {  # ARGUMENTS: the model that each seed starts from, by the preset SFT
  print_plan
  for seed in $SEEDS; do
    # shellcheck disable=SC2046
    [ -d "$OUT/sft-s$seed/model" ] || "$PARE" sft ${SFT:-quickstart-sft} "$@" trainer.seed="$seed" --out "$OUT/sft-s$seed" $(resume "sft-s$seed") --quiet
  done
}
run_all() {
  plan | while read -r name rest; do
    # shellcheck disable=SC2254
    case $name in $ONLY) printf '%s %s\n' "$name" "$rest" ;; esac
  done | xargs -P "$JOBS" -I{} bash -c 'one {}'
}
show() {  # PAGES: the tables of results/PAGE.md (default: of this script's name) for the runs that are done, and a report
  local name=${0##*/} commit page runs
  commit=$("$PARE" --version | awk 'NR == 1 {print substr($2, 1, 7)}')
  tools/experiments/rows.py "$OUT" "$name" "$commit" >"$OUT/rows.jsonl" || return 0
  for page in "${@:-$name}"; do
    tools/experiments/table.py --rows "$OUT/rows.jsonl" "tools/experiments/results/$page.md" || true
  done
  runs=$(for d in "$OUT"/*/model; do dirname "$d"; done | grep -v /sft- || true)
  # shellcheck disable=SC2086
  [ -z "$runs" ] || "$PARE" report $runs --out "$OUT/report.html"
}
