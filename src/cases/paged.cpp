// Writing and reading pages of keys and values.
#include "ops/paged.h"

#include "cases/layouts.h"

namespace pare::cases {

namespace {

Call attn_paged(Operands& o, const Dims& d) {
  const Sequences s(d, d["T"]);
  const int64_t H = d["H"], K = d["K"], D = d["D"];
  AttnPaged a{};
  a.o = o.out("o", {s.rows, H, D});
  a.q = o.in("q", {s.rows, H, D}, d["gap"]);
  a.k_pages = o.in("k_pages", s.pages.k(d), s.pages.present());
  a.v_pages = o.in("v_pages", s.pages.v(d), s.pages.present(D));
  a.page_table = s.put_table(o, d);
  a.queries = s.put_queries(o);
  a.pairs = s.pairs;
  a.slots = s.slots;
  a.scale = scale(d);
  std::vector<int64_t> reads;
  const auto put_work = [&] {
    for (size_t i = 0; i < reads.size(); i++)
      a.most_pairs =
          std::max(a.most_pairs, paged_block_pairs(s.list[i].rows, reads[i], H / K, reads[i] < s.list[i].slots));
    a.work = cases::put_work(o, "work", s.list, reads);
  };
  const int64_t results = paged_cut_results(s.count(), a.page_table.shape[1], H, D);
  if (results > 0 && o.act == DType::bf16)
    a.cuts = {o.stat_scratch("results", {results}),
              o.index("arrivals", {s.count() * K}, std::vector<int32_t>(s.count() * K))};
  std::vector<int32_t> budget = s.budget;
  if (d["budget"]) {
    if (d["budget"] < 2 || d["T"] != 1 || d["mass"])
      fail("attn_paged: lists are of rows alone (T=1), of 2 blocks at least, and go with mass=0");
    budget.assign(s.list.size(), d.i32("budget"));
  }
  if (d["mass"]) {
    a.mass_pages = o.stat_inout("mass_pages", s.pages.beside(d), positive());
    a.first = o.index("first", {s.count()}, s.first);
    if (o.act == DType::bf16) a.weights = o.stat_scratch("weights", {s.pages.count, K, H / K + 1, kPageSlots});
  }
  if (budget.empty()) {
    for (const PagedRow& e : s.list) reads.push_back(e.slots);
    put_work();
    return a;
  }
  std::vector<int64_t> total(s.list.size());  // by row of the table; entries of more rows read everything
  a.slots = a.pairs = 0;
  for (const PagedRow& e : s.list) {
    const int64_t r = e.rows, read = r == 1 ? listed_slots(e.slots, budget[e.table_row], d["block"]) : e.slots;
    total[e.table_row] = r == 1 ? e.slots : 0;
    reads.push_back(read);
    a.slots += read;
    a.pairs += r == 1 ? read : r * (e.slots - r) + r * (r + 1) / 2;
  }
  const int64_t room = s.room(budget, d["block"]);
  put_work();
  a.blocks = o.index("blocks", {s.count(), K, room}, random_blocks(total, budget, K, room, d["block"]));
  a.budget = o.index("budget", {s.count()}, budget);
  a.block = d.i32("block");
  return a;
}

// Of 2 n pages every second one is copied, or every fourth one twice.
Call kv_copy_pages(Operands& o, const Dims& d) {
  const int64_t n = d["n"], K = d["K"], D = d["D"];
  std::vector<int32_t> pairs = shuffled(2 * n);
  for (size_t i = 2; d["twice"] && i < pairs.size(); i += 4) pairs[i] = pairs[i - 2];
  KvCopyPages a{};
  a.k_pages = o.inout("k_pages", {2 * n, K, D, kPageSlots});
  a.v_pages = o.inout("v_pages", {2 * n, K, kPageSlots, D});
  a.pairs = o.index("pairs", {n, 2}, pairs);
  if (!d["beside"]) return a;
  const Shape beside{2 * n, K, kPageSlots};
  a.pos_pages = o.index_inout("pos_pages", beside, below("pos", 2 * n * K * kPageSlots, 99));
  a.mass_pages = o.stat_inout("mass_pages", beside);
  return a;
}

}  // namespace

std::vector<OpCase> paged_cases() {
  const std::vector<Dim> read =
      paged_dims() + std::vector<Dim>{{"budget", 0, "blocks that a row reads, with T=1; 0: everything", 0},
                                      kBlock,
                                      {"mass", 0, "1: with the attention that slots receive (H2O)", 0},
                                      kFirstBlocks,
                                      kLastBlocks};
  const std::vector<std::string> sizes = paged_sizes() + listed_sizes() + with(protected_sizes(), {"mass=1"});
  return {{"attn_paged", read, sizes, attn_paged},
          {"kv_copy_pages",
           {{"n", 256, "pages that are copied"},
            kKvHeads,
            kDim,
            edge("twice", "1: some have two copies"),
            edge("beside", "1: with what lies beside keys and values")},
           {"n=1,K=3,D=20", "n=3,K=3,D=20,twice=1,beside=1"},
           kv_copy_pages}};
}

}  // namespace pare::cases
