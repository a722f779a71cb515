// Files that a run reads, by their contents: equal on all ranks, and equal when a run is resumed.
#pragma once
#include <string>
#include <vector>

#include "run/config.h"

namespace pare {

struct Input {
  std::string name;   // its part in the run, wherever it lies: "data.train_files[0]", "tokenizer/chat_template.jinja"
  std::string key;    // of the configuration: it says where the file lies
  std::string feeds;  // "training problems"
  std::string path;
  std::string digest;  // XXH128 of a file, the hash of weights; empty: there is no such file
  bool needed = true;  // false: a run can do without it
};

// Every file, except weights, that a run of this configuration reads or would read if it existed.  A pipe or a device
// counts as absent: it cannot be read twice.  Parts of the program (presets, the tokenizer ssa) are listed too.
std::vector<Input> read_inputs(const Config& config);

// An input that has changed, and its digest before; empty: it did not exist.
struct InputChange {
  Input input;
  std::string before;
};

// The inputs that differ.  Of `before` only name, path and digest are read.
std::vector<InputChange> input_changes(const std::vector<Input>& before, const std::vector<Input>& now);

// Throws Error(usage) naming all changes whose path is not in `accepted`, with what they feed and what to do; `since`:
// the checkpoint that they are compared with.
void refuse_changes(const std::vector<InputChange>& changes, const std::vector<std::string>& accepted,
                    const std::string& since);

bool same_path(const std::string& a, const std::string& b);

}  // namespace pare
