// Configurations: the bytes are a file of one, and an override of the command line.
#include "base/text.h"
#include "run/config.h"
#include "tools/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pare;
  const std::string text(fuzz::text_of(data, size));
  fuzz::accepted([&] {
    Config config;
    apply_toml(config, text, "fuzz.toml");
    fuzz::accepted([&] { check_config(config); });
  });
  if (text.find('\0') == text.npos) fuzz::accepted([&] { parse_toml_override(text); });
  // Quoted, any UTF-8 is a string that reads back.
  if (utf8_bytes(text) == text.size())
    fuzz::check(parse_toml_override("key=" + toml_quote(text)).values.at(0).text == text, "toml_quote");
  return 0;
}
