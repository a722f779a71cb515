// Work in proportion to the text: the lines of the bytes are what stands in front, what is repeated, and what stands
// behind.  No reader of text takes more steps than a constant times its length.
#include "tools/fuzz/steps.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pare;
  const std::string_view bytes = fuzz::text_of(data, size);
  const size_t first = std::min(bytes.find('\n'), bytes.size()),
               last = std::max(first, std::min(bytes.rfind('\n'), bytes.size()));
  const std::string head(bytes.substr(0, first)), tail(bytes.substr(last));
  const std::string part(bytes.substr(std::min(first + 1, last), last - std::min(first + 1, last)));
  // Four times the text may take four times the steps, or a little more: there is a logarithm in sorting.
  const std::string some = fuzz::repeated(head, part, tail, 1 << 13), more = fuzz::repeated(head, part, tail, 1 << 15);
  for (const fuzz::Reader& reader : fuzz::readers()) {
    const uint64_t few = fuzz::steps_of(reader, some), many = fuzz::steps_of(reader, more);
    fuzz::check(many <= 6 * few + 1'000'000, reader.name, ": ", few, " steps for ", some.size(), " bytes, ", many,
                " for ", more.size());
    fuzz::check(many <= fuzz::kStepsPerByte * more.size() + fuzz::kStepsOfAnswer, reader.name, ": ", many,
                " steps for ", more.size(), " bytes");
  }
  return 0;
}
