// Rows of the key table: the model, the data, the run.
#include "run/config_table.h"

namespace pare::config_table {

namespace {

constexpr const char* kGenerated = " is set but data.task = \"ssa\" generates its data; set data.task=jsonl";
constexpr const char* kNoFiles = " turns validation on but data.val_files is empty; set it, or turn validation off";

}  // namespace

Groups model_keys() {
  return {
      {{},
       {PATH(model.path, any, "",
             "Hugging Face folder (config.json, safetensors) whose weights the run starts from; or OWNER/NAME of a "
             "model in the "
             "cache of the Hugging Face Hub",
             "verl", Flag{"--model"},
             REFUSE_IF(v.empty() == c.model.config.empty(),
                       " and model.config: ", v.empty() ? "neither is given" : "both are given",
                       "; set model.path to start from weights, or model.config to start from random ones")),
        PATH(model.config, any, "",
             "config.json, or the name of a shape in data/presets, of a model with random weights; instead of "
             "model.path",
             "pare"),
        APART(model.dtype, any, "",
              "type of weights and activations. bf16: the optimizer keeps an f32 copy of the weights; auto: f32 on the "
              "cpu, bf16 on cuda and emu",
              "pare; verl: fsdp_config.model_dtype", Flag{"--dtype"}, [](const Config& c) { act_type(c); }),
        FREE(model.enable_gradient_checkpointing, any, "",
             "keeps only the inputs of the transformer blocks and recomputes the rest in the backward pass: less "
             "memory, the same bits. auto: of as few blocks as memory needs",
             "verl; pare: auto")}},
      {{is_not("model.config", "")},
       {KEY(model.init, any, "",
            "distribution of the random weights: normal, with the config's initializer_range or with 1 / sqrt(fan-in) "
            "as standard deviation",
            "pare")}},
      {{},
       {KEY(model.lora.rank, within(0, 65536), "",
            "rank of the trained adapters. The model is frozen, or with distill.enable trained beside them; 0: no "
            "adapters",
            "verl",
            REFUSE_IF(v > 0 && !c.model.lora.adapter_path.empty(),
                      " and model.lora.adapter_path are both given; leave one out: an adapter has its own rank")),
        PATH(model.lora.adapter_path, any, "",
             "PEFT folder of adapters to start from, with their own rank, alpha and target_modules", "verl",
             Flag{"--adapter"})}},
      {{is_not("model.lora.rank", "0")},
       {KEY(model.lora.alpha, above_to(0, 1e6), "", "the product of an adapter is scaled by alpha / rank", "verl"),
        KEY(model.lora.target_modules,
            one_of({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}), "",
            "linear layers that get an adapter", "verl",
            REFUSE_IF(v.empty(), " is empty: no layer would have an adapter"))}},
  };
}

Groups data_keys() {
  const KeyCondition ssa = is("data.task", {"ssa"}), jsonl = is("data.task", {"jsonl"});
  return {
      {{},
       {KEY(data.task, one_of({"ssa", "jsonl"}), "",
            "source of the problems. ssa: generated short programs, a built-in task; jsonl: prompts and answers in "
            "files (implied by data.train_files or data.val_files)",
            "pare",
            REFUSE_IF(v == "jsonl" && c.data.train_files.empty() && c.data.val_files.empty(),
                      " = \"jsonl\" needs data.train_files, which is empty")),
        PATH(data.tokenizer, any, "",
             "ssa, a tokenizer.json, a tokenizer.bin or a folder with one; empty: ssa for the task ssa, else that of "
             "model.path",
             "verl", Flag{"--tokenizer"}),
        KEY(data.train_batch_size, at_least(1), "prompts", "prompts (`pare sft`: examples) per training step", "verl"),
        KEY(data.max_prompt_length, count(1), "tokens",
            "longest prompt; a longer one is an error, or is left out with data.filter_overlong_prompts", "verl",
            Flag{"--max-prompt-length"}),
        KEY(data.max_response_length, count(1), "tokens", "longest response; generation stops there", "verl",
            Flag{"--max-response-length"}, Flag{"--max-new-tokens"}),
        KEY(data.shuffle, any, "", "reshuffles the prompts in every epoch", "verl")}},
      {{ssa},
       {KEY(data.variant, one_of({"default", "ans", "rep", "late"}), "",
            "kind of errors that the teacher of `pare sft` makes", "pare"),
        KEY(data.train_rows, within(1, 1e7), "prompts", "size of the training set", "pare"),
        KEY(data.train_seed, at_least(0), "", "seed of the training set", "pare"),
        KEY(data.val_rows, within(1, 1e7), "prompts", "size of the validation set", "pare"),
        KEY(data.val_seed, at_least(0), "", "seed of the validation set", "pare"),
        KEY(data.min_statements, within(2, 23), "statements", "shortest program", "pare",
            REFUSE_IF(v > c.data.max_statements, " = ", v,
                      " is more than data.max_statements = ", c.data.max_statements)),
        KEY(data.max_statements, within(2, 23), "statements", "longest program", "pare"),
        KEY(data.val_min_statements, within(0, 23), "statements", "shortest program of validation; 0: as in training",
            "pare",
            REFUSE_IF(v > c.data.max_statements, " = ", v,
                      " is more than data.max_statements = ", c.data.max_statements)),
        KEY(data.noise, within(-1, 1), "probability",
            "chance that the teacher replaces the result of a statement by a random digit; below 0: the variant's own",
            "pare"),
        KEY(data.noise_ramp, within(0, 1), "fraction of the run",
            "initial part of `pare sft` over which the teacher's noise grows linearly from 0", "pare")}},
      {{jsonl},
       {PATH(data.train_files, any, "", "training files", "verl",
             REFUSE_IF(!v.empty() && c.data.task != "jsonl", kGenerated)),
        PATH(data.val_files, any, "", "validation files", "verl",
             REFUSE_IF(!v.empty() && c.data.task != "jsonl", kGenerated)),
        KEY(data.prompt_key, any, "",
            "field of the prompt, or a path such as extra_info.question; empty: prompt, problem, question, messages, "
            "conversations, prompt_ids or ids (`pare help data`)",
            "verl"),
        KEY(data.answer_key, any, "",
            "field of the answer, or a path; empty: reward_model.ground_truth, or else answer, or else solution",
            "pare"),
        KEY(data.system_prompt, any, "", "system message of rows that have none; empty: none", "verifiers"),
        KEY(data.filter_overlong_prompts, any, "",
            "leaves out rows whose prompt is longer than data.max_prompt_length, in training and validation, and "
            "prints their number; in `pare sft` also rows whose completion is longer than data.max_response_length. "
            "false: such a row is an error",
            "verl"),
        KEY(data.reward, any, "",
            "verifier of the responses: exact, contains, starts_with, gsm8k-strict, gsm8k-flexible, math-string, dapo, "
            "countdown or math-value; or command:PROGRAM ARGUMENTS, an external grader (`pare help data`). "
            "`pare sft` needs none",
            "pare", Flag{"--verifier"}),
        KEY(data.chat_template, any, "",
            "chat format of text prompts. auto: the one in the tokenizer's folder, plain if there is none; plain: BOS "
            "and the prompt; chatml (with the system message of the folder's template, if that is ChatML), qwen2.5, "
            "qwen3, llama-3, deepseek-r1: one user turn and the start of the assistant's; anything else: a text with "
            "{problem}",
            "pare; verl: model.custom_chat_template", Flag{"--chat-format"})}},
      {{jsonl, is("data.reward", {"command:*"})},
       {FREE(
           data.reward_timeout, above_to(0, 1e6), "seconds",
           "time limit of the grader for one answer; on the first timeout its process is restarted, on the second the "
           "run fails",
           "pare")}},
      {{jsonl, is("data.chat_template", {"auto", "qwen3"})},
       {KEY(data.apply_chat_template_kwargs.enable_thinking, any, "",
            "lets qwen3 think; false: the response starts after an empty thought", "verl")}},
      {{jsonl, is("data.chat_template", {"auto", "llama-3"})},
       {KEY(data.apply_chat_template_kwargs.date_string, any, "", "date in the system message of llama-3", "verl")}},
  };
}

Groups exact_keys() {
  return {
      {{},
       {FREE(exact.full, any, "",
             "compares the whole distribution of every token, not only the log-prob of the drawn one: the bits of all "
             "logits of sampler and learner, by a hash. A token that differs counts in exact/mismatch_tokens",
             "pare",
             REFUSE_IF(v && !(exact_learner(c) && checks_exact(c)),
                       " compares the sampler's distributions with the learner's, which this run does not hold equal (",
                       !c.trainer.exact ? "trainer.exact = false"
                       : !c.rollout.check_exact.value_or(true)
                           ? "rollout.check_exact = false"
                           : "rollout.kv.method, without learner.attention = \"replay\"",
                       "); set exact.full=false"))}},
  };
}

Groups trainer_keys() {
  return {
      {{},
       {FREE(trainer.command, any, "",
             "command that the configuration belongs to, `pare train` or `pare sft`; the other one refuses it. A run "
             "records its own in config.toml. any: both accept it",
             "pare"),
        APART(trainer.device, any, "",
              "device of all computation; emu: the CUDA kernels, emulated on the CPU, for tests", "verl",
              Flag{"--device"}),
        KEY(trainer.exact, any, "",
            "fixed order of every sum: the sampler's log-probs equal the learner's bit by bit. false (--exact=off), "
            "cuda only: cuBLASLt in linear layers, equal but for roundings",
            "pare", Flag{"--exact"}, [](const Config& c) { check_device(c.trainer); }),
        FREE(trainer.n_gpus_per_node, within(0, 1024), "", "ranks per node; 0: as many as were started", "verl"),
        FREE(trainer.nnodes, within(0, 65536), "", "nodes; 0: as many as were started", "verl"),
        FREE(trainer.nccl_timeout, at_least(1), "s", "time without progress of any rank after which the job ends",
             "verl"),
        FREE(trainer.comm, any, "",
             "transport between the devices of ranks. nccl: NCCL, which needs one device per rank; host: page-locked "
             "memory and MPI, which lets ranks share a device; auto: host where the ranks of a machine share its only "
             "device, else nccl",
             "pare", Flag{"--comm"}),
        FREE(trainer.total_epochs, within(0, 1e6), "epochs",
             "length of the run in passes over the training set, each of rows / data.train_batch_size steps, rounded "
             "down; ignored if trainer.total_training_steps is given as well; 0: off",
             "verl"),
        KEY(
            trainer.total_training_steps, at_least(1), "steps",
            "length of the run; the config.toml of a run has the steps computed from trainer.total_epochs", "verl",
            [](const Config& c) {
              if (c.trainer.total_training_steps == 0 && c.trainer.total_epochs == 0)
                fail("neither trainer.total_training_steps nor trainer.total_epochs is given; set one of them");
            },
            PartsIf{[](const Config& run, const Config&) {  // each step depends on the number of steps
              return run.actor.optim.lr_scheduler_type != LrSchedule::constant || run.data.noise_ramp > 0;
            }}),
        KEY(trainer.seed, at_least(0), "", "seed of every random draw but those of the ssa data sets", "TRL",
            Flag{"--seed"}),
        FREE(trainer.threads, within(0, 1024), "threads",
             "CPU threads of a rank; 0: one per core, shared with the other ranks of the machine; changes no result",
             "pare", Flag{"--threads"}),
        FREE(trainer.test_freq, at_least(0), "steps", "interval of validation; 0: never", "verl",
             REFUSE_IF(v > 0 && c.data.task == "jsonl" && c.data.val_files.empty(), kNoFiles)),
        FREE(trainer.val_before_train, any, "", "validates before the first step", "verl",
             REFUSE_IF(v && c.data.task == "jsonl" && c.data.val_files.empty(), kNoFiles)),
        FREE(trainer.check_nan, any, "", "stops at the first op whose output is not finite", "pare"),
        FREE(
            trainer.skip_nonfinite, at_least(0), "updates",
            "drops an update whose gradient norm is infinite or NaN, and continues, up to this many in a row; one more "
            "ends the run",
            "pare; optax: apply_if_finite"),
        FREE(trainer.experiment_name, any, "", "name of the run; empty: that of its configuration files", "verl"),
        FREE(trainer.default_local_dir, any, "",
             "run directory; empty, or a preset's own under changes to it: runs/NAME-TIME, in UTC", "verl"),
        APART(trainer.from_checkpoint, any, "",
              "checkpoint of another run (RUN/checkpoints/step-N) whose weights and moments the run starts from; "
              "`--from`. Empty: the weights of model.path or model.config",
              "pare"),
        FREE(trainer.save_freq, at_least(0), "steps",
             "interval of checkpoints, which are also written at the last step and at the best validation; 0: only on "
             "interrupts",
             "verl"),
        FREE(trainer.max_actor_ckpt_to_keep, at_least(0), "checkpoints",
             "newest checkpoints that are kept, beside the best in validation; 0: all", "verl"),
        FREE(trainer.save_model, any, "", "writes model/ at the end; false: a benchmark needs none", "pare"),
        FREE(trainer.save_dtype, any, "",
             "type of the weights in model/, rounded to nearest; auto: that of model.path, f32 if its files have "
             "several or the weights were random. Checkpoints always hold f32",
             "pare"),
        FREE(trainer.max_file_bytes, at_least(1), "bytes",
             "largest file of weights or moments; a larger tensor has a file of its own, and several files have an "
             "index. The ranks of rank 0's machine write them in parallel",
             "transformers: max_shard_size"),
        FREE(trainer.samples_freq, at_least(0), "steps", "interval at which responses are written and shown; 0: never",
             "pare")}},
      {{is_not("learner.shards", "1")},
       {KEY(trainer.balance_batch, any, "",
            "deals groups to shards of equal FLOPs; false: each group stays in the shard that sampled it", "verl")}},
      {{is_not("trainer.samples_freq", "0")},
       {FREE(trainer.samples_per_step, at_least(0), "responses", "responses of such a step that are written; 0: all",
             "TRL: num_completions_to_print")}},
  };
}

}  // namespace pare::config_table
