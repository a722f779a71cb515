// Scores of slots: window attention (SnapKV), redundancy (R-KV), accumulated attention (H2O); and the choice by them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "ref/kv.h"

namespace pare::ref {

std::vector<KvEvent> read_events(const char* op, const Tensor& events, const KvWork& work) {
  expect_dense(op, "events", events, {events.shape[0], 6});
  const View<int32_t> v(events);
  std::vector<KvEvent> list;
  for (int64_t i = 0; i < events.shape[0]; i++) {
    const KvEvent e{v(i, 0), v(i, 1), v(i, 2), v(i, 3), v(i, 4), v(i, 5)};
    expect(e.first >= 0 && e.recent >= 0 && e.keep >= e.recent && int64_t(e.first) + e.keep <= e.slots, "ref: ", op,
           ": event ", i, " has ", e.slots, " slots, ", e.first, " of them protected, ", e.recent, " recent, ", e.keep,
           " to be kept");
    list.push_back(e);
  }
  const KvWork counted = kv_work(list.data(), static_cast<int64_t>(list.size()));
  expect(counted == work, "ref: ", op, ": work says ", work.slots, " slots, ", work.candidates, " candidates, ",
         work.kept, " kept, ", work.pairs, " pairs; the events hold ", counted.slots, ", ", counted.candidates, ", ",
         counted.kept, ", ", counted.pairs);
  return list;
}

void expect_event_pages(const char* op, const char* name, const Tensor& list, int64_t event, int64_t slots,
                        int64_t pages) {
  expect(list.rank == 2 && event < list.shape[0] && slots <= list.shape[1] * kPageSlots, "ref: ", op, ": ", name,
         " is ", list.str(), ", event ", event, " has ", slots, " slots");
  const EventPages page{View<int32_t>(list), event};
  for (int64_t s = 0; s < slots; s += kPageSlots)
    expect(page(s) >= 0 && page(s) < pages, "ref: ", op, ": ", name, ": slot ", s, " of event ", event,
           " lies in page ", page(s), " of ", pages);
}

void expect_k_pages(const char* op, const Tensor& k_pages) {
  expect(k_pages.rank == 4, "ref: ", op, ": k_pages is ", k_pages.str(), ", expected [pages, K, D, 16]");
  expect_dense(op, "k_pages", k_pages, {k_pages.shape[0], k_pages.shape[1], k_pages.shape[2], kPageSlots});
}

void expect_slot_array(const char* op, const char* name, const Tensor& t, const Tensor& k_pages) {
  expect_dense(op, name, t, {k_pages.shape[0], k_pages.shape[1], kPageSlots});
}

namespace {

// score [E, K, max_slots] with room for every event.
void expect_score(const char* op, const Tensor& score, const std::vector<KvEvent>& events, int64_t kv_heads) {
  expect(score.rank == 3, "ref: ", op, ": score is ", score.str(), ", expected [E, K, max_slots]");
  expect_dense(op, "score", score, {static_cast<int64_t>(events.size()), kv_heads, score.shape[2]});
  for (const KvEvent& e : events)
    expect(e.slots <= score.shape[2], "ref: ", op, ": an event of ", e.slots, " slots, score is ", score.str());
}

void softmax(std::vector<double>& z) {
  if (z.empty()) return;
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double& x : z) sum += x = std::exp(x - max);
  for (double& x : z) x /= sum;
}

std::vector<double> pooled(const std::vector<double>& x, Pool pool, int64_t kernel) {
  std::vector<double> y(x.size());
  const int64_t n = static_cast<int64_t>(x.size());
  for (int64_t i = 0; i < n; i++) {
    const int64_t begin = std::max<int64_t>(0, i - kernel / 2), end = std::min(n, i + kernel / 2 + 1);
    y[i] = pool == Pool::max ? -std::numeric_limits<double>::infinity() : 0;
    for (int64_t j = begin; j < end; j++) y[i] = pool == Pool::max ? std::max(y[i], x[j]) : y[i] + x[j];
    if (pool == Pool::avg) y[i] /= static_cast<double>(kernel);
  }
  return y;
}

// The probabilities that query `q` (its heads of one group) gives slots [first, end).
template <class Logit>
std::vector<double> group_probability(GqaAgg aggregate, int64_t group, int64_t first, int64_t end, Logit logit) {
  std::vector<double> mean(end - first);
  if (aggregate == GqaAgg::mean_prob) {
    for (int64_t g = 0; g < group; g++) {
      std::vector<double> p(end - first);
      for (int64_t s = first; s < end; s++) p[s - first] = logit(g, s);
      softmax(p);
      for (size_t i = 0; i < p.size(); i++) mean[i] += p[i];
    }
    for (double& x : mean) x /= static_cast<double>(group);
    return mean;
  }
  for (int64_t s = first; s < end; s++) {
    double z = logit(0, s);
    for (int64_t g = 1; g < group; g++) z = aggregate == GqaAgg::max_logit ? std::max(z, logit(g, s)) : z + logit(g, s);
    mean[s - first] = aggregate == GqaAgg::max_logit ? z : z / static_cast<double>(group);
  }
  softmax(mean);
  return mean;
}

}  // namespace

void kv_window_scores(const KvWindowScores& a, Stream) {
  constexpr const char* op = "kv_window_scores";
  expect_k_pages(op, a.k_pages);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  const auto events = read_events(op, a.events, a.work);
  expect_score(op, a.score, events, kv_heads);
  expect(a.windows.rank == 3 && a.windows.shape[2] == dim && a.windows.shape[1] % kv_heads == 0, "ref: ", op,
         ": windows is ", a.windows.str(), ", k_pages ", a.k_pages.str());
  expect(a.kernel >= 1 && a.kernel % 2 == 1, "ref: ", op, ": kernel is ", a.kernel, ", expected an odd number");
  if (a.window_first) expect_index(op, "window_first", a.window_first, a.window);
  const int64_t group = a.windows.shape[1] / kv_heads;
  dispatch(op, a.k_pages, [&]<class T>(T) {
    const View<T> score(a.score), windows(a.windows), k(a.k_pages);
    for (int64_t i = 0; i < static_cast<int64_t>(events.size()); i++) {
      const KvEvent& e = events[i];
      expect_event_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
      expect(a.window >= 1 && a.window <= e.recent && e.window_row >= 0 &&
                 int64_t(e.window_row) + a.window <= a.windows.shape[0],
             "ref: ", op, ": event ", i, " has ", e.recent, " recent slots and window rows [", e.window_row, ", ",
             e.window_row + a.window, ") of ", a.windows.shape[0]);
      const EventPages page{View<int32_t>(a.src_pages), i};
      const int64_t oldest = a.window_first ? View<int32_t>(a.window_first)(i) : 0, candidates = e.slots - e.recent;
      for (int64_t h = 0; h < kv_heads; h++) {
        std::vector<double> raw(candidates - e.first);
        for (int64_t t = 0; t < a.window; t++) {
          const int64_t row = e.window_row + (oldest + t) % a.window;
          const int64_t end = a.span == SoftmaxSpan::exclude_window ? candidates : e.slots - a.window + t + 1;
          const auto p = group_probability(a.aggregate, group, e.first, end, [&](int64_t g, int64_t s) {
            double dot = 0;
            for (int64_t d = 0; d < dim; d++)
              dot += double(windows(row, h * group + g, d)) * k(page(s), h, d, s % kPageSlots);
            return dot * a.scale;
          });
          for (size_t s = 0; s < raw.size(); s++) raw[s] += p[s];
        }
        for (double& x : raw) x /= a.window;
        const auto result = pooled(raw, a.pool, a.kernel);
        for (size_t s = 0; s < raw.size(); s++) score(i, h, e.first + s) = static_cast<T>(result[s]);
      }
    }
  });
}

// R of one event and head: keys [n][dim].
static std::vector<double> redundancy(const std::vector<std::vector<double>>& keys, double threshold) {
  const int64_t n = static_cast<int64_t>(keys.size());
  std::vector<double> norm, mean(n);
  const auto dot = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (size_t d = 0; d < keys[i].size(); d++) sum += keys[i][d] * keys[j][d];
    return sum;
  };
  for (int64_t i = 0; i < n; i++) norm.push_back(std::sqrt(dot(i, i)) + 1e-8);
  for (int64_t i = 0; i < n; i++) {
    std::vector<double> row(n);
    for (int64_t j = 0; j < n; j++) row[j] = i == j ? 0 : dot(i, j) / (norm[i] * norm[j]);
    int64_t last = 0;
    for (int64_t j = 0; j < n; j++)
      if (row[j] > threshold) last = j;
    row[last] = 0;
    for (int64_t j = 0; j < n; j++) mean[j] += row[j] / static_cast<double>(n);
  }
  softmax(mean);
  return mean;
}

void kv_redundancy(const KvRedundancy& a, Stream) {
  constexpr const char* op = "kv_redundancy";
  expect_k_pages(op, a.k_pages);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  const auto events = read_events(op, a.events, a.work);
  expect_score(op, a.score, events, kv_heads);
  expect_dense(op, "workspace", a.workspace, {a.score.shape[0], kv_heads, 4, a.src_pages.shape[1] * kPageSlots});
  dispatch(op, a.k_pages, [&]<class T>(T) {
    const View<T> score(a.score), k(a.k_pages);
    for (int64_t i = 0; i < static_cast<int64_t>(events.size()); i++) {
      const KvEvent& e = events[i];
      expect_event_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
      const EventPages page{View<int32_t>(a.src_pages), i};
      for (int64_t h = 0; h < kv_heads; h++) {
        std::vector<std::vector<double>> keys(e.slots - e.first, std::vector<double>(dim));
        for (int64_t s = e.first; s < e.slots; s++)
          for (int64_t d = 0; d < dim; d++) keys[s - e.first][d] = k(page(s), h, d, s % kPageSlots);
        const auto r = redundancy(keys, a.threshold);
        for (int64_t s = e.first; s < e.slots - e.recent; s++)
          score(i, h, s) = static_cast<T>(a.lambda * double(score(i, h, s)) - (1 - double(a.lambda)) * r[s - e.first]);
      }
    }
  });
}

void kv_mass_scores(const KvMassScores& a, Stream) {
  constexpr const char* op = "kv_mass_scores";
  expect(a.mass_pages.rank == 3, "ref: ", op, ": mass_pages is ", a.mass_pages.str(), ", expected [pages, K, 16]");
  const int64_t pages = a.mass_pages.shape[0], kv_heads = a.mass_pages.shape[1];
  expect_dense(op, "mass_pages", a.mass_pages, {pages, kv_heads, kPageSlots});
  const auto events = read_events(op, a.events, a.work);
  expect_score(op, a.score, events, kv_heads);
  if (a.normalise) {
    expect_dense(op, "pos_pages", a.pos_pages, {pages, kv_heads, kPageSlots});
    expect_dense(op, "position", a.position, {a.events.shape[0]});
  }
  dispatch(op, a.mass_pages, [&]<class T>(T) {
    const View<T> score(a.score), mass(a.mass_pages);
    for (int64_t i = 0; i < static_cast<int64_t>(events.size()); i++) {
      const KvEvent& e = events[i];
      expect_event_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
      const EventPages page{View<int32_t>(a.src_pages), i};
      for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t s = e.first; s < e.slots - e.recent; s++) {
          int32_t queries = 1;
          if (a.normalise) {
            const int32_t pos = View<int32_t>(a.pos_pages)(page(s), h, s % kPageSlots);
            queries = View<int32_t>(a.position)(i) - pos + 1;
            expect(pos >= 0 && queries > 0, "ref: ", op, ": slot ", s, " of event ", i, " holds position ", pos,
                   ", the newest is ", View<int32_t>(a.position)(i));
          }
          score(i, h, s) = static_cast<T>(double(mass(page(s), h, s % kPageSlots)) / queries);
        }
    }
  });
}

void kv_select(const KvSelect& a, Stream) {
  constexpr const char* op = "kv_select";
  const auto events = read_events(op, a.events, a.work);
  expect(a.keep.rank == 3, "ref: ", op, ": keep is ", a.keep.str(), ", expected [R, K, max_keep]");
  expect_dense(op, "keep", a.keep, {a.keep.shape[0], a.keep.shape[1], a.keep.shape[2]});
  const int64_t kv_heads = a.keep.shape[1];
  if (a.score) expect_score(op, a.score, events, kv_heads);
  const View<int32_t> keep(a.keep);
  std::set<int32_t> taken;
  const auto choose = [&]<class T>(T, const Tensor& scores) {
    for (int64_t i = 0; i < static_cast<int64_t>(events.size()); i++) {
      const KvEvent& e = events[i];
      expect(e.keep_row >= 0 && e.keep_row < a.keep.shape[0] && e.keep <= a.keep.shape[2] &&
                 taken.insert(e.keep_row).second,
             "ref: ", op, ": event ", i, " keeps ", e.keep, " in row ", e.keep_row, " of ", a.keep.str(),
             ", which no other event has");
      expect(scores || e.keep == e.recent, "ref: ", op, ": event ", i, " chooses without scores");
      const int64_t end = e.slots - e.recent;
      for (int64_t h = 0; h < kv_heads; h++) {
        std::vector<std::pair<T, int32_t>> best;  // in order: score, slot
        for (int64_t s = e.first; scores && s < end; s++) {
          const View<T> score(scores);
          T x = score(i, a.shared_heads ? 0 : h, s);
          for (int64_t other = 1; a.shared_heads && other < kv_heads; other++) x += score(i, other, s);
          best.push_back({x, static_cast<int32_t>(s)});
        }
        std::sort(best.rbegin(), best.rend());
        best.resize(e.keep - e.recent);
        std::vector<int32_t> slots;
        for (const auto& [x, s] : best) slots.push_back(s);
        std::sort(slots.begin(), slots.end());
        for (int64_t s = end; s < e.slots; s++) slots.push_back(static_cast<int32_t>(s));
        for (int32_t j = 0; j < e.keep; j++) keep(e.keep_row, h, j) = slots[j];
      }
    }
  };
  if (a.score)
    dispatch(op, a.score, [&]<class T>(T t) { choose(t, a.score); });
  else
    choose(float{}, Tensor{});
}

}  // namespace pare::ref
