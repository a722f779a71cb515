#include "model/packed.h"

#include <algorithm>

namespace pare {

namespace {

class Packer {
 public:
  PackedBatch batch;

  // Appends the first n tokens as rows at positions from `pos` on; returns the first row.
  int32_t append(const std::vector<int32_t>& tokens, size_t n, size_t pos, bool of_prefix) {
    const int32_t first = static_cast<int32_t>(batch.rows());
    for (size_t i = 0; i < n; i++) {
      batch.ids.push_back(tokens[i]);
      batch.pos.push_back(static_cast<int32_t>(pos + i));
      batch.of_prefix.push_back(of_prefix);
    }
    return first;
  }

  void segment(int32_t row, size_t len, int32_t parent_row, size_t parent_len,
               const std::shared_ptr<const KvTraces>& trace = {}) {
    if (len == 0) return;
    const auto n = static_cast<int64_t>(len), p = static_cast<int64_t>(parent_len);
    batch.segments.push_back(
        {row, static_cast<int32_t>(len), parent_len ? parent_row : 0, static_cast<int32_t>(parent_len)});
    batch.traces.push_back(trace);
    batch.pairs += n * p + n * (n + 1) / 2;
  }

  // The rows of a member follow at `row`; its first token is predicted by `before` (-1: by nothing).
  void losses(const Member& m, int32_t before, int32_t row, size_t group, size_t member) {
    for (size_t t = 0; t < m.tokens.size(); t++) {
      const int32_t from = t == 0 ? before : row + static_cast<int32_t>(t) - 1;
      if (from < 0 || (m.kept && !(*m.kept)[t])) continue;
      batch.loss_rows.push_back(
          {from, static_cast<int32_t>(group), static_cast<int32_t>(member), static_cast<int32_t>(t)});
    }
  }
};

void check(const Group& g) {
  expect(!g.members.empty(), "a group without members");
  for (const Member& m : g.members)
    expect(!m.tokens.empty() && (!m.kept || m.kept->size() == m.tokens.size()), "a member with ", m.tokens.size(),
           " tokens, which is not what it says of each");
}

}  // namespace

std::vector<int64_t> loss_row_offsets(const std::vector<Group>& groups) {
  std::vector<int64_t> offsets = {0};
  for (const Group& g : groups)
    for (const Member& m : g.members) {
      int64_t rows = 0;
      for (size_t t = g.prefix.empty() ? 1 : 0; t < m.tokens.size(); t++) rows += !m.kept || (*m.kept)[t];
      offsets.push_back(offsets.back() + rows);
    }
  return offsets;
}

int64_t packed_rows(const Group& g) {
  size_t rows = g.prefix.size();
  for (const Member& m : g.members) rows += m.tokens.size() - 1;
  return static_cast<int64_t>(rows);
}

int64_t group_flops(const ModelConfig& c, const Group& g, int64_t recompute) {
  const int64_t rows = packed_rows(g), losses = loss_row_offsets({g}).back();
  const auto prefix = static_cast<int64_t>(g.prefix.size());
  int64_t pairs = prefix * (prefix + 1) / 2;
  for (const Member& m : g.members) {
    const auto own = static_cast<int64_t>(m.tokens.size()) - 1;
    pairs += own * prefix + own * (own + 1) / 2;
  }
  const int64_t down = c.hidden * c.ffn, layer = c.qkv_width() * c.hidden + c.hidden * c.q_width() + 3 * down;
  const int64_t again = 2 * rows * (layer - down) + 4 * c.q_width() * pairs;  // of a block, without its output
  return c.layers * (6 * rows * layer + 14 * c.q_width() * pairs) + recompute * again + 6 * losses * c.hidden * c.vocab;
}

PackedBatch pack_groups(const std::vector<Group>& groups, size_t begin, size_t end) {
  Packer p;
  for (size_t g = begin; g < end; g++) {
    const Group& group = groups[g];
    check(group);
    const size_t prefix = group.prefix.size();
    if (group.members.size() == 1 || prefix == 0) {  // nothing is shared: one segment each
      for (size_t m = 0; m < group.members.size(); m++) {
        const Member& member = group.members[m];
        const int32_t row = p.append(group.prefix, prefix, 0, true);
        p.append(member.tokens, member.tokens.size() - 1, prefix, false);
        p.segment(row, prefix + member.tokens.size() - 1, 0, 0, member.trace);
        const int32_t own = row + static_cast<int32_t>(prefix);
        p.losses(member, prefix ? own - 1 : -1, own, g, m);
      }
      continue;
    }
    const int32_t first = static_cast<int32_t>(p.batch.rows());
    const int32_t parent = first + static_cast<int32_t>(packed_rows(group) - static_cast<int64_t>(prefix));
    for (size_t m = 0; m < group.members.size(); m++) {
      const Member& member = group.members[m];
      const int32_t row = p.append(member.tokens, member.tokens.size() - 1, prefix, false);
      p.segment(row, member.tokens.size() - 1, parent, prefix, member.trace);
      p.losses(member, parent + static_cast<int32_t>(prefix) - 1, row, g, m);
    }
    p.append(group.prefix, prefix, 0, true);
    p.segment(parent, prefix, 0, 0);
  }
  return std::move(p.batch);
}

PackedBatch pack_members(const std::vector<Group>& groups, size_t g, size_t begin, size_t end) {
  Packer p;
  const Group& group = groups[g];
  check(group);
  const size_t prefix = group.prefix.size();
  p.batch.carried = true;
  int32_t rows = 0;
  for (size_t m = begin; m < end; m++) rows += static_cast<int32_t>(group.members[m].tokens.size()) - 1;
  for (size_t m = begin; m < end; m++) {
    const Member& member = group.members[m];
    const int32_t row = p.append(member.tokens, member.tokens.size() - 1, prefix, false);
    p.segment(row, member.tokens.size() - 1, 0, prefix, member.trace);
    p.losses(member, rows, row, g, m);
  }
  return std::move(p.batch);
}

PackedBatch pack_prefix(const Group& group) {
  Packer p;
  p.append(group.prefix, group.prefix.size(), 0, true);
  p.segment(0, group.prefix.size(), 0, 0);
  return std::move(p.batch);
}

std::vector<MicroBatch> plan_micro_batches(const std::vector<Group>& groups, int64_t max_rows) {
  std::vector<MicroBatch> plan;
  int64_t used = 0;
  for (size_t g = 0; g < groups.size(); g++) {
    const int64_t rows = packed_rows(groups[g]);
    const bool cut = rows > max_rows && groups[g].members.size() > 1 && !groups[g].prefix.empty();
    if (cut) {
      MicroBatch batch{g, g + 1, {}};
      int64_t part = 0;
      for (size_t m = 0; m < groups[g].members.size(); m++) {
        const int64_t own = static_cast<int64_t>(groups[g].members[m].tokens.size()) - 1;
        if (batch.parts.empty() || part + own > max_rows) {
          batch.parts.push_back({m, m});
          part = 0;
        }
        batch.parts.back().second = m + 1;
        part += own;
      }
      plan.push_back(batch);
      used = 0;
    } else if (plan.empty() || !plan.back().parts.empty() || used + rows > max_rows) {
      plan.push_back({g, g + 1, {}});
      used = rows;
    } else {
      plan.back().group_end = g + 1;
      used += rows;
    }
  }
  return plan;
}

namespace {

// `longest`: tokens of the longest sequence.
PackedBatch batch_of(int64_t rows, int64_t segments, int64_t loss_rows, int64_t longest) {
  PackedBatch b;
  b.ids.resize(rows);
  b.pos.resize(rows);
  b.of_prefix.resize(rows);
  b.loss_rows.resize(loss_rows);
  b.traces.resize(segments);
  b.segments.assign(segments, {static_cast<int32_t>(rows) - 1, 1, 0, 0});
  const int64_t len = std::min(rows, longest);
  b.segments[0] = {0, static_cast<int32_t>(len), 0, static_cast<int32_t>(longest - len)};
  return b;
}

}  // namespace

std::vector<LargestBatch> largest_batches(const BatchLimits& l, int64_t max_rows, int64_t logits_chunk) {
  std::vector<LargestBatch> all;
  const int64_t longest = (l.sequence > 0 ? l.sequence : l.prefix + l.tokens) - 1;
  const int64_t own = l.members * (l.tokens - 1), shared = longest - (l.tokens - 1);  // by the longest members
  // `groups` of them with `members` in all share the rows; members of one token have a loss row but none of their own.
  const auto add = [&](std::optional<PackedBatch> prefix, int64_t rows, int64_t groups, int64_t members) {
    if (rows == 0) return;
    const int64_t segments = std::min(rows, groups + members);
    const int64_t losses = std::min(rows - groups + members, members * l.tokens);
    int64_t epochs = 0;
    if (l.interval) epochs = std::min(rows, segments + std::min(rows, members) + rows / l.interval);
    // The logits of a chunk are most where the chunks are full.
    for (const int64_t n : {losses, losses / logits_chunk * logits_chunk}) {
      all.push_back({prefix, batch_of(rows, std::max(segments, epochs), n, longest), epochs, epochs * l.slots});
      all.back().batch.carried = prefix.has_value();
    }
  };
  const int64_t whole = std::min(l.groups * (shared + own), std::max(max_rows, longest));
  const int64_t groups = std::min(l.groups, whole);
  add({}, whole, groups, groups * l.members);
  const auto add_cut = [&](int64_t parent, int64_t rows) {
    if (l.members > 1 && parent + rows > max_rows) add(batch_of(parent, 1, 0, parent), rows, 0, l.members);
  };
  add_cut(shared, std::min(own, std::max(max_rows, l.tokens - 1)));
  if (l.sequence == 0) return all;
  // The prefix may have all rows that members leave: memory is greatest if they just fill a batch, or have as few rows
  // as make the group too large for one.
  const int64_t few = max_rows < longest ? 0 : 1 + (max_rows - longest) / std::max<int64_t>(l.members - 1, 1);
  add_cut(longest - std::min(l.tokens - 1, max_rows / l.members), std::min(own, max_rows));
  add_cut(longest - few, std::min(own, l.members * std::max<int64_t>(few, 1)));
  return all;
}

}  // namespace pare
