#include "run/data.h"

#include <algorithm>

#include "data/jsonl.h"
#include "data/ssa.h"

namespace pare {

static std::unique_ptr<Task> make_ssa(const DataKeys& d, bool val) {
  SsaConfig c = ssa_variant(d.variant);
  c.min_statements = static_cast<int>(val ? d.val_min_statements : d.min_statements);
  c.max_statements = static_cast<int>(d.max_statements);
  if (d.noise >= 0) c.noise = d.noise;
  return std::make_unique<SsaTask>(c, static_cast<uint64_t>(val ? d.val_seed : d.train_seed),
                                   val ? d.val_rows : d.train_rows);
}

ChatFormat chat_format(const Config& c) {
  const DataKeys& d = c.data;
  ChatFormat chat = find_chat_format(d.task == "ssa" ? "plain" : d.chat_template, tokenizer_spec(c));
  chat.thinking = d.apply_chat_template_kwargs.enable_thinking;
  chat.date = d.apply_chat_template_kwargs.date_string;
  return chat;
}

void Data::read(const Config& config, const ModelConfig& model) {
  const DataKeys& d = keys_ = config.data;
  vocab_ = model.vocab;
  tokenizer = make_tokenizer(tokenizer_spec(config));
  chat = chat_format(config);
  if (d.task == "ssa") {
    train = make_ssa(d, false);
    val = make_ssa(d, true);
  } else {
    if (RewardCommand::is_one(d.reward)) reward_command = std::make_shared<RewardCommand>(d.reward, d.reward_timeout);
    const auto read = [&](const std::vector<std::string>& files) -> std::unique_ptr<Task> {
      if (files.empty()) return nullptr;
      return std::make_unique<JsonlTask>(files, d.reward, RowKeys{d.prompt_key, d.answer_key, d.system_prompt},
                                         reward_command);
    };
    train = read(d.train_files);
    val = read(d.val_files);
  }
  if (tokenizer->vocab_size() > vocab_)
    fail("the tokenizer has ", tokenizer->vocab_size(), " tokens, the model's vocabulary only ", vocab_);

  eos = model.eos_ids;
  if (eos.empty() && tokenizer->eos() >= 0) eos.push_back(tokenizer->eos());
  if (eos.empty())
    fail(
        "no end-of-sequence token: set eos_token_id in the model's config.json, or eos_token in the "
        "tokenizer's tokenizer_config.json");
  const auto own = std::find(eos.begin(), eos.end(), tokenizer->eos());
  if (own != eos.end()) std::rotate(eos.begin(), own, own + 1);
  stop = make_stop(config.rollout, tokenizer.get(), vocab_);
  end = eos[0];
  if (const auto turn = turn_end(chat, *tokenizer);
      turn && std::find(stop.token_ids.begin(), stop.token_ids.end(), *turn) != stop.token_ids.end())
    end = *turn;
  if (const std::string note = turn_end_note(chat, *tokenizer, eos, stop); !note.empty()) notes.push_back(note);
}

const Task& Data::training_task() const {
  if (!train) fail("data.task = \"jsonl\" needs data.train_files to train on, which is empty");
  return *train;
}

void Data::keep_fitting(Task& task, const std::function<std::string(const Problem&)>& excess) {
  const int64_t rows = task.size();
  std::vector<int64_t> kept;
  std::string first, where;
  for (int64_t row = 0; row < rows; row++) {
    const Problem problem = task.problem(row);
    const std::string what = excess(problem);
    if (what.empty()) kept.push_back(row);
    if (!what.empty() && first.empty()) {
      first = what;
      where = problem.where;
    }
  }
  if (first.empty()) return;
  const int64_t out = rows - static_cast<int64_t>(kept.size());
  if (keys_.task != "jsonl") fail(first);
  const std::string set = &task == val.get() ? "validation" : "training";
  if (!keys_.filter_overlong_prompts)
    fail(where, ": ", first, out > 1 ? cat(" (", out, " of ", rows, " ", set, " rows are too long)") : std::string(),
         "; raise it, or leave such rows out with data.filter_overlong_prompts=true");
  if (kept.empty()) fail(where, ": ", first, "; data.filter_overlong_prompts leaves out all ", rows, " ", set, " rows");
  notes.push_back(cat("data.filter_overlong_prompts leaves out ", out, " of ", rows, " ", set,
                      " rows; the first: ", where, ": ", first));
  if (&task == train.get()) left_out += out;
  task.keep(kept);
}

std::vector<int32_t> Data::prompt_of_any_length(const Problem& problem) const {
  std::vector<int32_t> ids = problem.prompt_ids;
  try {
    if (ids.empty()) ids = encode_chat(chat, *tokenizer, conversation(problem));
  } catch (const Error& e) {
    fail(problem.where, ": ", e.what());
  }
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab_)
      fail(problem.where, ": the prompt has the token ", id, ", the model's vocabulary is ", vocab_);
  return ids;
}

std::vector<int32_t> Data::encode_prompt(const Problem& problem) const {
  std::vector<int32_t> ids = prompt_of_any_length(problem);
  if (static_cast<int64_t>(ids.size()) > keys_.max_prompt_length)
    fail(problem.where, ": the prompt has ", ids.size(), " tokens, data.max_prompt_length is ",
         keys_.max_prompt_length);
  return ids;
}

// A template may write more than the text (qwen3: an empty thought).  Where what it writes does not go on from its own
// prompt (deepseek-r1 drops the thought that its prompt opens), the text stands as it is.
std::string Data::reply_text(const Problem& problem) const {
  const std::string& content = problem.reply->content;
  if (chat.kind == ChatFormat::Kind::plain || chat.kind == ChatFormat::Kind::problem) return content;
  std::vector<Message> messages = conversation(problem);
  const std::string prompt = render_chat(chat, messages), thought = "<think>\n";
  messages.push_back(*problem.reply);
  const std::string whole = render_chat(chat, messages, false);
  if (whole.starts_with(prompt))
    for (const int32_t id : eos) {
      const std::string end = tokenizer->piece(id);
      const size_t at = whole.rfind(end);
      if (at != std::string::npos && at >= prompt.size() &&
          whole.find_first_not_of(" \n", at + end.size()) == std::string::npos)
        return whole.substr(prompt.size(), at - prompt.size());
    }
  return prompt.ends_with(thought) && content.starts_with(thought) ? content.substr(thought.size()) : content;
}

std::vector<int32_t> Data::encode_completion(const Problem& problem, const std::string& text) const {
  std::vector<int32_t> ids;
  try {
    ids = tokenizer->encode(problem.reply ? reply_text(problem) : text);
  } catch (const Error& e) {
    fail(problem.where, ": ", e.what());
  }
  ids.push_back(end);
  return ids;
}

std::string Data::response_text(const Completion& completion) const {
  return tokenizer->decode(std::span(completion.tokens).first(text_tokens(completion, stop, *tokenizer)));
}

Reward Data::reward(const Task& task, const Problem& problem, const Completion& completion) const {
  return task.reward(
      problem, {response_text(completion), completion.finished(), static_cast<int64_t>(completion.tokens.size())});
}

PromptStream::PromptStream(int64_t rows, bool shuffle, uint64_t seed) : rows_(rows), shuffle_(shuffle), seed_(seed) {
  start_epoch();
}

void PromptStream::start_epoch() {
  next_ = 0;
  if (!shuffle_) return;
  order_.resize(rows_);
  for (int64_t i = 0; i < rows_; i++) order_[i] = i;
  Rng rng(rng_key(seed_, RngStream::shuffle, static_cast<uint64_t>(epoch_)));
  for (int64_t i = rows_ - 1; i > 0; i--) std::swap(order_[i], order_[rng.below(static_cast<uint32_t>(i + 1))]);
}

void PromptStream::seek(const Cursor& cursor) {
  epoch_ = cursor.epoch;
  start_epoch();
  next_ = cursor.next;
}

PromptStream::Row PromptStream::next() {
  if (next_ == rows_) {
    epoch_++;
    start_epoch();
  }
  const int64_t i = next_++;
  return {epoch_, shuffle_ ? order_[i] : i};
}

}  // namespace pare
