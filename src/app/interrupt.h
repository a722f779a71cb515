// SIGINT (Ctrl-C) and SIGTERM: the first one asks the run to stop, the second one ends the process at once.
#pragma once

namespace pare {

void catch_interrupts();
bool interrupted();

}  // namespace pare
