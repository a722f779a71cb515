#include "kv/spec.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "ops/paged.h"

namespace pare {

namespace {

int64_t pages_of(int64_t slots) { return (slots + kPageSlots - 1) / kPageSlots; }

// PyramidKV (arXiv 2406.02069, and its code): from `most` in the first layer budgets fall linearly, with the mean
// `past`; both without the window.
int64_t pyramid(int64_t past, int64_t most, int64_t layer, int64_t layers) {
  const int64_t step = (most - (2 * past - most)) / (layers - 1);
  return most - layer * step;
}

std::vector<int64_t> layer_budgets(const KvSpec& spec, int64_t layers) {
  std::vector<int64_t> budget(layers, spec.evict.budget);
  if (spec.method != KvMethod::pyramidkv || layers == 1) return budget;
  const int64_t past = spec.evict.budget - spec.window.size;
  const auto least = static_cast<int64_t>(static_cast<double>(past) / spec.pyramidkv.beta);
  for (int64_t l = 0; l < layers; l++) budget[l] = pyramid(past, 2 * past - least, l, layers) + spec.window.size;
  return budget;
}

}  // namespace

KvResidency::KvResidency(const KvSpec& spec, int64_t layers)
    : evicts_(spec.evicts()),
      mass_(spec.method == KvMethod::h2o),
      trigger_(spec.evict.trigger),
      prompt_(spec.evict.prompt),
      buffer_(std::max<int64_t>(spec.evict.buffer, 1)),  // 0: a compression after every token
      mean_(spec.evict.budget),
      window_(spec.window.size),
      budget_(layer_budgets(spec, layers)) {}

int64_t KvResidency::protected_slots(int64_t prompt) const {
  return evicts_ && prompt_ == KvPrompt::compress ? 0 : prompt;
}

int64_t KvResidency::budget(int64_t layer, int64_t prompt) const {
  if (trigger_ != KvTrigger::prefill_once || budget_[0] == budget_[layers() - 1]) return budget_[layer];
  const int64_t past = mean_ - window_, own = prompt - protected_slots(prompt);
  if (own <= mean_ || own < 2 * past) return mean_;
  return pyramid(past, std::min(budget_[0] - window_, own - window_), layer, layers()) + window_;
}

bool KvResidency::due(int64_t layer, int64_t prompt, int64_t slots, int64_t tokens) const {
  if (!evicts_ || tokens < prompt) return false;
  const int64_t free = slots - protected_slots(prompt);
  switch (trigger_) {
    case KvTrigger::buffer_full:
      return free >= limit(layer) && tokens - protected_slots(prompt) > mean_;
    case KvTrigger::prefill_once:
      return tokens == prompt && free > budget(layer, prompt);
  }
  return false;
}

int64_t KvResidency::after_prefill(int64_t layer, int64_t prompt) const {
  return due(layer, prompt, prompt, prompt) ? protected_slots(prompt) + budget(layer, prompt) : prompt;
}

int64_t KvResidency::first_compression(int64_t layer, int64_t prompt) const {
  if (!evicts_ || trigger_ == KvTrigger::prefill_once) return std::numeric_limits<int64_t>::max();
  const int64_t own = prompt - protected_slots(prompt), free = after_prefill(layer, prompt) - protected_slots(prompt);
  return std::max(limit(layer) - free, mean_ + 1 - own);
}

// Until the first compression the slots grow.  From the budget they grow again to each later one, and no further.
int64_t KvResidency::peak(int64_t layer, int64_t prompt, int64_t fed) const {
  const int64_t start = after_prefill(layer, prompt), first = first_compression(layer, prompt);
  if (first > fed) return start + fed;
  return start + first;
}

int64_t KvResidency::prompt_pages(int64_t prompt) const { return layers() * pages_of(prompt); }

// A compression rewrites every page that is not wholly protected, so that a shared one must be replaced.
int64_t KvResidency::sample_pages(int64_t prompt, int64_t fed) const {
  int64_t pages = 0;
  for (int64_t l = 0; l < layers(); l++) {
    const int64_t shared =
        decode_compressions(l, prompt, fed) || mass_ ? protected_slots(prompt) : after_prefill(l, prompt);
    pages += pages_of(peak(l, prompt, fed)) - shared / kPageSlots;
  }
  return pages;
}

int64_t KvResidency::last_sample_pages(int64_t prompt, int64_t fed, int64_t samples) const {
  int64_t pages = 0;
  for (int64_t l = 0; l < layers(); l++) {
    const int64_t start = after_prefill(l, prompt);
    pages += pages_of(peak(l, prompt, fed)) - pages_of(start);
    if (samples > 1 && decode_compressions(l, prompt, fed) && !mass_)
      pages += start / kPageSlots - protected_slots(prompt) / kPageSlots;
  }
  return pages;
}

int64_t BlockBudget::operator()(int64_t n) const {
  int64_t blocks = steps_[0].blocks;
  for (const Step& s : steps_)
    if (n >= s.from) blocks = s.blocks;
  return blocks;
}

int64_t BlockBudget::most() const {
  int64_t blocks = 0;
  for (const Step& s : steps_) blocks = std::max(blocks, s.blocks);
  return blocks;
}

namespace {

void check_eviction(const KvSpec& s) {
  const KvEvictKeys& e = s.evict;
  const KvWindowKeys& w = s.window;
  if (e.budget < 1)
    fail("rollout.kv.evict.budget = ", e.budget, ": expected at least 1, since rollout.kv.method evicts tokens");
  const bool windowed = s.method == KvMethod::snapkv || s.method == KvMethod::rkv || s.method == KvMethod::pyramidkv;
  if (windowed && (w.size < 1 || w.size >= e.budget))
    fail("rollout.kv.window.size = ", w.size, ": expected 1 to less than rollout.kv.evict.budget = ", e.budget,
         ", which includes the window");
  if (s.method == KvMethod::streaming_llm && s.streaming_llm.sinks >= e.budget)
    fail("rollout.kv.streaming_llm.sinks = ", s.streaming_llm.sinks,
         " leaves no room for recent tokens in rollout.kv.evict.budget = ", e.budget);
  if (w.pooling_kernel < 1 || w.pooling_kernel % 2 == 0)
    fail("rollout.kv.window.pooling_kernel = ", w.pooling_kernel, ": expected an odd number");
  if (e.trigger == KvTrigger::prefill_once && e.prompt == KvPrompt::protect)
    fail(
        "rollout.kv.evict.trigger = \"prefill_once\" compresses the prompt, which rollout.kv.evict.prompt = "
        "\"protect\" forbids");
  if (s.merge.method == KvMergeMethod::value && s.merge.keys != MergeKeys::none)
    fail("rollout.kv.merge.method = \"value\" merges values only; set rollout.kv.merge.keys=none");
  if (s.method == KvMethod::pyramidkv && s.pyramidkv.beta <= 1)
    fail("rollout.kv.pyramidkv.beta = ", s.pyramidkv.beta, ": expected more than 1");
}

void check_blocks(const KvBlockKeys& b) {
  if (b.size != 4 && b.size != 16) fail("rollout.kv.blocks.size = ", b.size, ": expected 4 or 16 (a page)");
  if (b.first < 0 || b.last < 1)
    fail("rollout.kv.blocks.last = ", b.last, ": expected at least 1, the block of the newest token");
  if (b.count < b.first + b.last)
    fail("rollout.kv.blocks.count = ", b.count,
         " is less than rollout.kv.blocks.first + rollout.kv.blocks.last = ", b.first + b.last,
         ", which are included in it");
}

}  // namespace

void check_kv(const KvSpec& s) {
  if (s.evicts()) check_eviction(s);
  if (s.sparse_reads()) check_blocks(s.blocks);
  if (!s.evicts() && s.merge.method != KvMergeMethod::none)
    fail("rollout.kv.merge.method merges evicted tokens into kept ones, but rollout.kv.method evicts none");
}

}  // namespace pare
