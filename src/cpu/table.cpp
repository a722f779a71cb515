// The table `cpu`: fast f32.  Every op reads its tensors, cuts its outputs into ranges for the threads and calls the
// kernels of the instruction set in use (kernels.h).
#include "cpu/glue.h"

namespace pare {

const Table table_cpu = {"cpu",
#define X(op, Args) cpu::op,
                         PARE_OPS(X)
#undef X
};

}  // namespace pare
