// A run between two steps, on disk: a Hugging Face folder (weights in f32, config.json, tokenizer); or a PEFT folder if
// only adapters are trained; or the former with the latter in adapter/ if a sampler has adapters beside the model. With
// it lie the moments of AdamW (optimizer.safetensors), files of the method and state.json.  Large weights and moments
// have several files with an index (tensor_files.h).  A run that is resumed from it continues bit by bit.
//
// state.json has the hash of every other file, and on its second line its own hash, of all that follows this line.  It
// names the arithmetic of the program (kArithmetic, ops/list.h), which resumes no run of another one.
#pragma once
#include <cmath>
#include <map>
#include <string>

#include "run/inputs.h"
#include "run/training.h"

namespace pare {

// A change of an input that --accept-changed let pass, after `step`.
struct AcceptedChange {
  int64_t step;
  std::string name, path, before, now;  // digests; empty: no such file
};

// State saved in a checkpoint.
struct RunState {
  TrainingState training;
  double best_score = NAN;               // of the validations after a step; NaN without any
  int64_t best_step = 0;                 // and the step it came after
  int64_t checked = 0, mismatches = 0;   // exact/*_tokens of all steps
  std::map<std::string, uint64_t> logs;  // bytes of every append-only file of the run
  std::vector<Input> inputs;             // read by the run; empty: an older program did not record them
  std::vector<Input> weights;            // that it started from; save_checkpoint records those of its session
  std::vector<AcceptedChange> accepted;
  std::string chain;  // of the last line of certificates.jsonl; empty: an older program wrote none
};

// True for a path that save_checkpoint or save_model writes, relative to their folder (Owned, base/file.h).
bool is_saved_file(const std::string& path);

// Writes PATH, whole or not at all.  All ranks call it.  Those of rank 0's machine write weights and moments, each
// its share of the files; rank 0 writes all else.  Ranks send each other what lies on them.
void save_checkpoint(const std::string& path, const Session& session, Training& training, const RunState& state);

// Empty, or what keeps the folder from being a whole checkpoint: reads all of it, as a bit may have changed anywhere.
// Throws Error(failed) if the disk cannot be read.
std::string checkpoint_damage(const std::string& path);

// RunState::chain of a whole checkpoint.
std::string checkpoint_chain(const std::string& path);

// Inputs of a run that resumes, as they are now, and the paths of those that may differ.
struct ResumeInputs {
  std::vector<Input> files = {};
  std::vector<std::string> accepted = {};  // --accept-changed
};

// Throws Error(usage), naming keys, files and what to do, if the steps of a whole checkpoint cannot be continued with
// this configuration and these files.  Needs no session: a model that is not loaded is no time lost.
void check_resumable(const std::string& path, const Config& config, const ResumeInputs& inputs);

// Sets parameters, moments and counters to those of a whole checkpoint.  Fails as check_resumable does, and if weights
// that the run still needs (the base of its adapters, the reference of its KL) have changed.  The state has the inputs
// of then and all accepted changes.  Without files nothing is known of them: then their paths must be those of the run.
// `notes` gets a line for each thing that could not be checked or does not matter.
RunState load_checkpoint(const std::string& path, Session& session, Training& training, const ResumeInputs& inputs = {},
                         std::vector<std::string>* notes = nullptr);

// The same without comparing anything, for a caller that has.
RunState restore_checkpoint(const std::string& path, Session& session, Training& training);

// Throws Error(usage) if there is no whole checkpoint at `path` for a new run of this configuration: of the same
// command, with the same model, rank and layers of adapters.  `reads`: all of it, to find damage.
void check_startable(const std::string& path, const Config& config, bool reads);

// The beginning of a new run at step 0: parameters, moments and their count of updates are those of a whole checkpoint
// of another one, of any arithmetic.  Where the training rows, their order and the seed are the same, the rows go on
// behind those that were used.  Random draws go on in any case: with the same keys and a constant learning rate, steps
// have the bits of those that the other run would make next in this arithmetic.  Throws Error(usage) if its adapters
// belong to another base.
TrainingState start_from(const std::string& path, Session& session, Training& training,
                         const std::vector<Input>& inputs);

// model/ of a finished run, its weights in the type of trainer.save_dtype; by all ranks, as save_checkpoint.
void save_model(const std::string& path, const Session& session);

}  // namespace pare
