// Where a command computes.
#pragma once
#include <CLI/CLI.hpp>

#include "rl/config.h"

namespace pare {

// The table of a device that is linked into this program and can be used; else an Error: there is no falling back.
const Table& open_table(DeviceKind kind);

// Of commands without a configuration.
struct DeviceOptions {
  void add_to(CLI::App& command);
  DType act() const { return act_type(device, dtype); }

  DeviceKind device = DeviceKind::cpu;
  ActType dtype = ActType::automatic;
};

}  // namespace pare
