// Where a command computes.
#pragma once
#include "rl/config.h"

namespace pare {

// The table of a device that is linked into this program and can be used; else an Error: there is no falling back.
const Table& open_table(DeviceKind kind);

}  // namespace pare
