// Opens the device of a command.
#pragma once
#include "run/config.h"

namespace pare {

// The table of trainer.device and trainer.exact, which is linked into this program and can be used; else an Error:
// there is no falling back.
const Table& open_table(const TrainerKeys& where);

// The words that trainer.device may be in this build: "cpu cuda".
std::string linked_devices();

}  // namespace pare
