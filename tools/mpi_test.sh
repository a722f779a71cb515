#!/usr/bin/env bash
# Tests of several ranks on this machine: tools/mpi_test.sh MPIRUN FOLDER, of `make mpi-test`; with a third argument,
# `checked`, those of devices on kernels under the access checker and under ASan, of `make mpi-check`.
set -euo pipefail
mpirun=$1 folder=$2
# More ranks than cores, and by anyone: Open MPI asks.
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# The limits of time end a job that hangs.
if [ "${3:-}" = checked ]; then
  for kernels in check asan; do  # (What MPI itself leaves behind is not ours.)
    ASAN_OPTIONS=detect_leaks=0 timeout 900 "$mpirun" -n 2 "$folder/tests/in_ranks_$kernels" --gtest_brief=1 \
      --gtest_filter='Comm.*Device*:Comm.Op*:Comm.OtherCalls*:Ranks.*ByNccl'
  done
  exit
fi
# MPICH's mpirun names the process that was killed, not its rank, and leaves a stopped one.  What goes by NCCL goes by no MPI:
# once is enough.
case $mpirun in *mpich) in_ranks=-*ByNccl programs=-StruckRank.* ;; *) in_ranks=* programs=* ;; esac
for ranks in 2 3 4; do
  echo "$ranks ranks"
  # The emulator fills what it is given: a test without limits must not take the machine.
  (ulimit -v 8000000 && timeout 900 "$mpirun" -n "$ranks" "$folder/tests/in_ranks" --gtest_brief=1 --gtest_filter="$in_ranks")
  # What it measures means nothing here; it fails where what arrives is wrong.
  for device in cpu emu; do timeout 300 "$mpirun" -n "$ranks" "$folder/pare" bench --links 70001 --device $device; done
done
PARE_MPIRUN=$mpirun timeout 900 "$folder/tests/programs" --gtest_brief=1 --gtest_filter="$programs"
