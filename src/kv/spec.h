// Which keys and values a rollout keeps or reads: the choice, and what follows from it without asking the device.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/options.h"

namespace pare {

// Evicting methods free memory; quest and block_topk keep everything and read a part.
enum class KvMethod { dense, streaming_llm, h2o, tova, snapkv, rkv, pyramidkv, quest, block_topk };
enum class KvPrompt { compress, protect };
enum class KvScope { per_head, per_layer };
enum class KvTrigger { buffer_full, prefill_once };
enum class KvMergeMethod { none, d2o, value };

// The members are configuration keys (rollout.kv.*), which say what each means.
struct KvEvictKeys {
  int64_t budget = 512, buffer = 128;
  KvPrompt prompt = KvPrompt::compress;
  KvTrigger trigger = KvTrigger::buffer_full;
  KvScope scope = KvScope::per_head;
  bool operator==(const KvEvictKeys&) const = default;
};
struct KvWindowKeys {  // SnapKV's observation window: the queries that score the keys
  int64_t size = 8;
  GqaAgg gqa_aggregation = GqaAgg::max_logit;
  SoftmaxSpan softmax_span = SoftmaxSpan::exclude_window;
  Pool pooling = Pool::max;
  int64_t pooling_kernel = 7;
  bool operator==(const KvWindowKeys&) const = default;
};
struct StreamingLlmKeys {
  int64_t sinks = 4;
  bool operator==(const StreamingLlmKeys&) const = default;
};
struct RkvKeys {
  double lambda = 0.1, threshold = 0.5;
  bool operator==(const RkvKeys&) const = default;
};
struct PyramidKvKeys {
  double beta = 20;
  bool operator==(const PyramidKvKeys&) const = default;
};
struct KvMergeKeys {
  KvMergeMethod method = KvMergeMethod::none;
  MergeKeys keys = MergeKeys::none;
  double d2o_ema = 0.5;
  bool operator==(const KvMergeKeys&) const = default;
};
struct KvBlockKeys {
  int64_t size = 16, count = 32, first = 1, last = 2, dense_layers = 2;
  double acceptance_target = 0;
  int64_t acceptance_steps = 10;
  bool operator==(const KvBlockKeys&) const = default;
};
struct KvSpec {
  KvMethod method = KvMethod::dense;
  KvEvictKeys evict;
  KvWindowKeys window;
  StreamingLlmKeys streaming_llm;
  RkvKeys rkv;
  PyramidKvKeys pyramidkv;
  KvMergeKeys merge;
  KvBlockKeys blocks;
  bool operator==(const KvSpec&) const = default;

  bool evicts() const {
    return method != KvMethod::dense && method != KvMethod::quest && method != KvMethod::block_topk;
  }
  bool merges() const { return evicts() && merge.method != KvMergeMethod::none; }
  bool sparse_reads() const { return method == KvMethod::quest || method == KvMethod::block_topk; }
  bool adapts() const { return sparse_reads() && blocks.acceptance_target > 0; }
};

inline BlockSummary summary_kind(const KvSpec& spec) {
  return spec.method == KvMethod::quest ? BlockSummary::minmax : BlockSummary::mean;
}

// Throws Error(usage), naming both keys, if two settings contradict each other.
void check_kv(const KvSpec& spec);

// Slots that each layer of a sequence holds, and the times of its compression: the prompt is prefilled in full; then,
// whenever the slots that are not protected have grown to budget + buffer, a compression cuts them to the budget.  A
// dense cache is the case without compressions.
//
// PyramidKV's budgets fall from layer to layer, with rollout.kv.evict.budget as their mean.  A sequence that fits the
// mean is left alone in every layer, as published; later compressions cut every layer to its own budget.  At the end of
// a prompt (prefill_once) the budgets depend on its length n, as published: with C = budget - window, they are equal if
// n < 2 C, and the first layer keeps no more than n.
//
// A sequence: `prompt` tokens, then `fed` tokens of the response whose keys and values are appended (the last token of
// a response never is).
class KvResidency {
 public:
  KvResidency(const KvSpec& spec, int64_t layers);

  int64_t layers() const { return static_cast<int64_t>(budget_.size()); }
  // Slots that a compression keeps beyond the protected ones.
  int64_t budget(int64_t layer, int64_t prompt) const;
  int64_t protected_slots(int64_t prompt) const;
  // Slots of a prompt whose full pages its samples share: all, but for h2o, which writes to what may be evicted.
  int64_t shared_slots(int64_t prompt) const { return mass_ ? protected_slots(prompt) : prompt; }
  // Is a layer with `slots` slots to be compressed, when `tokens` of the sequence have been computed?
  bool due(int64_t layer, int64_t prompt, int64_t slots, int64_t tokens) const;
  int64_t after_prefill(int64_t layer, int64_t prompt) const;      // slots when the first token is drawn
  int64_t peak(int64_t layer, int64_t prompt, int64_t fed) const;  // most slots from then on

  // Pages, over all layers.  prompt_pages: while the prompt is computed.  sample_pages: that a sample takes beyond what
  // it shares with its prompt for good.  last_sample_pages: the same for the sample that takes over the prompt's own
  // sequence after `samples` - 1 others have forked it.
  int64_t prompt_pages(int64_t prompt) const;
  int64_t sample_pages(int64_t prompt, int64_t fed) const;
  int64_t last_sample_pages(int64_t prompt, int64_t fed, int64_t samples) const;

 private:
  // Tokens of the response before the first compression while decoding.
  int64_t first_compression(int64_t layer, int64_t prompt) const;
  bool decode_compressions(int64_t layer, int64_t prompt, int64_t fed) const {
    return first_compression(layer, prompt) <= fed;
  }
  int64_t limit(int64_t layer) const { return budget_[layer] + buffer_; }  // beyond what is protected

  const bool evicts_, mass_;
  const KvTrigger trigger_;
  const KvPrompt prompt_;
  const int64_t buffer_, mean_, window_;
  std::vector<int64_t> budget_;
};

// Blocks that a decoded token reads of `n` (quest, block_topk): rollout.kv.blocks.count, or what the acceptance rate
// made of it (rl/block_budget.h).
class BlockBudget {
 public:
  struct Step {
    int64_t from, blocks;
    bool operator==(const Step&) const = default;
  };
  explicit BlockBudget(const KvSpec& spec) : steps_{{0, spec.blocks.count}} {}
  explicit BlockBudget(std::vector<Step> steps) : steps_(std::move(steps)) {}  // one or more, from ascending from 0
  int64_t operator()(int64_t n) const;
  int64_t most() const;
  const std::vector<Step>& steps() const { return steps_; }

 private:
  std::vector<Step> steps_;
};

}  // namespace pare
