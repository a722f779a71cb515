#pragma once
#include "cases/layouts.h"

namespace pare::cases {

// The operands of KvCompact; keys: a normal, or of `k`.
KvCompact compact(Operands& o, const Dims& d, const Compressions& v, const Fill& k, int64_t fresh, bool mass);

}  // namespace pare::cases
