#!/bin/sh
# run.sh TARGET SECONDS FOLDER: runs FOLDER/fuzz_TARGET for that long.  What it finds worth keeping stays in
# FOLDER/TARGET/corpus, so the next run goes on from there.
set -eu
program=$3/fuzz_$1 folder=$3/$1
mkdir -p "$folder/corpus"
tools/fuzz/seeds.py "$1" "$folder"
if "$program" -max_total_time="$2" -timeout=20 -rss_limit_mb=4096 -max_len=4096 -print_final_stats=1 \
  -dict="$folder/dictionary" -artifact_prefix="$folder/" "$folder/corpus" "$folder/seeds" > "$folder/log" 2>&1; then
  echo "fuzz $1: $(sed -n 's/^stat::number_of_executed_units: *//p' "$folder/log") inputs in $2 s, nothing found"
  exit 0
fi
tail -n 40 "$folder/log" >&2
echo "fuzz $1: failed; all of it: $folder/log; again: $program $(sed -n 's/.*Test unit written to //p' "$folder/log")" >&2
exit 1
