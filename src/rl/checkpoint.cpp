#include "rl/checkpoint.h"

#include <filesystem>

#include "base/file.h"
#include "base/json.h"
#include "model/hf.h"
#include "model/json_file.h"
#include "rl/certificate.h"

namespace pare {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int format_version = 2;  // 1: hashed other bytes of the initial weights
constexpr const char* state_name = "state.json";
constexpr const char* optimizer_name = "optimizer.safetensors";

constexpr std::pair<Moment, const char*> moments[] = {{Moment::m, "adam.m."}, {Moment::v, "adam.v."}};

void save_optimizer(const std::string& path, const Session& session, const Learner& learner) {
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : session.model->layout)
    for (const auto& [moment, prefix] : moments)
      tensors.push_back({prefix + p.name, p.shape,
                         [&learner, m = moment, offset = p.offset](int64_t begin, int64_t count, float* out) {
                           learner.get_moment(m, offset + begin, count, out);
                         }});
  write_safetensors(path, std::move(tensors), learner.moments());
}

void load_optimizer(const std::string& path, const Session& session, Learner& learner) {
  const SafetensorsFile file(path);
  const char* const dtype = learner.moments() == DType::bf16 ? "BF16" : "F32";
  for (const Parameter& p : session.model->layout)
    for (const auto& [moment, prefix] : moments) {
      const SafetensorsTensor* t = file.find(prefix + p.name);
      if (!t || t->shape != p.shape || t->dtype != dtype)
        fail(path, ": expected ", prefix, p.name, " as ", dtype, shape_string(p.shape));
      learner.set_moment(moment, p.offset, p.size,
                         [&](int64_t begin, int64_t count, float* out) { file.read_f32(*t, out, begin, count); });
    }
}

json to_json(const RunState& s) {
  return {{"step", s.training.step},
          {"updates", s.training.updates},
          {"epoch", s.training.prompts.epoch},
          {"next", s.training.prompts.next},
          {"best_score", std::isnan(s.best_score) ? json() : json(s.best_score)},
          {"best_step", s.best_step},
          {"checked", s.checked},
          {"mismatches", s.mismatches},
          {"logs", s.logs}};
}

RunState run_state(const json& j) {
  RunState s;
  s.training = {j.at("step"), j.at("updates"), {j.at("epoch"), j.at("next")}};
  if (!j.at("best_score").is_null()) s.best_score = j.at("best_score");
  s.best_step = j.at("best_step");
  s.checked = j.at("checked"), s.mismatches = j.at("mismatches");
  s.logs = j.at("logs").get<std::map<std::string, uint64_t>>();
  return s;
}

// state.json of a checkpoint; fails if it is not what save_checkpoint writes.
struct StateFile {
  RunState run;
  Config config;
  std::string initial_weights;
  int64_t rows = 0;                       // of the training set
  std::map<std::string, uint64_t> files;  // bytes of the other files of the folder
};
StateFile read_state(const std::string& folder) {
  const std::string path = folder + "/" + state_name;
  const json j = read_json_file(path);
  try {
    if (j.at("format") != format_version)
      fail(path, ": format ", j.at("format").dump(), ", this program reads ", format_version);
    StateFile s;
    s.run = run_state(j.at("run"));
    s.initial_weights = j.at("initial_weights"), s.rows = j.at("rows"), s.files = j.at("files");
    apply_toml(s.config, j.at("config").get<std::string>(), path);
    return s;
  } catch (const json::exception& e) {
    fail(path, ": ", json_error(e));
  }
}

}  // namespace

void save_model(const std::string& path, const Session& session,
                const std::function<void(const std::string& folder)>& more) {
  save_hf(path, session.model_config, session.model->reader(), DType::f32, true, [&](const std::string& folder) {
    if (const std::string spec = tokenizer_spec(session.config); spec == "ssa")
      write_file(folder + "/tokenizer.ssa", ssa_tokenizer_file());
    else
      copy_tokenizer(spec, folder);
    if (more) more(folder);
  });
}

void save_checkpoint(const std::string& path, const Session& session, Training& training, const RunState& state) {
  save_model(path, session, [&](const std::string& folder) {
    save_optimizer(folder + "/" + optimizer_name, session, training.learner());
    json files;
    for (const auto& entry : fs::directory_iterator(folder)) files[entry.path().filename()] = entry.file_size();
    const json j = {{"format", format_version},          {"run", to_json(state)},
                    {"rows", session.train->size()},     {"initial_weights", hex16(session.initial_weights)},
                    {"config", to_toml(session.config)}, {"files", files}};
    write_file(folder + "/" + state_name, j.dump(2) + "\n");
  });
}

std::string checkpoint_damage(const std::string& path) {
  try {
    for (const auto& [name, bytes] : read_state(path).files) {
      std::error_code none;
      const uint64_t size = fs::file_size(fs::path(path) / name, none);
      if (none) return cat(name, " is missing");
      if (size != bytes) return cat(name, " has ", size, " bytes, expected ", bytes);
    }
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

RunState load_checkpoint(const std::string& path, Session& session, Training& training) {
  const StateFile s = read_state(path);
  const Config& config = session.config;
  if (const auto keys = keys_that_part(s.config, config); !keys.empty()) {
    std::string list;
    for (const std::string& k : keys) list += (list.empty() ? "" : ", ") + k;
    fail(path, " was written with other values of ", list, ": it cannot be continued bit by bit; ",
         "give the run's own config.toml, or start a new run");
  }
  if (config.trainer.total_training_steps < s.run.training.step)
    fail("trainer.total_training_steps = ", config.trainer.total_training_steps, " is less than the ",
         s.run.training.step, " steps that ", path, " has done");
  if (session.train->size() != s.rows)
    fail("the training set has ", session.train->size(), " rows, ", path, " was written with ", s.rows);
  if (needs_reference(config) && hex16(session.initial_weights) != s.initial_weights)
    fail(config.model.path, ": holds other weights than those that the run of ", path,
         " started from, which are the reference of its KL");
  session.model->set_parameters(hf_weights(path, session.model_config));
  load_optimizer(path + "/" + optimizer_name, session, training.learner());
  training.resume(s.run.training);
  return s.run;
}

}  // namespace pare
