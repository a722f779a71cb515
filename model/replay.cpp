#include "model/replay.h"

#include <numeric>

#include "model/packed.h"

namespace pare {

std::vector<int32_t> KvTrace::kept(int64_t kv_head) const {
  std::vector<int32_t> kept(first);
  std::iota(kept.begin(), kept.end(), 0);
  for (int32_t s = first; s < slots; s++)
    if (keep[kv_head * (slots - first) + s - first]) kept.push_back(s);
  return kept;
}

namespace {

// Returns the compressions of a layer that a later row of the segment sees.
std::vector<const KvTrace*> compressions_of(const PackedBatch& batch, size_t segment, int layer) {
  std::vector<const KvTrace*> compressions;
  if (!batch.traces[segment]) return compressions;
  const SegmentRow& s = batch.segments[segment];
  for (const KvTrace& t : *batch.traces[segment])
    if (t.layer == layer && t.tokens < s.parent_len + s.len) compressions.push_back(&t);
  return compressions;
}

void add_epochs(const SegmentRow& s, bool carried, const std::vector<const KvTrace*>& compressions, int64_t kv_heads,
                ReplayAttention& out) {
  const auto row_of = [&](int32_t token) {
    if (token >= s.parent_len) return s.row + token - s.parent_len;
    return carried ? -1 - (s.parent_row + token) : s.parent_row + token;
  };
  // The tokens in the slots of each head as the epoch begins, at token `begin`.
  std::vector<int32_t> parent(s.parent_len);
  std::iota(parent.begin(), parent.end(), 0);
  std::vector<std::vector<int32_t>> slots(kv_heads, parent);
  int32_t begin = s.parent_len;
  const auto epoch = [&](int32_t end) {
    const auto len = end - begin, parents = static_cast<int32_t>(slots[0].size());
    if (len > 0) {
      const auto list = static_cast<int32_t>(static_cast<int64_t>(out.lists.size()) / kv_heads);
      out.segments.push_back({row_of(begin), len, parents ? list : 0, parents});
      out.pairs += int64_t{len} * parents + int64_t{len} * (len + 1) / 2;
      for (int32_t slot = 0; slot < parents; slot++)
        for (const auto& tokens : slots) out.lists.push_back(row_of(tokens[slot]));
    }
    for (auto& tokens : slots)
      for (int32_t t = begin; t < end; t++) tokens.push_back(t);
    begin = end;
  };
  for (const KvTrace* compression : compressions) {
    expect(compression->tokens >= begin, "a compression at token ", compression->tokens, " of a sequence that has had ",
           begin);
    epoch(compression->tokens);
    for (int64_t h = 0; h < kv_heads; h++) {
      expect(static_cast<int32_t>(slots[h].size()) == compression->slots && compression->kv_heads() == kv_heads,
             "the trace says ", compression->slots, " slots at token ", compression->tokens, ", replayed are ",
             slots[h].size());
      std::vector<int32_t> kept = compression->kept(h);
      for (int32_t& slot : kept) slot = slots[h][slot];
      slots[h] = std::move(kept);
    }
  }
  epoch(s.parent_len + s.len);
}

}  // namespace

ReplayAttention replay_attention(const PackedBatch& batch, int layer) {
  std::vector<std::vector<const KvTrace*>> compressions;
  int64_t kv_heads = 0;
  for (size_t i = 0; i < batch.segments.size(); i++) {
    compressions.push_back(compressions_of(batch, i, layer));
    if (!compressions.back().empty()) kv_heads = compressions.back()[0]->kv_heads();
  }
  ReplayAttention out;
  if (kv_heads == 0) return out;
  for (size_t i = 0; i < batch.segments.size(); i++)
    add_epochs(batch.segments[i], batch.carried, compressions[i], kv_heads, out);
  return out;
}

}  // namespace pare
