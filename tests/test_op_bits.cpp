// Bitwise properties of the fast f32 tables: results depend neither on how many rows share a call, nor on how rows are
// packed, paged or split, nor on threads.  They follow from the order of sums that list.h defines.
#include <algorithm>

#include "base/thread_pool.h"
#include "op_harness.h"
#include "ops/attention.h"
#include "ops/logits.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/paged.h"
#include "ops/rope.h"

namespace pare::test {

namespace {

using Bytes = std::vector<unsigned char>;

Buffer f32(const Shape& shape, const std::vector<double>& v = {}) {
  Buffer b(DType::f32, shape);
  for (size_t i = 0; i < v.size(); i++) b.set(static_cast<int64_t>(i), v[i]);
  return b;
}
Buffer f32(const Shape& shape, const std::string& name) { return f32(shape, normal(name, elements(shape))); }
Buffer i32(const Shape& shape, const std::vector<int32_t>& v) {
  Buffer b(DType::i32, shape);
  for (size_t i = 0; i < v.size(); i++) b.set(static_cast<int64_t>(i), v[i]);
  return b;
}
// Equal; otherwise names the first f32 that differs, and how many do.
testing::AssertionResult same(const Bytes& a, const Bytes& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " bytes";
  size_t first = a.size(), count = 0;
  for (size_t i = 0; i < a.size(); i += sizeof(float))
    if (std::memcmp(&a[i], &b[i], sizeof(float))) {
      first = std::min(first, i);
      count++;
    }
  if (!count) return testing::AssertionSuccess();
  float x, y;
  std::memcpy(&x, &a[first], sizeof x);
  std::memcpy(&y, &b[first], sizeof y);
  return testing::AssertionFailure() << count << " of " << a.size() / sizeof(float) << " differ, first at "
                                     << first / sizeof(float) << ": " << x << " and " << y;
}
float at(const Buffer& b, int64_t i) { return static_cast<float>(b.get(i)); }

// Rows [begin, begin + count) of the first dimension.
Bytes row_bytes(const Buffer& b, int64_t begin, int64_t count) {
  const Bytes all = b.element_bytes();
  const int64_t row = static_cast<int64_t>(all.size()) / b.tensor().shape[0];
  return {all.begin() + begin * row, all.begin() + (begin + count) * row};
}

// Threads for one scope.
struct Threads {
  explicit Threads(int n) { set_threads(n); }
  ~Threads() { set_threads(0); }
};

class OpBits : public testing::TestWithParam<const Table*> {
 protected:
  const Table& table = *GetParam();
};

// ---- linear

struct PreparedWeight {
  PreparedWeight(const Table& table, int64_t O, int64_t I)
      : w(f32({O, I}, "w")), packed(f32({weight_panels(O), I, kPanel})), outputs(O) {
    table.pack_weight({weight(), w.tensor(), 0}, {});
  }
  Weight weight() const { return {packed.tensor(), outputs}; }
  Buffer w, packed;
  int64_t outputs;
};

struct LinearShape {
  int64_t inputs, outputs;
};
const LinearShape kLinears[] = {{1, 1}, {17, 3}, {63, 16}, {64, 47}, {130, 67}, {40, 129}};
const std::vector<int64_t> kRows = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 63, 64, 65, 130};

TEST_P(OpBits, LinearRowsDoNotDependOnTheNumberOfRows) {
  const int64_t all = 130;
  for (auto [I, O] : kLinears) {
    const PreparedWeight w(table, O, I);
    const Buffer x = f32({all, I}, "x"), dy = f32({all, O}, "dy"), bias = f32({O}, "bias"), res = f32({all, O}, "res");
    Bytes y1, dx1;  // row by row
    for (int64_t n = 0; n < all; n++) {
      const Buffer y = f32({1, O}), dx = f32({1, I});
      table.linear_fwd({y.tensor(), x.tensor().rows(n, 1), w.weight(), bias.tensor(), res.tensor().rows(n, 1)}, {});
      table.linear_bwd_input({dx.tensor(), dy.tensor().rows(n, 1), w.weight(), false}, {});
      const Bytes by = y.element_bytes(), bx = dx.element_bytes();
      y1.insert(y1.end(), by.begin(), by.end());
      dx1.insert(dx1.end(), bx.begin(), bx.end());
    }
    for (int64_t M : kRows) {
      const int64_t first = (all - M) / 2;  // the rows' places in the call change too
      const Buffer y = f32({M, O}), dx = f32({M, I});
      table.linear_fwd({y.tensor(), x.tensor().rows(first, M), w.weight(), bias.tensor(), res.tensor().rows(first, M)},
                       {});
      table.linear_bwd_input({dx.tensor(), dy.tensor().rows(first, M), w.weight(), false}, {});
      const int64_t wide = 4;  // bytes of f32
      EXPECT_TRUE(same(y.element_bytes(), Bytes(y1.begin() + first * O * wide, y1.begin() + (first + M) * O * wide)))
          << "linear_fwd M=" << M << " I=" << I << " O=" << O;
      EXPECT_TRUE(same(dx.element_bytes(), Bytes(dx1.begin() + first * I * wide, dx1.begin() + (first + M) * I * wide)))
          << "linear_bwd_input M=" << M << " I=" << I << " O=" << O;
    }
  }
}

TEST_P(OpBits, LinearIsOneChainOfFusedMultiplyAdds) {
  for (auto [I, O] : kLinears)
    for (int64_t M : {1, 7, 65}) {
      const PreparedWeight w(table, O, I);
      const Buffer x = f32({M, I}, "x"), dy = f32({M, O}, "dy"), bias = f32({O}, "bias"), res = f32({M, O}, "res");
      const Buffer y = f32({M, O}), plain = f32({M, O}), dx = f32({M, I}), dx_acc = f32({M, I}, "dx");
      const Buffer dw = f32({O, I}, "dw"), dbias = f32({O}, "dbias");
      const Buffer dx0 = f32({M, I}, "dx"), dw0 = f32({O, I}, "dw"), dbias0 = f32({O}, "dbias");
      table.linear_fwd({y.tensor(), x.tensor(), w.weight(), bias.tensor(), res.tensor()}, {});
      table.linear_fwd({plain.tensor(), x.tensor(), w.weight(), {}, {}}, {});
      table.linear_bwd_input({dx.tensor(), dy.tensor(), w.weight(), false}, {});
      table.linear_bwd_input({dx_acc.tensor(), dy.tensor(), w.weight(), true}, {});
      table.linear_bwd_weight({dw.tensor(), dbias.tensor(), dy.tensor(), x.tensor()}, {});
      int wrong[6] = {};
      for (int64_t n = 0; n < M; n++)
        for (int64_t o = 0; o < O; o++) {
          float sum = 0;
          for (int64_t i = 0; i < I; i++) sum = std::fma(at(x, n * I + i), at(w.w, o * I + i), sum);
          wrong[0] += at(plain, n * O + o) != sum;
          wrong[1] += at(y, n * O + o) != (sum + at(bias, o)) + at(res, n * O + o);
        }
      for (int64_t n = 0; n < M; n++)
        for (int64_t i = 0; i < I; i++) {
          float sum = 0;
          for (int64_t o = 0; o < O; o++) sum = std::fma(at(dy, n * O + o), at(w.w, o * I + i), sum);
          wrong[2] += at(dx, n * I + i) != sum;
          wrong[3] += at(dx_acc, n * I + i) != at(dx0, n * I + i) + sum;
        }
      for (int64_t o = 0; o < O; o++) {
        for (int64_t i = 0; i < I; i++) {
          float sum = at(dw0, o * I + i);
          for (int64_t n = 0; n < M; n++) sum = std::fma(at(dy, n * O + o), at(x, n * I + i), sum);
          wrong[4] += at(dw, o * I + i) != sum;
        }
        float sum = at(dbias0, o);
        for (int64_t n = 0; n < M; n++) sum += at(dy, n * O + o);
        wrong[5] += at(dbias, o) != sum;
      }
      const char* names[] = {"y", "y + bias + residual", "dx", "dx accumulated", "dw", "dbias"};
      for (int j = 0; j < 6; j++)
        EXPECT_EQ(wrong[j], 0) << names[j] << ": elements that differ, M=" << M << " I=" << I << " O=" << O;
    }
}

TEST_P(OpBits, ParameterGradientsContinueAcrossCalls) {
  const int64_t M = 65, first = 13, I = 33, O = 47, V = 11;
  const Buffer x = f32({M, I}, "x"), dy = f32({M, O}, "dy"), w = f32({I}, "w"), ids = i32({M}, below("ids", M, V));
  const Buffer rstd = f32({M}, "rstd"), dnorm = f32({M, I}, "dnorm");
  std::vector<Bytes> results;
  for (bool split : {false, true}) {
    const Buffer dw = f32({O, I}, "dw"), dbias = f32({O}, "dbias"), dtable = f32({V, O}, "dtable");
    const Buffer dgain = f32({I}, "dgain"), dx = f32({M, I});
    for (auto [begin, count] : split ? std::vector<std::pair<int64_t, int64_t>>{{0, first}, {first, M - first}}
                                     : std::vector<std::pair<int64_t, int64_t>>{{0, M}}) {
      auto part = [begin = begin, count = count](const Buffer& b) { return b.tensor().rows(begin, count); };
      table.linear_bwd_weight({dw.tensor(), dbias.tensor(), part(dy), part(x)}, {});
      table.embedding_bwd({dtable.tensor(), part(dy), part(ids)}, {});
      const Buffer parts = f32({norm_strands(count, DType::f32), I});
      table.rmsnorm_bwd({part(dx), dgain.tensor(), part(dnorm), part(x), w.tensor(), part(rstd), false, parts.tensor()},
                        {});
    }
    for (const Buffer* b : {&dw, &dbias, &dtable, &dgain, &dx}) results.push_back(b->element_bytes());
  }
  const char* names[] = {"linear dw", "linear dbias", "embedding dtable", "rmsnorm dw", "rmsnorm dx"};
  for (int i = 0; i < 5; i++) EXPECT_TRUE(same(results[i], results[5 + i])) << names[i];
}

// The definition, and that neither threads nor the passes that they ask for change it.
TEST_P(OpBits, QkNormRopeIsRmsnormThenRope) {
  struct Shape {
    int64_t rows, q_heads, k_heads, dim;
  };
  for (const auto& [N, H, K, D] : {Shape{131, 4, 2, 32}, {70, 5, 1, 20}, {37, 3, 2, 128}, {3, 1, 0, 6}}) {
    const int64_t h = H + K, positions = 13;
    const auto part = [&, D = D](const Buffer& b, int64_t first, int64_t heads) {  // [N, heads, D]
      return b.tensor().columns(first * D, heads * D).heads(heads);
    };
    const Buffer x = f32({N, h * D}, "x"), dy = f32({N, h * D}, "dy"), table_of = f32({positions, D}, "table");
    const Buffer pos = i32({N}, below("pos", N, positions));
    const Buffer w[] = {f32({D}, "q_norm"), f32({D}, "k_norm")};
    // One by one, a head of one row after the other.
    const Buffer y = f32({N, h * D}), rstd = f32({N, h}), dx = f32({N, h * D});
    const Buffer dw[] = {f32({D}, "dq"), f32({D}, "dk")};
    std::memcpy(dx.tensor().data, dy.tensor().data, dy.tensor().bytes());
    table.rope_bwd({part(dx, 0, h), table_of.tensor(), pos.tensor()}, {});
    for (int64_t n = 0; n < N; n++)
      for (int64_t i = 0; i < h; i++) {
        const int kind = i < H ? 0 : 1;
        const auto head = [&, D = D](const Buffer& b) { return b.tensor().rows(n, 1).columns(i * D, D); };
        const Tensor r = make_tensor(rstd.tensor().as<float>() + n * h + i, DType::f32, {1}), gain = w[kind].tensor();
        table.rmsnorm_fwd({head(y), r, head(x), gain, 1e-6f}, {});
        const Buffer parts = f32({1, D});
        table.rmsnorm_bwd({head(dx), dw[kind].tensor(), head(dx), head(x), gain, r, false, parts.tensor()}, {});
      }
    table.rope_fwd({part(y, 0, h), table_of.tensor(), pos.tensor()}, {});

    for (int n : {1, 2, 3}) {
      const Threads threads(n);
      const Buffer fused = f32({N, h * D}), fused_rstd = f32({N, h}), d = f32({N, h * D}), in_place = f32({N, h * D});
      const auto forward = [&, H = H](const Buffer& to) {
        table.qk_norm_rope_fwd({part(to, 0, h), fused_rstd.tensor(), part(x, 0, h), w[0].tensor(), w[1].tensor(),
                                table_of.tensor(), pos.tensor(), H, 1e-6f},
                               {});
      };
      forward(fused);
      const std::string what = cat(N, " rows, D ", D, ", ", n, " threads");
      EXPECT_TRUE(same(fused.element_bytes(), y.element_bytes())) << "y, " << what;
      EXPECT_TRUE(same(fused_rstd.element_bytes(), rstd.element_bytes())) << "rstd, " << what;
      std::memcpy(in_place.tensor().data, dy.tensor().data, dy.tensor().bytes());
      for (const Buffer* to : {&d, &in_place}) {
        const Buffer dq = f32({D}, "dq"), dk = f32({D}, "dk"), parts = f32({norm_parts(N * h), 2, D});
        table.qk_norm_rope_bwd(
            {part(*to, 0, h), dq.tensor(), dk.tensor(), parts.tensor(), part(to == &d ? dy : *to, 0, h), part(x, 0, h),
             w[0].tensor(), w[1].tensor(), fused_rstd.tensor(), table_of.tensor(), pos.tensor(), H},
            {});
        EXPECT_TRUE(same(to->element_bytes(), dx.element_bytes())) << "dx, " << what;
        EXPECT_TRUE(same(dq.element_bytes(), dw[0].element_bytes())) << "dq_norm, " << what;
        EXPECT_TRUE(same(dk.element_bytes(), dw[1].element_bytes())) << "dk_norm, " << what;
      }
    }
  }
}

// ---- attention

struct Heads {
  int64_t heads, kv_heads, dim;
};
const Heads kHeads[] = {{1, 1, 8}, {6, 2, 20}, {7, 1, 32}, {2, 2, 64}};

// q, k and v of one sequence.
struct Sequence {
  Sequence(const std::string& name, int64_t n, const Heads& s)
      : n(n),
        heads(s),
        q(f32({n, s.heads, s.dim}, name + "q")),
        k(f32({n, s.kv_heads, s.dim}, name + "k")),
        v(f32({n, s.kv_heads, s.dim}, name + "v")) {}
  int64_t n;
  Heads heads;
  Buffer q, k, v;
  float scale() const { return static_cast<float>(1 / std::sqrt(double(heads.dim))); }
};

int64_t count_pairs(const std::vector<int32_t>& segments) {
  int64_t pairs = 0;
  for (size_t i = 0; i < segments.size(); i += 4) {
    const int64_t len = segments[i + 1], parent = segments[i + 3];
    pairs += len * parent + len * (len + 1) / 2;
  }
  return pairs;
}

// Rows taken from sequences: (sequence, row) for each row of the batch.
using Layout = std::vector<std::pair<const Sequence*, int64_t>>;

void append(Layout& layout, const Sequence& s, int64_t begin, int64_t count) {
  for (int64_t i = begin; i < begin + count; i++) layout.emplace_back(&s, i);
}

Buffer gather(const Layout& layout, Buffer Sequence::*which) {
  const Buffer& first = layout[0].first->*which;
  const int64_t h = first.tensor().shape[1], D = first.tensor().shape[2];
  std::vector<double> v;
  for (auto [s, row] : layout)
    for (int64_t i = 0; i < h * D; i++) v.push_back((s->*which).get(row * h * D + i));
  return f32({static_cast<int64_t>(layout.size()), h, D}, v);
}

struct Attended {
  Buffer o, lse;
};
// Attention of a batch; parents lie in `parents`, or in the batch itself.
Attended attend(const Table& table, const Layout& layout, const std::vector<int32_t>& segments,
                const Sequence* parents = nullptr) {
  const Sequence& s = *layout[0].first;
  const int64_t N = static_cast<int64_t>(layout.size());
  const Buffer q = gather(layout, &Sequence::q), k = gather(layout, &Sequence::k), v = gather(layout, &Sequence::v);
  const Buffer list = i32({static_cast<int64_t>(segments.size()) / 4, 4}, segments);
  Attended r{f32({N, s.heads.heads, s.heads.dim}), f32({N, s.heads.heads})};
  const Buffer &pk = parents ? parents->k : k, &pv = parents ? parents->v : v;
  table.attn_fwd({r.o.tensor(), r.lse.tensor(), q.tensor(), k.tensor(), v.tensor(), pk.tensor(), pv.tensor(),
                  list.tensor(), count_pairs(segments), s.scale()},
                 {});
  return r;
}

Attended attend_alone(const Table& table, const Sequence& s) {
  Layout layout;
  append(layout, s, 0, s.n);
  return attend(table, layout, {0, static_cast<int32_t>(s.n), 0, 0});
}

void expect_rows(const Attended& is, int64_t begin, const Attended& alone, int64_t from, int64_t count,
                 const std::string& what) {
  EXPECT_TRUE(same(row_bytes(is.o, begin, count), row_bytes(alone.o, from, count))) << "o, " << what;
  EXPECT_TRUE(same(row_bytes(is.lse, begin, count), row_bytes(alone.lse, from, count))) << "lse, " << what;
}

TEST_P(OpBits, AttentionOfASequenceDoesNotDependOnItsBatch) {
  for (const Heads& h : kHeads) {
    const Sequence a("a", 150, h), b("b", 17, h), c("c", 65, h);
    Layout layout;
    append(layout, b, 0, 17);
    append(layout, c, 0, 65);
    append(layout, a, 0, 150);
    const Attended packed = attend(table, layout, {82, 150, 0, 0, 0, 17, 0, 0, 17, 65, 0, 0});
    expect_rows(packed, 0, attend_alone(table, b), 0, 17, "first of the batch");
    expect_rows(packed, 17, attend_alone(table, c), 0, 65, "middle of the batch");
    expect_rows(packed, 82, attend_alone(table, a), 0, 150, "last of the batch");
  }
}

TEST_P(OpBits, AttentionBehindAParentEqualsTheWholeSequence) {
  for (const Heads& h : kHeads) {
    const int32_t n = 150;
    const Sequence a("a", n, h), other("b", 3, h);
    const Attended whole = attend_alone(table, a);
    for (int32_t m : {1, 15, 16, 37, 63, 64, 65, 128, 149}) {
      const std::string what = cat("parent of ", m, ", D ", h.dim);
      Layout layout;  // three rows of another sequence, the child, its parent
      append(layout, other, 0, 3);
      append(layout, a, m, n - m);
      append(layout, a, 0, m);
      const Attended split = attend(table, layout, {3, n - m, 3 + n - m, m, 3 + n - m, m, 0, 0, 0, 3, 0, 0});
      expect_rows(split, 3, whole, m, n - m, what);
      expect_rows(split, 3 + n - m, whole, 0, m, what + ", its own rows");
      Layout child;
      append(child, a, m, n - m);
      expect_rows(attend(table, child, {0, n - m, 0, m}, &a), 0, whole, m, n - m, what + " in another batch");
    }
  }
}

// Runs two sequences through pages, `chunks` rows of the first and up to 3 of the second in each pass; returns o of the
// first.
Bytes through_pages(const Table& table, const Sequence& a, const Sequence& b, const std::vector<int32_t>& chunks,
                    const std::string& shuffle) {
  const Heads& h = a.heads;
  const int64_t pages = 40, per_sequence = 16;
  std::vector<int32_t> order(pages), swap = below(shuffle, pages, pages);
  for (int32_t i = 0; i < pages; i++) order[i] = i;
  for (int64_t i = 0; i < pages; i++) std::swap(order[i], order[swap[i]]);
  const Buffer page_table = i32({2, per_sequence}, {order.begin(), order.begin() + 2 * per_sequence});
  // Pages start as NaN: slots that are not in use must not be read.
  const Buffer k_pages = f32({pages, h.kv_heads, h.dim, 16}), v_pages = f32({pages, h.kv_heads, 16, h.dim});
  Bytes o;
  int32_t done_a = 0, done_b = 0;
  for (int32_t count : chunks) {
    const int32_t count_b = std::min<int32_t>(3, static_cast<int32_t>(b.n) - done_b);
    Layout layout;
    append(layout, b, done_b, count_b);
    append(layout, a, done_a, count);
    done_a += count;
    done_b += count_b;
    std::vector<int32_t> entries = {count_b, count, done_a, 0};
    if (count_b) entries.insert(entries.end(), {0, count_b, done_b, 1});
    const Buffer queries = i32({static_cast<int64_t>(entries.size()) / 4, 4}, entries);
    const Buffer q = gather(layout, &Sequence::q), k = gather(layout, &Sequence::k), v = gather(layout, &Sequence::v);
    const Buffer out = f32({count + count_b, h.heads, h.dim});
    int64_t pairs = 0;
    for (size_t i = 0; i < entries.size(); i += 4)
      pairs += int64_t(entries[i + 1]) * (entries[i + 2] - entries[i + 1]) +
               int64_t(entries[i + 1]) * (entries[i + 1] + 1) / 2;
    table.kv_write({k_pages.tensor(), v_pages.tensor(), k.tensor(), v.tensor(), page_table.tensor(), queries.tensor()},
                   {});
    table.attn_paged({out.tensor(), q.tensor(), k_pages.tensor(), v_pages.tensor(), page_table.tensor(),
                      queries.tensor(), pairs, done_a + (count_b ? done_b : 0), a.scale()},
                     {});
    const Bytes rows = row_bytes(out, count_b, count);
    o.insert(o.end(), rows.begin(), rows.end());
  }
  return o;
}

TEST_P(OpBits, PagedAttentionEqualsPackedAttention) {
  for (const Heads& h : kHeads) {
    const Sequence a("a", 130, h), b("b", 41, h);
    const Bytes packed = attend_alone(table, a).o.element_bytes();
    const std::vector<std::vector<int32_t>> schedules = {
        {130}, std::vector<int32_t>(130, 1), {17, 1, 46, 1, 65}, {64, 64, 2}, {1, 15, 16, 17, 81}};
    for (size_t i = 0; i < schedules.size(); i++)
      for (const char* shuffle : {"pages", "other pages"})
        EXPECT_TRUE(same(through_pages(table, a, b, schedules[i], shuffle), packed))
            << "schedule " << i << ", " << shuffle << ", D " << h.dim;
  }
}

// Batches in which segments share parents: members and their parent; two families in turn, whose parents begin in one
// row; members of more rows than are computed at once.
struct Family {
  int64_t rows;
  std::vector<int32_t> segments;
};
const Family kFamilies[] = {
    {117, {70, 13, 0, 70, 83, 1, 0, 70, 84, 33, 0, 70, 0, 70, 0, 0}},
    {131, {55, 9, 0, 20, 64, 7, 0, 55, 71, 18, 0, 20, 89, 2, 0, 20, 91, 21, 0, 55, 112, 19, 3, 17, 0, 55, 0, 0}},
    {330, {98, 131, 0, 98, 229, 101, 0, 98, 0, 98, 0, 0}},
};

using Calls = std::vector<std::vector<int32_t>>;  // the segments of each
Calls one_call_each(const std::vector<int32_t>& segments) {
  Calls each;
  for (size_t i = 0; i < segments.size(); i += 4) each.emplace_back(segments.begin() + i, segments.begin() + i + 4);
  return each;
}

TEST_P(OpBits, AttentionOfASegmentDoesNotDependOnItsSiblings) {
  for (const Heads& h : kHeads)
    for (const Family& family : kFamilies) {
      const Sequence s("s", family.rows, h);
      Layout layout;
      append(layout, s, 0, family.rows);
      const Attended all = attend(table, layout, family.segments);
      for (const std::vector<int32_t>& g : one_call_each(family.segments))
        expect_rows(all, g[0], attend(table, layout, g), g[0], g[1], cat("segment at ", g[0], ", D ", h.dim));
    }
}

TEST_P(OpBits, AttentionGradientsContinueAcrossCalls) {
  for (const Heads& h : kHeads)
    for (const Family& family : kFamilies) {
      const int64_t N = family.rows;
      const Sequence s("s", N, h);
      Layout layout;
      append(layout, s, 0, N);
      const Attended forward = attend(table, layout, family.segments);
      const Buffer d_o = f32({N, h.heads, h.dim}, "d_o");
      const std::vector<int32_t>& all = family.segments;
      std::vector<Calls> divisions = {{all}, one_call_each(all)};
      for (size_t cut = 4; cut < all.size(); cut += 4)
        divisions.push_back({{all.begin(), all.begin() + cut}, {all.begin() + cut, all.end()}});
      std::vector<std::vector<Bytes>> results;
      for (const Calls& calls : divisions) {
        const Buffer dq = f32({N, h.heads, h.dim});
        const Buffer dk = f32({N, h.kv_heads, h.dim}, "dk"), dv = f32({N, h.kv_heads, h.dim}, "dv");
        for (const std::vector<int32_t>& segments : calls) {
          const Buffer list = i32({static_cast<int64_t>(segments.size()) / 4, 4}, segments);
          AttnBwd a{};
          a.dq = dq.tensor();
          a.dk = a.dpk = dk.tensor();
          a.dv = a.dpv = dv.tensor();
          a.d_o = d_o.tensor();
          a.o = forward.o.tensor();
          a.lse = forward.lse.tensor();
          a.q = s.q.tensor();
          a.k = a.pk = s.k.tensor();
          a.v = a.pv = s.v.tensor();
          a.segments = list.tensor();
          a.pairs = count_pairs(segments);
          a.scale = s.scale();
          table.attn_bwd(a, {});
        }
        results.push_back({dq.element_bytes(), dk.element_bytes(), dv.element_bytes()});
      }
      for (size_t i = 1; i < results.size(); i++) {
        EXPECT_TRUE(same(results[0][0], results[i][0])) << "dq, D " << h.dim << ", " << N << " rows, division " << i;
        EXPECT_TRUE(same(results[0][1], results[i][1])) << "dk, D " << h.dim << ", " << N << " rows, division " << i;
        EXPECT_TRUE(same(results[0][2], results[i][2])) << "dv, D " << h.dim << ", " << N << " rows, division " << i;
      }
    }
}

// ---- log-probs

TEST_P(OpBits, LogprobLossAndSamplerAgree) {
  for (int64_t V : {1, 17, 127, 128, 129, 1000, 151936})
    for (float temperature : {1.0f, 0.7f}) {
      const int64_t R = V > 1000 ? 3 : 19;
      const std::vector<double> logits = normal("logits", R * V, 3);
      const Buffer token = i32({R}, {}), sampled = f32({R}), scratch = f32({R, V}, logits);
      const Buffer counter = i32({R, 3}, below("counter", R * 3, INT32_MAX));
      Sample sample{};
      sample.token = token.tensor();
      sample.logprob = sampled.tensor();
      sample.logits = scratch.tensor();
      sample.counter = counter.tensor();
      sample.key = 5;
      sample.temperature = temperature;
      table.sample(sample, {});
      const Buffer lp = f32({R}), h = f32({R}), input = f32({R, V}, logits);
      table.logprob({lp.tensor(), h.tensor(), input.tensor(), token.tensor(), temperature}, {});
      const Buffer loss_lp = f32({R}), loss_h = f32({R}), loss = f32({R}), kl = f32({R}),
                   gradient = f32({R, V}, logits);
      const Buffer clipped = i32({R}, {}), weight = f32({R}, "weight"), old = f32({R}, "old");
      LogitsLoss a{};
      a.logprob = loss_lp.tensor();
      a.entropy = loss_h.tensor();
      a.loss = loss.tensor();
      a.kl = kl.tensor();
      a.clipped = clipped.tensor();
      a.logits = gradient.tensor();
      a.target = token.tensor();
      a.weight = a.kl_weight = a.advantage = weight.tensor();
      a.old_logprob = old.tensor();
      a.spec.policy = PolicyLoss::ppo;
      a.spec.temperature = temperature;
      table.logits_loss(a, {});
      EXPECT_TRUE(same(sampled.element_bytes(), lp.element_bytes())) << "sample, V " << V;
      EXPECT_TRUE(same(loss_lp.element_bytes(), lp.element_bytes())) << "logits_loss, V " << V;
      EXPECT_TRUE(same(loss_h.element_bytes(), h.element_bytes())) << "entropy, V " << V;
      // Alone or in a batch.
      for (int64_t r = 0; r < R; r++) {
        const Buffer one = f32({1}), one_h = f32({1});
        table.logprob({one.tensor(), one_h.tensor(), input.tensor().rows(r, 1), token.tensor().rows(r, 1), temperature},
                      {});
        EXPECT_TRUE(same(one.element_bytes(), row_bytes(lp, r, 1))) << "row " << r << ", V " << V;
        EXPECT_TRUE(same(one_h.element_bytes(), row_bytes(h, r, 1))) << "entropy of row " << r << ", V " << V;
      }
    }
}

// ---- threads, at sizes large enough to be divided

TEST_P(OpBits, ThreadsDoNotChangeLargeResults) {
  const int64_t M = 130, I = 192, O = 272, V = 1021;
  std::vector<Bytes> first;
  for (int n : {1, 2, 3}) {
    const Threads threads(n);
    const PreparedWeight w(table, O, I);
    const Buffer x = f32({M, I}, "x"), dy = f32({M, O}, "dy"), y = f32({M, O}), dx = f32({M, I});
    const Buffer dw = f32({O, I}, "dw"), dbias = f32({O}, "dbias");
    table.linear_fwd({y.tensor(), x.tensor(), w.weight(), {}, {}}, {});
    table.linear_bwd_input({dx.tensor(), dy.tensor(), w.weight(), false}, {});
    table.linear_bwd_weight({dw.tensor(), dbias.tensor(), dy.tensor(), x.tensor()}, {});
    const Buffer gain = f32({I}, "gain"), normed = f32({M, I}), rstd = f32({M}), dgain = f32({I}, "dgain");
    table.rmsnorm_fwd({normed.tensor(), rstd.tensor(), x.tensor(), gain.tensor(), 1e-6f}, {});
    const Buffer dnorm = f32({M, I}, "dnorm"), dxn = f32({M, I});
    const Buffer parts = f32({norm_strands(M, DType::f32), I});
    table.rmsnorm_bwd(
        {dxn.tensor(), dgain.tensor(), dnorm.tensor(), x.tensor(), gain.tensor(), rstd.tensor(), false, parts.tensor()},
        {});
    const Attended attended = attend_alone(table, Sequence("s", 150, {8, 4, 32}));
    const Buffer logits = f32({M, V}, "logits"), lp = f32({M}), h = f32({M}), target = i32({M}, below("t", M, V));
    table.logprob({lp.tensor(), h.tensor(), logits.tensor(), target.tensor(), 1}, {});
    const Buffer many = f32({70001}, "many"), sums = f32({norm_blocks(70001, 9000)});
    table.square_sums({sums.tensor(), many.tensor(), 9000}, {});
    std::vector<Bytes> results;
    for (const Buffer* b :
         {&y, &dx, &dw, &dbias, &normed, &rstd, &dgain, &dxn, &attended.o, &attended.lse, &lp, &h, &sums})
      results.push_back(b->element_bytes());
    if (first.empty()) first = results;
    for (size_t i = 0; i < results.size(); i++)
      EXPECT_TRUE(same(first[i], results[i])) << "result " << i << ", " << n << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, OpBits, testing::Values(&table_cpu),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace

}  // namespace pare::test
