// Generation, by the learner's forward pass and kernels, over paged keys and values.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "kv/compressor.h"
#include "rollout/scheduler.h"

namespace pare {

struct Sampling {
  float temperature = 1;          // 0: greedy
  Truncation truncation = {};     // without effect where greedy
  uint64_t key = 0;               // rng_key(seed, RngStream::sample, step)
  std::vector<int32_t> eos = {};  // any of them ends a sequence
  Stop stop = {};                 // as does any of these
  bool dense = false;  // keep and read all keys and values, whatever RolloutLimits::kv says, by the dense model
  // act [completions * T, C], T >= every max_new_tokens, or absent: row completion * T + t receives the final hidden
  // state that token t was drawn from.
  Tensor hidden = {};
  bool hashes = false;                                       // Completion::hashes
  int64_t kept_ids = 0;                                      // most ids of a token in Completion::kept; 0: none there
  std::function<void(const PagedRun&, KvTrace)> trace = {};  // called with what each compression of the cache kept
  // On the null table, with requests that are all alike and end by their length: tokens and log-probs of the first so
  // many requests alone are returned, the others have none.  Passes that come again are counted without being made.
  int64_t planned = 0;
};

// Statistics of one generate(); FLOPs and bytes, including discarded tokens, are in the device's ledger.
struct RolloutStats {
  int64_t prefill_tokens = 0;    // rows of prompts computed: a prompt counts once, not once a sample
  int64_t decoded_tokens = 0;    // tokens of completions
  int64_t discarded_tokens = 0;  // drawn behind an EOS that the host had not read yet; no other count has them
  int64_t forward_passes = 0;
  int64_t graph_passes = 0;  // queued as one launch (Device::together), those that are discarded too
  int64_t peak_pages = 0;
  int peak_sequences = 0;
  int64_t finished = 0, completions = 0;
  // Over the tokens that were fed back, summed: slots resident after each, in the mean layer; the same of a dense
  // cache; slots that its attention read.  And the largest of the first two.
  double resident = 0, dense = 0, read = 0;
  double peak_resident = 0, peak_dense = 0;
  int64_t decode_rows = 0;                // those tokens
  int64_t compressions = 0, evicted = 0;  // compressions of a layer, and slots that they gave up
  double waited = 0;                      // seconds, for the slowest rank, over ranks

  void add(const RolloutStats& other);  // of another generate()
};

// Adds to the ledger so many times what was added since it was `before`.
void repeat(Ledger& ledger, const Ledger& before, int64_t times);

class Rollout {
 public:
  // Allocates the cache from `kv`.  generate() allocates the rest from `scratch` and frees it.  Both may share memory
  // with what is not used meanwhile, on one side of it (MemoryTurn): between two generate()s they hold nothing.
  // `dense`: the model that Sampling::dense samples from, the same but for its adapters; null: `model`.
  Rollout(const Model& model, const RolloutLimits& limits, Arena& kv, Arena& scratch, const Model* dense = nullptr);

  // All samples of all requests, in order (request, sample) whatever the schedule.  The tokens and log-probs of a
  // sample depend on the model, its prompt, its uid and `sampling` only, bit by bit.  `drawn` is called for every
  // token, with the completion that ends in it so far; `progress` after every pass, or as many as are waited for.
  //
  // Ranks share the requests: request i belongs to rank i mod ranks; all get the completions and the statistics.  Each
  // rank fills only its own rows of `hidden`, and calls `drawn` and `trace` for its own samples.
  //
  // Queues RolloutLimits::lookahead passes, each fed on the device by the tokens of the one before; then the host waits
  // once, for the tokens of all.  With Sampling::trace it waits for every pass and reads back its compressions.
  //
  // Throws before it starts for prompts that are empty, longer than max_context less max_new_tokens, or with ids
  // outside the vocabulary, and for a request that the pool cannot hold alone (Exit::memory).  After an exception from
  // an op or a callback the object must not be used again.
  //
  // On the `null` table every token is 0: with neither eos nor stop every sample runs to
  // max_new_tokens, the worst case.
  std::vector<Completion> generate(const std::vector<Request>& requests, const Sampling& sampling,
                                   const std::function<void(const RolloutStats&)>& progress = {},
                                   const std::function<void(const Completion&)>& drawn = {});

  // On the null table: a pass with as many rows, draws and compressions as these limits allow.  It allocates from
  // `scratch` the most that any generate() does.
  static void plan(const Model& model, const RolloutLimits& limits, Arena& scratch, const Sampling& sampling = {});

  // Budget of block-sparse methods, at first from RolloutLimits::kv; may change between two generate()s.
  const BlockBudget& block_budget() const { return budget_; }
  void set_block_budget(const BlockBudget& budget);

  const RolloutStats& stats() const { return stats_; }  // of the last generate()
  const KvCache& cache() const { return cache_; }

 private:
  std::vector<Completion> sample(const std::vector<Request>& requests, const Sampling& sampling,
                                 const std::function<void(const RolloutStats&)>& progress,
                                 const std::function<void(const Completion&)>& drawn);
  // State that lasts from pass to pass, in `scratch`.
  struct State {
    Tensor hidden;  // act [1 + rows, C]: final hidden states, the kept row first
    LinearParts parts;
    Tensor cut_results, cut_arrivals;  // PagedCuts, or absent
    Tensor drawn;                      // u8: the next two as one piece of memory
    Tensor logprob;  // stat [lookahead * max_sequences]: of the passes that are queued, one after another
    Tensor token;    // i32, likewise
    Tensor hash;     // i32 [.., 2], likewise; absent without Sampling::hashes
    Tensor kept;     // i32 [.., 1 + Sampling::kept_ids], likewise; absent without them
  };
  // A pass that is queued on the device.
  struct QueuedPass {
    Batch batch;
    int64_t first = 0;  // draw: its place in State::token
    // Counts of each run: slots of the mean layer that its attention saw and read; compressions of its layers.
    struct Count {
      double slots = 0, read = 0;
      int64_t compressions = 0, evicted = 0;
    };
    std::vector<Count> counts;
  };
  // By Scheduler::alike: samples admitted, and the ledger.  Of the moments after some were.
  struct Seen {
    std::map<std::vector<int64_t>, std::pair<int64_t, Ledger>> states;
    int64_t admitted = -1;
  };
  // Returns the limits with what was left to be chosen.
  static RolloutLimits checked(const RolloutLimits& given, const ModelConfig& config);
  // Inputs of the draws of a pass besides the hidden states.
  struct DrawInputs {
    Tensor row;      // i32 [draws], and one more where a row is kept: rows of State::hidden; that of the pass
    Tensor counter;  // i32 [draws, 3]: as in Sample
    Tensor moves;    // i32 [draws, 2]: (draw, row of Sampling::hidden), or none
  };
  State make_state(const Sampling& sampling) const;
  void check(const std::vector<Request>& requests, const Sampling& sampling) const;
  void run(Batch batch, const Sampling& sampling, const State& state);
  DrawInputs draw_inputs(const Batch& batch, const Sampling& sampling, Inputs& inputs) const;
  void draw(const QueuedPass& pass, const DrawInputs& inputs, const Sampling& sampling, const State& state);
  void read(const State& state);
  void count(const QueuedPass& pass, const std::vector<bool>& kept);
  void skip_alike(Scheduler& scheduler, Seen& seen, int64_t all);

  const Model &model_, &dense_model_;
  const RolloutLimits limits_;
  Arena &kv_, &scratch_;
  KvCache cache_;
  const std::unique_ptr<KvPolicy> policy_;  // null: dense
  BlockBudget budget_;
  const KvResidency residency_, dense_residency_;
  std::unique_ptr<Compressor> compressor_;  // of evicting policies
  RolloutStats stats_;
  std::vector<QueuedPass> passes_;
  std::vector<int32_t> tokens_;  // of all queued passes, once they are read
  std::vector<uint64_t> hashes_;
  std::vector<int32_t> kept_;
  std::vector<float> logprobs_;
};

}  // namespace pare
