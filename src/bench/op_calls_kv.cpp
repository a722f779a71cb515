// A cache that evicts: copies of pages and rows, scores, choice, compaction, merging.
#include <array>
#include <cmath>

#include "bench/op_call.h"

namespace pare {

namespace {

using detail::op_call;

const Dim kHeads{"H", 12, "query heads"}, kKvHeads{"K", 2, "key/value heads"}, kDim{"D", 128, "head dim"};
const std::vector<Dim> kEvents = {{"E", 64, "events: sequences times layers"},
                                  {"L", 640, "slots before an event"},
                                  {"keep", 512, "slots that stay, the recent ones included"},
                                  {"window", 8, "recent slots, and queries of the window"},
                                  kKvHeads,
                                  kDim};

// Events of one size, each with its own pages.
struct Events {
  Tensor events, pages, k_pages;
  KvWork work;
  int64_t count, slots, page_count, per_event;  // events, slots of an event, pages
};
Events events(Operands& o, const Dims& d) {
  if (d["window"] > d["keep"] || d["keep"] > d["L"])
    fail("window=", d["window"], ",keep=", d["keep"], ",L=", d["L"], " must not fall");
  Events v{};
  v.count = d["E"], v.slots = d["L"], v.per_event = (v.slots + 15) / 16, v.page_count = v.count * v.per_event;
  std::vector<KvEvent> list(static_cast<size_t>(v.count));
  for (int64_t e = 0; e < v.count; e++)
    list[static_cast<size_t>(e)] = {.slots = static_cast<int32_t>(v.slots),
                                    .first = 0,
                                    .recent = static_cast<int32_t>(d["window"]),
                                    .keep = static_cast<int32_t>(d["keep"]),
                                    .keep_row = static_cast<int32_t>(e),
                                    .window_row = static_cast<int32_t>(e * d["window"])};
  v.work = kv_work(list.data(), v.count);
  v.events = o.indices({v.count, 6}, [&](int64_t i) {
    const KvEvent& e = list[static_cast<size_t>(i / 6)];
    return std::array{e.slots, e.first, e.recent, e.keep, e.keep_row, e.window_row}[i % 6];
  });
  v.pages = o.list({v.count, v.per_event}, shuffled(v.page_count));
  v.k_pages = o.act({v.page_count, d["K"], d["D"], 16});
  return v;
}

// Every slot but, evenly spread, as many of the older ones as must go.
Tensor kept(Operands& o, const Dims& d) {
  const int64_t keep = d["keep"], recent = d["window"], chosen = keep - recent, candidates = d["L"] - recent;
  return o.indices({d["E"], d["K"], keep}, [=](int64_t i) {
    const int64_t j = i % keep;
    return j < chosen ? j * candidates / chosen : candidates + j - chosen;
  });
}
// In place.
KvCompact compact(Operands& o, const Dims& d, const Events& v) {
  KvCompact a{};
  a.k_pages = v.k_pages, a.v_pages = o.act({v.page_count, d["K"], 16, d["D"]});
  a.pos_pages = o.indices({v.page_count, d["K"], 16}, [](int64_t i) { return i % 16; });
  a.keep = kept(o, d), a.src_pages = a.dst_pages = v.pages, a.events = v.events, a.work = v.work;
  return a;
}

void add_copies(std::vector<OpBench>& list) {
  list.push_back(
      {"kv_copy_pages", {{"n", 256, "pages that are copied"}, kKvHeads, kDim}, [](Operands& o, const Dims& d) {
         KvCopyPages a{};
         a.k_pages = o.act({2 * d["n"], d["K"], d["D"], 16}), a.v_pages = o.act({2 * d["n"], d["K"], 16, d["D"]});
         a.pairs = o.list({d["n"], 2}, shuffled(2 * d["n"]));
         return op_call(o, &Device::kv_copy_pages, a);
       }});
  list.push_back(
      {"copy_rows", {{"n", 256, "rows that are copied"}, {"C", 1536, "width"}}, [](Operands& o, const Dims& d) {
         return op_call(
             o, &Device::copy_rows,
             CopyRows{o.act({d["n"], d["C"]}), o.act({d["n"], d["C"]}),
                      o.indices({d["n"], 2}, [&](int64_t i) { return i % 2 ? d["n"] - 1 - i / 2 : i / 2; })});
       }});
}

void add_scores(std::vector<OpBench>& list) {
  std::vector<Dim> window = kEvents;
  window.insert(window.end(), {kHeads, {"kernel", 7, "slots of a pooling window, odd"}});
  list.push_back({"kv_window_scores", window, [](Operands& o, const Dims& d) {
                    const Events v = events(o, d);
                    KvWindowScores a{};
                    a.score = o.stat({v.count, d["K"], v.slots});
                    a.windows = o.act({v.count * d["window"], d["H"], d["D"]});
                    a.window_first = o.indices({v.count}, [](int64_t) { return 0; });
                    a.k_pages = v.k_pages, a.src_pages = v.pages, a.events = v.events, a.work = v.work;
                    a.window = static_cast<int32_t>(d["window"]), a.kernel = static_cast<int32_t>(d["kernel"]);
                    a.scale = 1 / std::sqrt(static_cast<float>(d["D"]));
                    return op_call(o, &Device::kv_window_scores, a);
                  }});
  list.push_back({"kv_redundancy", kEvents, [](Operands& o, const Dims& d) {
                    const Events v = events(o, d);
                    KvRedundancy a{};
                    a.score = o.stat({v.count, d["K"], v.slots});
                    a.k_pages = v.k_pages, a.src_pages = v.pages, a.events = v.events, a.work = v.work;
                    a.lambda = 0.1f, a.threshold = 0.5f;
                    a.workspace = o.stat({v.count, d["K"], 4, v.per_event * 16});
                    return op_call(o, &Device::kv_redundancy, a);
                  }});
  list.push_back({"kv_mass_scores", kEvents, [](Operands& o, const Dims& d) {
                    const Events v = events(o, d);
                    KvMassScores a{};
                    a.score = o.stat({v.count, d["K"], v.slots});
                    a.mass_pages = o.positive({v.page_count, d["K"], 16});
                    a.src_pages = v.pages, a.events = v.events, a.work = v.work;
                    return op_call(o, &Device::kv_mass_scores, a);
                  }});
  list.push_back({"kv_select", kEvents, [](Operands& o, const Dims& d) {
                    const Events v = events(o, d);
                    KvSelect a{};
                    a.keep = o.indices({v.count, d["K"], d["keep"]}, [](int64_t) { return 0; });
                    a.score = o.stat({v.count, d["K"], v.slots}), a.events = v.events, a.work = v.work;
                    return op_call(o, &Device::kv_select, a);
                  }});
}

void add_moves(std::vector<OpBench>& list) {
  list.push_back({"kv_compact", kEvents, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::kv_compact, compact(o, d, events(o, d)));
                  }});
  std::vector<Dim> merge = kEvents;
  merge.push_back({"kind", 1, "0 CaM, 1 D2O, 2 LOOK-M, 3 by values", 0});
  list.push_back({"kv_merge", merge, [](Operands& o, const Dims& d) {
                    const Events v = events(o, d);
                    KvMerge a{};
                    a.compact = compact(o, d, v);
                    if (d["kind"] > 3) fail("kv_merge: kind=", d["kind"], " is none of 0 to 3");
                    a.kind = std::array{KvMergeKind::cam, KvMergeKind::d2o, KvMergeKind::lookm_pivot,
                                        KvMergeKind::value}[d["kind"]];
                    const bool cam = a.kind == KvMergeKind::cam, keys = !cam && a.kind != KvMergeKind::value;
                    a.keys = keys ? MergeKeys::unrotated : MergeKeys::none;
                    if (keys) a.rope = o.stat({kPageSlots, d["D"]});  // of the positions in pos_pages
                    if (cam) a.compact.mass_pages = o.positive({v.page_count, d["K"], 16});
                    a.links = o.stat({v.count, d["K"], 2, v.per_event * 16});
                    a.merged = o.stat({v.count, d["K"], d["keep"], 2 * d["D"] + 1});
                    if (a.kind == KvMergeKind::d2o) {
                      a.threshold = o.positive({v.count});
                      a.threshold_row = o.indices({v.count}, [](int64_t i) { return i; });
                      a.ema_old = 0.5f, a.ema_new = 0.5f;
                    }
                    a.uid = o.indices({v.count, 2}, [](int64_t i) { return i; }), a.key = 77, a.targets = 3;
                    return op_call(o, &Device::kv_merge, a);
                  }});
}

}  // namespace

void add_kv_benches(std::vector<OpBench>& list) {
  add_copies(list);
  add_scores(list);
  add_moves(list);
}

}  // namespace pare
