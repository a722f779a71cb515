#include "bench/text.h"

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "data/verify/verify.h"
#include "tokenizer/unicode.h"

namespace pare {

nlohmann::json bench_text() {
  constexpr size_t kBytes = 1'000'000;
  nlohmann::json rows;
  const auto line = [&](const char* reader, const char* part, auto&& read) {
    std::string text;
    while (text.size() < kBytes) text += part;
    const auto start = std::chrono::steady_clock::now();
    read(text);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double rate = static_cast<double>(text.size()) * 1e-6 / seconds;
    rows.push_back({{"reader", reader}, {"part", part}, {"MB_per_second", rate}});
    std::printf("text       %-14s %-30s %8.1f MB/s\n", reader, nlohmann::json(part).dump().c_str(), rate);
    std::fflush(stdout);
  };
  for (const char* mode : {"math-value", "math-string"})
    for (const char* part : {"\\boxed{1}", "\\[ ", "$", "\\text{", "The answer is 5. ", "So 2 + 2 = 4, and so on.\n"})
      line(mode, part, [&](const std::string& text) { find_verifier(mode).grade(text, true, "5"); });
  for (const char* part : {"a\u0301\u0323", "\u0301\u0323"})
    line("NFC", part, [](const std::string& text) { nfc(text); });
  return rows;
}

}  // namespace pare
