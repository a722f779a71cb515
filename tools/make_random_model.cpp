// Writes a Hugging Face folder with the shapes of a config.json and random weights (transformers' initialisation) in
// BF16: what a model of that size costs to load, to sample and to train can then be measured without having it.
//
//   build/make_random_model data/presets/qwen2.5-0.5b.json TOKENIZER_DIR OUT_DIR [SEED]
//
// The files of the tokenizer are copied from TOKENIZER_DIR.
#include <cstdio>
#include <cstdlib>

#include "base/json_file.h"
#include "model/hf/folder.h"
#include "model/model.h"

int main(int argc, char** argv) {
  using namespace pare;
  if (argc < 4 || argc > 5) {
    std::fprintf(stderr, "usage: make_random_model CONFIG.json TOKENIZER_DIR OUT_DIR [SEED]\n");
    return static_cast<int>(Exit::usage);
  }
  try {
    const ModelConfig config = parse_model_config(read_json_file(argv[1]), argv[1]);
    const uint64_t seed = argc == 5 ? std::strtoull(argv[4], nullptr, 10) : 1;
    save_hf(argv[3], config, init_parameters(config, seed, Init::config), DType::bf16, false,
            [&](const std::string& folder) { copy_tokenizer(argv[2], folder); });
    return static_cast<int>(Exit::ok);
  } catch (const Error& e) {
    std::fprintf(stderr, "make_random_model: %s\n", e.what());
    return static_cast<int>(e.code);
  }
}
