#include "model/learner.h"

#include <algorithm>
#include <optional>

#include "ops/data.h"
#include "ops/logits.h"

namespace pare {

namespace {

// Uploads doubles to a stat tensor.
Tensor upload_stat(const Model& model, Arena& arena, const char* name, std::span<const double> values) {
  const Tensor t = arena.alloc(name, model.stat, {static_cast<int64_t>(values.size())});
  if (model.stat == DType::f64) {
    model.device.upload({t, values.data()});
  } else {
    const std::vector<float> narrow(values.begin(), values.end());
    model.device.upload({t, narrow.data()});
  }
  return t;
}

Tensor upload_ints(const Model& model, Arena& arena, const char* name, const std::vector<int32_t>& values) {
  const Tensor t = arena.alloc(name, DType::i32, {static_cast<int64_t>(values.size())});
  model.device.upload({t, values.data()});
  return t;
}

using LossRow = PackedBatch::LossRow;

// Loss rows whose logits exist at a time.
struct Chunk {
  int64_t first, n;
  Tensor of(const Tensor& t) const { return t.rows(first, n); }
};

// Equal chunks of at most `most` of n rows: no short last one, so that learner products always have many rows.
std::vector<Chunk> chunks_of(int64_t n, int64_t most) {
  const int64_t pieces = (n + most - 1) / most;
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < pieces; i++) chunks.push_back({n * i / pieces, n * (i + 1) / pieces - n * i / pieces});
  return chunks;
}

// The LM head on the loss rows of a batch, for the loss and for log-probs, a chunk at a time: the logits of a batch
// never exist as a whole.
struct LossHead {
  const Model& model;
  Arena& arena;
  const PackedBatch& batch;
  const std::vector<Group>& groups;
  const LearnerOptions& options;
  const float temperature;
  const Tensor sampler;  // SamplerStates::hidden, or absent
  const std::vector<Chunk> chunks = chunks_of(std::ssize(batch.loss_rows), options.logits_chunk);
  const std::vector<int32_t> rows = of_rows([](const LossRow& r, const Member&) { return r.row; });
  const Tensor row = upload_ints(model, arena, "loss_row", rows);  // i32 [R]
  const Tensor pairs = upload_pairs("loss_pairs", rows);           // i32 [R, 2]
  const Tensor target =
      upload_ints(model, arena, "target", of_rows([](const LossRow& r, const Member& m) { return m.tokens[r.token]; }));
  const Tensor sampler_pairs = sampler ? upload_pairs("sampler_pairs", of_rows(sampler_row)) : Tensor{};

  // Returns f(r, its member) of each loss row r.
  template <class F>
  std::vector<int32_t> of_rows(F f) const {
    std::vector<int32_t> values;
    for (const LossRow& r : batch.loss_rows) values.push_back(f(r, groups[r.group].members[r.member]));
    return values;
  }
  static int32_t sampler_row(const LossRow& r, const Member& m) {
    expect(m.sampler_row.has_value(), "a member without hidden states of its sampler");
    return *m.sampler_row + r.token;
  }
  // Uploads the pairs of CopyRows that copy row rows[i] into the chunk of i.
  Tensor upload_pairs(const char* name, const std::vector<int32_t>& rows) const {
    std::vector<int32_t> all;
    for (const Chunk& c : chunks)
      for (int64_t i = 0; i < c.n; i++) all.insert(all.end(), {rows[c.first + i], static_cast<int32_t>(i)});
    return upload_ints(model, arena, name, all).matrix(2);
  }

  // Final hidden states of a chunk's rows.
  Tensor input(const Chunk& c, const Tensor& hidden) const {
    const Tensor h = arena.alloc("head input", model.dtype, {c.n, model.config.hidden});
    model.device.copy_rows({.y = h, .x = hidden, .index = c.of(pairs)});
    return h;
  }
  // Sums over all logits, if none is cut.
  std::optional<VocabSums> sums(const Tensor& of_target, bool only) const {
    if (options.truncation.on()) return {};
    return VocabSums{.tiles = {}, .target = of_target, .temperature = temperature, .only = only};
  }
  // Logits of another policy, from its hidden states.  Overwrites `x`, the input of a product.
  Tensor logits(const char* name, const Chunk& c, const Tensor& x, const Tensor& hidden, const Tensor& index,
                const Weight& head) const {
    const Tensor y = arena.alloc(name, model.dtype, {c.n, model.config.vocab});
    model.device.copy_rows({.y = x, .x = hidden, .index = c.of(index)});
    model.device.linear_fwd({.y = y, .x = x, .w = head, .bias = {}, .residual = {}});
    return y;
  }
  Tensor sampler_logits(const Chunk& c, const Tensor& x) const {
    return sampler ? logits("sampler logits", c, x, sampler, sampler_pairs, model.head) : Tensor{};
  }
  // Truncates logits of a chunk to what their tokens were drawn from.
  void truncate(const Chunk& c, std::initializer_list<Tensor> logits) const {
    Device& device = model.device;
    if (!options.truncation.on()) return;
    if (options.kept_ids == 0) {
      for (const Tensor& t : logits)
        if (t) device.truncate({.logits = t, .temperature = temperature, .keep = options.truncation});
      return;
    }
    const int64_t room = 1 + options.kept_ids;
    std::vector<int32_t> lists(static_cast<size_t>(c.n * room), -1);
    for (int64_t i = 0; i < c.n; i++) {
      const LossRow& r = batch.loss_rows[static_cast<size_t>(c.first + i)];
      const Member& m = groups[r.group].members[r.member];
      expect(m.kept_ids || device.planning(), "a member without the ids that its tokens were drawn from");
      const std::span<const int32_t> ids = m.kept_ids ? m.kept_ids->of(r.token) : std::span<const int32_t>();
      int32_t* const list = lists.data() + i * room;
      list[0] = static_cast<int32_t>(ids.size());
      std::copy(ids.begin(), ids.end(), list + 1);
    }
    const Tensor ids = arena.alloc("kept ids", DType::i32, {c.n, room});
    device.upload({ids, lists.data()});
    for (const Tensor& t : logits)
      if (t) device.keep_listed({.logits = t, .ids = ids});
  }
};

void append(std::vector<double>& column, const std::vector<double>& rows) {
  column.insert(column.end(), rows.begin(), rows.end());
}

void check_ids(const Model& model, const std::vector<Group>& groups) {
  const auto check = [&](const std::vector<int32_t>& ids) {
    for (int32_t id : ids)
      if (id < 0 || id >= model.config.vocab)
        fail("token id ", id, " is outside the model's vocabulary of ", model.config.vocab);
  };
  for (const Group& g : groups) {
    check(g.prefix);
    for (const Member& m : g.members) {
      check(m.tokens);
      const auto length = static_cast<int64_t>(g.prefix.size() + m.tokens.size());
      if (length - 1 > model.config.max_position)
        fail("a sequence of ", length, " tokens is longer than the model's ", model.config.max_position, " positions");
    }
  }
}

// Calls run(batch, carried) for every micro-batch, or, with `limits`, for the largest there could be; carried prefixes
// live as long as their members' batches.  make_prefix(batch) gives the pass of a prefix, after its forward; end_prefix
// is called after its last member.
template <class Prefix, class MakePrefix, class EndPrefix, class Run>
void for_micro_batches(const Model& model, const std::vector<Group>& groups, const BatchLimits* limits,
                       const LearnerOptions& options, Arena& arena, const BatchProgress& progress,
                       MakePrefix make_prefix, EndPrefix end_prefix, Run run) {
  if (limits) {
    for (const LargestBatch& b : largest_batches(*limits, options.max_rows, options.logits_chunk)) {
      const ArenaScope scope(arena);
      for (int64_t l = 0; b.epochs && l < model.config.layers; l++) {  // what Pass makes of traces
        arena.alloc("segments", DType::i32, {b.epochs, 4});
        arena.alloc("kept slots", DType::i32, {b.kept, model.config.kv_heads});
      }
      if (!b.prefix) {
        run(b.batch, static_cast<Prefix*>(nullptr));
        continue;
      }
      Prefix prefix = make_prefix(*b.prefix);
      run(b.batch, &prefix);
      end_prefix(prefix);
    }
    return;
  }
  const std::vector<MicroBatch> plan = plan_micro_batches(groups, options.max_rows);
  for (size_t i = 0; i < plan.size(); i++) {
    const MicroBatch& b = plan[i];
    const ArenaScope scope(arena);
    if (b.parts.empty()) {
      run(pack_groups(groups, b.group_begin, b.group_end), static_cast<Prefix*>(nullptr));
    } else {
      Prefix prefix = make_prefix(pack_prefix(groups[b.group_begin]));
      for (const auto& [begin, end] : b.parts) {
        const ArenaScope part(arena);
        run(pack_members(groups, b.group_begin, begin, end), &prefix);
      }
      end_prefix(prefix);
    }
    if (progress) progress(i + 1, plan.size());
  }
}

// The groups that the loss rows of the largest batches name.
std::vector<Group> one_token() { return {{{0}, {{.tokens = {0}, .sampler_row = 0}}}}; }

// The groups of an update that one shard or rank computes, as a list of their own.
struct Part {
  std::vector<Group> groups;
  TokenTerms terms;
  std::vector<size_t> members;  // of each member, its index in the whole list
};

// Returns the groups g with wanted(g), and their terms if there are any.
template <class F>
Part part_of(const std::vector<Group>& groups, const TokenTerms* terms, const std::vector<int64_t>& offsets, F wanted) {
  Part part;
  size_t member = 0;
  for (size_t g = 0; g < groups.size(); g++)
    for (size_t m = 0; m < groups[g].members.size(); m++, member++) {
      if (!wanted(g)) continue;
      if (m == 0) part.groups.push_back(groups[g]);
      part.members.push_back(member);
      if (!terms) continue;
      for (auto column : {&TokenTerms::weight, &TokenTerms::kl_weight, &TokenTerms::advantage, &TokenTerms::old_logprob,
                          &TokenTerms::log_ratio, &TokenTerms::ref_logprob}) {
        const auto first = (terms->*column).begin();
        (part.terms.*column).insert((part.terms.*column).end(), first + offsets[member], first + offsets[member + 1]);
      }
    }
  return part;
}

constexpr std::vector<double> TokenOuts::*kColumns[] = {&TokenOuts::logprob, &TokenOuts::entropy, &TokenOuts::loss,
                                                        &TokenOuts::kl,      &TokenOuts::overlap, &TokenOuts::mass};

// Calls f(column of to, column of from) for the columns that `from` has; makes room for them in `to`.
template <class F>
void for_columns(TokenOuts& to, TokenOuts& from, F f) {
  const auto pair = [&](auto& into, auto& column) {
    into.resize(static_cast<size_t>(to.offsets.back()));
    f(into, column);
  };
  for (auto column : kColumns)
    if (!(from.*column).empty()) pair(to.*column, from.*column);
  if (!from.clipped.empty()) pair(to.clipped, from.clipped);
  if (!from.hash.empty()) pair(to.hash, from.hash);
}

// Copies the results of a part to its rows of the whole.
void put(TokenOuts& whole, TokenOuts& own, const Part& part) {
  for_columns(whole, own, [&](auto& into, auto& column) {
    for (size_t m = 0; m < part.members.size(); m++)
      std::copy(column.begin() + own.offsets[m], column.begin() + own.offsets[m + 1],
                into.begin() + whole.offsets[part.members[m]]);
  });
  whole.sharing += own.sharing;
}

// Gives every rank the results of the others; rank_of[m] computed member m.
void gather(Comm& comm, TokenOuts& out, const std::vector<int>& rank_of) {
  if (comm.ranks() == 1) return;
  const auto each = [&](auto& column, auto f) {
    for (size_t m = 0; m < rank_of.size(); m++)
      f(rank_of[m], std::span(column).subspan(out.offsets[m], out.offsets[m + 1] - out.offsets[m]));
  };
  Packed own;
  for_columns(out, out, [&](auto&, auto& column) {
    each(column, [&](int rank, auto rows) {
      if (rank == comm.rank())
        for (const auto x : rows) own.put(x);
    });
  });
  std::vector<Packed> all;
  for (std::string& bytes : comm.gather(own.bytes())) all.emplace_back(std::move(bytes));
  for_columns(out, out, [&](auto&, auto& column) {
    each(column, [&](int rank, auto rows) {
      for (auto& x : rows) x = all[static_cast<size_t>(rank)].take<std::remove_reference_t<decltype(x)>>();
    });
  });
}

// Returns of_group(g) for each member, g being its group.
template <class T>
std::vector<int> of_members(const std::vector<Group>& groups, T of_group) {
  std::vector<int> all;
  for (size_t g = 0; g < groups.size(); g++) all.insert(all.end(), groups[g].members.size(), of_group(g));
  return all;
}

// True if there are several machines whose ranks follow one another and whose shards in a round are whole blocks.
bool machines_have_blocks(Comm& comm) {
  const std::vector<int>& machines = comm.machines();
  const int n = comm.node_ranks();
  for (int r = 0; r < comm.ranks(); r++)
    if (machines[static_cast<size_t>(r)] != r / n * n) return false;
  return n < comm.ranks() && comm.ranks() % n == 0 && n % kShardBlock == 0;
}

DType moments_type(const Model& model, const LearnerOptions& options) {
  return options.moments == DType::bf16 ? DType::bf16 : model.stat;
}

}  // namespace

Learner::Learner(Model& model, Arena& gradients, Arena& optimizer, Arena& activations, const LearnerOptions& options)
    : model_(model),
      trained_(model.adapters ? static_cast<const Parameters&>(*model.adapters) : model),
      activations_(activations),
      options_(options),
      by_machine_(machines_have_blocks(model.device.comm)),
      flat_(gradients.alloc("gradients", model.stat, {trained_.size()})),
      views_(model.adapters ? ParameterViews(*model.adapters, flat_)
                            : ParameterViews(model.config, model.layout, flat_)),
      own_head_(model.config.tied && !model.adapters),
      head_(own_head_ ? gradients.alloc("head gradient", model.stat, {model.config.vocab, model.config.hidden})
                      : views_.head),
      sum_(options.shards > 1 ? gradients.alloc("sum of shards", model.stat, {trained_.own()}) : Tensor{}),
      block_(options.shards > kShardBlock && !by_machine_
                 ? gradients.alloc("sum of eight shards", model.stat, {trained_.own()})
                 : Tensor{}),
      m_(optimizer.alloc("adam m", moments_type(model, options), {trained_.own()})),
      v_(optimizer.alloc("adam v", moments_type(model, options), {trained_.own()})),
      norm_(optimizer.alloc("gradient norm", model.stat, {1})),
      own_(blocks_between(trained_.blocks, trained_.own_begin(), trained_.own_end())) {
  expect(options.shards % model.device.comm.ranks() == 0, options.shards, " shards for ", model.device.comm.ranks(),
         " ranks");
  model.device.zero({m_});
  model.device.zero({v_});
}

TokenOuts Learner::accumulate(const std::vector<Group>& groups, const TokenTerms& terms, const LossSpec& spec,
                              const LossPolicies& others, const BatchProgress& progress) {
  begin_update();
  if (options_.shards == 1) return accumulate(groups, terms, nullptr, spec, others, progress);
  Comm& comm = model_.device.comm;
  const auto ranks = static_cast<int64_t>(comm.ranks());
  const std::vector<int> shard_of = shards_of(groups);
  TokenOuts out{.offsets = loss_row_offsets(groups)};
  size_t done = 0, all = 0;
  std::vector<Part> parts;
  for (int64_t round = 0; round < options_.shards / ranks; round++) {
    parts.push_back(
        part_of(groups, &terms, out.offsets, [&](size_t g) { return shard_of[g] == round * ranks + comm.rank(); }));
    all += plan_micro_batches(parts.back().groups, options_.max_rows).size();
  }
  for (int64_t round = 0; round < std::ssize(parts); round++) {
    const Part& part = parts[static_cast<size_t>(round)];
    size_t last = 0;
    TokenOuts own = accumulate(part.groups, part.terms, nullptr, spec, others, [&](size_t n, size_t) {
      last = n;
      if (progress) progress(done + n, all);
    });
    done += last;
    put(out, own, part);
    add_shards(round);
  }
  for (auto column : {&TokenOuts::logprob, &TokenOuts::entropy, &TokenOuts::loss, &TokenOuts::kl})
    (out.*column).resize(static_cast<size_t>(out.offsets.back()));  // also where all shards of the rank are empty
  out.clipped.resize(static_cast<size_t>(out.offsets.back()));
  if (options_.hashes) out.hash.resize(out.clipped.size());
  gather(comm, out, of_members(groups, [&](size_t g) { return static_cast<int>(shard_of[g] % ranks); }));
  if (options_.blocks)
    for (int64_t BlockSharing::*n :
         {&BlockSharing::read, &BlockSharing::again, &BlockSharing::run_read, &BlockSharing::together})
      out.sharing.*n = comm.sum(out.sharing.*n);
  return out;
}

std::vector<int> Learner::shards_of(const std::vector<Group>& groups) const {
  std::vector<int64_t> flops;
  std::vector<int> shards;
  for (const Group& g : groups) {
    flops.push_back(group_flops(model_.config, g, 0));
    shards.push_back(static_cast<int>(g.shard));
  }
  return options_.balance ? deal(flops, options_.shards) : shards;
}

std::vector<int64_t> Learner::flops_of(const std::vector<Group>& groups) const {
  std::vector<int64_t> flops;
  for (const Group& g : groups) flops.push_back(group_flops(model_.config, g, options_.recompute));
  return flops;
}

void Learner::plan(const BatchLimits& limits, const LossSpec& spec, const LossPolicies& others) {
  expect(model_.device.planning(), "the largest batches are for planning");
  accumulate(one_token(), TokenTerms(1), &limits, spec, others, {});
}

TokenOuts Learner::accumulate(const std::vector<Group>& groups, const TokenTerms& terms, const BatchLimits* limits,
                              const LossSpec& spec, const LossPolicies& others, const BatchProgress& progress) {
  const Model* const reference = others.reference;
  expect(is_exact(spec.kl) == (reference != nullptr), "exact KL and a reference model come together");
  expect(spec.centring.on == bool{others.sampler}, "centring and the sampler's states come together");
  check_ids(model_, groups);
  TokenOuts out{.offsets = loss_row_offsets(groups)};
  expect(std::ssize(terms.weight) == out.offsets.back(), terms.weight.size(), " loss terms of ", out.offsets.back(),
         " loss rows");
  const BlockReads* const blocks = options_.blocks ? &*options_.blocks : nullptr;
  const BlockReads* const reference_blocks = options_.dense_reference ? nullptr : blocks;
  struct Prefix {
    std::unique_ptr<Pass> pass, reference;
  };
  for_micro_batches<Prefix>(
      model_, groups, limits, options_, activations_, progress,
      [&](const PackedBatch& batch) {
        Prefix p{std::make_unique<Pass>(model_, activations_, batch, Pass::Keep::prefix, blocks), nullptr};
        p.pass->forward();
        if (reference) {
          p.reference = std::make_unique<Pass>(*reference, activations_, batch, Pass::Keep::all, reference_blocks);
          p.reference->forward();
        }
        return p;
      },
      [&](Prefix& p) { p.pass->backward(views_); },
      [&](const PackedBatch& batch, Prefix* p) {
        Pass pass(model_, activations_, batch, Pass::Keep::all, blocks, p ? p->pass.get() : nullptr,
                  options_.recompute);
        pass.forward();
        if (!limits) out.sharing += pass.block_sharing(batch);
        std::unique_ptr<Pass> ref;
        if (reference) {
          ref = std::make_unique<Pass>(*reference, activations_, batch, Pass::Keep::nothing, reference_blocks,
                                       p ? p->reference.get() : nullptr);
          ref->forward();
        }
        if (limits) {
          TokenOuts none;
          head_loss(batch, groups, TokenTerms(batch.loss_rows.size()), pass, others, ref.get(), spec, none);
        } else {
          head_loss(batch, groups, terms, pass, others, ref.get(), spec, out);
        }
        pass.backward(views_);
      });
  head_pending_ = own_head_;
  return out;
}

// LM head, loss and their backward.  The rows of the batch follow those that `out` has.
void Learner::head_loss(const PackedBatch& batch, const std::vector<Group>& groups, const TokenTerms& terms,
                        const Pass& pass, const LossPolicies& others, const Pass* reference_pass, const LossSpec& spec,
                        TokenOuts& out) {
  Device& device = model_.device;
  Arena& arena = activations_;
  const ArenaScope scope(arena);
  const auto rows = static_cast<int64_t>(batch.loss_rows.size());
  if (rows == 0) return;

  const LossHead head{model_, arena, batch, groups, options_, spec.temperature, others.sampler};
  const auto term = [&](const char* name, const std::vector<double>& column) {
    return upload_stat(model_, arena, name, std::span(column).subspan(out.logprob.size(), rows));
  };
  const Tensor weight = term("weight", terms.weight), kl_weight = term("kl_weight", terms.kl_weight),
               advantage = term("advantage", terms.advantage), old_logprob = term("old_logprob", terms.old_logprob),
               log_ratio = term("log_ratio", terms.log_ratio), ref_logprob = term("ref_logprob", terms.ref_logprob);
  const Tensor logprob = arena.alloc("logprob", model_.stat, {rows}),
               entropy = arena.alloc("entropy", model_.stat, {rows}), loss = arena.alloc("loss", model_.stat, {rows}),
               kl = arena.alloc("kl", model_.stat, {rows}), clipped = arena.alloc("clipped", DType::i32, {rows}),
               hash = options_.hashes ? arena.alloc("hashes of logits", DType::i32, {rows, 2}) : Tensor{};

  LinearParts parts;
  const int64_t sums =
      linear_turn_sums(std::ranges::max(head.chunks, {}, &Chunk::n).n, model_.config.hidden, model_.config.vocab);
  if (sums > 0 && model_.dtype == DType::bf16) {
    parts = {arena.alloc("sums of d head input", model_.stat, {sums}),
             arena.alloc("parts of d head input", DType::i32, {kLinearTiles})};
    device.zero({parts.arrivals});
  }
  for (const Chunk& c : head.chunks) {
    const ArenaScope scope(arena);
    const Tensor h = head.input(c, pass.hidden),
                 dh = arena.alloc("d head input", model_.dtype, {c.n, model_.config.hidden});
    const auto [logits, tiles] = head_forward(model_, arena, h, head.sums({}, false));
    if (hash) device.hash_runs({.hash = c.of(hash), .x = logits.flat(), .run = model_.config.vocab, .each = true});
    Tensor ref_logits;
    if (reference_pass)
      ref_logits = head.logits("reference logits", c, dh, reference_pass->hidden, head.pairs, others.reference->head);
    const Tensor sampler_logits = head.sampler_logits(c, dh);
    head.truncate(c, {logits, ref_logits, sampler_logits});
    device.logits_loss({.logprob = c.of(logprob),
                        .entropy = c.of(entropy),
                        .loss = c.of(loss),
                        .kl = c.of(kl),
                        .clipped = c.of(clipped),
                        .logits = logits,
                        .target = c.of(head.target),
                        .weight = c.of(weight),
                        .kl_weight = c.of(kl_weight),
                        .advantage = c.of(advantage),
                        .old_logprob = c.of(old_logprob),
                        .log_ratio = c.of(log_ratio),
                        .ref_logprob = c.of(ref_logprob),
                        .ref_logits = ref_logits,
                        .sampler_logits = sampler_logits,
                        .spec = spec,
                        .tiles = tiles});
    if (head_) device.linear_bwd_weight({.dw = head_, .dbias = {}, .dy = logits, .x = h});
    device.linear_bwd_input({.dx = dh, .dy = logits, .w = model_.head, .accumulate = false, .parts = parts});
    device.scatter_add_rows({.y = pass.d_hidden, .x = dh, .index = c.of(head.row)});
  }

  append(out.logprob, download_stat(model_.device, logprob));
  append(out.entropy, download_stat(model_.device, entropy));
  append(out.loss, download_stat(model_.device, loss));
  append(out.kl, download_stat(model_.device, kl));
  out.clipped.resize(out.logprob.size());
  device.download({out.clipped.data() + out.clipped.size() - rows, clipped});
  if (!hash) return;
  out.hash.resize(out.logprob.size());
  device.download({out.hash.data() + out.hash.size() - rows, hash});
}

TokenOuts Learner::logprobs(const Model& model, Arena& arena, const std::vector<Group>& groups, double temperature,
                            const LearnerOptions& options, const SamplerStates* states) {
  Comm& comm = model.device.comm;
  if (comm.ranks() == 1) return logprobs(model, arena, groups, nullptr, temperature, options, states);
  const auto rank_of = [&](size_t g) { return static_cast<int>(groups[g].shard % comm.ranks()); };
  TokenOuts out{.offsets = loss_row_offsets(groups)};
  const Part part = part_of(groups, nullptr, out.offsets, [&](size_t g) { return rank_of(g) == comm.rank(); });
  TokenOuts own = logprobs(model, arena, part.groups, nullptr, temperature, options, states);
  put(out, own, part);
  const auto rows = static_cast<size_t>(out.offsets.back());
  out.logprob.resize(rows);
  out.entropy.resize(rows);
  if (states) {
    out.overlap.resize(rows);
    out.mass.resize(rows);
  }
  gather(comm, out, of_members(groups, rank_of));
  return out;
}

void Learner::plan_logprobs(const Model& model, Arena& arena, const BatchLimits& limits, const LearnerOptions& options,
                            const SamplerStates* states) {
  expect(model.device.planning(), "the largest batches are for planning");
  logprobs(model, arena, one_token(), &limits, 1, options, states);
}

TokenOuts Learner::logprobs(const Model& model, Arena& arena, const std::vector<Group>& groups,
                            const BatchLimits* limits, double temperature, const LearnerOptions& options,
                            const SamplerStates* states) {
  const MemoryTurn turn(arena);
  check_ids(model, groups);
  TokenOuts out{.offsets = loss_row_offsets(groups)};
  Device& device = model.device;
  const BlockReads* const blocks = options.blocks ? &*options.blocks : nullptr;
  using Prefix = std::unique_ptr<Pass>;
  for_micro_batches<Prefix>(
      model, groups, limits, options, arena, {},
      [&](const PackedBatch& batch) {
        Prefix p = std::make_unique<Pass>(model, arena, batch, Pass::Keep::all, blocks);
        p->forward();
        return p;
      },
      [](Prefix&) {},
      [&](const PackedBatch& batch, Prefix* p) {
        Pass pass(model, arena, batch, Pass::Keep::nothing, blocks, p ? p->get() : nullptr);
        pass.forward();
        const auto rows = static_cast<int64_t>(batch.loss_rows.size());
        if (rows == 0) return;
        const LossHead head{
            model, arena, batch, groups, options, static_cast<float>(temperature), states ? states->hidden : Tensor{}};
        const Tensor logprob = arena.alloc("logprob", model.stat, {rows}),
                     entropy = arena.alloc("entropy", model.stat, {rows});
        Tensor overlap, mass;
        if (states) {
          overlap = arena.alloc("overlap", model.stat, {rows});
          mass = arena.alloc("mass", model.stat, {rows});
        }
        for (const Chunk& c : head.chunks) {
          const ArenaScope scope(arena);
          const Tensor h = head.input(c, pass.hidden), target = c.of(head.target);
          const auto [logits, tiles] = head_forward(model, arena, h, head.sums(target, !states));
          const Tensor sampler_logits = head.sampler_logits(c, h);
          head.truncate(c, {logits, sampler_logits});
          device.logprob({.logprob = c.of(logprob),
                          .entropy = c.of(entropy),
                          .logits = logits,
                          .target = target,
                          .temperature = static_cast<float>(temperature),
                          .tiles = tiles});
          if (!states) continue;
          device.overlap_probs({.overlap = c.of(overlap),
                                .mass = c.of(mass),
                                .p_logits = logits,
                                .q_logits = sampler_logits,
                                .temperature = static_cast<float>(temperature),
                                .lambda = states->lambda,
                                .top_k = states->top_k});
        }
        append(out.logprob, download_stat(model.device, logprob));
        append(out.entropy, download_stat(model.device, entropy));
        if (!states) return;
        append(out.overlap, download_stat(model.device, overlap));
        append(out.mass, download_stat(model.device, mass));
      });
  return out;
}

}  // namespace pare
