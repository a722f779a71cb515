// Files of weights: the bytes are one as they stand, and behind the first, which says how many bytes of data follow,
// the header of one.
#include "model/hf/safetensors.h"

#include <cstring>
#include <vector>

#include "tools/fuzz/fuzz.h"

namespace pare::fuzz {
namespace {

void read(std::string_view bytes) {
  const MemoryFile memory(bytes);
  accepted([&] {
    const SafetensorsFile file(memory.path());
    for (const SafetensorsTensor& t : file.tensors()) {
      check(file.find(t.name) == &t, "a tensor that is not found");
      check(t.begin + t.bytes <= bytes.size(), "a tensor beyond the file");
      std::vector<float> values(static_cast<size_t>(t.size()));
      accepted([&] { file.read_f32(t, values.data()); });
    }
  });
}

}  // namespace
}  // namespace pare::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pare::fuzz;
  const std::string_view text = text_of(data, size);
  read(text);
  if (text.empty()) return 0;
  const uint64_t length = size - 1;
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  read(file.append(text.substr(1)).append(data[0], '\x3f'));
  return 0;
}
