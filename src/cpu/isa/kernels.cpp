#include "cpu/kernels.h"

#include "cpu/isa/tile.h"

namespace pare {

#define PARE_PASTE(a, b) a##b
#define PARE_NAME(isa) PARE_PASTE(kernels_, isa)
#define PARE_STRING(x) #x
#define PARE_QUOTE(x) PARE_STRING(x)

const Kernels PARE_NAME(PARE_ISA) = {
    .name = PARE_QUOTE(PARE_ISA),
    .tile_rows = PARE_ISA::kTileRows,
#define X(name, Result, args) .name = PARE_ISA::name,
#include "cpu/kernels.inc"
#undef X
};

}  // namespace pare
