#!/usr/bin/env bash
# Tests of several ranks on this machine: tools/mpi_test.sh MPIRUN FOLDER, of `make mpi-test`.
set -euo pipefail
mpirun=$1 folder=$2
# More ranks than cores, and by anyone: Open MPI asks.
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for ranks in 2 3 4; do
  echo "$ranks ranks"
  # The emulator fills what it is given: a test without limits must not take the machine.
  (ulimit -v 8000000 && timeout 120 "$mpirun" -n "$ranks" "$folder/tests/in_ranks" --gtest_brief=1)
done
PARE_MPIRUN=$mpirun timeout 300 "$folder/tests/programs" --gtest_brief=1
