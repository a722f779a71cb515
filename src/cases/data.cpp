// Data movement, also between ranks, and embedding.

#include "ops/data.h"

#include "cases/cases.h"

namespace pare::cases {

namespace {

Call upload(Operands& o, const Dims& d) { return Upload{o.bytes("dst", d["n"], Use::out), o.host(d["n"])}; }
Call download(Operands& o, const Dims& d) { return Download{o.host(d["n"]), o.bytes("src", d["n"], Use::in)}; }
Call zero(Operands& o, const Dims& d) { return Zero{o.bytes("x", d["n"], Use::inout)}; }
Call accumulate(Operands& o, const Dims& d) {
  return Accumulate{o.stat_inout("y", {d["n"]}), o.stat_in("x", {d["n"]})};
}

// What a rank that is alone has to send: to itself.
Call all_to_all(Operands& o, const Dims& d) {
  const int64_t n = d["n"], first = d["first"];
  return AllToAll{o.stat_out("y", {n}), o.stat_in("x", {first + n + 3}), {first}, {n}, {n}, &self()};
}
Call all_gather(Operands& o, const Dims& d) { return AllGather{o.stat_inout("y", {d["n"]}), {d["n"]}, &self()}; }
Tensor rows_below(Operands& o, const char* name, int64_t count, int64_t n) {
  return o.index(name, {count}, below(name, count, n));
}
// Random rows, one after the other or, if there are more, to random places.
Call copy_rows(Operands& o, const Dims& d) {
  const int64_t n = d["n"], C = d["C"], heads = d["heads"], to = d["to"] ? d["to"] : n, of = d["N"] ? d["N"] : n;
  std::vector<int32_t> places = shuffled(to), sources = below("index", n, of), pairs, y, x;
  for (int32_t i = 0; i < n; i++)  // in place no row is both
    pairs.insert(pairs.end(), {d["in_place"] ? places[n + i % (to - n)] : sources[i], d["to"] ? places[i] : i});
  CopyRows a{};
  if (d["tokens"]) {  // ids that are NaNs as floats keep their bits
    for (int32_t i = 0; i < to; i++) y.push_back(0x7f812345 + i);
    for (int32_t i = 0; i < of; i++) x.push_back(0x7fa00001 - i);
    a.y = o.index_inout("y", {to, 1}, y);
    a.x = o.index("x", {of, 1}, x);
  } else {
    a.y = o.inout("y", {to, C}, d["gap"]);
    const Shape rows = heads ? Shape{of, heads, C / heads} : Shape{of, C};
    a.x = d["in_place"] ? a.y : o.in("x", rows, d["gap"] ? d["gap"] + 7 : 0);
  }
  a.index = o.index("index", {n, 2}, pairs);
  return a;
}
Call hash_runs(Operands& o, const Dims& d) {
  HashRuns a{};
  a.x = o.in("x", {d["n"]});
  a.run = d["run"];
  a.each = d["each"];
  a.first = static_cast<uint64_t>(d["first"]);
  a.hash = o.index_out("hash", {a.runs(), 2});
  return a;
}
Call scatter_add_rows(Operands& o, const Dims& d) {
  return ScatterAddRows{o.inout("dx", {d["N"], d["C"]}), o.in("dy", {d["R"], d["C"]}),
                        rows_below(o, "index", d["R"], d["N"])};
}
Call embedding_fwd(Operands& o, const Dims& d) {
  EmbeddingFwd a{o.out("y", {d["N"], d["C"]}), o.weight("table", d["V"], d["C"]), rows_below(o, "ids", d["N"], d["V"])};
  if (d["norm"])
    a.norm = {.y = o.out("normed", {d["N"], d["C"]}),
              .rstd = o.stat_out("rstd", {d["N"]}),
              .w = o.in("gain", {d["C"]}),
              .eps = 1e-6f};
  return a;
}
Call embedding_bwd(Operands& o, const Dims& d) {
  return EmbeddingBwd{o.stat_inout("dtable", {d["V"], d["C"]}), o.in("dy", {d["N"], d["C"]}),
                      rows_below(o, "ids", d["N"], d["V"])};
}

}  // namespace

std::vector<OpCase> data_cases() {
  const std::vector<Dim> bytes = {{"n", 1 << 24, "bytes"}};
  const std::vector<std::string> few = {"n=1", "n=15", "n=16", "n=17", "n=67"};
  const std::vector<Dim> parts = {{"n", 1 << 24, "elements"}, edge("first", "elements in front of them")};
  const std::vector<std::string> cut = {"n=1", "n=16", "n=67,first=5"};
  const std::vector<Dim> rows = {{"R", 1024, "rows that are moved"}, {"N", 4096, "rows there are"}, kWidth};
  const std::vector<std::string> moved = {"R=1,N=1,C=1", "R=5,N=3,C=17", "R=13,N=7,C=64", "R=3,N=11,C=33"};
  const std::vector<Dim> table = {kRows, kWidth, {"V", 151936, "vocabulary"}};
  const std::vector<std::string> ids = {"N=1,C=1,V=1", "N=5,C=17,V=3", "N=13,C=64,V=7", "N=3,C=33,V=11"};
  return {{"upload", bytes, few, upload},
          {"download", bytes, few, download},
          {"zero", bytes, few, zero},
          {"accumulate", {{"n", 1 << 24, "elements"}}, few, accumulate},
          {"copy_rows",
           {{"n", 256, "rows that are copied"},
            kWidth,
            edge("N", "rows there are; 0: n"),
            edge("to", "rows of the result, more than n or, to be in order, 0"),
            edge("heads", "of the rows; 0: none"),
            edge("tokens", "1: ids, in place of numbers"),
            kGap,
            kInPlace},
           {"n=1,C=1", "n=5,N=3,C=17", "n=13,N=7,C=64", "n=3,N=4,C=21,to=5,gap=2", "n=1,N=7,C=24,heads=3,to=3,gap=5",
            "n=2,C=33,to=6,gap=1,in_place=1", "n=3,N=3,C=1,to=5,tokens=1"},
           copy_rows},
          {"hash_runs",
           {{"n", 1 << 24, "numbers"},
            {"run", 1 << 14, "numbers of a run"},
            edge("first", "the first number's number"),
            edge("each", "1: numbers count from 0 in every run")},
           {"n=1,run=1", "n=17,run=5", "n=300,run=129", "n=260,run=300,first=4294967235", "n=39,run=13,each=1",
            "n=1000,run=333,first=7,each=1"},
           hash_runs},
          {"all_to_all", parts, cut, all_to_all},
          {"all_gather", {{"n", 1 << 24, "elements"}}, few, all_gather},
          {"scatter_add_rows", rows, moved, scatter_add_rows},
          {"embedding_fwd", table + std::vector{edge("norm", "1: the norm of y, too")},
           with(ids, {"", "norm=1"}) + std::vector<std::string>{"N=9,C=40,V=11,norm=1"}, embedding_fwd},
          {"embedding_bwd", table, ids, embedding_bwd}};
}

}  // namespace pare::cases
