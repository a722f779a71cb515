// Attention of packed sequences and over pages, dense and with lists of blocks.
#include <algorithm>
#include <array>
#include <cmath>

#include "bench/op_call.h"

namespace pare {

namespace {

using detail::op_call;

const Dim kHeads{"H", 12, "query heads"}, kKvHeads{"K", 2, "key/value heads"}, kDim{"D", 128, "head dim"};
float scale(const Dims& d) { return 1 / std::sqrt(static_cast<float>(d["D"])); }

// ---- packed sequences: groups of sequences that share a prefix

const std::vector<Dim> kPacked = {{"G", 1, "groups"},
                                  {"S", 1, "sequences of a group"},
                                  {"L", 4096, "rows of a sequence"},
                                  {"P", 0, "rows of the prefix that a group shares", 0},
                                  kHeads,
                                  kKvHeads,
                                  kDim};

struct Packed {
  std::vector<int32_t> segments;
  int64_t rows = 0, slots = 0;
  std::vector<int64_t> seen;  // slots that each row sees
  std::vector<bool> prefix;   // rows of a prefix
};
Packed packed(const Dims& d) {
  Packed p;
  const auto segment = [&](int64_t row, int64_t len, int64_t parent, int64_t parent_len, bool prefix) {
    for (int64_t v : {row, len, parent, parent_len}) p.segments.push_back(static_cast<int32_t>(v));
    p.slots += parent_len + len;
    for (int64_t i = 0; i < len; i++) p.seen.push_back(parent_len + i + 1), p.prefix.push_back(prefix);
    p.rows += len;
  };
  const int64_t prefix = d["P"];
  for (int64_t g = 0; g < d["G"]; g++) {
    const int64_t parent = p.rows;
    if (prefix) segment(parent, prefix, 0, 0, true);
    for (int64_t s = 0; s < d["S"]; s++) segment(p.rows, d["L"], prefix ? parent : 0, prefix, false);
  }
  return p;
}
int64_t sum(const std::vector<int64_t>& v) {
  int64_t n = 0;
  for (int64_t x : v) n += x;
  return n;
}

AttnFwd attn_fwd(Operands& o, const Dims& d, const Packed& p) {
  AttnFwd a{};
  a.o = o.act({p.rows, d["H"], d["D"]}), a.lse = o.stat({p.rows, d["H"]}), a.q = o.act({p.rows, d["H"], d["D"]});
  a.pk = a.k = o.act({p.rows, d["K"], d["D"]}), a.pv = a.v = o.act({p.rows, d["K"], d["D"]});
  a.segments = o.list({static_cast<int64_t>(p.segments.size()) / 4, 4}, p.segments);
  a.pairs = sum(p.seen), a.scale = scale(d);
  return a;
}
AttnBwd attn_bwd(Operands& o, const AttnFwd& f) {
  const auto like = [&](const Tensor& t) { return o.act({t.shape[0], t.shape[1], t.shape[2]}); };
  AttnBwd a{};
  a.dq = like(f.q), a.dpk = a.dk = like(f.k), a.dpv = a.dv = like(f.v), a.d_o = like(f.o);
  a.o = f.o, a.q = f.q, a.k = f.k, a.v = f.v, a.pk = f.pk, a.pv = f.pv, a.lse = f.lse, a.segments = f.segments;
  a.pairs = f.pairs, a.scale = f.scale, a.blocks = f.blocks, a.budget = f.budget, a.block = f.block;
  return a;
}

// ---- lists of blocks

const Dim kBlock{"block", 16, "slots of a block, 4 or 16", 4}, kBudget{"budget", 32, "blocks that a row reads", 2};
const Dim kMean{"mean", 1, "1: blocks by their mean (block top-k), 0: by minimum and maximum (Quest)", 0};
BlockSummary kind(const Dims& d) { return d["mean"] ? BlockSummary::mean : BlockSummary::minmax; }

// The last block and, from the second on, every so many of those before it; -1 where a row reads everything.
void add_list(std::vector<int32_t>& lists, int64_t slots, int64_t budget, int64_t block, int64_t kv_heads) {
  const int64_t all = blocks_of(slots, block);
  for (int64_t h = 0; h < kv_heads; h++)
    for (int64_t i = 0; i < budget; i++)
      lists.push_back(static_cast<int32_t>(all <= budget    ? -1
                                           : i + 1 < budget ? i * (all - 1) / (budget - 1)
                                                            : all - 1));
}

struct PackedBlocks {
  std::vector<int32_t> budget;
  int64_t pairs = 0, scored = 0;
};
// Rows of a prefix read everything.
PackedBlocks packed_blocks(const Dims& d, const Packed& p) {
  PackedBlocks b;
  for (size_t i = 0; i < p.seen.size(); i++) {
    const int32_t budget = p.prefix[i] ? INT32_MAX : static_cast<int32_t>(d["budget"]);
    b.budget.push_back(budget);
    b.pairs += listed_slots(p.seen[i], budget, d["block"]);
    if (const int64_t all = blocks_of(p.seen[i], d["block"]); all > budget) b.scored += all - 2;
  }
  return b;
}
Tensor packed_lists(Operands& o, const Dims& d, const Packed& p, const PackedBlocks& b) {
  std::vector<int32_t> lists;
  for (size_t i = 0; i < p.seen.size(); i++)
    add_list(lists, b.budget[i] == INT32_MAX ? 0 : p.seen[i], d["budget"], d["block"], d["K"]);
  return o.list({p.rows, d["K"], d["budget"]}, lists);
}

AttnFwd listed_attn_fwd(Operands& o, const Dims& d) {
  const Packed p = packed(d);
  AttnFwd a = attn_fwd(o, d, p);
  if (!d["budget"]) return a;
  if (d["budget"] < 2) fail("lists are of 2 blocks at least");
  const PackedBlocks b = packed_blocks(d, p);
  a.blocks = packed_lists(o, d, p, b), a.budget = o.list({p.rows}, b.budget),
  a.block = static_cast<int32_t>(d["block"]);
  a.pairs = b.pairs;
  return a;
}

void add_packed(std::vector<OpBench>& list) {
  std::vector<Dim> listed = kPacked;
  listed.insert(listed.end(), {{"budget", 0, "blocks that a row reads; 0: everything", 0}, kBlock, kTensorKernel});
  list.push_back({"attn_fwd", listed, [](Operands& o, const Dims& d) {
                    choose_tensor_kernel(o, d);
                    return op_call(o, &Device::attn_fwd, listed_attn_fwd(o, d));
                  }});
  list.push_back({"attn_bwd", listed, [](Operands& o, const Dims& d) {
                    choose_tensor_kernel(o, d);
                    const AttnFwd f = listed_attn_fwd(o, d);
                    o.device.attn_fwd(f);
                    return op_call(o, &Device::attn_bwd, attn_bwd(o, f));
                  }});
  std::vector<Dim> blocks = kPacked;
  blocks.insert(blocks.end(), {kBlock, kBudget});
  blocks.push_back(kMean);
  list.push_back(
      {"attn_block_select", blocks, [](Operands& o, const Dims& d) {
         const Packed p = packed(d);
         const PackedBlocks b = packed_blocks(d, p);
         const int64_t segments = static_cast<int64_t>(p.segments.size()) / 4;
         const int64_t most = blocks_of(d["P"] + d["L"], d["block"]) + 1;
         AttnBlockSelect a{};
         a.blocks = o.list({p.rows, d["K"], d["budget"]}, std::vector<int32_t>(p.rows * d["K"] * d["budget"], -1));
         a.summary = o.act({segments, d["K"], most * summary_rows(kind(d)), d["D"]});
         a.q = o.act({p.rows, d["H"], d["D"]}), a.pk = a.k = o.act({p.rows, d["K"], d["D"]});
         a.segments = o.list({segments, 4}, p.segments), a.budget = o.list({p.rows}, b.budget);
         a.scored = b.scored, a.slots = p.slots, a.block = static_cast<int32_t>(d["block"]);
         a.first_blocks = 1, a.last_blocks = 1, a.kind = kind(d);
         return op_call(o, &Device::attn_block_select, a);
       }});
}

// ---- pages

const std::vector<Dim> kPaged = {{"B", 64, "sequences"},
                                 {"L", 4096, "slots of a sequence, the new ones included"},
                                 {"T", 1, "new rows of a sequence, at most L"},
                                 kHeads,
                                 kKvHeads,
                                 kDim};

struct Pages {
  Tensor k, v, table, queries;
  int64_t count, per_sequence;
};
Pages pages(Operands& o, const Dims& d, bool values = true) {
  if (d["T"] > d["L"]) fail("T=", d["T"], " is more than the L=", d["L"], " slots of a sequence");
  Pages p{};
  p.per_sequence = (d["L"] + 15) / 16, p.count = p.per_sequence * d["B"];
  p.k = o.act({p.count, d["K"], d["D"], 16});
  if (values) p.v = o.act({p.count, d["K"], 16, d["D"]});
  p.table = o.list({d["B"], p.per_sequence}, shuffled(p.count));
  p.queries = o.indices({d["B"], 4}, [&](int64_t i) {
    const int64_t e = i / 4;
    return std::array{e * d["T"], d["T"], d["L"], e}[i % 4];
  });
  return p;
}
AttnPaged attn_paged(Operands& o, const Dims& d) {
  const Pages p = pages(o, d);
  const int64_t B = d["B"], T = d["T"], L = d["L"];
  AttnPaged a{};
  a.o = o.act({B * T, d["H"], d["D"]}), a.q = o.act({B * T, d["H"], d["D"]});
  a.k_pages = p.k, a.v_pages = p.v, a.page_table = p.table, a.queries = p.queries;
  a.pairs = B * (T * (L - T) + T * (T + 1) / 2), a.slots = B * L, a.scale = scale(d);
  return a;
}

void add_paged(std::vector<OpBench>& list) {
  list.push_back({"kv_write", kPaged, [](Operands& o, const Dims& d) {
                    const Pages p = pages(o, d);
                    KvWrite a{};
                    a.k_pages = p.k, a.v_pages = p.v, a.page_table = p.table, a.queries = p.queries;
                    a.k = o.act({d["B"] * d["T"], d["K"], d["D"]}), a.v = o.act({d["B"] * d["T"], d["K"], d["D"]});
                    return op_call(o, &Device::kv_write, a);
                  }});
  std::vector<Dim> listed = kPaged;
  listed.insert(listed.end(), {{"budget", 0, "blocks that a row reads, with T=1; 0: everything", 0},
                               kBlock,
                               {"mass", 0, "1: with the attention that slots receive (H2O)", 0}});
  list.push_back({"attn_paged", listed, [](Operands& o, const Dims& d) {
                    AttnPaged a = attn_paged(o, d);
                    if (const int64_t budget = d["budget"]) {
                      if (budget < 2 || d["T"] != 1)
                        fail("attn_paged: lists are of rows alone (T=1) and of 2 blocks at least");
                      std::vector<int32_t> lists;
                      for (int64_t e = 0; e < d["B"]; e++) add_list(lists, d["L"], budget, d["block"], d["K"]);
                      a.blocks = o.list({d["B"], d["K"], budget}, lists);
                      a.budget = o.indices({d["B"]}, [budget](int64_t) { return budget; });
                      a.block = static_cast<int32_t>(d["block"]);
                      a.pairs = a.slots = d["B"] * listed_slots(d["L"], budget, d["block"]);
                    }
                    if (d["mass"]) {
                      if (d["budget"]) fail("attn_paged: mass goes with budget=0");
                      a.mass_pages = o.positive({a.k_pages.shape[0], d["K"], 16});
                      a.first = o.indices({d["B"]}, [](int64_t) { return 0; });
                    }
                    return op_call(o, &Device::attn_paged, a);
                  }});
  std::vector<Dim> summary = kPaged;
  summary.insert(summary.end(), {kBlock, kMean});
  list.push_back({"kv_block_summary", summary, [](Operands& o, const Dims& d) {
                    const Pages p = pages(o, d, false);
                    KvBlockSummary a{};
                    a.summary = o.act({p.count, d["K"], 16 / d["block"] * summary_rows(kind(d)), d["D"]});
                    a.k_pages = p.k, a.page_table = p.table, a.queries = p.queries;
                    a.pages = d["B"] * (p.per_sequence - (d["L"] - d["T"]) / 16);
                    a.block = static_cast<int32_t>(d["block"]), a.kind = kind(d);
                    return op_call(o, &Device::kv_block_summary, a);
                  }});
  std::vector<Dim> select = summary;
  select.erase(select.begin() + 2);  // T: only rows alone choose
  select.push_back(kBudget);
  list.push_back(
      {"kv_block_select", select, [](Operands& o, const Dims& d) {
         const int64_t B = d["B"], all = blocks_of(d["L"], d["block"]), per = (d["L"] + 15) / 16;
         KvBlockSelect a{};
         a.blocks = o.list({B, d["K"], d["budget"]}, std::vector<int32_t>(B * d["K"] * d["budget"], -1));
         a.score = o.stat({B, d["K"], std::max(all - 2, int64_t{1})}), a.q = o.act({B, d["H"], d["D"]});
         a.summary = o.act({B * per, d["K"], 16 / d["block"] * summary_rows(kind(d)), d["D"]});
         a.page_table = o.list({B, per}, shuffled(B * per));
         a.queries = o.indices({B, 4}, [&](int64_t i) { return std::array{i / 4, int64_t{1}, d["L"], i / 4}[i % 4]; });
         a.budget = o.indices({B}, [&](int64_t) { return d["budget"]; });
         a.scored = all > d["budget"] ? B * (all - 2) : 0;
         a.block = static_cast<int32_t>(d["block"]), a.first_blocks = 1, a.last_blocks = 1, a.kind = kind(d);
         return op_call(o, &Device::kv_block_select, a);
       }});
}

}  // namespace

void add_attention_benches(std::vector<OpBench>& list) {
  add_packed(list);
  add_paged(list);
}

}  // namespace pare
