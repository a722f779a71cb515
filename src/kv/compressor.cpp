#include "kv/compressor.h"

#include <algorithm>

#include "ops/data.h"
#include "ops/merge.h"

namespace pare {

namespace {
constexpr size_t kCompressionsAtOnce = 64;  // bounds the scratch memory of a pass with many compressions
}  // namespace

Compressor::Compressor(const Model& model, const KvSpec& spec, KvCache& cache, KvPolicy& policy, Arena& kv)
    : model_(model), spec_(spec), cache_(cache), policy_(policy), residency_(spec, model.config.layers) {
  if (spec.merge.method == KvMergeMethod::d2o)
    threshold_ = kv.alloc("kv.merge_threshold", model.stat, {cache.max_sequences() * cache.layers()});
}

void Compressor::forked(int parent, int child) {
  if (!threshold_) return;
  cache_.device().zero({.x = thresholds(child)});
  cache_.device().accumulate({.y = thresholds(child), .x = thresholds(parent)});
}

void Compressor::compress(const std::vector<PagedRun>& runs, Arena& scratch) {
  std::vector<Due> due;
  const auto flush = [&] {
    if (!due.empty()) compress_some(due, scratch);
    due.clear();
  };
  for (const PagedRun& run : runs) {
    if (threshold_ && run.tokens == run.rows) cache_.device().zero({.x = thresholds(run.sequence)});  // a new one
    if (due.size() + cache_.layers() > kCompressionsAtOnce) flush();
    for (int layer = 0; layer < cache_.layers(); layer++)
      if (residency_.due(layer, run.prompt, cache_.slots(run.sequence, layer), run.tokens))
        due.push_back({&run, layer});
  }
  flush();
}

void Compressor::compress_some(std::span<const Due> due, Arena& scratch) {
  Device& device = cache_.device();
  const auto n = static_cast<int64_t>(due.size()), width = cache_.max_pages();
  std::vector<KvCompression> list;
  std::vector<int32_t> src_pages(n * width), dst_pages(n * width), rings;
  int64_t most_slots = 0, most_kept = 0;
  for (int64_t i = 0; i < n; i++) {
    const auto& [run, layer] = due[i];
    const auto slots = static_cast<int32_t>(cache_.slots(run->sequence, layer));
    const int64_t first = residency_.protected_slots(run->prompt) + policy_.forced_first();
    const int64_t budget = residency_.budget(layer, run->prompt), kept = budget - policy_.forced_first();
    list.push_back({.slots = slots,
                    .first = static_cast<int32_t>(first),
                    .recent = static_cast<int32_t>(policy_.forced_last(budget)),
                    .keep = static_cast<int32_t>(kept),
                    .window_row = policy_.window_row(layer, run->sequence)});
    rings.push_back(run->tokens % policy_.window());
    cache_.cut(run->sequence, layer, first, first + kept, run->decodes(), src_pages.data() + i * width,
               dst_pages.data() + i * width);
    most_slots = std::max<int64_t>(most_slots, slots);
    most_kept = std::max(most_kept, kept);
    if (counted) counted(*run, slots - first - kept);
  }
  const ArenaScope scope(scratch);
  const auto upload = [&](const char* name, const void* data, int64_t rows, int64_t columns) {
    const Tensor t = scratch.alloc(name, DType::i32, {rows, columns});
    device.upload({.dst = t, .src = data});
    return t;
  };
  constexpr int64_t kFields = sizeof(KvCompression) / sizeof(int32_t);
  const Tensor compressions = upload("kv.compressions", list.data(), n, kFields);
  const int64_t pages = (most_slots + kPageSlots - 1) / kPageSlots;  // of the longest list
  const Tensor src = upload("kv.src_pages", src_pages.data(), n, width).columns(0, pages);
  const Tensor dst = upload("kv.dst_pages", dst_pages.data(), n, width).columns(0, pages);
  const Tensor keep = scratch.alloc("kv.keep", DType::i32, {n, model_.config.kv_heads, most_kept});
  cache_.copy_cut(scratch);
  const Tensor oldest = upload("kv.oldest", rings.data(), 1, n).flat();
  const Tensor score = scratch.alloc("kv.score", model_.stat, {n, model_.config.kv_heads, pages * kPageSlots});
  const KvWork work = kv_work(list.data(), n);
  policy_.score({compressions, src, oldest, work}, score, scratch);
  device.kv_select({.keep = keep,
                    .score = work.kept == work.slots - work.candidates ? Tensor{} : score,  // all of it is forced
                    .compressions = compressions,
                    .work = work,
                    .shared_heads = spec_.evict.scope == KvScope::per_layer});
  move({.k_pages = cache_.k_pages,
        .v_pages = cache_.v_pages,
        .pos_pages = cache_.fields.pos,
        .mass_pages = cache_.fields.mass,
        .keep = keep,
        .src_pages = src,
        .dst_pages = dst,
        .compressions = compressions,
        .work = work},
       due, scratch);
  cache_.drop_cut();
  if (!trace) return;
  std::vector<int32_t> host(keep.size());
  device.download({.dst = host.data(), .src = keep});
  for (int64_t i = 0; i < n; i++) {
    const KvCompression& e = list[i];
    const int64_t kv_heads = model_.config.kv_heads, scored = e.slots - e.first;
    KvTrace t{due[i].layer, due[i].run->tokens, e.slots, e.first, std::vector<bool>(kv_heads * scored)};
    for (int64_t h = 0; h < kv_heads; h++)
      for (int64_t j = 0; j < e.keep; j++) {
        // `null` chose nothing: any slots stand for its choice.
        const int64_t slot = device.planning() ? j : host[(i * kv_heads + h) * keep.shape[2] + j] - e.first;
        t.keep[h * scored + slot] = true;
      }
    trace(*due[i].run, std::move(t));
  }
}

// Kept slots to their places; what is evicted is merged into them first, if the policy says so.
void Compressor::move(const KvCompact& compact, std::span<const Due> due, Arena& scratch) {
  Device& device = cache_.device();
  if (!spec_.merges()) return device.kv_compact(compact);
  std::vector<int32_t> threshold_rows;
  for (const Due& d : due) threshold_rows.push_back(d.run->sequence * cache_.layers() + d.layer);
  const auto n = static_cast<int64_t>(due.size()), heads = model_.config.kv_heads;
  const int64_t slots = compact.src_pages.shape[1] * kPageSlots;
  const Tensor rows = scratch.alloc("kv.threshold_rows", DType::i32, {n});
  device.upload({.dst = rows, .src = threshold_rows.data()});
  const bool d2o = spec_.merge.method == KvMergeMethod::d2o;
  device.kv_merge({.compact = compact,
                   .kind = d2o ? KvMergeKind::d2o : KvMergeKind::value,
                   .keys = spec_.merge.keys,
                   .nearest = scratch.alloc("kv.nearest", DType::i32, {n, heads, slots}),
                   .cosines = scratch.alloc("kv.cosines", model_.stat, {n, heads, slots}),
                   .merged = scratch.alloc("kv.merged", model_.stat,
                                           {n, heads, compact.keep.shape[2], 2 * model_.config.head_dim + 1}),
                   .rope = spec_.merge.keys == MergeKeys::unrotated ? model_.rotation : Tensor{},
                   .threshold = threshold_,
                   .threshold_row = d2o ? rows : Tensor{},
                   .ema_old = static_cast<float>(spec_.merge.d2o_ema),
                   .ema_new = static_cast<float>(1 - spec_.merge.d2o_ema)});
}

}  // namespace pare
