#!/bin/sh
# Installs the Debian packages named, without asking; where that is not possible, and where there is no apt, prints the
# command and fails.
set -u
# The same packages elsewhere: Debian, Fedora, Arch, Homebrew.
names="
nlohmann-json3-dev json-devel     nlohmann-json nlohmann-json
libcli11-dev       cli11-devel    cli11         cli11
libtoml11-dev      toml11-devel   toml11        toml11
libgtest-dev       gtest-devel    gtest         googletest
libutf8proc-dev    utf8proc-devel libutf8proc   utf8proc
libgmp-dev         gmp-devel      gmp           gmp
libmpfr-dev        mpfr-devel     mpfr          mpfr
libmpc-dev         libmpc-devel   libmpc        libmpc
libxxhash-dev      xxhash-devel   xxhash        xxhash
g++-12             gcc-c++        gcc           gcc
"
missing=""
for p in "$@"; do dpkg -s "$p" >/dev/null 2>&1 || missing="$missing $p"; done
[ -z "$missing" ] && exit 0

# The missing packages in a column of the table.
named() {
  for p in $missing; do
    echo "$names" | while read -r debian fedora arch brew; do
      [ "$debian" = "$p" ] && case $1 in dnf) echo "$fedora" ;; pacman) echo "$arch" ;; brew) echo "$brew" ;; esac
    done
  done | tr '\n' ' '
}
if [ "$(id -u)" = 0 ]; then run=""; elif sudo -n true 2>/dev/null; then run="sudo -n"; else run="none"; fi
if ! command -v apt-get >/dev/null 2>&1; then
  echo "libraries are missing, some or all of these; run this, then make again:" >&2
  if command -v dnf >/dev/null 2>&1; then
    echo "    sudo dnf install $(named dnf)" >&2
  elif command -v pacman >/dev/null 2>&1; then
    echo "    sudo pacman -S --needed $(named pacman)" >&2
  elif command -v brew >/dev/null 2>&1; then
    echo "    brew install $(named brew)" >&2
    echo "    export CPATH=\$(brew --prefix)/include LIBRARY_PATH=\$(brew --prefix)/lib" >&2
  else
    echo "    (Debian's names)$missing" >&2
  fi
  exit 1
fi
if [ "$run" != none ]; then
  echo "installing$missing"
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  $run apt-get update -qq && $run apt-get install -y -qq $missing >/dev/null && exit 0
fi
echo "missing libraries; run this, then make again:" >&2
echo "    sudo apt-get install -y$missing" >&2
exit 1
