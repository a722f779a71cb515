#include "app/device.h"

namespace pare {

// Null where they are not linked: a program has the tables that the Makefile gives it.
[[gnu::weak]] extern const Table table_cuda;
[[gnu::weak]] extern const Table table_emu;

const Table& open_table(DeviceKind kind) {
  if (kind == DeviceKind::cpu) return table_cpu;
  const bool cuda = kind == DeviceKind::cuda;
  const Table* const table = cuda ? &table_cuda : &table_emu;
  if (!table)
    fail("this program was built without the device ", cuda ? "cuda" : "emu", "; `make ", cuda ? "cuda" : "emu",
         "` builds build/", cuda ? "cuda" : "emu", "/pare, which has it");
  table->open();
  return *table;
}

}  // namespace pare
