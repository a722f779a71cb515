#include "rollout/scheduler.h"

#include <algorithm>

namespace pare {

namespace {

// Computed once for all samples: the prompt, and the prefix that all responses share.
int64_t prompt_size(const Request& r) { return r.given_tokens(); }
int32_t prompt_token(const Request& r, int64_t i) {
  const auto n = std::ssize(r.prompt);
  return i < n ? r.prompt[i] : r.prefix[i - n];
}
int samples_of(const Request& r) { return static_cast<int>(r.uids.size()); }

// Tokens of a response whose keys and values are stored.
int64_t fed(const Request& r) { return r.max_new_tokens - 1; }

// What a sample adds to the pages of its prompt.  Only the last one can count on taking over the prompt's sequence.
int64_t pages_of_sample(const KvResidency& residency, const Request& r, int sample) {
  if (r.max_new_tokens == 1) return 0;  // never leaves the prompt
  return sample + 1 == samples_of(r) ? residency.last_sample_pages(prompt_size(r), fed(r), samples_of(r))
                                     : residency.sample_pages(prompt_size(r), fed(r));
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

const char* finish_name(Finish finish) {
  return finish == Finish::eos ? "eos" : finish == Finish::stop ? "stop" : "length";
}

std::optional<Finish> end_of(const std::vector<int32_t>& eos, const Stop& stop, std::span<const int32_t> prefix,
                             std::span<const int32_t> tokens) {
  if (tokens.empty()) return std::nullopt;
  if (contains(eos, tokens.back())) return Finish::eos;
  if (contains(stop.token_ids, tokens.back()) || (stop.text && stop.text(prefix, tokens))) return Finish::stop;
  return std::nullopt;
}

int64_t Scheduler::pages_needed(const KvResidency& residency, const Request& request) {
  return residency.prompt_pages(prompt_size(request)) + pages_of_sample(residency, request, 0);
}

int64_t Scheduler::own_pages(const Request& request, int sample) const {
  return pages_of_sample(residency_, request, sample);
}

Scheduler::Scheduler(const KvResidency& residency, const std::vector<Request>& requests,
                     const std::vector<int32_t>& eos, const RolloutLimits& limits, KvCache& cache,
                     std::function<void(int, int)> forked, Stop stop)
    : residency_(residency),
      requests_(requests),
      eos_(eos),
      limits_(limits),
      cache_(cache),
      forked_(std::move(forked)),
      stop_(std::move(stop)) {
  for (int r = 0; r < static_cast<int>(requests.size()); r++) {
    first_.push_back(static_cast<int>(completions_.size()));
    for (int s = 0; s < samples_of(requests[r]); s++) {
      completions_.emplace_back();
      completions_.back().request = r;
      completions_.back().sample = s;
    }
  }
  ended_.resize(completions_.size());
}

Scheduler::Alike Scheduler::alike() const {
  Alike a{.samples = {}, .requests = {0}, .admitted = 0};
  const int request = prompts_.empty() ? next_request_ : prompts_.back().request;
  const int64_t n = samples_of(requests_[0]), now = prompts_.empty() ? 0 : prompts_.back().admitted;
  a.admitted = prompts_.empty() ? n * request : n * request + now;
  bool one = prompts_.size() == 1;
  std::vector<int64_t> state = {1, cache_.pool().used(), cache_.reserved()};
  for (const Prompt& p : prompts_) {
    state.insert(state.end(), {request - p.request, p.filled, p.admitted - p.drawn});
    a.requests.push_back(p.admitted);
  }
  a.requests.insert(a.requests.end(), state.begin(), state.end());
  a.samples = std::move(state);
  for (const Running& r : running_) {
    const Completion& c = completions_[r.completion];
    one = one && c.request == request;
    a.samples.insert(a.samples.end(), {now - c.sample, r.drawn});
    a.requests.insert(a.requests.end(), {request - c.request, c.sample, r.drawn});
  }
  if (one)
    a.samples.push_back(request);
  else
    a.samples.clear();
  return a;
}

int64_t Scheduler::samples_left() const {
  return prompts_.empty() ? 0
                          : std::max(0, samples_of(requests_[prompts_.back().request]) - 1 - prompts_.back().admitted);
}

void Scheduler::skip(int64_t samples) {
  const int64_t n = samples_of(requests_[0]), whole = samples % n == 0 ? samples / n : 0;
  const auto later = [&](int completion) { return static_cast<int>(completion + samples); };
  // The last first: a place may be that of another one.
  std::vector<int> moved;
  for (const Running& r : running_) moved.push_back(r.completion);
  std::sort(moved.rbegin(), moved.rend());
  for (const int c : moved) {
    std::swap(completions_[later(c)].tokens, completions_[c].tokens);
    std::swap(completions_[later(c)].logprobs, completions_[c].logprobs);
  }
  for (Running& r : running_) r.completion = later(r.completion);
  for (Prompt& p : prompts_) {
    p.request += static_cast<int>(whole);
    if (whole == 0) {
      p.admitted += static_cast<int>(samples);
      p.drawn += static_cast<int>(samples);
    }
  }
  next_request_ += static_cast<int>(whole);
  finished_ += samples;
}

int Scheduler::in_flight() const {
  size_t n = running_.size();
  for (const Prompt& p : prompts_) n += p.admitted - p.drawn;
  return static_cast<int>(n);
}

void Scheduler::admit() {
  for (int places = limits_.max_sequences - in_flight(); places > 0; places--) {
    const bool continued =
        !prompts_.empty() && prompts_.back().admitted < samples_of(requests_[prompts_.back().request]);
    if (!continued && next_request_ == static_cast<int>(requests_.size())) return;
    const Request& r = requests_[continued ? prompts_.back().request : next_request_];
    const int64_t prompt_pages = residency_.prompt_pages(prompt_size(r));
    const int sample = continued ? prompts_.back().admitted : 0;
    if (!cache_.reserve(own_pages(r, sample) + (continued ? 0 : prompt_pages))) return;
    if (!continued) prompts_.push_back({.request = next_request_++, .sequence = cache_.open(prompt_pages)});
    prompts_.back().admitted++;
  }
}

void Scheduler::decode_rows(Batch& batch) {
  for (const Running& running : running_) {
    const Completion& c = completions_[running.completion];
    const Request& r = requests_[c.request];
    const auto row = static_cast<int32_t>(batch.ids.size());
    const bool settled = static_cast<int32_t>(c.tokens.size()) == running.drawn;
    if (!settled) batch.fed.insert(batch.fed.end(), {running.draw, row});
    cache_.append(running.sequence, 1);
    batch.ids.push_back(settled ? c.tokens.back() : 0);
    batch.positions.push_back(static_cast<int32_t>(prompt_size(r)) + running.drawn - 1);
    batch.runs.push_back(
        {running.sequence, row, 1, batch.positions.back() + 1, static_cast<int32_t>(prompt_size(r)), r.uids[c.sample]});
    batch.draws.push_back({row, r.uids[c.sample], running.drawn, running.completion});
  }
}

void Scheduler::prompt_rows(Batch& batch) {
  for (Prompt& p : prompts_) {
    const Request& r = requests_[p.request];
    int32_t last = Batch::kKept;
    if (p.filled < prompt_size(r)) {
      const auto row = static_cast<int32_t>(batch.ids.size());
      const auto n =
          static_cast<int32_t>(std::min<int64_t>(limits_.max_batched_tokens - row, prompt_size(r) - p.filled));
      if (n == 0) return;
      cache_.append(p.sequence, n);
      for (int64_t i = p.filled; i < p.filled + n; i++) {
        batch.ids.push_back(prompt_token(r, i));
        batch.positions.push_back(static_cast<int32_t>(i));
      }
      p.filled += n;
      batch.prefill += n;
      batch.runs.push_back(
          {p.sequence, row, n, static_cast<int32_t>(p.filled), static_cast<int32_t>(prompt_size(r)), r.uids[0]});
      if (p.filled < prompt_size(r)) return;
      last = row + n - 1;
      if (p.admitted < samples_of(r)) batch.keep = last;
    }
    for (int s = p.drawn; s < p.admitted; s++) batch.draws.push_back({last, r.uids[s], 0, first_[p.request] + s});
  }
}

Batch Scheduler::next() {
  admit();
  Batch batch;
  decode_rows(batch);
  prompt_rows(batch);
  return batch;
}

std::optional<Finish> Scheduler::finish_of(const Completion& c) const {
  const Request& r = requests_[c.request];
  if (const auto end = end_of(eos_, stop_, r.prefix, c.tokens)) return end;
  return static_cast<int>(c.tokens.size()) == r.max_new_tokens ? std::optional(Finish::length) : std::nullopt;
}

bool Scheduler::idle() const {
  return running_.empty() && prompts_.empty() && next_request_ == static_cast<int>(requests_.size());
}

// The samples of a finished prompt that have just drawn their first token, the first of them as draw `draw`.  The last
// of all takes over the sequence of the prompt.
void Scheduler::start_samples(Prompt& p, int32_t draw) {
  const Request& r = requests_[p.request];
  for (; p.drawn < p.admitted; p.drawn++) {
    const int64_t reservation = own_pages(r, p.drawn);
    const bool last = p.drawn + 1 == samples_of(r);
    int sequence = p.sequence;
    if (r.max_new_tokens == 1) {
      if (last) cache_.close(p.sequence);
      continue;
    }
    if (last) {
      cache_.extend(sequence, reservation);
    } else {
      sequence = cache_.fork(p.sequence, reservation, residency_.shared_slots(prompt_size(r)));
      if (forked_) forked_(p.sequence, sequence);
    }
    running_.push_back({first_[p.request] + p.drawn, sequence, 1, draw++});
  }
}

void Scheduler::advance(const Batch& batch) {
  int32_t draw = 0;
  for (Running& running : running_) {
    running.drawn++;
    running.draw = draw++;
  }
  std::erase_if(running_, [&](const Running& running) {
    if (running.drawn < requests_[completions_[running.completion].request].max_new_tokens) return false;
    cache_.close(running.sequence);
    return true;
  });
  for (Prompt& p : prompts_) {
    if (p.filled < prompt_size(requests_[p.request])) continue;
    const int32_t samples = p.admitted - p.drawn;
    start_samples(p, draw);
    draw += samples;
  }
  expect(draw == static_cast<int32_t>(batch.draws.size()), "a batch of ", batch.draws.size(), " draws, ", draw,
         " were expected");
  std::erase_if(prompts_, [&](const Prompt& p) { return p.drawn == samples_of(requests_[p.request]); });
}

std::vector<bool> Scheduler::settle(const Batch& batch, const int32_t* tokens, const float* logprobs,
                                    const uint64_t* hashes, const Tensor& kept_ids) {
  std::vector<bool> kept;
  for (size_t i = 0; i < batch.draws.size(); i++) {
    const int completion = batch.draws[i].completion;
    kept.push_back(!ended_[completion]);
    if (!kept.back()) continue;
    Completion& c = completions_[completion];
    c.tokens.push_back(tokens[i]);
    c.logprobs.push_back(logprobs[i]);
    if (hashes) c.hashes.push_back(hashes[i]);
    if (kept_ids) {
      const int32_t* const list = kept_ids.rows(static_cast<int64_t>(i), 1).as<int32_t>();
      if (const int64_t room = kept_ids.shape[1] - 1; list[0] > room)
        fail("token ", c.tokens.size(), " of a response was drawn from ", list[0],
             " tokens of the vocabulary, more than rollout.max_kept_ids = ", room,
             "; raise that, lower rollout.top_p or set rollout.top_k");
      c.kept.ids.insert(c.kept.ids.end(), list + 1, list + 1 + list[0]);
      c.kept.ends.push_back(std::ssize(c.kept.ids));
    }
    const std::optional<Finish> finish = finish_of(c);
    if (!finish) continue;
    finished_++;
    ended_[completion] = true;
    c.finish = *finish;
    if (!c.finished()) continue;
    // Unless it would have been the last token anyway.
    std::erase_if(running_, [&](const Running& running) {
      if (running.completion != completion) return false;
      cache_.close(running.sequence);
      return true;
    });
  }
  return kept;
}

}  // namespace pare
