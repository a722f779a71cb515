// Continuous batching over a fixed pool of pages: the rows of the next forward pass.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kv/kv_cache.h"
#include "kv/paged_attention.h"
#include "model/replay.h"

namespace pare {

struct Request {
  std::vector<int32_t> prompt;
  std::vector<uint64_t> uids;        // one per sample: the sequence's name in the random draws (sequence_uid)
  int max_new_tokens;                // per sample, EOS included
  std::vector<int32_t> prefix = {};  // given tokens that every response begins with; computed with the prompt

  int64_t given_tokens() const { return static_cast<int64_t>(prompt.size() + prefix.size()); }
};

enum class Finish { eos, stop, length };
const char* finish_name(Finish finish);  // "eos", "stop" or "length"

struct Completion {
  int request = 0, sample = 0;
  std::vector<int32_t> tokens;  // behind the request's prefix; EOS or the stop token included
  std::vector<float> logprobs;  // of each token under the distribution it was drawn from
  Finish finish = Finish::length;
  std::vector<uint64_t> hashes = {};  // of the logits that each token was drawn from (HashRuns::each), or none
  KeptIds kept = {};                  // Sampling::kept_ids
  bool finished() const { return finish != Finish::length; }  // not cut at its limit
};

// Ends a response besides EOS.
struct Stop {
  std::vector<int32_t> token_ids = {};
  // Returns whether the last of the tokens completes a stop string in the text of prefix and tokens; null: there are no
  // stop strings.
  std::function<bool(std::span<const int32_t> prefix, std::span<const int32_t> tokens)> text = {};
};
// Returns how a response with these tokens ends, if it does: an EOS precedes a stop token, which precedes a string.
std::optional<Finish> end_of(const std::vector<int32_t>& eos, const Stop& stop, std::span<const int32_t> prefix,
                             std::span<const int32_t> tokens);

struct RolloutLimits {
  int max_sequences;       // generated at the same time
  int max_batched_tokens;  // rows of a forward pass, at least max_sequences
  int64_t max_context;     // prompt and new tokens of a sequence
  int64_t kv_pages = 0;    // pages of the pool (16 slots of one layer); 0: as many as max_sequences may ever need
  int64_t max_prompt = 0;  // of them, tokens of a prompt and prefix; 0: max_context - 1
  KvSpec kv = {};          // what is kept and read of keys and values
  int lookahead = 1;       // forward passes that are queued before the host reads the tokens of the first
};

// One forward pass.
struct Batch {
  std::vector<int32_t> ids, positions;  // of each row; the id is 0 where `fed` names the token
  std::vector<int32_t> fed;             // (draw of the batch before, row): tokens that the host has not read yet
  std::vector<PagedRun> runs;           // those that decode first, in the order of their draws
  // A token to draw from the hidden state of row `row`, or of the kept row for kKept.
  struct Draw {
    int32_t row;
    uint64_t uid;
    int32_t position;  // of the new token in the response, from 0
    int completion;    // index in Scheduler::completions
  };
  static constexpr int32_t kKept = -1;
  std::vector<Draw> draws;
  int32_t keep = kKept;  // the row to keep after the draws, if any
  int64_t prefill = 0;   // rows of prompts
};

// A prompt is computed once, in chunks, for all its samples.  Samples are admitted strictly in order (request, sample),
// when a place among max_sequences is free and the pool can reserve all pages that the sample may ever need beyond the
// full pages of its prompt: nothing is ever preempted.  A sample of more than one token forks the prompt's cache at its
// first; the last sample takes the cache over.  A request starts only when all samples before it are admitted, so at
// most one prompt waits for samples: its final hidden state is the one row kept between passes.
//
// The schedule follows from lengths alone, except for sequences that end at an EOS or a stop: they continue, token by
// token, until settle() receives their tokens.  So batches can be scheduled ahead of their tokens; rows and draws
// behind an end are discarded, and stay within the memory reserved for the longest response.
class Scheduler {
 public:
  // forked(parent, child): called when a sequence of the cache continues another.
  Scheduler(const KvResidency& residency, const std::vector<Request>& requests, const std::vector<int32_t>& eos,
            const RolloutLimits& limits, KvCache& cache, std::function<void(int parent, int child)> forked = {},
            Stop stop = {});

  // Sequences that the cache must hold: a prompt waits beside max_sequences running ones.
  static int cache_sequences(const RolloutLimits& limits) { return limits.max_sequences + 1; }
  // Pages that always suffice to finish `request` alone.
  static int64_t pages_needed(const KvResidency& residency, const Request& request);

  bool done() const { return finished_ == completions(); }
  bool idle() const;  // no batch is left to schedule, whatever tokens are still to be settled
  Batch next();       // appends the slots of its rows to the cache
  // Records that `batch`, the last of next(), is computed: its sequences grow by a token, those of full length end.
  void advance(const Batch& batch);
  // Records the tokens of a computed batch, in the order of its draws; batches in order.  Returns which were kept:
  // those whose sequence had not ended before.  `kept`: ListKept::ids, in memory of the host; throws Error(usage) for a
  // token that keeps more ids than there is room for.
  std::vector<bool> settle(const Batch& batch, const int32_t* tokens, const float* logprobs,
                           const uint64_t* hashes = nullptr, const Tensor& kept = {});

  // For identical requests: repeated work need not be scheduled again.  Between batches whose tokens
  // are all settled, alike() says everything that decides the batches to come, but for how many samples are left: of
  // two equal ones the second continues as the first did, `admitted` samples later.  Empty: in neither way.
  //   of samples: within one request, before its last sample; of requests: at the beginning of one
  struct Alike {
    std::vector<int64_t> samples, requests;
    int64_t admitted = 0;  // of all requests
  };
  Alike alike() const;
  // Goes on as if so many more samples, whole requests or samples of the current one, had been admitted, and as many
  // had ended, whose completions stay empty.
  void skip(int64_t samples);
  int64_t samples_left() const;  // of the current request, but for its last one

  int in_flight() const;  // samples admitted, and not yet known to have ended
  int64_t completions() const { return static_cast<int64_t>(completions_.size()); }
  int64_t finished() const { return finished_; }
  const Completion& completion(int index) const { return completions_[index]; }   // so far
  std::vector<Completion> take_completions() { return std::move(completions_); }  // in order (request, sample)

 private:
  struct Prompt {
    int request, sequence;
    int64_t filled = 0;           // tokens whose keys and values are in the cache
    int admitted = 0, drawn = 0;  // samples; those in between wait for their first token
  };
  struct Running {
    int completion, sequence;
    int32_t drawn, draw;  // tokens, settled or not; the last one's place among the draws of its batch
  };
  std::optional<Finish> finish_of(const Completion& c) const;
  void admit();
  void decode_rows(Batch& batch);
  void prompt_rows(Batch& batch);
  void start_samples(Prompt& prompt, int32_t draw);

  int64_t own_pages(const Request& request, int sample) const;

  const KvResidency& residency_;
  const std::vector<Request>& requests_;
  const std::vector<int32_t>& eos_;
  const RolloutLimits& limits_;
  KvCache& cache_;
  const std::function<void(int, int)> forked_;
  const Stop stop_;
  std::vector<Completion> completions_;
  std::vector<bool> ended_;       // of each completion
  std::vector<int> first_;        // of each request: its first completion
  int next_request_ = 0;          // the request whose samples are being admitted
  std::vector<Prompt> prompts_;   // in order of admission
  std::vector<Running> running_;  // past their first token, in order of that
  int64_t finished_ = 0;
};

}  // namespace pare
