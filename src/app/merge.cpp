// pare merge: a model with an adapter in it, as a Hugging Face folder.
#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "base/hub_cache.h"
#include "base/text.h"
#include "model/hf/peft.h"

namespace pare {
namespace {

struct Options {
  std::string model, adapter, out, dtype;
};

DType dtype_of(const Options& o, const ModelConfig& config) {
  if (o.dtype.empty()) return hf_dtype(o.model, config);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    if (o.dtype == dtype_name(dtype)) return dtype;
  fail("--dtype is \"", o.dtype, "\", expected f32, bf16 or f16");
}

void merge(Options o) {
  o.model = in_hub_cache(o.model);
  const ModelConfig config = load_model_config(o.model);
  const DType dtype = dtype_of(o, config);
  save_hf(o.out, config, merged_weights(hf_weights(o.model, config), o.adapter, config), dtype, false,
          [&](const std::string& folder) {
            copy_tokenizer(o.model, folder);
            copy_generation_config(o.model, folder);
          });
  std::printf("%s: %s with %s, in %s\n", printable(o.out).c_str(), printable(o.model).c_str(),
              printable(o.adapter).c_str(), dtype_name(dtype));
}

}  // namespace

void add_merge(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("merge", "a model with a LoRA adapter in it, as a Hugging Face folder");
  c.option("--model", o->model, "Hugging Face folder").required();
  c.option("--adapter", o->adapter, "PEFT folder: adapter_config.json and adapter_model.safetensors").required();
  c.option("--out", o->out, "folder to create").required();
  c.option("--dtype", o->dtype, "type of the weights: f32, bf16 or f16; that of the model's if not given");
  c.action([o] { merge(*o); });
}

}  // namespace pare
