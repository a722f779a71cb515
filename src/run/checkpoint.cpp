#include "run/checkpoint.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/file.h"
#include "base/json.h"
#include "base/json_file.h"
#include "model/hf/folder.h"
#include "run/certificate.h"

namespace pare {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int format_version = 3;  // 1: other hash of the initial weights; 2: no hashes of files
constexpr const char* state_name = "state.json";
constexpr const char* optimizer_name = "optimizer.safetensors";
// In the folder of a model whose sampler has adapters.  It may be moved: their base is "..".
constexpr const char* adapter_folder = "/adapter";

constexpr std::pair<Moment, const char*> moments[] = {{Moment::m, "adam.m."}, {Moment::v, "adam.v."}};

std::vector<Learner*> learners(Training& training) {
  std::vector<Learner*> all = {&training.learner()};
  if (training.student()) all.push_back(training.student());
  return all;
}

// What lies in parts on the ranks: of each set of parameters that is trained the master, and the moments of its
// learner.
enum Part : size_t { master, first_moment, second_moment, parts };

using Sets = std::vector<const Parameters*>;
Sets trained_sets(const Session& session) {
  if (session.frozen()) return {session.adapters.get()};
  return session.sparse ? Sets{session.model.get(), session.adapters.get()} : Sets{session.model.get()};
}

// `learners`: of the sets, or none, where no moment is read.
ShardReader shard_reader(const Sets& sets, const std::vector<Learner*>& learners) {
  std::vector<ShardReader::Array> arrays;
  for (size_t i = 0; i < sets.size(); i++) {
    const Parameters* const set = sets[i];
    arrays.push_back({set->cuts, [set](int64_t begin, int64_t count, float* out) {
                        set->device.download({out, set->master.rows(begin - set->own_begin(), count)});
                      }});
    for (const Moment m : {Moment::m, Moment::v})
      arrays.push_back(
          {set->cuts, [m, learner = learners.empty() ? nullptr : learners[i]](
                          int64_t begin, int64_t count, float* out) { learner->get_moment(m, begin, count, out); }});
  }
  return {sets[0]->device.comm, std::move(arrays)};
}

// On rank 0, while the others answer: the parameters of set `i`.
ParameterReader parameters_of(const Sets& sets, size_t i, ShardReader& shards) {
  const Parameters& set = *sets[i];
  if (!set.master) return set.reader();
  return [&, i](size_t parameter, int64_t begin, int64_t count, float* out) {
    shards.read(i * parts + master, set.layout[parameter].offset + begin, count, out);
  };
}

FileSum save_optimizer(const std::string& path, const Sets& sets, DType dtype, ShardReader& shards) {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < sets.size(); i++)
    for (const Parameter& p : sets[i]->layout)
      for (const auto& [moment, prefix] : moments)
        tensors.push_back(
            {prefix + p.name, p.shape,
             [&, array = i * parts + (moment == Moment::m ? first_moment : second_moment), offset = p.offset](
                 int64_t begin, int64_t count, float* out) { shards.read(array, offset + begin, count, out); }});
  return write_safetensors(path, std::move(tensors), dtype);
}

void load_optimizer(const std::string& path, Training& training) {
  const SafetensorsFile file(path);
  const char* const dtype = training.learner().moments() == DType::bf16 ? "BF16" : "F32";
  for (Learner* learner : learners(training))
    for (const Parameter& p : learner->trained().layout)
      for (const auto& [moment, prefix] : moments) {
        const SafetensorsTensor* t = file.find(prefix + p.name);
        if (!t || t->shape != p.shape || t->dtype != dtype)
          fail(path, ": expected ", prefix, p.name, " as ", dtype, shape_string(p.shape));
        learner->set_moment(moment, p.offset, p.size,
                            [&](int64_t begin, int64_t count, float* out) { file.read_f32(*t, out, begin, count); });
      }
}

json blocks_json(const std::vector<BlockBudget::Step>& steps) {
  json list = json::array();
  for (const BlockBudget::Step& s : steps) list.push_back({s.from, s.blocks});
  return list;
}

json to_json(const RunState& s) {
  return {{"step", s.training.step},
          {"updates", s.training.updates},
          {"student_updates", s.training.student_updates},
          {"epoch", s.training.prompts.epoch},
          {"next", s.training.prompts.next},
          {"blocks", blocks_json(s.training.blocks)},
          {"best_score", std::isnan(s.best_score) ? json() : json(s.best_score)},
          {"best_step", s.best_step},
          {"checked", s.checked},
          {"mismatches", s.mismatches},
          {"logs", s.logs}};
}

RunState run_state(const json& j) {
  RunState s;
  s.training = {
      j.at("step"), j.at("updates"), j.value("student_updates", int64_t{0}), {j.at("epoch"), j.at("next")}, {}};
  for (const json& step : j.value("blocks", json::array())) s.training.blocks.push_back({step.at(0), step.at(1)});
  if (!j.at("best_score").is_null()) s.best_score = j.at("best_score");
  s.best_step = j.at("best_step");
  s.checked = j.at("checked"), s.mismatches = j.at("mismatches");
  s.logs = j.at("logs").get<std::map<std::string, uint64_t>>();
  return s;
}

// The text of a JSON object without its opening line: with that, and with its hash as the first of its members.
std::string sealed(const std::string& rest) { return cat("{\n  \"xxh128\": \"", xxh128(rest), "\",\n", rest); }

void check_seal(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const size_t first = text.find('\n'), second = first == text.npos ? text.npos : text.find('\n', first + 1);
  if (second == text.npos || text != sealed(text.substr(second + 1)))
    fail(path, " is damaged: what follows its second line has not the XXH128 that this line says");
}

DType saved_dtype(const Session& session) {
  switch (session.config.trainer.save_dtype) {
    case SaveType::automatic:
      return session.frozen() ? DType::f32 : session.weights_dtype;
    case SaveType::f32:
      return DType::f32;
    case SaveType::bf16:
      return DType::bf16;
    case SaveType::f16:
      return DType::f16;
  }
  return DType::f32;
}

// The template of the folder of the tokenizer is not the format of the run.
bool has_other_template(const Session& session, const std::string& spec) {
  if (session.config.data.task == "ssa" || session.config.data.chat_template == "auto") return false;
  try {
    const ChatFormat own = find_chat_format("auto", spec);
    return own.kind != session.chat.kind || own.text != session.chat.text;
  } catch (const Error&) {  // an unknown one
    return true;
  }
}

// With the chat template that the run used.
FileSums save_tokenizer(const std::string& folder, const Session& session) {
  const std::string spec = tokenizer_spec(session.config);
  if (spec == "ssa") return {{"tokenizer.ssa", write_file(folder + "/tokenizer.ssa", ssa_tokenizer_file())}};
  FileSums sums = copy_tokenizer(spec, folder);
  if (!has_other_template(session, spec)) return sums;
  fs::remove_all(folder + "/additional_chat_templates");
  std::erase_if(sums, [](const auto& file) { return file.first.starts_with("additional_chat_templates/"); });
  const Tokenizer& tokenizer = *session.tokenizer;
  sums["chat_template.jinja"] =
      write_file(folder + "/chat_template.jinja",
                 chat_jinja(session.chat, tokenizer.bos() < 0 ? "" : tokenizer.piece(tokenizer.bos())));
  return sums;
}

// The files of the model that are copied.
FileSums save_model_files(const std::string& folder, const Session& session) {
  const std::string& model = session.config.model.path;
  return model.empty() ? FileSums() : copy_generation_config(model, folder);
}

// state.json of a checkpoint; fails if it is not what save_checkpoint writes.
struct StateFile {
  RunState run;
  Config config;
  std::string initial_weights;
  int64_t rows = 0;  // of the training set
  FileSums files;    // the other files of the folder
};
StateFile read_state(const std::string& folder) {
  const std::string path = cat(folder, "/", state_name);
  const json j = read_json_file(path);
  try {
    if (j.at("format") != format_version)
      fail(path, ": format ", j.at("format").dump(), ", this program reads ", format_version,
           "; continue with the program that wrote it, or start from its weights: model.path=", folder);
    check_seal(path);
    StateFile s;
    s.run = run_state(j.at("run"));
    s.initial_weights = j.at("initial_weights"), s.rows = j.at("rows");
    for (const auto& [name, sum] : j.at("files").items()) s.files[name] = {sum.at("bytes"), sum.at("xxh128")};
    apply_toml(s.config, j.at("config").get<std::string>(), path);
    return s;
  } catch (const json::exception& e) {
    fail(path, ": ", json_error(e));
  }
}

}  // namespace

void save_model(const std::string& path, const Session& session) {
  const Sets sets = trained_sets(session);
  ShardReader shards = shard_reader(sets, {});
  if (!session.device.comm.first()) return shards.answer();
  const DType dtype = saved_dtype(session);
  const auto adapters = [&](const std::string& folder, const std::string& base, DType type) {
    write_adapter_files(folder, *session.adapters, parameters_of(sets, sets.size() - 1, shards),
                        session.adapters->spec.alpha, base, type);
  };
  if (session.frozen())
    save_folder(path, true, [&](const std::string& folder) {
      adapters(folder, session.config.model.path, dtype);
      save_tokenizer(folder, session);
    });
  else
    save_hf(path, session.model_config, parameters_of(sets, 0, shards), dtype, true, [&](const std::string& folder) {
      save_tokenizer(folder, session);
      save_model_files(folder, session);
      if (session.sparse)
        write_folder(folder + adapter_folder, [&](const std::string& inner) { adapters(inner, "..", DType::f32); });
    });
  shards.done();
}

void save_checkpoint(const std::string& path, const Session& session, Training& training, const RunState& state) {
  const Sets sets = trained_sets(session);
  ShardReader shards = shard_reader(sets, learners(training));
  if (!session.device.comm.first()) return shards.answer();
  write_folder(path, [&](const std::string& folder) {
    // Adapters with alpha = rank are what lies on the device, bit by bit.
    const auto adapters = [&](const std::string& inner, const std::string& base) {
      return write_adapter_files(inner, *session.adapters, parameters_of(sets, sets.size() - 1, shards),
                                 static_cast<double>(session.adapters->spec.rank), base, DType::f32);
    };
    FileSums sums = session.frozen()
                        ? adapters(folder, session.config.model.path)
                        : write_hf_files(folder, session.model_config, parameters_of(sets, 0, shards), DType::f32);
    if (session.sparse)
      write_folder(folder + adapter_folder, [&](const std::string& inner) {
        for (const auto& [name, sum] : adapters(inner, "..")) sums[cat(adapter_folder + 1, "/", name)] = sum;
      });
    sums.merge(save_tokenizer(folder, session));
    if (!session.frozen()) sums.merge(save_model_files(folder, session));
    sums[optimizer_name] = save_optimizer(cat(folder, "/", optimizer_name), sets, training.learner().moments(), shards);
    sums.merge(training.save_files(folder));
    json files;
    for (const auto& [name, sum] : sums) files[name] = {{"bytes", sum.bytes}, {"xxh128", sum.xxh128}};
    const json j = {{"format", format_version},          {"run", to_json(state)},
                    {"rows", session.train->size()},     {"initial_weights", hex16(session.initial_weights)},
                    {"config", to_toml(session.config)}, {"files", files}};
    write_file(cat(folder, "/", state_name), sealed(j.dump(2).substr(2) + "\n"));
  });
  shards.done();
}

std::string checkpoint_damage(const std::string& path) {
  try {
    const FileSums files = read_state(path).files;
    for (const auto& [name, sum] : files) {
      std::error_code none;
      const uint64_t size = fs::file_size(fs::path(path) / name, none);
      if (none) return cat(name, " is missing");
      if (size != sum.bytes) return cat(name, " has ", size, " bytes, expected ", sum.bytes);
    }
    for (const auto& [name, sum] : files)
      if (const FileSum found = read_sum(cat(path, "/", name)); found.xxh128 != sum.xxh128)
        return cat(name, " is damaged: its XXH128 is ", found.xxh128, ", it was written with ", sum.xxh128);
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
  if ((needs_reference(config) || session.frozen()) && hex16(session.initial_weights) != s.initial_weights)
    fail(config.model.path, ": holds other weights than those that the run of ", path, " started from, which are ",
         session.frozen() ? "those that its adapters belong to" : "the reference of its KL");
  if (session.adapters)
    session.adapters->set_parameters(
        adapter_weights(session.sparse ? path + adapter_folder : path, session.model_config));
  if (!session.frozen()) session.model->set_parameters(hf_weights(path, session.model_config));
  load_optimizer(path + "/" + optimizer_name, training);
  training.load_files(path);
  training.resume(s.run.training);
  return s.run;
}

}  // namespace pare
