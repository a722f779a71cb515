// pare generate: text from a model: completions, chat, samples of many prompts.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <optional>

#include "app/commands.h"
#include "app/console.h"
#include "app/device.h"
#include "app/interrupt.h"
#include "app/prompts.h"
#include "app/shorthands.h"
#include "app/show.h"
#include "base/progress.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/thread_pool.h"
#include "model/hf/folder.h"
#include "run/fit.h"
#include "run/plan.h"

namespace pare {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Options {
  Shorthands keys{
      {{"--model", "Hugging Face folder"},
       {"--adapter", "LoRA adapter, a PEFT folder"},
       {"--tokenizer", "ssa, a tokenizer file or a folder with one; default: the model's"},
       {"--chat-format",
        "chatml, qwen2.5, qwen3, llama-3, deepseek-r1, plain or a text with {problem}; default: the model's own"},
       {"--max-new-tokens", "longest response, in tokens"},
       {"--n", "samples per prompt"},
       {"--temperature", "0: greedy"},
       {"--top-p", "1: off"},
       {"--top-k", "0: off"},
       {"--min-p", "0: off"},
       {"--seed"},
       {"--threads"},
       {"--device"},
       {"--exact"},
       {"--dtype"}}};
  std::vector<std::string> config;
  std::optional<std::string> prompt, chat, system, file;
  bool greedy = false, no_thinking = false, jsonl = false, quiet = false;
  bool interactive() const { return !prompt && !chat && !file; }
};

Config configuration(const Options& o, const Command& command, std::vector<std::string>& notes) {
  // A pass of 512 rows is enough for the speed of prompts, and takes little memory.
  std::vector<std::string> arguments = {"data.task=jsonl", "rollout.val_kwargs.temperature=1",
                                        "rollout.val_kwargs.kv=rollout", "rollout.max_num_seqs=64",
                                        "rollout.max_num_batched_tokens=512"};
  arguments.insert(arguments.end(), o.config.begin(), o.config.end());
  for (const std::string& override : o.keys.overrides(command)) arguments.push_back(override);
  if (o.greedy) arguments.push_back("rollout.val_kwargs.temperature=0");
  if (o.no_thinking) arguments.push_back("data.apply_chat_template_kwargs.enable_thinking=false");
  Config c = read_config(arguments, &notes);
  const ValKeys& v = c.rollout.val_kwargs;
  if (v.kv == ValKv::both)
    fail("rollout.val_kwargs.kv = \"both\" is for the validation of a run; pare generate takes dense or rollout");
  if (v.kv == ValKv::dense) c.rollout.kv = {};
  check_kv(c.rollout.kv);
  if (v.temperature == 0 && v.n > 1)
    fail("greedy decoding gives the same response ", v.n, " times: drop --n, or sample with --temperature 1");
  if (o.interactive() && (v.n > 1 || o.jsonl))
    fail(o.jsonl ? "--jsonl" : "--n", " needs --prompt, --chat or --file: a conversation has one answer per turn");
  if (o.system && !o.chat && !o.interactive()) fail("--system needs --chat or a conversation");
  return c;
}

void put(const std::string& text) {
  print(text);
  finish_output();
}

// Thrown out of a generation that Ctrl-C stops.
struct Stopped {};

class Generator {
 public:
  Generator(const Config& config, const Prompts& prompts);

  // All samples of all requests; `drawn` is called for every token.
  std::vector<Completion> generate(const std::vector<Request>& requests,
                                   const std::function<void(const Completion&)>& drawn,
                                   const std::function<void(const RolloutStats&)>& progress = {});
  // A line about the last generation: what it computed, how fast, in how much memory.
  std::string statistics(const std::vector<Request>& requests, const std::vector<Completion>& done) const;

 private:
  RolloutLimits limits(const std::vector<Request>& requests, const RolloutKeys& keys) const;
  ArenaLimits memory(const std::vector<Request>& requests) const;  // of kv and activations; fits
  int64_t dense_pages(const std::vector<Request>& requests, const std::vector<Completion>& done) const;
  void pass(const RolloutStats& now);

  const Config& config_;
  const ModelConfig& model_config_;
  Sampling sampling_;
  const Table& table_;
  const std::optional<LoraSpec> lora_;
  Engine engine_;
  // Of the last generation: the time of prompts, and of the tokens that were fed back.
  RolloutLimits limits_{};
  RolloutStats stats_;
  Clock::time_point time_;
  double prefill_seconds_ = 0, decode_seconds_ = 0;
};

// Bytes of the weights, which fit.
size_t weight_bytes(const Config& config, const ModelConfig& model, const std::optional<LoraSpec>& lora,
                    const Table& table) {
  Engine books(table_null, {.weights = SIZE_MAX});
  books.make(model, act_type(config), false, lora);
  const ArenaLimits all = books.peaks();
  if (const Room room = room_on(table); all.total() > room.bytes) does_not_fit("the weights take", all, room, {});
  return all.weights;
}

Generator::Generator(const Config& config, const Prompts& prompts)
    : config_(config),
      model_config_(prompts.model),
      sampling_{.temperature = static_cast<float>(config.rollout.val_kwargs.temperature),
                .truncation = truncation_of(config.rollout.val_kwargs),
                .key = rng_key(static_cast<uint64_t>(config.trainer.seed), RngStream::sample, 0),
                .eos = prompts.eos,
                .stop = prompts.stop},
      table_(open_table(config.trainer)),
      lora_(config.model.lora.adapter_path.empty() ? std::nullopt : lora_spec(config.model.lora)),
      engine_(table_, {.weights = weight_bytes(config, model_config_, lora_, table_)}) {
  set_threads(static_cast<int>(config.trainer.threads));
  engine_.make(model_config_, act_type(config), false, lora_);
  engine_.model->set_parameters(hf_weights(config.model.path, model_config_));
  if (lora_) engine_.adapters->set_parameters(adapter_weights(config.model.lora.adapter_path, model_config_));
}

// Room for the requests; of several samples as many at a time as half of the memory holds.
RolloutLimits Generator::limits(const std::vector<Request>& requests, const RolloutKeys& r) const {
  const KvResidency residency(r.kv, model_config_.layers);
  RolloutLimits l{.max_sequences = 1, .max_batched_tokens = 1, .max_context = 2, .kv = r.kv};
  int64_t samples = 0, longest = 0;  // pages of the longest sequence alone
  for (const Request& q : requests) {
    const auto prompt = static_cast<int64_t>(q.prompt.size());
    samples += static_cast<int64_t>(q.uids.size());
    l.max_prompt = std::max(l.max_prompt, prompt);
    l.max_context = std::max(l.max_context, prompt + q.max_new_tokens);
    longest = std::max(longest, Scheduler::pages_needed(residency, q));
  }
  l.max_sequences = static_cast<int>(std::min(samples, r.max_num_seqs));
  l.max_batched_tokens = static_cast<int>(std::max<int64_t>(r.max_num_batched_tokens, l.max_sequences));
  l.lookahead = lookahead(config_);
  const int64_t page = KvCache::page_bytes(model_config_, r.kv, engine_.model->dtype);
  const int64_t room = r.kv_cache_bytes > 0
                           ? r.kv_cache_bytes / page
                           : std::max(longest, static_cast<int64_t>(engine_.device.memory().free() / 2) / page);
  if (room == 0)
    throw Error(Exit::memory, cat("does not fit: rollout.kv_cache_bytes = ", r.kv_cache_bytes,
                                  " holds no page of keys and values, of which one takes ", page, " bytes; raise it"));
  l.kv_pages = std::min(room, l.max_sequences * longest);
  return l;
}

ArenaLimits Generator::memory(const std::vector<Request>& requests) const {
  const Room room = room_on(table_);
  const auto needed = [&](const RolloutKeys& keys) {
    return rollout_memory(model_config_, engine_.model->dtype, lora_, limits(requests, keys));
  };
  const ArenaLimits all = needed(config_.rollout);
  if (all.total() > room.bytes)
    does_not_fit(
        "beside the weights it takes", all, room,
        what_fits(config_, {"rollout.kv_cache_bytes", "rollout.max_num_seqs", "rollout.max_num_batched_tokens"}, {},
                  [&](const Config& c) { return needed(c.rollout).total() <= room.bytes; }));
  return all;
}

// The time since the last pass; that of a pass with rows of both is divided as its rows are.
void Generator::pass(const RolloutStats& now) {
  const Clock::time_point time = Clock::now();
  const double seconds = std::chrono::duration<double>(time - time_).count();
  const auto prefill = static_cast<double>(now.prefill_tokens - stats_.prefill_tokens);
  const auto decode = static_cast<double>(now.decode_rows - stats_.decode_rows);
  const double part = decode > 0 ? decode / (prefill + decode) : 0;
  prefill_seconds_ += (1 - part) * seconds;
  decode_seconds_ += part * seconds;
  stats_ = now;
  time_ = time;
}

std::vector<Completion> Generator::generate(const std::vector<Request>& requests,
                                            const std::function<void(const Completion&)>& drawn,
                                            const std::function<void(const RolloutStats&)>& progress) {
  limits_ = limits(requests, config_.rollout);
  const ArenaLimits arenas = memory(requests);
  Arena kv("kv", engine_.device.memory(), arenas.kv), scratch("scratch", engine_.device.memory(), arenas.activations);
  Rollout rollout(*engine_.model, limits_, kv, scratch);
  stats_ = {};
  prefill_seconds_ = decode_seconds_ = 0;
  time_ = Clock::now();
  return rollout.generate(
      requests, sampling_,
      [&](const RolloutStats& now) {
        pass(now);
        if (progress) progress(now);
        if (interrupted()) throw Stopped();
      },
      drawn);
}

// Pages that a dense cache would hold at its peak, with as many sequences at a time: the schedule follows from lengths
// and tokens.
int64_t Generator::dense_pages(const std::vector<Request>& requests, const std::vector<Completion>& done) const {
  RolloutLimits limits = limits_;
  limits.max_sequences = stats_.peak_sequences;
  limits.kv = {};
  const KvResidency residency({}, model_config_.layers);
  for (const Request& r : requests)
    limits.kv_pages = std::max(limits.kv_pages, Scheduler::pages_needed(residency, r) * limits.max_sequences);
  Device device(table_null);
  Arena books("kv", no_memory);
  KvCache cache(model_config_, {}, device, books, engine_.model->dtype, limits.kv_pages,
                Scheduler::cache_sequences(limits), limits.max_context);
  Scheduler scheduler(residency, requests, sampling_.eos, limits, cache, {}, sampling_.stop);
  while (!scheduler.done()) {
    const Batch batch = scheduler.next();
    std::vector<int32_t> tokens;
    for (const Batch::Draw& d : batch.draws) tokens.push_back(done[d.completion].tokens[d.position]);
    scheduler.advance(batch);
    scheduler.settle(batch, tokens.data(), std::vector<float>(tokens.size()).data());
  }
  return cache.pool().peak();
}

std::string Generator::statistics(const std::vector<Request>& requests, const std::vector<Completion>& done) const {
  const auto rate = [](int64_t tokens, double seconds) {
    return tokens > 0 && seconds > 0 ? cat(", ", human(static_cast<double>(tokens) / seconds), " tok/s") : "";
  };
  const auto bytes = [&](int64_t pages, const KvSpec& kv) {
    return human(static_cast<double>(pages * KvCache::page_bytes(model_config_, kv, engine_.model->dtype))) + "B";
  };
  const KvSpec& kv = config_.rollout.kv;
  std::string line = cat(stats_.prefill_tokens, " prompt tokens", rate(stats_.prefill_tokens, prefill_seconds_), "; ",
                         stats_.decoded_tokens, " new tokens", rate(stats_.decode_rows, decode_seconds_), "; KV ",
                         bytes(stats_.peak_pages, kv), " at most");
  if (kv.method != KvMethod::dense)
    line += cat(", dense ", bytes(kv.evicts() ? dense_pages(requests, done) : stats_.peak_pages, {}));
  return line;
}

// ---- what is written -----------------------------------------------------------------------------------------------

// One sample, written as it comes.  Ctrl-C ends it where an InterruptScope lives; returns what there is then.
std::string stream(Generator& generator, const Prompts& prompts, const Prompt& prompt, uint64_t uid, bool quiet) {
  Request request{prompt.ids, {uid}, prompt.max_new_tokens};
  StreamDecoder decoder(prompts.tokenizer(), prompt.ids.back());
  std::string text;
  const auto write = [&](const std::string& more) {
    put(more);
    text += more;
  };
  Completion answer;
  try {
    generator.generate({request}, [&](const Completion& c) {
      answer.tokens.push_back(c.tokens.back());
      if (text_tokens(c, prompts.stop, prompts.tokenizer()) == c.tokens.size()) write(decoder.push(c.tokens.back()));
    });
  } catch (const Stopped&) {
  }
  write(decoder.finish());
  put("\n");
  request.max_new_tokens = static_cast<int>(answer.tokens.size());
  if (!quiet && !answer.tokens.empty()) std::fprintf(stderr, "%s\n", generator.statistics({request}, {answer}).c_str());
  return text;
}

std::string json_line(const Prompts& prompts, const Prompt& prompt, const Completion& c, bool greedy) {
  Json line = {{"prompt", prompt.given}, {"row", c.request}, {"sample", c.sample}};
  if (prompts.has_tokenizer()) {
    StreamDecoder decoder(prompts.tokenizer(), prompt.ids.back());
    std::string text;
    const size_t shown = text_tokens(c, prompts.stop, prompts.tokenizer());
    for (size_t i = 0; i < shown; i++) text += decoder.push(c.tokens[i]);
    line["text"] = text + decoder.finish();
  }
  line["tokens"] = c.tokens;
  if (!greedy) line["logprobs"] = c.logprobs;
  line["finish"] = finish_name(c.finish);
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

// All samples of all prompts, a JSON object each, in order; a line is written when it and those before it are finished.
void write_samples(const Config& config, const Prompts& prompts, const std::vector<Prompt>& given, bool quiet) {
  const int64_t n = config.rollout.val_kwargs.n;
  double bytes = 0;
  for (const Prompt& p : given) bytes += static_cast<double>(n) * (sizeof(Completion) + 8.0 * p.max_new_tokens);
  if (bytes > static_cast<double>(machine_memory()))
    throw Error(Exit::memory,
                cat("does not fit: the responses, ", n, " of each prompt, take ", bytes, " bytes; the machine has ",
                    machine_memory(), "; --n ",
                    std::floor(static_cast<double>(machine_memory()) * static_cast<double>(n) / bytes), " fits"));
  Generator generator(config, prompts);
  std::vector<Request> requests;
  for (size_t r = 0; r < given.size(); r++) {
    requests.push_back({given[r].ids, {}, given[r].max_new_tokens});
    for (int64_t s = 0; s < n; s++) requests[r].uids.push_back(sequence_uid(0, r, 0, static_cast<uint64_t>(s)));
  }
  const bool greedy = config.rollout.val_kwargs.temperature == 0;
  std::map<int64_t, std::string> waiting;
  int64_t next = 0, finished = 0;
  const int64_t samples = n * std::ssize(given);
  std::optional<ProgressLine> work(std::in_place, "generation", samples, false);
  const auto drawn = [&](const Completion& c) {
    const Prompt& prompt = given[static_cast<size_t>(c.request)];
    if (!c.finished() && static_cast<int>(c.tokens.size()) < prompt.max_new_tokens) return;
    waiting[c.request * n + c.sample] = json_line(prompts, prompt, c, greedy);
    finished++;
    for (auto first = waiting.begin(); first != waiting.end() && first->first == next; next++) {
      work->hide();
      put(first->second);
      first = waiting.erase(first);
    }
  };
  catch_interrupts();
  try {
    const auto done = generator.generate(requests, drawn, [&](const RolloutStats& s) {
      work->done(s.finished, rollout_note(*work, s.finished, samples, s.decoded_tokens));
    });
    work.reset();
    if (!quiet) std::fprintf(stderr, "%s\n", generator.statistics(requests, done).c_str());
  } catch (const Stopped&) {
    work.reset();
    for (const auto& [place, line] : waiting) put(line);
    throw Error(Exit::interrupted,
                cat("interrupted: ", finished, " of ", samples, " samples are finished and written"));
  }
}

// Lines of standard input, each answered, with what was said before where the chat format has turns.
void converse(const Config& config, const Options& o, const Prompts& prompts) {
  const ChatFormat::Kind kind = prompts.chat().kind;
  const bool turns = kind != ChatFormat::Kind::plain && kind != ChatFormat::Kind::problem;
  if (o.system && !turns) fail("--system needs a chat format that has turns; choose one with --chat-format");
  prompts.tokenizer();
  print_notes(prompts.notes());
  Generator generator(config, prompts);
  const bool terminal = isatty(STDIN_FILENO);
  if (terminal && !o.quiet)
    std::fprintf(stderr, "%s; Ctrl-C stops it, Ctrl-D ends\n",
                 turns ? "Each line is answered" : "Each line is continued by itself (the model has no chat format)");
  std::vector<Message> said;
  if (o.system) said.push_back({"system", *o.system});
  std::string line;
  for (uint64_t turn = 0;; turn++) {
    if (terminal) std::fputs("> ", stderr);
    if (!std::getline(std::cin, line)) break;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::vector<Message> all = turns ? said : std::vector<Message>();
    all.push_back({"user", line});
    try {
      const Prompt prompt = prompts.messages(all);
      const InterruptScope scope;
      all.push_back({"assistant", stream(generator, prompts, prompt, sequence_uid(0, turn, 0, 0), o.quiet)});
      said = all;
    } catch (const Error& e) {  // at a terminal the line is forgotten, and one may go on
      if (!terminal || e.code != Exit::usage) throw;
      std::fprintf(stderr, "pare: %s\n", printable(e.what()).c_str());
    }
  }
  if (terminal) std::fputs("\n", stderr);
}

void run(const Options& o, const Command& command) {
  std::vector<std::string> notes;
  const Config config = configuration(o, command, notes);
  print_notes(notes);
  ProgressLine::quiet = o.quiet;
  const Prompts prompts(config);
  if (o.interactive()) return converse(config, o, prompts);
  if (o.file) {
    const std::vector<Prompt> given = prompts.file(*o.file);
    print_notes(prompts.notes());
    return write_samples(config, prompts, given, o.quiet);
  }
  if (o.chat && prompts.chat().kind == ChatFormat::Kind::plain)
    fail("--chat: ", config.model.path, " has no chat template; choose a format with --chat-format, or use --prompt");
  std::vector<Message> messages;
  if (o.system) messages.push_back({"system", *o.system});
  if (o.chat) messages.push_back({"user", *o.chat});
  const Prompt prompt = o.chat ? prompts.messages(messages) : prompts.text(*o.prompt);
  print_notes(prompts.notes());
  if (o.jsonl || config.rollout.val_kwargs.n > 1) return write_samples(config, prompts, {prompt}, o.quiet);
  Generator generator(config, prompts);
  stream(generator, prompts, prompt, sequence_uid(0, 0, 0, 0), o.quiet);
}

constexpr const char* kFooter =
    R"(Without --prompt, --chat and --file, lines of standard input are answered in a conversation (or each continued by
itself, if the model has no chat format).  Ctrl-C stops an answer, Ctrl-D ends the conversation, which is computed
from its start at every turn.  A response ends at EOS, at rollout.stop_token_ids or rollout.stop, after
--max-new-tokens, or at the model's last position.

--file: JSON lines as in training (`pare help data`): "prompt", "problem" or "question" (a text, in the model's chat
format; --chat-format plain continues it), "messages" ([{"role", "content"}]) or "prompt_ids".

With --file, --n above 1 or --jsonl, standard output has one JSON object per sample, in order:
  {"prompt": as given, "row": its number in the file, from 0, "sample": 0 to n-1, "text", "tokens",
   "logprobs": as sampled (not of --greedy), "finish": "eos", "stop" or "length"}
Otherwise it has the text alone.  Progress, speed and KV memory go to standard error.  Ctrl-C writes the samples that
are finished.

The keys of `pare train` select a sparse cache (first a model: DIR is a Hugging Face folder, or
runs/NAME/model of a run):
  pare generate --model DIR --prompt TEXT rollout.kv.method=snapkv rollout.kv.evict.budget=256
)";

}  // namespace

void add_generate(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("generate", "text from a model: a prompt, a chat, a file of prompts");
  c.option("config", o->config, "presets or TOML files, then overrides group.key=value, as of `pare train`");
  const Option prompt = c.option("--prompt", o->prompt, "text to continue");
  const Option chat = c.option("--chat", o->chat, "user turn, in the model's chat format");
  const Option file = c.option("--file", o->file, "prompts: JSON lines");
  prompt.excludes(chat).excludes(file);
  chat.excludes(file);
  c.option("--system", o->system, "system message of the chat");
  o->keys.add(c);
  c.flag("--greedy", o->greedy, "greedy decoding instead of sampling at temperature 1");
  c.flag("--no-thinking", o->no_thinking, "qwen3: starts the answer after an empty thought");
  c.flag("--jsonl", o->jsonl, "prints JSON lines, one per sample, instead of text");
  c.flag("--quiet", o->quiet, "prints no statistics");
  c.footer(kFooter);
  c.action([o, c] { run(*o, c); });
}

}  // namespace pare
