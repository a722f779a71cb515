// Runs that take milliseconds: a model with a hidden width of 16 on a task of one character, which it starts about half
// of its responses with, and everything it needs as files in a temporary folder.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "run/grpo_training.h"
#include "run/sft_training.h"
#include "tests/keys.h"
#include "tests/tiny_tokenizer.h"
#include "tests/weights.h"

namespace pare::test {

using Overrides = Keys;

inline std::string tiny_folder() { return cat(testing::TempDir(), "pare_tiny_run_", getpid(), "/"); }

inline void write_tiny_file(const std::string& name, const std::string& text) {
  std::ofstream(tiny_folder() + name, std::ios::binary) << text;
}

inline std::string config_json(int hidden, int vocab = 48, int kv_heads = 1) {
  return cat(R"({"model_type": "qwen3", "hidden_size": )", hidden, R"(, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": )",
             kv_heads, R"(, "head_dim": 8, "intermediate_size": 24, "vocab_size": )", vocab, R"(,
    "max_position_embeddings": 160, "tie_word_embeddings": true, "eos_token_id": 2})");
}

// llama2.c's tokenizer.bin: three special pieces, a space, and the characters of the rows.
inline std::string tokenizer_bin() {
  std::string bytes;
  const auto put = [&](auto x) { bytes.append(reinterpret_cast<const char*>(&x), sizeof x); };
  put(int32_t{5});
  for (const char* piece : {"<unk>", "<s>", "</s>", " ", "a", "b", "c", "p", "q", ";", "?", "0", "1"}) {
    put(0.0f);
    put(static_cast<int32_t>(std::strlen(piece)));
    bytes += piece;
  }
  return bytes;
}

inline Overrides tiny_jsonl() {
  return {"data.task=jsonl", cat("data.train_files=", tiny_folder(), "train.jsonl"), "data.reward=starts_with",
          cat("data.val_files=", tiny_folder(), "val.jsonl"), "data.tokenizer=ssa"};
}
inline const Overrides tiny_sizes = {"data.train_batch_size=4",     "data.max_prompt_length=16",
                                     "data.max_response_length=12", "rollout.n=4",
                                     "rollout.max_num_seqs=16",     "trainer.total_training_steps=4",
                                     "trainer.threads=1",           "rollout.max_num_batched_tokens=64",
                                     "actor.optim.lr=1e-2",         "actor.optim.weight_decay=0"};

// Everything above, in the folder; `trained` knows the task as far as it can be known, `random` nothing.
inline void make_tiny_run() {
  std::filesystem::create_directories(tiny_folder());
  write_tiny_file("config.json", config_json(16));
  write_tiny_file("wide.json", config_json(24));
  write_tiny_file("bytes.json", config_json(16, 270));
  write_tiny_file("kv_heads.json", config_json(16, 48, 2));
  write_tiny_file("tokenizer.json", tokenizer_json({}, {"<|im_start|>", "<|im_end|>", "<|begin_of_text|>",
                                                        "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"})
                                        .dump());
  write_tiny_file("tokenizer.bin", tokenizer_bin());
  std::string train, short_prompts;
  // Every prompt with every completion: there is nothing to know, so that answers stay random.
  const char* prompts[] = {"p0?", "pq0?", "p1?", "pq11?"};
  const char* completions[] = {"a;b1", "b;c", "a", "b;1;0;1", "a;c0;b", "b"};
  for (int i = 0; i < 24; i++) {
    const std::string rest = cat(R"(", "answer": "a", "completion": ")", completions[i / 4], "\"}\n");
    train += cat(R"({"prompt": ")", prompts[i % 4], rest);
    short_prompts += cat(R"({"prompt": "?)", rest);
  }
  write_tiny_file("train.jsonl", train);
  write_tiny_file("short.jsonl", short_prompts);
  write_tiny_file("val.jsonl", train.substr(0, train.find('\n', 500) + 1));
  std::string cache;
  for (int row = 0; row < 24; row++) {
    if (row == 20) write_tiny_file("part.jsonl", cache);
    cache += cat("{\"row\": ", row, R"(, "text": "a;b1", "finished": true})", "\n");
  }
  write_tiny_file("cache.jsonl", cache);
  write_tiny_file("empty.toml", "");
  write_tiny_file("never.jsonl", R"({"prompt": "p?", "answer": "ssss"})");

  Session session(load_config(tiny_jsonl() + tiny_sizes +
                              Overrides{cat("model.config=", tiny_folder(), "config.json"), "model.init=fan_in",
                                        "trainer.total_training_steps=60", "data.train_batch_size=24"}));
  save_weights(tiny_folder() + "random", session.model_config, session.model->get_parameters(), DType::f32, true);
  SftTraining sft(session);
  while (sft.steps() < 60) sft.step();
  save_weights(tiny_folder() + "trained", session.model_config, session.model->get_parameters(), DType::f32, true);
}

// The run that a test changes: 4 prompts x 4 responses of at most 12 tokens.
inline Overrides tiny_run() {
  return Overrides{cat("model.path=", tiny_folder(), "trained")} + tiny_jsonl() + tiny_sizes;
}

}  // namespace pare::test
