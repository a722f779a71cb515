// Losses over packed groups, their gradients, and the optimizer.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "model/pass.h"
#include "ops/options.h"

namespace pare {

// Results of the loss rows of a pass, [R] each.
struct TokenOuts {
  std::vector<int64_t> offsets;  // loss_row_offsets
  std::vector<double> logprob = {}, entropy = {};
  // accumulate() alone: the policy loss before its weight, the KL estimate before its coefficient.
  std::vector<double> loss = {}, kl = {};
  std::vector<int32_t> clipped = {};  // LogitsLoss::clipped
  std::vector<uint64_t> hash = {};    // LearnerOptions::hashes
  BlockSharing sharing = {};          // of all rows
  // logprobs() with the sampler's states alone: OverlapProbs with the sampler's distribution.
  std::vector<double> overlap = {}, mass = {};

  // The rows of member m, of all groups, in a column.
  std::span<const double> of(const std::vector<double>& column, size_t m) const {
    return std::span(column).subspan(offsets[m], offsets[m + 1] - offsets[m]);
  }
};

// States kept by the sampler: the final hidden states that tokens were drawn from, and the options of OverlapProbs.
struct SamplerStates {
  Tensor hidden;  // act [M, C]; Member::sampler_row says which rows are whose
  float lambda = 1;
  int32_t top_k = 0;
};

// Policies that a loss compares the model with.
struct LossPolicies {
  const Model* reference = nullptr;  // of an exact KL, else null
  Tensor sampler = {};               // SamplerStates::hidden, of score centring, else absent
};

struct LearnerOptions {
  int64_t max_rows = 4096;                // rows of a micro-batch
  int64_t logits_chunk = 1024;            // loss rows whose logits exist at a time
  DType moments = DType::f32;             // of AdamW: bf16, or f32, which is f64 where act is
  int64_t recompute = 0;                  // first blocks that keep their input only, and are computed twice
  std::optional<BlockReads> blocks = {};  // what rows behind a prefix read; none: everything
  bool dense_reference = false;           // the reference model reads everything, whatever `blocks` says
  int64_t shards = 1;                     // of an update (list.h); a multiple of the ranks
  bool balance = true;                    // shards of equal FLOPs; or a group is of the shard that it was sampled in
  Truncation truncation = {};             // of the sampler: the policy is its distribution over what is kept
  // Most ids of a token in Member::kept_ids; 0: none, as the logits are the sampler's and Truncate finds them.
  int64_t kept_ids = 0;
  bool hashes = false;      // accumulate() hashes the logits of every loss row (HashRuns::each)
  int64_t piece = 1 << 24;  // elements of a gradient that travel between all ranks at a time
};

struct AdamWOptions {
  double lr = 1e-6, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  double max_norm = 1;         // 0: no clipping
  uint64_t seed = 1;           // of the rounding of bf16 moments
  int64_t skip_nonfinite = 0;  // updates in a row that may be dropped
};

enum class Moment { m, v };  // of AdamW

using BatchProgress = std::function<void(size_t done, size_t all)>;  // micro-batches

// Sums over loss rows of weighted losses (TokenTerms).  Trains the adapters of its model if it has them, else the
// model.  The gradient of a shard is one chain per parameter over its groups in order, so any split into micro-batches
// gives the same bits on a table that keeps the order of list.h.  Ranks share the shards, shard s being that of rank s
// mod ranks, and all of them get what the loss rows gave.
class Learner {
 public:
  // Gradients (and, for tied embeddings, a second accumulator) from `gradients`, optimizer states from `optimizer`;
  // activations while it works.  The arenas outlive the learner.  Gradients and activations may share memory with what
  // is not used from the first accumulate() of an update to its step() (MemoryTurn).
  Learner(Model& model, Arena& gradients, Arena& optimizer, Arena& activations, const LearnerOptions& options);

  // Adds the gradient of the loss to the accumulators, which begin an update as zeros, with more than one shard once
  // for each step().
  TokenOuts accumulate(const std::vector<Group>& groups, const TokenTerms& terms, const LossSpec& spec,
                       const LossPolicies& others = {}, const BatchProgress& progress = {});
  int64_t shards() const { return options_.shards; }
  // In which accumulate() computes them.  Blocks that are computed twice count once: they change no bit.
  std::vector<int> shards_of(const std::vector<Group>& groups) const;
  std::vector<int64_t> flops_of(const std::vector<Group>& groups) const;  // of each, predicted (group_flops)
  // Log-probs and entropies of the kept tokens; no gradient.  With `states` also overlap and mass, the model being p.
  // The rank that a group was sampled on (Group::shard) computes them, all get them.
  static TokenOuts logprobs(const Model& model, Arena& activations, const std::vector<Group>& groups,
                            double temperature, const LearnerOptions& options, const SamplerStates* states = nullptr);

  // On the null table: accumulate() and logprobs() on batches that are larger than any of such groups, so that their
  // activations are the most that any of them takes.
  void plan(const BatchLimits& limits, const LossSpec& spec, const LossPolicies& others = {});
  static void plan_logprobs(const Model& model, Arena& activations, const BatchLimits& limits,
                            const LearnerOptions& options, const SamplerStates* states = nullptr);

  // Clips by the global norm, updates the parameters and ends the update; returns the norm before clipping.  If that is
  // not finite, the update is dropped and nothing changes; after options.skip_nonfinite of them in a row the next one
  // throws Error(Exit::non_finite).
  double step(const AdamWOptions& options);
  void drop_gradients() { update_.reset(); }  // ends the update without a step

  // A saved optimizer: the number of updates, and the moments, elements [begin, begin + count) in the order of
  // trained().layout; get_moment is of this rank's elements, set_moment leaves the others out.
  const Parameters& trained() const { return trained_; }
  int64_t steps() const { return steps_; }
  int64_t skipped() const { return skipped_; }  // updates dropped in a row, up to now
  void set_steps(int64_t steps, int64_t skipped) {
    steps_ = steps;
    skipped_ = skipped;
  }
  DType moments() const { return m_.dtype; }
  void get_moment(Moment moment, int64_t begin, int64_t count, float* out) const;
  void set_moment(Moment moment, int64_t begin, int64_t count, const TensorReader& read);
  // Gradients in the same order, of this rank's elements.
  std::vector<double> gradients();

 private:
  TokenOuts accumulate(const std::vector<Group>& groups, const TokenTerms& terms, const BatchLimits* limits,
                       const LossSpec& spec, const LossPolicies& others, const BatchProgress& progress);
  static TokenOuts logprobs(const Model& model, Arena& activations, const std::vector<Group>& groups,
                            const BatchLimits* limits, double temperature, const LearnerOptions& options,
                            const SamplerStates* states);
  void head_loss(const PackedBatch& batch, const std::vector<Group>& groups, const TokenTerms& terms, const Pass& pass,
                 const LossPolicies& others, const Pass* reference_pass, const LossSpec& spec, TokenOuts& out);
  void begin_update();
  void add_head_gradient();
  void add_shards(int64_t round);
  void add_shards_of_ranks(int64_t round);
  void add_shards_by_machine();
  void add(int64_t shard, const Tensor& gradient, int64_t first);
  template <class F>
  void for_pieces(F f);
  const Tensor& gradient() const { return sum_ ? sum_ : flat_; }  // of an update, this rank's elements
  Tensor own(const ParameterBlock& block, const Tensor& part) const;
  double gradient_norm();

  Model& model_;
  const Parameters& trained_;
  Arena& activations_;
  const LearnerOptions options_;
  const bool by_machine_;      // sums of eight shards travel between machines, not their gradients
  Tensor flat_;                // stat [parameters]: of the shard that is being computed
  ParameterViews views_;       // of flat_
  bool own_head_;              // the head's gradient has an accumulator of its own: of tied embeddings
  Tensor head_;                // stat [V, C]: that, or views_.head
  bool head_pending_ = false;  // own_head_: it holds something
  Tensor sum_, block_;         // stat [own]: of all shards, of the block of eight; absent if flat_ is all there is
  std::optional<MemoryTurn> update_;       // while the gradients are those of one
  Tensor m_, v_, norm_;                    // moments [own]
  const std::vector<ParameterBlock> own_;  // what this rank updates
  int64_t steps_ = 0, skipped_ = 0;
};

}  // namespace pare
