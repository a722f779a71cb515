#include "bench/tokenizer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tokenizer/tokenizer.h"

namespace pare {

nlohmann::json bench_tokenizer() {
  namespace fs = std::filesystem;
  const char *path = std::getenv("PARE_TOKENIZER"), *text_path = std::getenv("PARE_TEXT");
  if (!path) {
    std::printf("tokenizer  not measured: set PARE_TOKENIZER to a tokenizer.json, and PARE_TEXT to an English text\n");
    return nullptr;
  }
  if (!text_path) text_path = "README.md";
  std::ifstream in(text_path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (text.empty()) fail(text_path, ": cannot be read, or is empty");
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const auto tokenizer = make_tokenizer(path);
  double first = 0, best = 1e9;
  size_t tokens = 0;
  for (int i = 0; i < 5; i++) {
    const double start = seconds();
    tokens = tokenizer->encode(text).size();
    best = std::min(best, seconds() - start);
    if (i == 0) first = best;  // with an empty cache of words
  }
  const auto megabytes = static_cast<double>(text.size()) * 1e-6;
  nlohmann::json row{{"megabytes", megabytes},
                     {"tokens", tokens},
                     {"MB_per_second", megabytes / best},
                     {"MB_per_second_first_pass", megabytes / first}};
  std::printf("tokenizer  encode %.2f MB, %zu tokens: %.1f MB/s, first pass %.1f MB/s\n", megabytes, tokens,
              megabytes / best, megabytes / first);
  std::fflush(stdout);
  const std::string file = fs::is_directory(path) ? (fs::path(path) / "tokenizer.json").string() : path;
  const std::string python = "RAYON_NUM_THREADS=1 python3 tools/bench/tokenizer.py '" + file + "' '" + text_path + "'";
  if (FILE* pipe = popen(python.c_str(), "r")) {
    double rate = 0;
    if (std::fscanf(pipe, "%lf", &rate) == 1 && rate > 0) {
      row["rust_MB_per_second"] = rate;
      row["ratio"] = megabytes / best / rate;
      std::printf("tokenizer  the Rust library on the same text: %.1f MB/s, ratio %.1f\n", rate,
                  megabytes / best / rate);
    }
    pclose(pipe);
  }
  return row;
}

}  // namespace pare
