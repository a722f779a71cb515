// Rows of the key table: the sampler and its cache.
#include "run/config_table.h"

namespace pare::config_table {

namespace {

constexpr const char* kNoSets =
    " draws from a set of tokens, and algorithm.rpo.prefix_loss = \"included\" trains on tokens of earlier steps, "
    "whose sets are not kept; set algorithm.rpo.prefix_loss=masked";

}  // namespace

Groups rollout_keys() {
  return {
      {{},
       {KEY(rollout.n, at_least(1), "samples", "responses per prompt, the size of a group", "verl",
            REFUSE_IF(
                v == 1,
                " = 1 gives groups of one, where algorithm.adv_estimator makes every advantage 0: nothing is learned")),
        KEY(rollout.temperature, above(0), "", "divisor of the logits, in the sampler and in the learner", "verl"),
        KEY(rollout.top_k, count(-1), "tokens",
            "number of most probable tokens to sample from; 0 or -1: off. With this, top_p or min_p the policy is the "
            "distribution over the tokens kept: the learner keeps the same ones",
            "verl", REFUSE_IF(v > 0 && trains_on_prefixes(c), " = ", v, kNoSets)),
        KEY(rollout.top_p, above_to(0, 1), "probability",
            "cumulative probability of the most probable tokens to sample from, after top_k; 1: off", "verl",
            REFUSE_IF(v < 1 && trains_on_prefixes(c), " = ", v, kNoSets)),
        KEY(rollout.min_p, within(0, 1), "",
            "least probability of a token to sample, as a share of the most probable one's; 0: off", "vLLM",
            REFUSE_IF(v > 0 && trains_on_prefixes(c), " = ", v, kNoSets)),
        FREE(rollout.max_kept_ids, count(1), "tokens",
             "most tokens that top_k, top_p and min_p may keep for one draw where the sampler records them: with "
             "several updates of a rollout, a reference policy, a sampler that reads less than the learner, distill, "
             "or trainer.exact=false. A draw from more is an error",
             "pare"),
        KEY(rollout.stop_token_ids, within(0, 2147483647), "",
            "token ids that end a response as EOS does: the token is part of it and trained on, but not part of "
            "the text if it is special",
            "vLLM"),
        KEY(rollout.stop, any, "",
            "texts that end a response, with the token that completes one of them; they are part of its text", "vLLM"),
        FREE(rollout.max_num_seqs, count(1), "sequences", "most sequences that are decoded together", "verl",
             REFUSE_IF(v > c.rollout.max_num_batched_tokens, " = ", v,
                       " sequences cannot decode together in rollout.max_num_batched_tokens = ",
                       c.rollout.max_num_batched_tokens, " rows")),
        FREE(rollout.max_num_batched_tokens, count(1), "tokens", "most rows in one forward pass of the rollout",
             "verl"),
        FREE(rollout.kv_cache_bytes, at_least(0), "bytes",
             "size of the page pool; 0: enough for max_num_seqs sequences", "pare"),
        FREE(rollout.free_cache_engine, any, "",
             "keys and values, used only while sampling, share memory with gradients and activations, used only while "
             "training: a run allocates the larger of the two; false: both. Changes no bit",
             "verl"),
        FREE(
            rollout.check_exact, any, "",
            "compares the sampler's log-probs with the learner's bit by bit and logs exact/mismatch_tokens. auto: only "
            "where both have the same distribution (the same attention)",
            "pare")}},
      {{is("trainer.exact", {"true"})},
       {FREE(rollout.on_mismatch, any, "",
             "exit code of an exact run with mismatched tokens, which warns at once and runs to its end: 1 (fail) or 0 "
             "(continue)",
             "pare")}},
      {{},
       {KEY(rollout.val_kwargs.n, at_least(1), "samples", "responses per validation prompt", "verl", Flag{"--n"}),
        KEY(rollout.val_kwargs.temperature, at_least(0), "", "temperature in validation; 0: greedy", "verl",
            Flag{"--temperature"}),
        FREE(rollout.val_kwargs.kv, any, "",
             "cache in validation: dense; as rollout.kv configures it (rollout; the default of `pare eval`); or one "
             "pass with each (both)",
             "pare")}},
      {{is_not("rollout.val_kwargs.temperature", "0.0")},
       {KEY(rollout.val_kwargs.top_k, count(-1), "tokens", "top_k in validation; 0 or -1: off", "verl",
            Flag{"--top-k"}),
        KEY(rollout.val_kwargs.top_p, above_to(0, 1), "probability", "top_p in validation; 1: off", "verl",
            Flag{"--top-p"}),
        KEY(rollout.val_kwargs.min_p, within(0, 1), "", "min_p in validation; 0: off", "vLLM", Flag{"--min-p"})}},
  };
}

Groups kv_keys() {
  const auto method = [](std::vector<std::string> words) { return is("rollout.kv.method", std::move(words)); };
  const KeyCondition evicting = method({"streaming_llm", "h2o", "tova", "snapkv", "rkv", "pyramidkv"});
  const KeyCondition scoring = method({"h2o", "tova", "snapkv", "rkv", "pyramidkv"});
  const KeyCondition windowed = method({"snapkv", "rkv", "pyramidkv"});
  const KeyCondition block_sparse = method({"quest", "block_topk"});
  return {
      {{},
       {KEY(
           rollout.kv.method, any, "",
           "policy of the sampler's cache. dense: attends to all tokens; streaming_llm, h2o, tova, snapkv, rkv and "
           "pyramidkv evict tokens; quest and block_topk keep all and select the blocks that each token attends to",
           "Sparse-RL, DistillSparse", [](const Config& c) { check_kv(c.rollout.kv); },
           REFUSE_IF(sparser_than_learner(c) && c.rollout.check_exact.value_or(false) && !c.distill.enable,
                     " samples from another distribution than the dense learner's, which rollout.check_exact forbids; "
                     "set rollout.check_exact=auto, or learner.attention=replay"))}},
      {{evicting},
       {KEY(rollout.kv.evict.budget, at_least(1), "tokens",
            "tokens that a compression leaves in a layer, the newest ones included, beside those of the prompt that "
            "are protected",
            "Sparse-RL: 512"),
        KEY(rollout.kv.evict.prompt, any, "", "whether the prompt may be evicted (compress) or not (protect)", "pare"),
        KEY(rollout.kv.evict.trigger, any, "",
            "time of a compression: whenever the buffer is full, or once, at the end of the prompt",
            "R-KV; SnapKV: prefill_once"),
        KEY(rollout.kv.merge.method, any, "",
            "destination of evicted tokens. none: dropped; d2o, value: merged into the kept token with the most "
            "similar key, in every layer",
            "D2O; kvpress")}},
      {{evicting, is("rollout.kv.evict.trigger", {"buffer_full"})},
       {KEY(rollout.kv.evict.buffer, at_least(0), "tokens",
            "tokens above the budget that trigger a compression; 0: every token does", "Sparse-RL, R-KV: 128")}},
      {{scoring},
       {KEY(rollout.kv.evict.scope, any, "", "heads that share a selection: none, or all of a layer",
            "R-KV; TOVA: per_layer")}},
      {{windowed},
       {KEY(rollout.kv.window.size, at_least(1), "tokens",
            "newest tokens, which are always kept and whose queries score the others", "R-KV: 8"),
        KEY(rollout.kv.window.pooling_kernel, at_least(1), "tokens",
            "odd number of neighbours over which scores are pooled; 1: no pooling", "R-KV: 7; SnapKV: 5")}},
      {{windowed, is_not("rollout.kv.window.pooling_kernel", "1")},
       {KEY(rollout.kv.window.pooling, any, "", "kind of the pooling", "R-KV: max; SnapKV: avg")}},
      {{method({"snapkv", "rkv", "pyramidkv", "tova"})},
       {KEY(rollout.kv.window.gqa_aggregation, any, "", "reduction over the query heads that share a key head",
            "R-KV; kvpress: mean_prob"),
        KEY(rollout.kv.window.softmax_span, any, "",
            "tokens in the denominator of the softmax: the candidates alone, or the window too",
            "R-KV; SnapKV: include_window")}},
      {{method({"streaming_llm"})},
       {KEY(rollout.kv.streaming_llm.sinks, at_least(0), "tokens",
            "oldest tokens, which are always kept (attention sinks)", "StreamingLLM: 4")}},
      {{method({"rkv"})},
       {KEY(rollout.kv.rkv.lambda, within(0, 1), "", "weight of attention against redundancy; 1: snapkv",
            "Sparse-RL: 0.1")}},
      {{method({"rkv"}), is_not("rollout.kv.rkv.lambda", "1.0")},
       {KEY(rollout.kv.rkv.threshold, within(-1, 1), "cosine",
            "cosine similarity above which two keys count as redundant", "R-KV")}},
      {{method({"pyramidkv"})},
       {KEY(rollout.kv.pyramidkv.beta, above(1), "",
            "ratio of the mean budget to that of the last layer, about; budgets fall linearly from layer to layer",
            "PyramidKV: 20")}},
      {{evicting, is("rollout.kv.merge.method", {"d2o"})},
       {KEY(rollout.kv.merge.keys, any, "",
            "treatment of the keys of merged tokens: those of the kept token stay, or the unrotated keys are merged "
            "like the values (D2O: the rotated ones)",
            "pare"),
        KEY(rollout.kv.merge.d2o_ema, within(0, 1), "",
            "weight of the old similarity threshold in its moving average over compressions", "D2O")}},
      {{block_sparse},
       {KEY(rollout.kv.blocks.size, at_least(4), "tokens", "size of a block, 4 or 16", "Quest: 16"),
        KEY(rollout.kv.blocks.first, at_least(0), "blocks", "oldest blocks, which are always selected",
            "DistillSparse's code"),
        KEY(rollout.kv.blocks.last, at_least(1), "blocks", "newest blocks, which are always selected",
            "DistillSparse's code"),
        KEY(rollout.kv.blocks.dense_layers, at_least(0), "layers", "first layers, which attend to everything",
            "Quest, DistillSparse: 2"),
        KEY(rollout.kv.blocks.count, at_least(1), "blocks",
            "blocks that a token attends to, the first and last ones included", "DistillSparse: 24, 32")}},
      {{block_sparse, is("learner.attention", {"dense"})},
       {KEY(rollout.kv.blocks.acceptance_target, within(0, 1), "fraction",
            "target of the 5 % quantile of the acceptance rate. The number of blocks is adapted to reach it, "
            "separately for each range of context lengths; 0: off",
            "Sparrow (arXiv 2606.08446): 0.86")}},
      {{block_sparse, is("learner.attention", {"dense"}), is_not("rollout.kv.blocks.acceptance_target", "0.0")},
       {KEY(rollout.kv.blocks.acceptance_steps, at_least(1), "steps", "interval of these adaptations", "pare")}},
  };
}

}  // namespace pare::config_table
