// A run at the border of two steps, on disk: a Hugging Face folder (weights in f32, config.json, tokenizer), or a PEFT
// folder where adapters alone are trained, or the first with the second in adapter/ where a sampler has adapters beside
// the model; and optimizer.safetensors (the moments of AdamW), files of the method and state.json.  It is continued bit
// by bit.  state.json has the hash of every other file, and on its second line its own, which is that of what follows
// this line.
#pragma once
#include <cmath>
#include <map>
#include <string>

#include "run/training.h"

namespace pare {

// What a run carries on.
struct RunState {
  TrainingState training;
  double best_score = NAN;               // of the validations after a step; NaN without any
  int64_t best_step = 0;                 // and the step it came after
  int64_t checked = 0, mismatches = 0;   // exact/*_tokens of all steps
  std::map<std::string, uint64_t> logs;  // bytes of every append-only file of the run
};

// True for a path that save_checkpoint or save_model writes, relative to their folder (Owned, base/file.h).
bool is_saved_file(const std::string& path);

// Writes PATH, whole or not at all.  All ranks call it; rank 0 alone writes, the others send what lies on them.
void save_checkpoint(const std::string& path, const Session& session, Training& training, const RunState& state);

// Empty, or what keeps the folder from being a whole checkpoint: reads all of it, as a bit may have changed anywhere.
// Throws Error(failed) if the disk cannot be read.
std::string checkpoint_damage(const std::string& path);

// Sets parameters, moments and counters to those of a whole checkpoint.  Fails, naming the keys, if the configuration
// of the session would have given other steps, and if data or initial model are not those of the run.
RunState load_checkpoint(const std::string& path, Session& session, Training& training);

// model/ of a finished run, its weights in the type of trainer.save_dtype; by all ranks, as save_checkpoint.
void save_model(const std::string& path, const Session& session);

}  // namespace pare
