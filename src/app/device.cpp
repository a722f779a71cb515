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

void DeviceOptions::add_to(CLI::App& command) {
  const std::map<std::string, DeviceKind> devices = {
      {"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}, {"emu", DeviceKind::emu}};
  const std::map<std::string, ActType> types = {
      {"auto", ActType::automatic}, {"f32", ActType::f32}, {"bf16", ActType::bf16}};
  command.add_option("--device", device, config_key("trainer.device").meaning)
      ->type_name("cpu|cuda|emu")
      ->transform(CLI::CheckedTransformer(devices));
  command.add_option("--dtype", dtype, config_key("model.dtype").meaning)
      ->type_name("auto|f32|bf16")
      ->transform(CLI::CheckedTransformer(types));
}

}  // namespace pare
