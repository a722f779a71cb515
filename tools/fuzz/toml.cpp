// Configurations: the bytes are a file of one, and an override of the command line.
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
  // Quoted, any text without control characters is a string that reads back.
  bool plain = true;
  for (const char c : text) plain &= (c >= ' ' && c < '\x7f') || c == '\n' || c == '\t';
  if (plain) fuzz::check(parse_toml_override("key=" + toml_quote(text)).values.at(0).text == text, "toml_quote");
  return 0;
}
