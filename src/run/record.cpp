#include "run/record.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <fstream>

#include "base/hash.h"
#include "base/json.h"
#include "base/rng.h"
#include "ops/list.h"
#include "run/certificate.h"
#include "run/session.h"

namespace pare {

using nlohmann::ordered_json;

namespace {

void mix(uint64_t& h, uint64_t x) { h = mix64(h ^ x); }
void mix(uint64_t& h, std::span<const int32_t> ids) {
  mix(h, ids.size());
  for (const int32_t id : ids) mix(h, static_cast<uint32_t>(id));
}

RecordLine sealed(const ordered_json& values) {
  std::string text = values.dump();
  text.pop_back();
  const std::string chain = xxh128(text);
  return {cat(text, R"(,"chain":")", chain, "\"}"), chain};
}

// Returns the chain of a line that sealed() wrote; empty if the line is another one or was changed.
std::string chain_of(const std::string& line) {
  constexpr size_t digits = 32;
  const std::string before = R"(,"chain":")", after = "\"}";
  if (line.size() < before.size() + digits + after.size() || !line.ends_with(after)) return "";
  const std::string chain = line.substr(line.size() - after.size() - digits, digits);
  const std::string text = line.substr(0, line.size() - after.size() - digits - before.size());
  return line == text + before + chain + after && xxh128(text) == chain ? chain : "";
}

}  // namespace

uint64_t response_hash(uint64_t uid, std::span<const int32_t> tokens, std::span<const float> logprobs) {
  uint64_t h = uid;
  mix(h, tokens);
  for (const float x : logprobs) mix(h, std::bit_cast<uint32_t>(x));
  return h;
}

void StepRecord::add_prompt(const Request& request) {
  mix(prompts, request.uids.size());
  for (const uint64_t uid : request.uids) mix(prompts, uid);
  mix(prompts, request.prompt);
  mix(prompts, request.prefix);
}

void StepRecord::add_response(uint64_t uid, std::span<const int32_t> tokens, std::span<const float> logprobs) {
  uids.push_back(uid);
  responses.push_back(response_hash(uid, tokens, logprobs));
}

void StepRecord::set_advantages(std::span<const Trajectory> samples) {
  advantages = samples.size();
  for (const Trajectory& s : samples)
    for (const uint64_t x : {s.uid, std::bit_cast<uint64_t>(s.reward), std::bit_cast<uint64_t>(s.advantage),
                             static_cast<uint64_t>(s.dropped())})
      mix(advantages, x);
}

uint64_t weights_hash(const Session& s) {
  uint64_t sum = 0;
  if (!s.frozen()) sum += s.model->hash();
  if (s.adapters) sum += s.adapters->hash(static_cast<uint64_t>(s.model->size()));
  uint64_t all = 0;
  for (const int64_t part : s.device.comm.gather(static_cast<int64_t>(sum))) all += static_cast<uint64_t>(part);
  return all;
}

bool is_recorded(std::string_view metric) {
  constexpr std::array<std::string_view, 5> of_the_process = {"timing_s/", "memory/", "perf/", "comm/", "flops/"};
  for (const std::string_view group : of_the_process)
    if (metric.starts_with(group)) return false;
  return metric != "tokens/discarded" && metric != "reward/restarts" && metric != "exact/checked_tokens" &&
         metric != "arithmetic" && metric != "accepted_changes" && metric != "chain";
}

RecordLine start_line(const Session& s, int64_t step, int64_t drawn, const std::vector<Input>& inputs,
                      const std::string& previous) {
  ordered_json line = {{"step", step}, {"previous", previous}, {"arithmetic", kArithmetic}};
  line["command"] = command_name(s.config.trainer.command);
  line["type"] = dtype_name(s.model->dtype);
  if (s.model->dtype == DType::bf16) line["logits_chunk"] = s.learner_options().logits_chunk;
  for (const auto& [key, value] : keys_of_bits(s.config)) line["config"][key] = value;
  line["inputs"] = ordered_json::object();
  for (const Input& i : inputs)
    if (!i.digest.empty()) line["inputs"][i.name] = i.digest;
  line["drawn"] = drawn;
  line["base"] = hex16(s.base_weights);
  line["weights"] = hex16(weights_hash(s));
  return sealed(line);
}

RecordLine step_line(const Metrics& metrics, const StepRecord* record, const std::vector<Input>& changed,
                     const std::string& previous) {
  ordered_json line, logged = ordered_json::parse(metrics.json());
  line["step"] = logged.at("training/global_step");
  line["previous"] = previous;
  for (const Input& i : changed) line["inputs"][i.name] = i.digest;
  if (record) {
    line["prompts"] = hex16(record->prompts);
    line["responses"] = ordered_json::array();
    for (const uint64_t r : record->responses) line["responses"].push_back(hex16(r));
    if (!record->scores.empty()) line["scores"] = record->scores;
    line["advantages"] = hex16(record->advantages);
    line["weights"] = hex16(record->weights);
  }
  for (const auto& [name, value] : logged.items())
    if (is_recorded(name)) line["metrics"][name] = value;
  return sealed(line);
}

std::vector<Recorded> read_record(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in)
    fail(path,
         " is not there: a program without certificates made this run, or the file was lost; run it again to "
         "have it audited");
  std::vector<std::string> texts;
  for (std::string text; std::getline(in, text) && !in.eof();) texts.push_back(text);
  if (texts.empty()) fail(path, " is empty: the run has no step yet");
  size_t first = texts.size() - 1;  // the last start, or where there is none, the first line
  while (first > 0 && texts[first].find(R"(,"config":{)") == std::string::npos) first--;
  std::vector<Recorded> lines;
  for (size_t i = first; i < texts.size(); i++) {
    Recorded line{.chain = chain_of(texts[i]), .values = {}};
    const auto refuse = [&](const auto&... what) { throw Error(Exit::failed, cat(path, ":", i + 1, what...)); };
    if (line.chain.empty()) refuse(" was changed: the line has not the hash at its end");
    line.values = try_parse_json(texts[i]);
    if (!line.values.is_object()) refuse(" is no line that a run wrote");
    line.step = line.values.at("step");
    line.start = line.values.contains("config");
    if (lines.empty() && !line.start) refuse(" is of step ", line.step, ": lines before it are gone");
    if (const std::string previous = line.values.at("previous"); !lines.empty() && previous != lines.back().chain)
      refuse(" (step ", line.step, ") does not continue the line before it (step ", lines.back().step,
             "): lines were changed or are gone");
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace pare
