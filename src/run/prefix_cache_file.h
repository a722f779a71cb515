// The responses that RPO takes prefixes from, as files of JSON lines:
//
//   {"row", "ids", "finished", "score", "reward", "step", "shortest"}    of a checkpoint
//   {"row", "ids" or "text", "finished" or "finish"}                     given (algorithm.rpo.cache_file)
//
// A row is that of the training set, from 0: of data.train_files the lines that are not empty, in order.
// `pare generate --model DIR --file TRAIN` writes such lines, of whatever model: "text" is encoded again, "tokens" are
// not read.
#pragma once
#include <string>

#include "base/file.h"
#include "rl/prefix_cache.h"
#include "run/session.h"

namespace pare {

constexpr const char* prefix_cache_name = "prefix_cache.jsonl";

FileSum write_prefix_cache(const std::string& path, const PrefixCache& cache);
PrefixCache read_prefix_cache(const std::string& path, const Session& session);

// algorithm.rpo.cache_file.  A text gets the EOS where it is finished; what is longer than data.max_response_length is
// cut to it, and is not finished then.  With MissingRows::fail the rows are those of the training set, with lazy others
// are passed over.  Errors name the line.
PrefixCache read_cache_file(const std::string& path, const Session& session);

}  // namespace pare
