#!/bin/sh
# Installs the Debian packages named, without asking; where that is not possible prints the command and fails.
set -u
missing=""
for p in "$@"; do dpkg -s "$p" >/dev/null 2>&1 || missing="$missing $p"; done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then run=""; elif sudo -n true 2>/dev/null; then run="sudo -n"; else run="none"; fi
if [ "$run" != none ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing$missing"
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  $run apt-get update -qq && $run apt-get install -y -qq $missing >/dev/null && exit 0
fi
echo "missing libraries; run this, then make again:" >&2
echo "    sudo apt-get install -y$missing" >&2
exit 1
