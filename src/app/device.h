// Opens the device of a command.
#pragma once
#include "run/config.h"

namespace pare {

struct Session;

// The table of trainer.device and trainer.exact, which is linked into this program and can be used; else an Error:
// there is no falling back.
const Table& open_table(const TrainerKeys& where);

// Throws where ranks differ in what must be the same on all of them: every key, program, instruction set, device,
// weights and files that they read.
void check_equal_ranks(const Session& session, const Table& table);

// The words that trainer.device may be in this build: "cpu cuda".
std::string linked_devices();

}  // namespace pare
