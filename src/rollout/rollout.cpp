#include "rollout/rollout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "ops/inputs.h"
#include "ops/logits.h"
#include "ops/paged.h"

namespace pare {

RolloutLimits Rollout::checked(const RolloutLimits& given, const ModelConfig& config) {
  RolloutLimits limits = given;
  if (limits.max_sequences < 1) fail("rollout: max_sequences is ", limits.max_sequences, ", at least 1 is needed");
  if (limits.max_batched_tokens < limits.max_sequences)
    fail("rollout: max_batched_tokens (", limits.max_batched_tokens, ") must be at least max_sequences (",
         limits.max_sequences, "): every running sequence takes one row of a pass");
  if (limits.max_context < 2 || limits.max_context > config.max_position)
    fail("rollout: max_context is ", limits.max_context, "; the model takes 2 to ", config.max_position, " positions");
  if (limits.kv_pages < 0) fail("rollout: kv_pages is ", limits.kv_pages);
  if (limits.lookahead < 1) fail("rollout: lookahead is ", limits.lookahead, ", at least 1 is needed");
  if (limits.max_prompt == 0) limits.max_prompt = limits.max_context - 1;  // and a token
  check_kv(limits.kv);
  if (limits.kv_pages == 0) {
    // What the worst of all prompts takes, with a response as long as there is room for.
    const auto sequence = [&](const KvSpec& kv) {
      const KvResidency residency(kv, config.layers);
      int64_t most = residency.prompt_pages(limits.max_prompt);
      for (int64_t prompt = 1; prompt <= limits.max_prompt; prompt++) {
        int64_t pages = 0;
        for (int64_t l = 0; l < config.layers; l++)
          pages += (residency.peak(l, prompt, limits.max_context - prompt) + kPageSlots - 1) / kPageSlots;
        most = std::max(most, pages);
      }
      return most;
    };
    limits.kv_pages = std::max(Scheduler::cache_sequences(limits) * sequence(limits.kv), 2 * sequence({}));
  }
  return limits;
}

Rollout::Rollout(const Model& model, const RolloutLimits& limits, Arena& kv, Arena& scratch, const Model* dense)
    : model_(model),
      dense_model_(dense ? *dense : model),
      limits_(checked(limits, model.config)),
      kv_(kv),
      scratch_(scratch),
      cache_(model.config, limits_.kv, model.device, kv, model.dtype, limits_.kv_pages,
             Scheduler::cache_sequences(limits_), limits_.max_context),
      policy_(make_kv_policy(limits_.kv, model.config, cache_, kv)),
      budget_(limits_.kv),
      residency_(limits_.kv, model.config.layers),
      dense_residency_({}, model.config.layers) {
  if (limits_.kv.evicts()) compressor_ = std::make_unique<Compressor>(model, limits_.kv, cache_, *policy_, kv);
}

void Rollout::set_block_budget(const BlockBudget& budget) {
  budget_ = budget;
  if (policy_) policy_->set_budget(budget);
}

void RolloutStats::add(const RolloutStats& o) {
  prefill_tokens += o.prefill_tokens;
  decoded_tokens += o.decoded_tokens;
  discarded_tokens += o.discarded_tokens;
  forward_passes += o.forward_passes;
  graph_passes += o.graph_passes;
  peak_pages = std::max(peak_pages, o.peak_pages);
  peak_sequences = std::max(peak_sequences, o.peak_sequences);
  finished += o.finished;
  completions += o.completions;
  waited += o.waited;
  resident += o.resident;
  dense += o.dense;
  read += o.read;
  decode_rows += o.decode_rows;
  peak_resident = std::max(peak_resident, o.peak_resident);
  peak_dense = std::max(peak_dense, o.peak_dense);
  compressions += o.compressions;
  evicted += o.evicted;
}

void Rollout::check(const std::vector<Request>& requests, const Sampling& sampling) const {
  if (!(sampling.temperature >= 0) || std::isinf(sampling.temperature))
    fail("sampling: temperature is ", sampling.temperature, ", expected 0 (greedy) or a positive number");
  if (const Truncation& t = sampling.truncation; !t.valid())
    fail("sampling: top_k is ", t.top_k, ", top_p ", t.top_p, " and min_p ", t.min_p,
         ", expected 0 (off) or more, more than 0 and at most 1 (off), and 0 (off) to 1");
  for (size_t i = 0; i < requests.size(); i++) {
    const Request& r = requests[i];
    const int64_t size = r.given_tokens();
    expect(!r.uids.empty(), "request ", i, " asks for no samples");
    if (r.max_new_tokens < 1) fail("request ", i, ": max_new_tokens is ", r.max_new_tokens, ", at least 1 is needed");
    if (r.prompt.empty()) fail("request ", i, ": the prompt is empty; a sequence starts from at least one token");
    if (size + r.max_new_tokens > limits_.max_context)
      fail("request ", i, ": a prompt of ", size, " tokens and ", r.max_new_tokens,
           " new ones do not fit in max_context, ", limits_.max_context, " (the model has ", model_.config.max_position,
           " positions)");
    for (const auto& [name, ids] : {std::pair{"prompt", &r.prompt}, {"prefix", &r.prefix}})
      for (int64_t t = 0; t < std::ssize(*ids); t++)
        if ((*ids)[t] < 0 || (*ids)[t] >= model_.config.vocab)
          fail("request ", i, ": token ", t, " of the ", name, " is ", (*ids)[t], ", outside the vocabulary of ",
               model_.config.vocab);
    const int64_t needed = Scheduler::pages_needed(sampling.dense ? dense_residency_ : residency_, r),
                  page = cache_.page_bytes(model_.config, limits_.kv, model_.dtype);
    if (needed > limits_.kv_pages)
      throw Error(Exit::memory, cat("does not fit: request ", i, ": one sequence of ", size, " prompt and ",
                                    r.max_new_tokens, " new tokens needs ", needed, " KV pages (", needed * page,
                                    " bytes), the pool has ", limits_.kv_pages, " (", limits_.kv_pages * page,
                                    " bytes): enlarge the pool (rollout.kv_cache_bytes) or shorten the sequences"));
  }
}

Rollout::State Rollout::make_state(const Sampling& sampling) const {
  const int64_t draws = int64_t{limits_.lookahead} * limits_.max_sequences;
  const auto width = static_cast<int64_t>(dtype_size(model_.stat));
  const Tensor hidden =
      scratch_.alloc("rollout.hidden", model_.dtype, {1 + limits_.max_batched_tokens, model_.config.hidden});
  const Tensor drawn = scratch_.alloc("rollout.drawn", DType::u8, {draws * (width + 4)});
  const int64_t sums = forward_sums(model_, 1 + limits_.max_batched_tokens);
  LinearParts parts;
  if (sums > 0) parts.sums = scratch_.alloc("rollout.sums", model_.stat, {sums});
  if (model_.dtype == DType::bf16) {
    parts.arrivals = scratch_.alloc("rollout.arrivals", DType::i32, {kLinearTiles});
    model_.device.zero({parts.arrivals});
  }
  // For rows of several cuts (PagedCuts).
  Tensor cut_results, cut_arrivals;
  const int64_t results =
      paged_cut_results(cache_.max_sequences(), cache_.max_pages(), model_.config.heads, model_.config.head_dim);
  if (results > 0 && model_.dtype == DType::bf16) {
    cut_results = scratch_.alloc("rollout.cuts", model_.stat, {results});
    cut_arrivals =
        scratch_.alloc("rollout.cut_arrivals", DType::i32, {cache_.max_sequences() * model_.config.kv_heads});
    model_.device.zero({cut_arrivals});
  }
  return {.hidden = hidden,
          .parts = parts,
          .cut_results = cut_results,
          .cut_arrivals = cut_arrivals,
          .drawn = drawn,
          .logprob = make_tensor(drawn.data, model_.stat, {draws}),
          .token = make_tensor(drawn.rows(draws * width, draws * 4).data, DType::i32, {draws}),
          .hash = sampling.hashes ? scratch_.alloc("rollout.hashes", DType::i32, {draws, 2}) : Tensor{},
          .kept = sampling.kept_ids > 0 ? scratch_.alloc("rollout.kept_ids", DType::i32, {draws, 1 + sampling.kept_ids})
                                        : Tensor{}};
}

// Queues one pass over the model and the draws that follow it.
void Rollout::run(Batch rows, const Sampling& sampling, const State& state) {
  int64_t before = 0, first = 0;  // place of the draws of the pass before, and of this one
  if (!passes_.empty()) {
    before = passes_.back().first;
    first = before + std::ssize(passes_.back().batch.draws);
  }
  QueuedPass& pass = passes_.emplace_back(QueuedPass{.batch = std::move(rows), .first = first, .counts = {}});
  const Batch& batch = pass.batch;
  pass.counts.resize(batch.runs.size());
  Device& device = model_.device;
  const auto n = static_cast<int64_t>(batch.ids.size());
  const ArenaScope scope(scratch_);
  KvPolicy* const policy = sampling.dense ? nullptr : policy_.get();
  Compressor* const compressor = sampling.dense ? nullptr : compressor_.get();
  if (compressor)
    compressor->counted = [&](const PagedRun& run, int64_t evicted) {
      QueuedPass::Count& c = pass.counts[&run - batch.runs.data()];
      c.compressions++;
      c.evicted += evicted;
    };

  // All uploads come first: those of a pass that is launched as one would overtake its kernels.
  Inputs inputs(scratch_);
  const Tensor ids = inputs.add("rollout.ids", {n}, batch.ids.data());
  const Tensor positions = inputs.add("rollout.positions", {n}, batch.positions.data());
  // In steady decoding the token of row i is draw i, and read where it was drawn.
  const Tensor drawn = state.token.rows(before, first - before);
  bool in_place = n > 0 && std::ssize(batch.fed) == 2 * n;
  for (int64_t i = 0; i < std::ssize(batch.fed); i++) in_place = in_place && batch.fed[i] == i / 2;
  const Tensor fed = inputs.add("rollout.fed", {in_place ? 0 : std::ssize(batch.fed) / 2, 2}, batch.fed.data());
  const PagedCuts cuts{state.cut_results, state.cut_arrivals};
  PagedAttention attention(cache_, policy, scratch_, inputs, batch.runs, positions, cuts, model_.attention_scale());
  const DrawInputs draws = draw_inputs(batch, sampling, inputs);
  inputs.upload(device);

  const auto forward_and_draw = [&] {
    if (fed.size() > 0) device.copy_rows({.y = ids.matrix(1), .x = drawn.matrix(1), .index = fed});
    if (n > 0)
      forward_rows(sampling.dense ? dense_model_ : model_, scratch_, in_place ? drawn.rows(0, n) : ids, positions,
                   attention, state.parts, state.hidden.rows(1, n));
    if (!batch.draws.empty()) draw(pass, draws, sampling, state);
  };
  // Passes with prompts are of any size, and long.
  if (n > 0 && batch.prefill == 0)
    stats_.graph_passes += device.together(forward_and_draw);
  else
    forward_and_draw();

  // Before the compressions that follow the pass: what its attention saw.
  for (size_t i = 0; i < batch.runs.size() && batch.runs[i].decodes(); i++) {
    QueuedPass::Count& c = pass.counts[i];
    for (int l = 0; l < cache_.layers(); l++)
      c.slots += static_cast<double>(cache_.slots(batch.runs[i].sequence, l)) / static_cast<double>(cache_.layers());
    c.read = policy ? policy->slots_read(batch.runs[i], c.slots) : c.slots;
  }
  if (compressor && n > 0) compressor->compress(batch.runs, scratch_);
}

Rollout::DrawInputs Rollout::draw_inputs(const Batch& batch, const Sampling& sampling, Inputs& inputs) const {
  const auto n = static_cast<int64_t>(batch.draws.size());
  std::vector<int32_t> row, counter, moves;
  for (const Batch::Draw& d : batch.draws) {
    row.push_back(d.row + 1);
    row.push_back(static_cast<int32_t>(row.size() / 2));
    counter.push_back(static_cast<int32_t>(d.uid));
    counter.push_back(static_cast<int32_t>(d.uid >> 32));
    counter.push_back(d.position);
  }
  if (batch.keep != Batch::kKept) row.insert(row.end(), {batch.keep + 1, 0});
  if (sampling.hidden) {
    const int64_t room = sampling.hidden.shape[0] / stats_.completions;
    for (int64_t i = 0; i < n; i++) {
      moves.push_back(static_cast<int32_t>(i));
      moves.push_back(static_cast<int32_t>(batch.draws[i].completion * room + batch.draws[i].position));
    }
  }
  return {.row = inputs.add("rollout.index", {std::ssize(row) / 2, 2}, row.data()),
          .counter = inputs.add("rollout.counter", {n, 3}, counter.data()),
          .moves = inputs.add("rollout.hidden_index", {std::ssize(moves) / 2, 2}, moves.data())};
}

// Only rows that a token is drawn from meet the LM head.
void Rollout::draw(const QueuedPass& pass, const DrawInputs& inputs, const Sampling& sampling, const State& state) {
  Device& device = model_.device;
  const ModelConfig& c = model_.config;
  const Tensor& hidden = state.hidden;
  const auto n = static_cast<int64_t>(pass.batch.draws.size());
  const ArenaScope scope(scratch_);
  const Tensor gathered = scratch_.alloc("rollout.rows", model_.dtype, {n, c.hidden});
  bool all = true;  // of the first rows, in order, as in every pass that only decodes
  for (int64_t i = 0; i < n; i++) all = all && pass.batch.draws[i].row == i;
  const Tensor rows = all ? hidden.rows(1, n) : gathered;
  if (!all) device.copy_rows({.y = rows, .x = hidden, .index = inputs.row.rows(0, n)});
  if (pass.batch.keep != Batch::kKept) device.copy_rows({.y = hidden, .x = hidden, .index = inputs.row.rows(n, 1)});
  if (sampling.hidden) device.copy_rows({.y = sampling.hidden, .x = rows, .index = inputs.moves});
  const bool greedy = sampling.temperature == 0, truncates = sampling.truncation.on() && !greedy;
  std::optional<VocabSums> sums;  // of all logits
  if (!truncates) sums = {.tiles = {}, .target = {}, .temperature = greedy ? 1 : sampling.temperature};
  const auto [logits, tiles] = head_forward(model_, scratch_, rows, sums);
  if (state.hash)
    device.hash_runs({.hash = state.hash.rows(pass.first, n), .x = logits.flat(), .run = c.vocab, .each = true});
  if (truncates) device.truncate({.logits = logits, .temperature = sampling.temperature, .keep = sampling.truncation});
  if (state.kept) device.list_kept({.ids = state.kept.rows(pass.first, n), .logits = logits});
  device.sample({.token = state.token.rows(pass.first, n),
                 .logprob = state.logprob.rows(pass.first, n),
                 .logits = logits,
                 .counter = inputs.counter,
                 .key = sampling.key,
                 .temperature = sampling.temperature,
                 .tiles = tiles});
}

// Waits for the passes that are queued.
void Rollout::read(const State& state) {
  std::vector<char> host(state.drawn.bytes());
  model_.device.download({.dst = host.data(), .src = state.drawn});
  const auto n = static_cast<size_t>(state.token.size());
  tokens_.resize(n);
  logprobs_.resize(n);
  std::memcpy(tokens_.data(), host.data() + state.logprob.bytes(), state.token.bytes());
  if (model_.stat == DType::f64) {
    std::vector<double> wide(n);
    std::memcpy(wide.data(), host.data(), state.logprob.bytes());
    logprobs_.assign(wide.begin(), wide.end());
  } else {
    std::memcpy(logprobs_.data(), host.data(), state.logprob.bytes());
  }
  if (state.hash) {
    hashes_.resize(n);
    model_.device.download({.dst = hashes_.data(), .src = state.hash});
  }
  if (state.kept) {
    kept_.resize(static_cast<size_t>(state.kept.size()));
    model_.device.download({.dst = kept_.data(), .src = state.kept});
  }
}

// The books of a pass, but for what came after the end of a sequence.
void Rollout::count(const QueuedPass& pass, const std::vector<bool>& kept) {
  const Batch& batch = pass.batch;
  stats_.forward_passes += !batch.ids.empty();
  stats_.prefill_tokens += batch.prefill;
  for (const bool k : kept) (k ? stats_.decoded_tokens : stats_.discarded_tokens)++;
  double resident = 0, dense = 0;
  for (size_t i = 0; i < batch.runs.size(); i++) {
    const PagedRun& run = batch.runs[i];
    const QueuedPass::Count& c = pass.counts[i];
    if (run.decodes() && !kept[i]) continue;
    stats_.compressions += c.compressions;
    stats_.evicted += c.evicted;
    if (!run.decodes()) continue;
    resident += c.slots;
    dense += run.tokens;
    stats_.read += c.read;
    stats_.peak_resident = std::max(stats_.peak_resident, c.slots);
    stats_.peak_dense = std::max(stats_.peak_dense, static_cast<double>(run.tokens));
    stats_.decode_rows++;
  }
  stats_.resident += resident;
  stats_.dense += dense;
}

std::vector<Completion> Rollout::generate(const std::vector<Request>& requests, const Sampling& sampling,
                                          const std::function<void(const RolloutStats&)>& progress,
                                          const std::function<void(const Completion&)>& drawn) {
  Comm& comm = model_.device.comm;
  if (comm.ranks() == 1) return sample(requests, sampling, progress, drawn);
  std::vector<Request> own;
  for (size_t i = static_cast<size_t>(comm.rank()); i < requests.size(); i += static_cast<size_t>(comm.ranks()))
    own.push_back(requests[i]);
  Packed packed;
  for (const Completion& c : sample(own, sampling, progress, drawn)) {
    packed.put_all(c.tokens);
    packed.put_all(c.logprobs);
    packed.put_all(c.hashes);
    packed.put_all(c.kept.ids);
    packed.put_all(c.kept.ends);
    packed.put(c.finish);
  }
  const double before = comm.waited;
  std::vector<Packed> all;
  for (std::string& bytes : comm.gather(packed.bytes())) all.emplace_back(std::move(bytes));
  stats_.waited = comm.waited - before;
  std::vector<Completion> completions;
  for (size_t i = 0; i < requests.size(); i++)
    for (size_t k = 0; k < requests[i].uids.size(); k++) {
      Packed& from = all[i % all.size()];
      Completion& c = completions.emplace_back();
      c.request = static_cast<int>(i);
      c.sample = static_cast<int>(k);
      c.tokens = from.take_all<std::vector<int32_t>>();
      c.logprobs = from.take_all<std::vector<float>>();
      c.hashes = from.take_all<std::vector<uint64_t>>();
      c.kept.ids = from.take_all<std::vector<int32_t>>();
      c.kept.ends = from.take_all<std::vector<int64_t>>();
      c.finish = from.take<Finish>();
    }
  Packed stats;
  stats.put(stats_);
  stats_ = {};
  for (std::string& bytes : comm.gather(stats.bytes())) stats_.add(Packed(std::move(bytes)).take<RolloutStats>());
  return completions;
}

std::vector<Completion> Rollout::sample(const std::vector<Request>& requests, const Sampling& sampling,
                                        const std::function<void(const RolloutStats&)>& progress,
                                        const std::function<void(const Completion&)>& drawn) {
  check(requests, sampling);
  const MemoryTurn keys(kv_), turn(scratch_);
  const ArenaScope scope(scratch_);
  const State state = make_state(sampling);
  const int lookahead = sampling.trace ? 1 : limits_.lookahead;
  Scheduler scheduler(
      sampling.dense ? dense_residency_ : residency_, requests, sampling.eos, limits_, cache_,
      [&](int parent, int child) {
        if (sampling.dense) return;
        if (policy_) policy_->forked(parent, child);
        if (compressor_) compressor_->forked(parent, child);
      },
      sampling.stop);
  stats_ = {.completions = scheduler.completions()};
  if (compressor_) compressor_->trace = sampling.trace;
  cache_.reset_peak();
  Seen seen;
  int64_t samples = 0;
  for (const Request& r : requests) samples += std::ssize(r.uids);
  const bool planned = sampling.planned > 0 && !requests.empty();
  // Compressions of the cache are wanted of those that are returned.
  const int64_t before = !planned ? samples : sampling.trace ? sampling.planned * std::ssize(requests[0].uids) : 0;
  while (!scheduler.done()) {
    if (scheduler.finished() >= before) skip_alike(scheduler, seen, samples);
    passes_.clear();
    do {
      run(scheduler.next(), sampling, state);
      stats_.peak_sequences = std::max(stats_.peak_sequences, scheduler.in_flight());
      scheduler.advance(passes_.back().batch);
    } while (std::ssize(passes_) < lookahead && !scheduler.idle());
    if (std::any_of(passes_.begin(), passes_.end(), [](const QueuedPass& p) { return !p.batch.draws.empty(); }))
      read(state);
    for (const QueuedPass& pass : passes_) {
      const std::vector<bool> kept = scheduler.settle(
          pass.batch, tokens_.data() + pass.first, logprobs_.data() + pass.first,
          sampling.hashes ? hashes_.data() + pass.first : nullptr,
          state.kept ? make_tensor(kept_.data(), DType::i32, {state.kept.shape[0], state.kept.shape[1]})
                           .rows(pass.first, std::ssize(pass.batch.draws))
                     : Tensor{});
      count(pass, kept);
      if (drawn)
        for (size_t i = 0; i < kept.size(); i++)
          if (kept[i]) drawn(scheduler.completion(pass.batch.draws[i].completion));
    }
    stats_.peak_pages = cache_.pool().peak();
    stats_.finished = scheduler.finished();
    if (progress) progress(stats_);
  }
  expect(cache_.pool().used() == 0 && cache_.reserved() == 0, "the rollout left ", cache_.pool().used(),
         " pages in use and ", cache_.reserved(), " reserved");
  std::vector<Completion> completions = scheduler.take_completions();
  for (Completion& c : completions) {
    if (c.request >= sampling.planned) break;
    const auto n = static_cast<size_t>(requests[c.request].max_new_tokens);
    c.tokens.resize(n);
    c.logprobs.resize(n);
    if (sampling.hashes) c.hashes.resize(n);
    if (sampling.kept_ids > 0) c.kept.ends.resize(n);
  }
  return completions;
}

}  // namespace pare
