# Sourced by tools/gpu_check.sh and tools/node_check.sh: stages, each a process with a limit of its own, so that one that
# fails or hangs costs no other.  A script has `usage`, reads its options by read_options, sets `work` (a folder of its
# own), and has a function `summary`, which writes what there is so far.

# MORE ARGUMENTS...: the options of both scripts, and MORE ("m:"), as device, out, build, machine and list; `rest`: what
# follows them.
read_options() {
  local option OPTIND=1 more=$1
  shift
  device=cuda out=${OUT:-} build=build machine="" list=""
  while getopts "d:o:b:nh$more" option; do
    case $option in
      d) device=$OPTARG ;;
      o) out=$OPTARG ;;
      b) build=$OPTARG ;;
      m) machine=$OPTARG ;;
      n) list=1 ;;
      h) echo "$usage"; exit 0 ;;
      *) echo "$usage" >&2; exit 2 ;;
    esac
  done
  rest=("${@:OPTIND}")
  [[ $device =~ ^(cuda|emu)$ ]] || { echo "$usage" >&2; exit 2; }
}

# What `env` takes before a program that needs CUDA's libraries: they lie in the toolkit or came with PyTorch, which itself
# must not see the others.
libraries=LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64:$(python3 -c '
import glob, nvidia
print(":".join(lib for place in nvidia.__path__ for lib in glob.glob(place + "/*/lib")))' 2>/dev/null)
# Of a run of random weights: without what is beside its steps, and with a gradient though nothing is right.
bare="model.path= trainer.test_freq=0 trainer.val_before_train=false trainer.save_freq=0
algorithm.adv_filter_threshold=0 actor.entropy_coeff=0.01"

# ---- for stages.  Exit codes of theirs, which no program has: not on this machine; nothing else can be run
not_here=93 no_more=94
on_gpu() { [ "$device" = cuda ] || { echo "only on a GPU"; return $not_here; }; }
has() { command -v "$1" || { echo "there is no $1 on the PATH: $2"; return $not_here; }; }
fact() { printf '%s\t%s\n' "$1" "$2" >>"$work/facts.tsv"; }

driver() {
  on_gpu || return
  has nvidia-smi "no NVIDIA driver is installed here" || return 1
  nvidia-smi --query-gpu=name --format=csv,noheader | sed 's/^/gpu\t/' >>"$work/facts.tsv" &&
    nvidia-smi --query-gpu=driver_version --format=csv,noheader | sed 's/^/driver\t/' >>"$work/facts.tsv" && nvidia-smi
}

# Empty: --exact=off cannot run here.
find_cublas_lt() {
  [ "$device" = cuda ] || { echo emulated; return; }
  for n in 13 12; do env "$libraries" python3 -c "import ctypes; print(ctypes.CDLL('libcublasLt.so.$n'))" 2>/dev/null; done
}

# ---- running them
# The names and limits of the stages that a function names, and the seconds of all of them.
list_stages() {
  local total=0 most=0
  stage() { printf '%4d  %s\n' "$2" "$1"; total=$((total + $2)); }
  beside() { printf '%4d  %s\n' "$2" "$1"; most=$(($2 > most ? $2 : most)); }
  join() { total=$((total + most)) most=0; }
  "$1"
  echo "$total seconds at most"
}

# Of each stage, by number: its name, limit, second of the start, and while it runs its process.
declare -a names limits begun running
stages=0 failed=0

# Before the first stage: the command, and what files there may be of an earlier call beside those of every call.
begin_stages() {
  local command=$1
  shift
  mkdir -p "$out" && (cd "$out" && rm -f log.txt summary.json table.md "$@") || exit
  trap finish EXIT
  trap 'exit 143' TERM INT
  fact date "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  fact command "$command"
  fact on "$device"
  fact host "$(uname -srm), $(nproc) cores"
  fact commit "$(cat commit 2>/dev/null || git describe --always --dirty --abbrev=40 2>/dev/null)"
  export device out work libraries bare not_here no_more
  export -f $(compgen -A function)
}

finish() {
  [ ${#running[@]} = 0 ] || kill "${running[@]}" 2>/dev/null
  [ ! -e "$out/table.md" ] || cat "$out/table.md"
  rm -rf "$work"
}

# NAME SECONDS COMMAND...: starts a stage, at the same time as those before it since the last join.
beside() {
  local name=$1 limit=$2 n=$((++stages))
  shift 2
  [ "$device" = cuda ] || limit=$((4 * limit))
  case $name in
    ${PARE_CHECK_HANG:-}) set -- sleep 1000; limit=1 ;;
    ${PARE_CHECK_FAIL:-}) set -- bash -c 'echo "a planted failure"; exit 9' ;;
  esac
  names[$n]=$name limits[$n]=$limit begun[$n]=$SECONDS
  echo "==== $name: $*" >"$work/log.$n"
  stage=${name// /-} timeout -k 2 "$limit" bash -o pipefail -c '"$@"' stage "$@" >>"$work/log.$n" 2>&1 </dev/null &
  running[$n]=$!
}

# Processes of a stage that was stopped may hold memory of a device for a while.
given_back() {
  local i
  for ((i = 0; i < 20; i++)); do
    [ "$device" = cuda ] && nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep -qx '[0-9]*' || return 0
    sleep 0.5
  done
}

# Until all that runs is over, or should long be: a process that waits for a driver cannot be killed.
join() {
  local n rc me=$(basename "$0" .sh)
  while [ ${#running[@]} -gt 0 ]; do
    for n in "${!running[@]}"; do
      if ! kill -0 "${running[$n]}" 2>/dev/null; then
        wait "${running[$n]}"
        rc=$?
      elif [ $((SECONDS - begun[$n])) -gt $((limits[$n] + 4)) ]; then
        rc=stuck
      else
        continue
      fi
      case $rc in
        0) result=passed ;;
        $not_here) result="not possible here" ;;
        stuck) result="would not end after ${limits[$n]} s" ;;
        124 | 137) result="stopped after ${limits[$n]} s" ;;
        *) result="failed ($rc)" ;;
      esac
      [ "$rc" = 0 ] || [ "$rc" = $not_here ] || failed=1
      unset "running[$n]"
      printf '%s\t%s\t%s\n' "${names[$n]}" "$result" $((SECONDS - begun[$n])) >>"$work/stages.tsv"
      echo "$me: ${names[$n]}: $result, $((SECONDS - begun[$n])) s$([ "$rc" = 0 ] || tail -n 1 "$work/log.$n" | sed 's/^/: /')"
      # The first and the last of long output: eight files of 16 MiB are what may be brought home from some machines.
      { head -c 100000 "$work/log.$n"; tail -c +100001 "$work/log.$n" | tail -c 100000; echo; } >>"$out/log.txt"
      summary 2>>"$out/log.txt"
      [ "$rc" != $no_more ] || { echo "$me: nothing else can be run"; exit 1; }
    done
    sleep 0.03
  done
}
stage() { beside "$@"; join; [ "$result" = passed ] || given_back; }
