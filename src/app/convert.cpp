// pare convert: a llama2.c checkpoint as a Hugging Face folder.
#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "model/hf/folder.h"
#include "model/hf/llama2c.h"
#include "tokenizer/tokenizer.h"

namespace pare {
namespace {

struct Options {
  std::string checkpoint, out, tokenizer;
};

void convert(const Options& options) {
  const Llama2cCheckpoint checkpoint = load_llama2c(options.checkpoint);
  const ModelConfig& config = checkpoint.config;
  if (!options.tokenizer.empty()) {
    const int32_t vocab = load_sentencepiece(options.tokenizer)->vocab_size();
    if (vocab != config.vocab)
      fail(options.tokenizer, ": has ", vocab, " pieces, but the vocabulary of ", options.checkpoint, " has ",
           config.vocab, "; take the tokenizer.bin that was made for this model");
  }
  save_hf(options.out, config, flat_parameters(config, checkpoint.weights.data()), DType::f32, false,
          [&](const std::string& folder) {
            if (!options.tokenizer.empty()) copy_file(options.tokenizer, folder + "/tokenizer.bin");
          });
  std::printf("%s: llama, %zu parameters, %lld layers, vocabulary of %lld\n", printable(options.out).c_str(),
              checkpoint.weights.size(), static_cast<long long>(config.layers), static_cast<long long>(config.vocab));
}

}  // namespace

void add_convert(const Command& program) {
  auto options = std::make_shared<Options>();
  const Command command = program.command("convert", "Hugging Face folder of a llama2.c checkpoint");
  command.option("--llama2c", options->checkpoint, "checkpoint of llama2.c, version 0").required();
  command.option("--out", options->out, "folder to create").required();
  command.option("--tokenizer", options->tokenizer, "its tokenizer.bin, which is copied into the folder");
  command.action([options] { convert(*options); });
}

}  // namespace pare
