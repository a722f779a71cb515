// The data of a run: problems, how they become tokens, and the texts and rewards of responses.
#pragma once
#include <functional>
#include <memory>

#include "data/reward_command.h"
#include "data/task.h"
#include "run/config.h"
#include "run/stop.h"
#include "tokenizer/chat.h"

namespace pare {

// The format of text prompts; plain of the task ssa.
ChatFormat chat_format(const Config& config);

struct Data {
  // Reads the tokenizer and the tasks; `model` has the vocabulary and the end-of-sequence ids.  Throws an Error if the
  // tokenizer has more tokens than the model, or if nothing ends a sequence.
  void read(const Config& config, const ModelConfig& model);

  const Task& training_task() const;  // train; throws an Error that names data.train_files if there is none
  // Returns the ids of the problem, or of its conversation in the chat format of the run.  Throws an Error if they are
  // more than data.max_prompt_length.
  std::vector<int32_t> encode_prompt(const Problem& problem) const;
  std::vector<int32_t> prompt_of_any_length(const Problem& problem) const;  // the same without that limit
  // Returns the ids that the problem's row teaches: its completion as it stands, or its reply as the chat format
  // renders that after the prompt, and EOS.
  std::vector<int32_t> encode_completion(const Problem& problem, const std::string& text) const;
  // Keeps the rows of `task` that fit.  `excess` returns how a row is too long ("the prompt has 7 tokens, data.max_...
  // is 5"), or an empty text.  Throws at the first such row; with data.filter_overlong_prompts it is left out, and
  // `notes` has their number.
  void keep_fitting(Task& task, const std::function<std::string(const Problem&)>& excess);
  std::string response_text(const Completion& completion) const;  // of text_tokens()
  Reward reward(const Task& task, const Problem& problem, const Completion& completion) const;

  std::unique_ptr<Tokenizer> tokenizer;           // absent: nothing was read
  ChatFormat chat;                                // of text prompts
  std::shared_ptr<RewardCommand> reward_command;  // of data.reward = "command:..."; absent: another one
  std::unique_ptr<Task> train, val;               // absent: jsonl without train_files, without val_files
  int64_t left_out = 0;                           // rows of train_files, by data.filter_overlong_prompts
  std::vector<std::string> notes;                 // on the data and how responses end, for the user
  std::vector<int32_t> eos;  // any of them ends a response; the first is the tokenizer's, if it is one of them
  Stop stop;                 // other ends of a response
  int32_t end = -1;  // ends a completion that is given as a text: eos[0], or the end of a turn if it is a stop token

 private:
  std::string reply_text(const Problem& problem) const;
  DataKeys keys_;
  int64_t vocab_ = 0;
};

// Rows of a data set in the order of training: epoch after epoch, each shuffled by (seed, epoch).
class PromptStream {
 public:
  PromptStream(int64_t rows, bool shuffle, uint64_t seed);
  struct Row {
    int64_t epoch, row;
  };
  Row next();

  struct Cursor {
    int64_t epoch = 0, next = 0;  // next: rows of the epoch that were given out
    bool operator==(const Cursor&) const = default;
  };
  Cursor cursor() const { return {epoch_, next_}; }
  void seek(const Cursor& cursor);

 private:
  void start_epoch();
  const int64_t rows_;
  const bool shuffle_;
  const uint64_t seed_;
  int64_t epoch_ = 0, next_ = 0;
  std::vector<int64_t> order_;
};

}  // namespace pare
