#!/bin/sh
# aarch64 has the bits of x86-64: `arm_check.sh PROGRAM FOLDER JOBS` builds the program for aarch64 in FOLDER and runs
# three steps of next-token training and three of GRPO with PROGRAM and, under qemu, with that one.  Every log-prob,
# every metric that is no time, and every weight must be the same.
set -eu
program=$1 folder=$2 jobs=$3
root=$folder/root
skip() {
  echo "note: aarch64 not checked: $1"
  exit 0
}
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $tool >/dev/null || skip "no $tool; sudo apt-get install -y g++-aarch64-linux-gnu qemu-user"
done

# Static, so that qemu needs no library of aarch64.
cxx="aarch64-linux-gnu-g++ -isystem $PWD/$root/usr/include/aarch64-linux-gnu -L$PWD/$root/usr/lib/aarch64-linux-gnu"
links() {
  echo '#include <gmpxx.h>
        int main() {}' | $cxx -x c++ - -static -o "$folder/try" -lutf8proc -lmpc -lmpfr -lgmpxx -lgmp 2>"$folder/try.log"
}
# The libraries for aarch64 from where this system has its packages; the system itself is left as it is.
fetch() {
  mkdir -p "$root/lists/partial" "$root/cache/archives/partial"
  echo "APT::Architectures { \"arm64\"; }; Dir::State::lists \"$PWD/$root/lists\"; Dir::Cache \"$PWD/$root/cache\";" >"$root/apt.conf"
  export APT_CONFIG="$PWD/$root/apt.conf"
  apt-get update -qq || true
  cd "$root"
  apt-get download -qq libgmp-dev:arm64 libmpfr-dev:arm64 libmpc-dev:arm64 libutf8proc-dev:arm64 libgmpxx4ldbl:arm64
  for package in *.deb; do dpkg -x "$package" .; done
}
mkdir -p "$folder"
links || (fetch) >"$folder/fetch.log" 2>&1 || skip "its libraries cannot be had from apt, see $folder/fetch.log"
links || skip "its libraries cannot be linked, see $folder/try.log"
make -s JOBS="$jobs" BUILD="$folder" MACHINE=aarch64 CXX="$cxx" LDFLAGS="-pthread -static" "$folder/pare"

steps() {  # DIRECTORY PROGRAM...
  out=$1
  shift
  keys="trainer.total_training_steps=3 trainer.samples_freq=1 trainer.test_freq=0 trainer.val_before_train=false"
  # shellcheck disable=SC2086
  "$@" sft quickstart-sft $keys --out "$out-sft" --force --quiet
  # shellcheck disable=SC2086
  "$@" train quickstart model.path="$out-sft/model" $keys --out "$out" --force --quiet
  for run in "$out-sft" "$out"; do
    tr ',' '\n' <"$run/metrics.jsonl" | grep -v 'timing_s/\|perf/' >"$run/timeless"
  done
}
steps "$folder/here" "$program"
qemu-aarch64 "$folder/pare" --version | grep '^instructions neon$' >/dev/null || {
  echo "$folder/pare does not compute with NEON"
  exit 1
}
for isa in neon generic; do
  steps "$folder/$isa" env PARE_ISA=$isa qemu-aarch64 "$folder/pare"
  for file in -sft/timeless -sft/model/model.safetensors /timeless /rollouts.jsonl /model/model.safetensors; do
    cmp "$folder/here$file" "$folder/$isa$file"
  done
  PARE_ISA=$isa qemu-aarch64 "$folder/pare" audit "$folder/here" --step 3
done
echo "aarch64: the bits of this machine, by NEON and by portable code ($(grep -c certificate "$folder/here/timeless") steps of GRPO)"
