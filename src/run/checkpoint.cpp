#include "run/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "base/file.h"
#include "base/foreign_file.h"
#include "base/json.h"
#include "base/json_file.h"
#include "base/text.h"
#include "model/hf/files.h"
#include "model/hf/folder.h"
#include "model/hf/tensor_files.h"
#include "ops/data.h"
#include "run/certificate.h"
#include "run/prefix_cache_file.h"

namespace pare {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int format_version = 3;  // 1: other hash of the initial weights; 2: no hashes of files
constexpr const char* state_name = "state.json";
constexpr const char* optimizer_name = "optimizer";  // of tensor files
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
enum Part : size_t { master, first_moment, second_moment, kinds };

using Sets = std::vector<const Parameters*>;
Sets trained_sets(const Session& session) {
  if (session.frozen()) return {session.adapters.get()};
  return session.sparse ? Sets{session.model.get(), session.adapters.get()} : Sets{session.model.get()};
}

// `learners`: of the sets, or none, where no moment is read.
PartReader part_reader(const Sets& sets, const std::vector<Learner*>& learners) {
  std::vector<PartReader::Array> arrays;
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

// The parameters of set `i`, while all ranks read or answer.  A folder of weights that are not finite could not be
// read back.
ParameterReader parameters_of(const Sets& sets, size_t i, PartReader& reader) {
  const Parameters& set = *sets[i];
  const ParameterReader narrow = set.master ? ParameterReader() : set.reader();
  return [&set, &reader, narrow, i](size_t parameter, int64_t begin, int64_t count, float* out) {
    const Parameter& p = set.layout[parameter];
    if (narrow)
      narrow(parameter, begin, count, out);
    else
      reader.read(i * kinds + master, p.offset + begin, count, out);
    const float* const bad = std::find_if_not(out, out + count, [](float x) { return std::isfinite(x); });
    if (bad != out + count)
      throw Error(Exit::non_finite, cat("the weights are not finite and are not saved: ", p.name, " holds ",
                                        number_text(*bad), "; a smaller actor.optim.lr may help"));
  };
}

std::vector<NamedTensor> optimizer_tensors(const Sets& sets, PartReader& reader) {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < sets.size(); i++)
    for (const Parameter& p : sets[i]->layout)
      for (const auto& [moment, prefix] : moments)
        tensors.push_back(
            {prefix + p.name, p.shape,
             [&, array = i * kinds + (moment == Moment::m ? first_moment : second_moment), offset = p.offset](
                 int64_t begin, int64_t count, float* out) { reader.read(array, offset + begin, count, out); }});
  return tensors;
}

// Tensor files that are written together, each name in one type.
struct TensorSet {
  std::string name;
  DType dtype;
  std::vector<TensorFile> files;
};

// Writes the files into the folder that rank 0 names, each by one of the ranks of its machine, and their indexes by
// rank 0, which gets the sums of all.  All ranks call it.  Throws on rank 0 if a rank could not write its files.
FileSums write_together(const std::string& folder_of_first, const std::vector<TensorSet>& sets, Comm& comm,
                        PartReader& reader) {
  const std::string folder = comm.broadcast(folder_of_first);
  const std::vector<int>& machines = comm.machines();
  const auto writers = std::count(machines.begin(), machines.end(), 0);
  const auto turn = std::count(machines.begin(), machines.begin() + comm.rank(), 0);  // of this rank among them
  Packed own;
  std::vector<std::pair<std::string, FileSum>> written;
  Exit code = Exit::ok;
  std::string error;
  int64_t at = 0;
  try {
    for (const TensorSet& set : sets)
      for (const TensorFile& file : set.files)
        if (machines[static_cast<size_t>(comm.rank())] == 0 && at++ % writers == turn)
          written.emplace_back(file.name, write_safetensors(cat(folder, "/", file.name), file.tensors, set.dtype));
  } catch (const Error& e) {
    code = e.code;
    error = e.what();
  }
  reader.finish();
  own.put(code);
  own.put_all(error);
  own.put(written.size());
  for (const auto& [name, sum] : written) {
    own.put_all(name);
    own.put(sum.bytes);
    own.put_all(sum.xxh128);
  }
  FileSums sums;
  for (std::string& bytes : comm.gather(own.bytes())) {
    Packed of_rank(std::move(bytes));
    const auto exit = of_rank.take<Exit>();
    const auto what = of_rank.take_all<std::string>();
    if (comm.first() && exit != Exit::ok) throw Error(exit, what);
    for (auto n = of_rank.take<size_t>(); n > 0; n--) {
      const auto name = of_rank.take_all<std::string>();
      sums[name].bytes = of_rank.take<uint64_t>();
      sums[name].xxh128 = of_rank.take_all<std::string>();
    }
  }
  if (comm.first())
    for (const TensorSet& set : sets) sums.merge(write_index(folder, set.name, set.files, set.dtype));
  return sums;
}

// `exact`: of the type that they had, so that no bit changes; else either.
void load_optimizer(const std::string& folder, Training& training, bool exact) {
  const std::vector<SafetensorsFile> files = open_tensors(folder, optimizer_name);
  const char* const dtype = training.learner().moments() == DType::bf16 ? "BF16" : "F32";
  for (Learner* learner : learners(training))
    for (const Parameter& p : learner->trained().layout)
      for (const auto& [moment, prefix] : moments) {
        const std::string name = prefix + p.name;
        const SafetensorsTensor* t = nullptr;
        const auto file =
            std::find_if(files.begin(), files.end(), [&](const SafetensorsFile& f) { return (t = f.find(name)); });
        if (!t || t->shape != p.shape || (exact && t->dtype != dtype))
          fail(file == files.end() ? cat(folder, "/", optimizer_name, ".safetensors") : file->path(), ": expected ",
               name, " as ", dtype, shape_string(p.shape));
        learner->set_moment(moment, p.offset, p.size,
                            [&](int64_t begin, int64_t count, float* out) { file->read_f32(*t, out, begin, count); });
      }
}

json blocks_json(const std::vector<BlockBudget::Step>& steps) {
  json list = json::array();
  for (const BlockBudget::Step& s : steps) list.push_back({s.from, s.blocks});
  return list;
}

json to_json(const std::vector<Input>& inputs) {
  json j = json::object();
  for (const Input& i : inputs)
    if (!i.digest.empty()) j[i.name] = {{"path", i.path}, {"xxh128", i.digest}};
  return j;
}

std::vector<Input> inputs_of(const json& run, const char* name) {
  std::vector<Input> inputs;
  const json list = run.value(name, json::object());
  for (const auto& [part, i] : list.items()) inputs.push_back({part, "", "", i.at("path"), i.at("xxh128")});
  return inputs;
}

json to_json(const std::vector<AcceptedChange>& changes) {
  json list = json::array();
  for (const AcceptedChange& c : changes)
    list.push_back({{"step", c.step}, {"name", c.name}, {"path", c.path}, {"before", c.before}, {"now", c.now}});
  return list;
}

json to_json(const RunState& s) {
  return {{"step", s.training.step},
          {"updates", s.training.updates},
          {"student_updates", s.training.student_updates},
          {"skipped", s.training.skipped},
          {"student_skipped", s.training.student_skipped},
          {"epoch", s.training.prompts.epoch},
          {"next", s.training.prompts.next},
          {"blocks", blocks_json(s.training.blocks)},
          {"best_score", std::isnan(s.best_score) ? json() : json(s.best_score)},
          {"best_step", s.best_step},
          {"checked", s.checked},
          {"mismatches", s.mismatches},
          {"logs", s.logs},
          {"drawn", s.training.drawn},
          {"inputs", to_json(s.inputs)},
          {"weights", to_json(s.weights)},
          {"accepted", to_json(s.accepted)},
          {"chain", s.chain}};
}

RunState run_state(const json& j) {
  RunState s;
  s.training = {.step = j.at("step"),
                .updates = j.at("updates"),
                .student_updates = j.value("student_updates", int64_t{0}),
                .skipped = j.value("skipped", int64_t{0}),
                .student_skipped = j.value("student_skipped", int64_t{0}),
                .prompts = {j.at("epoch"), j.at("next")},
                .blocks = {}};
  for (const json& step : j.value("blocks", json::array())) s.training.blocks.push_back({step.at(0), step.at(1)});
  if (!j.at("best_score").is_null()) s.best_score = j.at("best_score");
  s.best_step = j.at("best_step");
  s.checked = j.at("checked");
  s.mismatches = j.at("mismatches");
  s.logs = j.at("logs").get<std::map<std::string, uint64_t>>();
  s.training.drawn = j.value("drawn", int64_t{0});
  s.inputs = inputs_of(j, "inputs");
  s.weights = inputs_of(j, "weights");
  s.chain = j.value("chain", "");
  for (const json& c : j.value("accepted", json::array()))
    s.accepted.push_back({c.at("step"), c.at("name"), c.at("path"), c.at("before"), c.at("now")});
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

TensorSet model_files(const Sets& sets, const Session& session, DType dtype, PartReader& reader) {
  return {"model", dtype,
          deal_tensors("model", hf_tensors(session.model_config, parameters_of(sets, 0, reader)), dtype,
                       session.config.trainer.max_file_bytes)};
}

// True if the tokenizer's folder has another chat template than the run.
bool has_other_template(const Session& session, const std::string& spec) {
  if (session.config.data.task == "ssa" || session.config.data.chat_template == "auto") return false;
  try {
    const ChatFormat own = find_chat_format("auto", spec);
    return own.kind != session.chat.kind || own.text != session.chat.text || own.system != session.chat.system;
  } catch (const Error&) {  // an unknown one
    return true;
  }
}

// Saves the tokenizer with the chat template of the run.
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

// Saves the files of the model that are copied.
FileSums save_model_files(const std::string& folder, const Session& session) {
  const std::string& model = session.config.model.path;
  return model.empty() ? FileSums() : copy_generation_config(model, folder);
}

// Returns the weights that the session started from, as inputs.
std::vector<Input> read_weights(const Session& s) {
  const ModelKeys& m = s.config.model;
  std::vector<Input> weights = {{"model.path/weights", m.path.empty() ? "model.config" : "model.path",
                                 s.frozen()                  ? "base of its adapters"
                                 : needs_reference(s.config) ? "reference of its KL"
                                                             : "initial weights",
                                 m.path.empty() ? m.config : m.path, hex16(s.base_weights)}};
  if (!m.lora.adapter_path.empty())
    weights.push_back({"model.lora.adapter_path/weights", "model.lora.adapter_path",
                       needs_reference(s.config) ? "reference of its KL" : "initial adapters", m.lora.adapter_path,
                       hex16(s.initial_weights - s.base_weights)});
  return weights;
}

// The content of a checkpoint's state.json.
struct StateFile {
  RunState run;
  Config config;
  std::string initial_weights;
  int arithmetic = 1;  // of programs that did not record it
  int64_t rows = 0;    // of the training set
  FileSums files;      // the other files of the folder
};
// Throws an Error unless save_checkpoint can have written it.
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
    s.initial_weights = j.at("initial_weights");
    s.rows = j.at("rows");
    s.arithmetic = j.value("arithmetic", s.arithmetic);
    for (const auto& [name, sum] : j.at("files").items()) s.files[name] = {sum.at("bytes"), sum.at("xxh128")};
    apply_recorded(s.config, j.at("config").get<std::string>(), path);
    return s;
  } catch (const json::exception& e) {
    fail(path, ": ", json_error(e));
  }
}

}  // namespace

bool is_saved_file(const std::string& path) {
  const std::string adapter = cat(adapter_folder + 1, "/"), templates = "additional_chat_templates/";
  if (path == adapter || path == templates) return true;
  std::string name = path.starts_with(adapter) ? path.substr(adapter.size()) : path;
  if (name.ends_with(".tmp")) name.resize(name.size() - 4);  // of a write that was cut off
  if (name.starts_with(templates)) return name.ends_with(".jinja") && name.find('/', templates.size()) == name.npos;
  if (is_tensor_file(name, "model") || is_tensor_file(name, optimizer_name)) return true;
  if (name == state_name || name == prefix_cache_name) return true;
  const auto files = folder_files();
  return std::any_of(files.begin(), files.end(),
                     [&](const FolderFile& f) { return f.saved != FolderFile::Saved::no && name == f.name; });
}

void save_model(const std::string& path, const Session& session) {
  const Sets sets = trained_sets(session);
  Comm& comm = session.device.comm;
  PartReader reader = part_reader(sets, {});
  const DType dtype = saved_dtype(session);
  std::vector<TensorSet> weights;
  if (!session.frozen()) weights.push_back(model_files(sets, session, dtype, reader));
  const auto adapters = [&](const std::string& folder, const std::string& base, DType type) {
    write_adapter_files(folder, *session.adapters, parameters_of(sets, sets.size() - 1, reader),
                        session.adapters->spec.alpha, base, type);
  };
  const auto fill = [&](const std::string& folder) {
    write_together(folder, weights, comm, reader);
    if (session.frozen())
      adapters(folder, session.config.model.path, dtype);
    else
      write_hf_config(folder, session.model_config, dtype);
    save_tokenizer(folder, session);
    if (!session.frozen()) save_model_files(folder, session);
    if (session.sparse)
      write_folder(folder + adapter_folder, [&](const std::string& inner) { adapters(inner, "..", DType::f32); });
  };
  if (comm.first())
    write_folder(path, fill, is_saved_file);
  else
    write_together("", weights, comm, reader);
  reader.finish();
}

void save_checkpoint(const std::string& path, const Session& session, Training& training, const RunState& state) {
  const Sets sets = trained_sets(session);
  Comm& comm = session.device.comm;
  PartReader reader = part_reader(sets, learners(training));
  std::vector<TensorSet> tensors;
  if (!session.frozen()) tensors.push_back(model_files(sets, session, DType::f32, reader));
  const DType type = training.learner().moments();
  tensors.push_back(
      {optimizer_name, type,
       deal_tensors(optimizer_name, optimizer_tensors(sets, reader), type, session.config.trainer.max_file_bytes)});
  const auto fill = [&](const std::string& folder) {
    FileSums sums = write_together(folder, tensors, comm, reader);
    // Adapters with alpha = rank are the bits on the device.
    const auto adapters = [&](const std::string& inner, const std::string& base) {
      return write_adapter_files(inner, *session.adapters, parameters_of(sets, sets.size() - 1, reader),
                                 static_cast<double>(session.adapters->spec.rank), base, DType::f32);
    };
    sums.merge(session.frozen() ? adapters(folder, session.config.model.path)
                                : write_hf_config(folder, session.model_config, DType::f32));
    if (session.sparse)
      write_folder(folder + adapter_folder, [&](const std::string& inner) {
        for (const auto& [name, sum] : adapters(inner, "..")) sums[cat(adapter_folder + 1, "/", name)] = sum;
      });
    sums.merge(save_tokenizer(folder, session));
    if (!session.frozen()) sums.merge(save_model_files(folder, session));
    sums.merge(training.save_files(folder));
    json files;
    for (const auto& [name, sum] : sums) files[name] = {{"bytes", sum.bytes}, {"xxh128", sum.xxh128}};
    RunState run = state;
    run.weights = read_weights(session);
    const json j = {{"format", format_version},
                    {"arithmetic", kArithmetic},
                    {"run", to_json(run)},
                    {"rows", session.train->size()},
                    {"config", to_toml(session.config)},
                    {"initial_weights", hex16(session.initial_weights)},
                    {"files", files}};
    write_file(cat(folder, "/", state_name), sealed(j.dump(2).substr(2) + "\n"));
  };
  if (comm.first())
    write_folder(path, fill, is_saved_file);
  else
    write_together("", tensors, comm, reader);
  reader.finish();
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
    if (e.code == Exit::failed) throw;  // the disk cannot be read: nobody knows what is there
    return e.what();
  }
}

std::string checkpoint_chain(const std::string& path) { return read_state(path).run.chain; }

namespace {

// Returns the config.toml of the run that holds the checkpoint.
std::string config_of(const std::string& checkpoint) {
  return (fs::path(checkpoint).parent_path().parent_path() / "config.toml").string();
}

void check_configuration(const std::string& path, const StateFile& s, const Config& config, bool by_content) {
  const RunCommand own = s.config.trainer.command, given = config.trainer.command;
  if (own != RunCommand::any && given != RunCommand::any && own != given)
    fail(path, " is a checkpoint of `pare ", command_name(own), "`; continue with: pare ", command_name(own), " ",
         shell_word(config_of(path)), " --resume");
  const bool adapters = lora_spec(config.model.lora) && !config.distill.enable;
  if (s.arithmetic != kArithmetic)
    fail(path, " was written by a program with arithmetic ", s.arithmetic, ", this one has arithmetic ", kArithmetic,
         " (other sums or functions), so the run cannot be continued bit by bit; continue with a program of that "
         "arithmetic, or start a new run from its weights and moments: pare ",
         command_name(given), " ", shell_word(config_of(path)), " --from ", shell_word(path),
         ", or from its weights alone: ", adapters ? "model.lora.adapter_path=" : "model.path=", shell_word(path));
  if (const auto keys = keys_that_part(s.config, config, by_content && !s.run.inputs.empty()); !keys.empty()) {
    std::string list, overrides;
    for (const std::string& k : keys) {
      list += (list.empty() ? "" : ", ") + k;
      overrides += " " + shell_word(cat(k, "=", config_key(k).show(config)));
    }
    fail(path, " was written with other values of ", list, ", so the run cannot be continued bit by bit; ",
         "start a new one from its weights and moments: pare ", command_name(given), " ", shell_word(config_of(path)),
         overrides, " --from ", shell_word(path));
  }
  if (config.trainer.total_training_steps < s.run.training.step)
    fail("trainer.total_training_steps = ", config.trainer.total_training_steps, " is less than the ",
         s.run.training.step, " steps that ", path, " has done");
}

// Weights that are in the checkpoint only matter where they were given anew: the user expects them to.
bool matters(const InputChange& change, const Session& s, const std::vector<Input>& before) {
  const bool adapters = change.input.key == "model.lora.adapter_path";
  if (needs_reference(s.config) || (s.frozen() && !adapters)) return true;
  return std::none_of(before.begin(), before.end(), [&](const Input& i) {
    return i.name == change.input.name && same_path(i.path, change.input.path);
  });
}

// Compares the inputs of the run with those recorded, and accepts those that may differ.
void check_inputs(const std::string& path, RunState& run, const Session& session, const ResumeInputs& inputs,
                  std::vector<std::string>* notes) {
  std::vector<InputChange> changes = input_changes(run.inputs, inputs.files);
  for (const InputChange& change : input_changes(run.weights, read_weights(session))) {
    if (matters(change, session, run.weights))
      changes.push_back(change);
    else if (notes)
      notes->push_back(cat(change.input.path, " (", change.input.key,
                           ") holds other weights than those that the run started from; no later step reads them"));
  }
  refuse_changes(changes, inputs.accepted, path);
  for (const auto& [input, before] : changes)
    run.accepted.push_back({run.training.step, input.name, input.path, before, input.digest});
}

void load_parameters(const std::string& path, Session& session) {
  if (session.adapters)
    session.adapters->set_parameters(
        adapter_weights(session.sparse ? path + adapter_folder : path, session.model_config));
  if (!session.frozen()) session.model->set_parameters(hf_weights(path, session.model_config));
}

}  // namespace

void check_resumable(const std::string& path, const Config& config, const ResumeInputs& inputs) {
  const StateFile s = read_state(path);
  check_configuration(path, s, config, true);
  for (const std::string& file : inputs.accepted) {
    const auto is = [&](const Input& i) { return same_path(i.path, file); };
    const auto any = [&](const std::vector<Input>& list) { return std::any_of(list.begin(), list.end(), is); };
    if (!any(inputs.files) && !any(s.run.inputs) && !any(s.run.weights))
      fail("--accept-changed ", file, ": the run reads no such file");
  }
  if (!s.run.inputs.empty()) refuse_changes(input_changes(s.run.inputs, inputs.files), inputs.accepted, path);
}

RunState load_checkpoint(const std::string& path, Session& session, Training& training, const ResumeInputs& inputs,
                         std::vector<std::string>* notes) {
  const StateFile s = read_state(path);
  const Config& config = session.config;
  check_configuration(path, s, config, !inputs.files.empty());
  RunState run = s.run;
  if (!inputs.files.empty() && !run.inputs.empty()) {
    check_inputs(path, run, session, inputs, notes);
  } else {
    if ((needs_reference(config) || session.frozen()) && hex16(session.initial_weights) != s.initial_weights)
      fail(config.model.path, " (model.path): holds other weights than those that the run of ", path,
           " started from, which are the ", session.frozen() ? "base of its adapters" : "reference of its KL");
    if (notes)
      notes->push_back(cat(path,
                           " was written by an older program, without hashes of data, tokenizer and model files: "
                           "whether they have changed since cannot be seen"));
  }
  if (session.train->size() != s.rows)
    fail("the training set has ", session.train->size(), " rows, ", path, " was written with ", s.rows,
         ": its order would be another one; start a new run from its weights and moments: --from ", shell_word(path));
  restore_checkpoint(path, session, training);
  return run;
}

RunState restore_checkpoint(const std::string& path, Session& session, Training& training) {
  RunState run = read_state(path).run;
  load_parameters(path, session);
  load_optimizer(path, training, true);
  training.load_files(path);
  training.resume(run.training);
  return run;
}

namespace {

std::string trained_parameters(const Config& c) {
  if (c.model.lora.rank == 0 && c.model.lora.adapter_path.empty()) return "a whole model";
  return c.distill.enable ? "a model and adapters of its sampler" : "adapters";
}

// Checks that model and adapters have the shapes of the checkpoint.
void check_shapes(const std::string& path, const Config& c) {
  const std::optional<LoraSpec> ours = lora_spec(c.model.lora);
  if (ours) {
    const LoraSpec theirs = load_adapter_config(c.distill.enable ? path + adapter_folder : path);
    if (theirs.rank != ours->rank || theirs.targets != ours->targets)
      fail("--from ", path, ": its adapters have rank ", theirs.rank, ", those of this run rank ", ours->rank,
           "; model.lora.rank and model.lora.target_modules must be those of its run");
  }
  if (ours && !c.distill.enable) return;  // the checkpoint has no model
  const json theirs = to_json(load_model_config(path)), model = to_json(read_model_config(c.model));
  for (const auto& [key, value] : model.items())
    if (!key.ends_with("_token_id") && theirs.value(key, json()) != value)
      fail("--from ", path, ": its model has ", key, " = ", theirs.value(key, json()).dump(), ", that of this run ",
           value.dump(), " (", c.model.path.empty() ? "model.config" : "model.path", ")");
}

// Checks that the adapters have the base of the checkpoint.
void check_base(const std::string& path, const StateFile& s, const Session& session) {
  if (!session.frozen()) return;
  for (const Input& base : s.run.weights)
    if (base.name == "model.path/weights" && base.digest != hex16(session.base_weights))
      fail("--from ", path, ": its adapters are those of another base than ", session.config.model.path,
           " (model.path)");
}

// True if the training rows and their order are those of the checkpoint's run.
bool same_rows(const StateFile& s, const Session& session, const std::vector<Input>& inputs) {
  if (session.train->size() != s.rows) return false;
  for (const char* key :
       {"data.task", "data.shuffle", "data.train_seed", "data.min_statements", "data.max_statements", "trainer.seed"})
    if (config_key(key).show(s.config) != config_key(key).show(session.config)) return false;
  const auto changes = input_changes(s.run.inputs, inputs);
  return std::none_of(changes.begin(), changes.end(),
                      [](const InputChange& c) { return c.input.name.starts_with("data.train_files["); });
}

}  // namespace

void check_startable(const std::string& path, const Config& config, bool reads) {
  if (!fs::exists(fs::path(path) / state_name))
    fail("--from ", path, ": no checkpoint (it has no ", state_name, "); expected RUN/checkpoints/step-N");
  if (const std::string damage = reads ? checkpoint_damage(path) : ""; !damage.empty())
    fail("--from ", path, ": the checkpoint is not whole: ", damage);
  const Config theirs = read_state(path).config;
  const RunCommand own = theirs.trainer.command;
  if (own != RunCommand::any && own != config.trainer.command)
    fail("--from ", path, ": a checkpoint of `pare ", command_name(own),
         "`, whose moments are those of another objective; ",
         "start from its weights alone: model.path=", shell_word(path));
  if (const std::string was = trained_parameters(theirs), is = trained_parameters(config); was != is)
    fail("--from ", path, ": its run trains ", was, ", this one trains ", is,
         " (model.lora.rank, model.lora.adapter_path, distill.enable)");
  check_shapes(path, config);
}

TrainingState start_from(const std::string& path, Session& session, Training& training,
                         const std::vector<Input>& inputs) {
  const StateFile s = read_state(path);
  check_base(path, s, session);
  load_parameters(path, session);
  load_optimizer(path, training, false);
  const TrainingState& before = s.run.training;
  TrainingState state{.step = 0,
                      .updates = before.updates,
                      .student_updates = before.student_updates,
                      .prompts = {},
                      .blocks = {},
                      .drawn = before.drawn + before.step};
  if (same_rows(s, session, inputs)) state.prompts = before.prompts;
  training.resume(state);
  return state;
}

}  // namespace pare
