// Interface of KV policies.  A policy observes every layer of every pass and returns one thing: the scores of slots in
// a compression (evicting policies), or the blocks that a decoded token reads (block-sparse ones).
#pragma once
#include <memory>
#include <vector>

#include "kv/kv_cache.h"
#include "kv/spec.h"
#include "ops/rows.h"

namespace pare {

class Inputs;  // ops/inputs.h

// Rows [row, row + rows) of a forward pass are the newest tokens of one sequence.
struct PagedRun {
  int sequence;
  int32_t row, rows;
  int32_t tokens;  // of the sequence after this pass: the absolute position of its newest token, plus 1
  int32_t prompt;  // of them, those of the prompt
  uint64_t uid;    // names its random draws
  bool decodes() const { return tokens > prompt; }
};

// One layer of a forward pass, after its keys and values were written.
struct KvPass {
  int layer;
  Tensor q;                           // act [N, H, D], after QK-norm and RoPE
  Tensor page_table, queries;         // as in AttnPaged
  const std::vector<PagedRun>& runs;  // entry i of `queries` is runs[i]
  float scale;
};

// The blocks that the entries of a pass read: as AttnPaged wants them.  Absent: everything is read.
struct KvBlocks {
  Tensor blocks, budget;
  int32_t block = 0;
};

// Compressions, all of one pass or some of them.
struct KvCompressions {
  Tensor compressions;  // i32 [E, 5]: KvCompression
  Tensor src_pages;     // i32 [E, max pages]: before the compression
  Tensor oldest;        // i32 [E]: where in a ring of window() rows the oldest lies
  KvWork work;
};

class KvPolicy {
 public:
  virtual ~KvPolicy() = default;

  // Before the layers of a pass: adds its inputs, which last as long as the pass.
  virtual void begin(const std::vector<PagedRun>& /*runs*/, Inputs& /*inputs*/) {}
  // Before the attention of a layer: records what later compressions need, and returns the blocks to read.
  virtual void observe(const KvPass& /*pass*/) {}
  // Returns the number of slots that each run reads in a layer, by a list or not; empty: no run has a list.
  virtual std::vector<int64_t> reads(int /*layer*/, const std::vector<PagedRun>& /*runs*/) const { return {}; }
  virtual KvBlocks blocks(const KvPass& /*pass*/, Arena& /*scratch*/) { return {}; }
  // Block-sparse policies: the budget of the next passes.
  virtual void set_budget(const BlockBudget& /*budget*/) {}
  // i32 [runs]: protected slots of each, where the attention that slots receive is added up (AttnPaged).
  virtual Tensor mass_first() const { return {}; }
  // Slots that a decoded token reads in the mean layer, of `resident` ones.
  virtual double slots_read(const PagedRun& /*run*/, double resident) const { return resident; }
  // `child` continues `parent` from here on.
  virtual void forked(int /*parent*/, int /*child*/) {}

  // Policies with an observation window: its length, and the first row of a sequence's ring (KvWindowScores).
  virtual int32_t window() const { return 1; }
  virtual int32_t window_row(int /*layer*/, int /*sequence*/) const { return 0; }

  // Evicting policies.  A compression keeps slots that are forced at either end of what is not protected, and for the
  // rest those with the highest scores.  forced_first(): tokens beyond the protected ones that stay because they are
  // the oldest; forced_last(budget): because they are the newest.
  virtual int64_t forced_first() const { return 0; }
  virtual int64_t forced_last(int64_t budget) const { return budget; }
  // score: stat [E, K, max_slots] out, for the candidates of each compression.
  virtual void score(const KvCompressions& /*compressions*/, const Tensor& /*score*/, Arena& /*scratch*/) {}
};

// Returns the policy of `spec`, null for dense.  Allocates its state from `kv`, named kv.*.
std::unique_ptr<KvPolicy> make_kv_policy(const KvSpec& spec, const ModelConfig& config, KvCache& cache, Arena& kv);

}  // namespace pare
