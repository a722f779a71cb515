// Groups of sequences packed into rows without padding, in the order in which their gradients are summed.
#pragma once
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "model/config.h"
#include "model/replay.h"
#include "ops/rows.h"

namespace pare {

// One continuation of a group's prefix.
struct Member {
  std::vector<int32_t> tokens;                 // at least one
  std::optional<std::vector<bool>> kept = {};  // of each token: LM head and loss run for it; none: for all
  std::optional<int32_t> sampler_row = {};     // of tokens[0] in SamplerStates::hidden; the rows of the others follow
  // Compressions of the cache that it was sampled with, if they are to be replayed.  Those past its end have no effect.
  std::shared_ptr<const KvTraces> trace = {};
  std::shared_ptr<const KeptIds> kept_ids = {};  // of its tokens, where LearnerOptions::kept_ids asks for them
};

// Sequences that share a prefix.  The prefix runs once for all members.
struct Group {
  std::vector<int32_t> prefix;
  std::vector<Member> members;
  int64_t shard = 0;  // in which it was sampled
};

// A loss row is a kept token that something predicts: with an empty prefix the first token of a member is none.
// Columns of loss rows [R] have them in the order of groups, members and tokens.  [M + 1]: the rows of member m, of all
// groups, are [offsets[m], offsets[m + 1]).
std::vector<int64_t> loss_row_offsets(const std::vector<Group>& groups);

// Inputs of the loss rows besides their log-probs (LogitsLoss), [R] each.
struct TokenTerms {
  explicit TokenTerms(size_t rows = 0)
      : weight(rows),
        kl_weight(rows),
        advantage(rows),
        old_logprob(rows, std::numeric_limits<double>::quiet_NaN()),
        log_ratio(rows),
        ref_logprob(rows) {}
  std::vector<double> weight, kl_weight, advantage;
  std::vector<double> old_logprob;  // NaN: the log-prob of this very pass
  std::vector<double> log_ratio, ref_logprob;
};

struct PackedBatch {
  struct LossRow {
    int32_t row;                   // hidden state that predicts; rows(): the last row of the carried prefix
    int32_t group, member, token;  // of the list of groups given to the builder
  };
  std::vector<int32_t> ids, pos;     // [N]; the last token of a member is never fed: it predicts nothing
  std::vector<bool> of_prefix;       // [N]: rows of a prefix
  std::vector<SegmentRow> segments;  // members of a group, then its prefix
  std::vector<std::shared_ptr<const KvTraces>> traces;  // of each segment; null: none
  int64_t pairs = 0;                                    // visible (query, key) pairs: AttnFwd::pairs
  bool carried = false;            // parents are the rows of a prefix that runs as a batch of its own
  std::vector<LossRow> loss_rows;  // groups, members, tokens ascending

  int64_t rows() const { return static_cast<int64_t>(ids.size()); }
};

// Rows that a group takes: prefix + sum of (tokens - 1).
int64_t packed_rows(const Group& group);

// FLOPs of linear layers and attention of the group: forward, backward and a second forward of `recompute` blocks.
int64_t group_flops(const ModelConfig& config, const Group& group, int64_t recompute);

// Whole groups [begin, end).
PackedBatch pack_groups(const std::vector<Group>& groups, size_t begin, size_t end);
// Members [begin, end) of one group, whose prefix is carried.
PackedBatch pack_members(const std::vector<Group>& groups, size_t group, size_t begin, size_t end);
// The prefix of one group alone.
PackedBatch pack_prefix(const Group& group);

// Micro-batches of at most `max_rows` rows: whole groups, in order, as many as fit; a group that does not fit alone is
// cut between members.  A prefix or member longer than max_rows makes a batch of its own.
struct MicroBatch {
  size_t group_begin, group_end;                 // whole groups
  std::vector<std::pair<size_t, size_t>> parts;  // not empty: group_begin alone, cut into these runs of members
};
std::vector<MicroBatch> plan_micro_batches(const std::vector<Group>& groups, int64_t max_rows);

// Maxima over the groups of an update; each group has a prefix of at least one token.
struct BatchLimits {
  int64_t groups, members, prefix, tokens;  // groups; members of a group; tokens of a prefix, of a member
  int64_t interval = 0, slots = 0;          // where compressions are replayed: rows between two, slots of a layer
  int64_t sequence = 0;                     // tokens of a prefix and one of its members together; 0: no less than both
};
// Batches that are larger, array by array, than any that such groups make.  They are for planning: none could run.
struct LargestBatch {
  std::optional<PackedBatch> prefix;  // that `batch` carries
  PackedBatch batch;
  int64_t epochs = 0, kept = 0;  // where compressions are replayed: segments and kept slots of a layer
};
std::vector<LargestBatch> largest_batches(const BatchLimits& limits, int64_t max_rows, int64_t logits_chunk);

}  // namespace pare
