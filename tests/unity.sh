#!/bin/sh
# Joins tests to translation units of some 2000 lines, which compile their headers and templates once:
#
#     tests/unity.sh DIRECTORY NAME TEST.cpp...
#
# Writes DIRECTORY/tests/unity_NAME_1.cpp and so on, unless they are the same, and prints tests/unity_NAME_1.cpp ...  The
# names of a test keep apart from those of the others in a namespace inside the one that the test opens.
set -eu
into=$1/tests name=$2 number=0 lines=0
shift 2
mkdir -p "$into"
finish() {
  unit=unity_${name}_$((number += 1)).cpp
  if cmp -s "$into/new" "$into/$unit"; then rm "$into/new"; else mv "$into/new" "$into/$unit"; fi
  echo "tests/$unit"
  lines=0
}
for test; do
  if [ $lines = 0 ]; then : >"$into/new"; fi
  echo "#line 1 \"$test\"" >>"$into/new"
  sed -E "s/^namespace pare(::test)? \{/namespace pare\1::$(basename "$test" .cpp) {/" "$test" >>"$into/new"
  lines=$((lines + $(wc -l <"$test")))
  if [ $lines -ge 2000 ]; then finish; fi
done
if [ $lines -gt 0 ]; then finish; fi
