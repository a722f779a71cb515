#include "run/prefix_cache_file.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include "base/json.h"

namespace pare {

namespace {

using nlohmann::json;

// A whole number of [0, most]; nlohmann would cut a fraction off and wrap the rest.
int64_t whole(const json& x, const char* what, int64_t most) {
  if (!x.is_number_integer() || x < 0 || x > most)
    fail(what, " is ", x.dump(), ", expected a whole number from 0 to ", most);
  return x.get<int64_t>();
}
std::vector<int32_t> token_ids(const json& list) {
  if (!list.is_array()) fail("\"ids\" is of type ", list.type_name(), ", expected a list of token ids");
  std::vector<int32_t> ids;
  for (const json& id : list)
    ids.push_back(static_cast<int32_t>(whole(id, "a token of \"ids\"", std::numeric_limits<int32_t>::max())));
  return ids;
}

// "finished" of a cache, or "finish" of the samples of pare generate.
bool is_finished(const json& line) {
  if (line.contains("finished") || !line.contains("finish")) return line.at("finished").get<bool>();
  for (const Finish finish : {Finish::eos, Finish::stop, Finish::length})
    if (line["finish"] == finish_name(finish)) return finish != Finish::length;
  fail("\"finish\" is ", line["finish"].dump(), ", expected \"eos\", \"stop\" or \"length\"");
}

json number(double x) { return std::isnan(x) ? json() : json(x); }
double number(const json& x) { return x.is_null() ? NAN : x.get<double>(); }

// Calls add(object, where) for every line.
template <class Add>
void read_lines(const std::string& path, Add add) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, ": cannot be read; expected JSON lines");
  std::string line;
  for (int64_t number = 1; std::getline(in, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = cat(path, ":", number);
    const json object = parse_json(line, where);
    if (!object.is_object()) fail(where, ": is of type ", object.type_name(), ", expected an object");
    try {
      add(object, where);
    } catch (const json::exception& e) {
      fail(where, ": ", json_error(e));
    } catch (const Error& e) {
      if (std::string_view(e.what()).starts_with(where)) throw;
      throw Error(e.code, cat(where, ": ", e.what()));
    }
  }
}

void check_entry(const CachedResponse& entry, const Session& session, const std::string& where) {
  if (entry.ids.empty()) fail(where, ": a response without a token");
  for (size_t i = 0; i < entry.ids.size(); i++) {
    const int32_t id = entry.ids[i];
    if (id < 0 || id >= session.model_config.vocab)
      fail(where, ": the token ", id, " is outside the model's vocabulary of ", session.model_config.vocab);
    const bool last = i + 1 == entry.ids.size();
    const auto end = end_of(session.eos, session.stop, {}, std::span(entry.ids).first(i + 1));
    if (end && !(last && entry.finished))
      fail(where, ": an EOS or stop (", id, ") that is not the end of a finished response");
    if (last && entry.finished && !end)
      fail(where, ": a finished response whose last token, ", id, ", is no EOS and no stop");
  }
}

}  // namespace

FileSum write_prefix_cache(const std::string& path, const PrefixCache& cache) {
  std::string lines;
  for (const auto& [row, entry] : cache)
    lines += nlohmann::ordered_json({{"row", row},
                                     {"ids", entry.ids},
                                     {"finished", entry.finished},
                                     {"score", number(entry.score)},
                                     {"reward", number(entry.reward)},
                                     {"step", entry.step},
                                     {"shortest", entry.shortest}})
                 .dump() +
             "\n";
  return write_file(path, lines);
}

PrefixCache read_prefix_cache(const std::string& path, const Session& session) {
  PrefixCache cache;
  read_lines(path, [&](const json& line, const std::string& where) {
    constexpr int64_t any = std::numeric_limits<int64_t>::max();
    CachedResponse entry{token_ids(line.at("ids")),
                         line.at("finished"),
                         number(line.at("score")),
                         number(line.at("reward")),
                         whole(line.at("step"), "\"step\"", any),
                         whole(line.at("shortest"), "\"shortest\"", any)};
    check_entry(entry, session, where);
    cache[whole(line.at("row"), "\"row\"", any)] = std::move(entry);
  });
  return cache;
}

PrefixCache read_cache_file(const std::string& path, const Session& session) {
  if (session.left_out > 0)
    fail(
        "algorithm.rpo.cache_file counts all rows of data.train_files, of which data.filter_overlong_prompts leaves "
        "out ",
        session.left_out, "; remove those from the training files");
  const bool strict = session.config.algorithm.rpo.missing == MissingRows::fail;
  const int64_t rows = session.training_task().size(), limit = session.config.data.max_response_length;
  PrefixCache cache;
  read_lines(path, [&](const json& line, const std::string& where) {
    const int64_t row = whole(line.at("row"), "\"row\"", std::numeric_limits<int64_t>::max());
    if (row >= rows) {
      if (!strict) return;
      fail(where, ": row ", row, ", the training set has ", rows, " (algorithm.rpo.missing=lazy passes it over)");
    }
    if (cache.contains(row)) fail(where, ": a second response to row ", row, "; one is cached");
    CachedResponse entry;
    entry.score = entry.reward = NAN;
    entry.finished = is_finished(line);
    if (line.contains("ids")) {
      entry.ids = token_ids(line.at("ids"));
    } else {
      entry.ids = session.tokenizer->encode(line.at("text").get<std::string>());
      if (entry.finished && !end_of({}, session.stop, {}, entry.ids)) entry.ids.push_back(session.end);
    }
    if (std::ssize(entry.ids) > limit) {
      entry.ids.resize(limit);
      entry.finished = false;
    }
    check_entry(entry, session, where);
    entry.shortest = std::ssize(entry.ids);
    cache[row] = std::move(entry);
  });
  for (int64_t row = 0; strict && row < rows; row++)
    if (!cache.contains(row))
      fail(path, ": no response to row ", row, " of the training set (algorithm.rpo.missing=lazy samples one)");
  return cache;
}

}  // namespace pare
