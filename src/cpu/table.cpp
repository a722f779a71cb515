// The table `cpu`: fast f32.  Every op reads its tensors, cuts its outputs into ranges for the threads and calls the
// kernels of the instruction set in use (kernels.h).
#include "cpu/glue.h"

namespace pare {

const Table table_cpu = {.name = "cpu",
#define X(op, Args) .op = cpu::op,
                         PARE_OPS(X)
#undef X
                             .act = DType::f32};

}  // namespace pare
