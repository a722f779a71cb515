#include "model/hf/files.h"

namespace pare {

std::span<const FolderFile> folder_files() {
  using enum FolderFile::Part;
  using enum FolderFile::Saved;
  static constexpr FolderFile files[] = {
      {"config.json", model, written,
       "shape and arithmetic; an absent key is the default of the model's class in transformers"},
      {"generation_config.json", model, copied, "`eos_token_id`, which replaces that of `config.json`"},
      {"model.safetensors", model, written, "weights"},
      {"model.safetensors.index.json", model, written, "names of the shards, if there is no `model.safetensors`"},
      {"model-*.safetensors", model, written, "weights of a shard"},
      {"tokenizer.json", tokenizer, copied, "vocabulary and merges; `post_processor` says whether BOS is added"},
      {"tokenizer_config.json", tokenizer, copied,
       "`eos_token`, `pad_token`; `chat_template`, if no file holds a template. Not `add_bos_token`, which "
       "transformers 5 ignores beside a `tokenizer.json`"},
      {"special_tokens_map.json", tokenizer, copied,
       "`eos_token`, `pad_token`, before those of a `tokenizer_config.json` without `added_tokens_decoder`"},
      {"chat_template.jinja", tokenizer, copied, "chat template, before that of `tokenizer_config.json`"},
      {"additional_chat_templates/*.jinja", tokenizer, copied,
       "`default.jinja`, before `chat_template.jinja`; the others are not read"},
      {"added_tokens.json", tokenizer, copied, ""},
      {"vocab.json", tokenizer, copied, ""},
      {"merges.txt", tokenizer, copied, ""},
      {"tokenizer.model", tokenizer, copied, ""},
      {"tokenizer.bin", tokenizer, copied, "pieces of SentencePiece, as llama2.c writes them"},
      {"vocab_pieces.json", tokenizer, copied, "the same as JSON"},
      {"tokenizer.ssa", tokenizer, copied, "symbols of the built-in task"},
      {"adapter_config.json", adapter, written, "settings of PEFT"},
      {"adapter_model.safetensors", adapter, written, "weights of an adapter"},
      {"chat_template.json", none, no, "template of processors of images, which tokenizers do not read"},
      {"README.md", none, no, ""},
      {"LICENSE", none, no, ""},
  };
  return files;
}

}  // namespace pare
