#include "app/device.h"

#include "app/version.h"
#include "cpu/cpu.h"
#include "run/certificate.h"
#include "run/ranks.h"
#include "run/session.h"

namespace pare {

// Null where they are not linked: a program has the tables that the Makefile gives it.
[[gnu::weak]] extern const Table table_cuda;
[[gnu::weak]] extern const Table table_emu;
[[gnu::weak]] extern const Table table_cuda_fast;
[[gnu::weak]] extern const Table table_emu_fast;

std::string linked_devices() { return cat("cpu", &table_cuda ? " cuda" : "", &table_emu ? " emu" : ""); }

const Table& open_table(const TrainerKeys& where) {
  check_device(where);
  if (where.device == DeviceKind::cpu) return table_cpu;
  const bool cuda = where.device == DeviceKind::cuda;
  const Table* const table =
      where.exact ? (cuda ? &table_cuda : &table_emu) : (cuda ? &table_cuda_fast : &table_emu_fast);
  if (!table)
    fail("this program was built without the device ", cuda ? "cuda" : "emu", "; `make ", cuda ? "cuda" : "emu",
         "` builds build/", cuda ? "cuda" : "emu", "/pare, which has it");
  table->open(world(), where.comm);
  return *table;
}

void check_equal_ranks(const Session& session, const Table& table) {
  Comm& comm = session.device.comm;
  if (comm.ranks() == 1) return;
  Facts facts = facts_of(session.config);
  facts.insert(facts.end(), {{"instruction set", cpu_isa()},
                             {"program", version()},
                             {"device", table.describe ? table.describe() : table.name},
                             {"way between devices", comm.link ? comm.link->name() : ""},
                             {"hash of the initial weights", hex16(session.initial_weights)}});
  const Facts files = facts_of_files(session.config);
  facts.insert(facts.end(), files.begin(), files.end());
  expect_equal(comm, facts);
}

}  // namespace pare
