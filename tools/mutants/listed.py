"""Mutants that no rule makes, those that change nothing, and those of a clean build."""
# By file: (text, which the file holds once, what stands in its place or in that of [[this]], what the change is).
LISTED = {
    "data/verify/countdown.cpp": [
        ("numbers_of(*equation) == puzzle.numbers", "numbers_of(*equation).size() == puzzle.numbers.size()",
         "numbers only counted"),
        ("std::abs(complex_of(*difference)) < 1e-5", "std::abs(complex_of(*difference)) < 1e-2", "near misses are right"),
    ],
    "src/rl/grpo.cpp": [
        ("prompt % keys_.learner.shards", "groups % keys_.learner.shards", "shard by group, not by prompt"),
        ("for (const std::span<Trajectory> batch : batches) set_corrections(c, batch);", "set_corrections(c, samples_);",
         "corrections of the step, not of each batch"),
        ("if (a.adv_filter_threshold > 0) drop_groups_without_signal(samples_);", "", "groups without signal are judged"),
        ("batches.size() <= 1 && keys_.actor.ppo_epochs == 1", "batches.size() <= 1", "later epochs taken for the first"),
    ],
    "src/rl/report.cpp": [
        ("s.kl_penalty / static_cast<double>(s.tokens.size())", "s.kl_penalty", "penalty not by token"),
        ("terms.old_logprob[r] - out.logprob[r]", "out.logprob[r] - terms.old_logprob[r]", "KL of the wrong sign"),
    ],
    "src/rl/loss.cpp": [
        ("sum / static_cast<double>(end - begin)", "sum", "sum instead of mean"),
        ("s.kl_correction ? weight * (*s.kl_correction)[t] : weight", "weight", "KL weight without its correction"),
        (".seed = [[seed]]", "0", "every seed rounds alike"),
        ("kept[t] = plan.weight[t] != 0;", "kept[t] = true;", "tokens that the plan leaves out are trained"),
    ],
    "src/rl/mismatch.cpp": [
        ("keys.veto > 0 ? keys.veto : 1e-4", "1e-4", "veto ignored"),
        ("if (s.ruling == Ruling::rejected) masked += n;", "", "rejected tokens are not masked ones"),
    ],
    "src/rl/corrections.cpp": [
        ("std::exp(std::clamp(log_ratio, -20.0, 20.0))", "std::exp(log_ratio)", "log-ratio not clamped"),
    ],
    "src/kv/compressor.cpp": [
        ("run->tokens % policy_.window()", "(run->tokens + 1) % policy_.window()", "ring starts one query late"),
    ],
    "src/run/config_checks.cpp": [
        ("return c.trainer.exact && !sparser_than_learner(c);", "return !sparser_than_learner(c);", "exact without exact sums"),
    ],
    "src/run/config_keys_run.cpp": [
        ("run.data.noise_ramp > 0", "false", "steps may change under a noise ramp"),
    ],
    "src/run/checkpoint.cpp": [
        ("needs_reference(config) || session.frozen()", "needs_reference(config)", "adapters on another base"),
    ],
    "src/run/sft_training.cpp": [("i % c.learner.shards", "int64_t{0}", "all groups in shard 0")],
    "src/run/run_directory.cpp": [
        ("if (step > state.training.step) remove_folder(step_path(step), is_saved_file);", "", "damaged later checkpoints stay"),
    ],
    "src/rollout/rollout.cpp": [
        ("comm.waited - before", "comm.waited", "cumulative over steps"),
        ("batch.fed[i] == i / 2", "true", "tokens of other rows"),
        ("pass.batch.draws[i].row == i", "true", "hidden states of other rows"),
    ],
    "model/learner.cpp": [("length - 1 > model.config.max_position", "length > model.config.max_position",
                           "the longest sequence is refused")],
    "model/lora.cpp": [("2 * static_cast<uint64_t>(begin + b)", "2 * static_cast<uint64_t>(b)", "pieces of A alike")],
    "tokenizer/chat.cpp": [
        ("i + 1 == messages.size() || !thought.empty()", "true", "empty thoughts of earlier answers stay"),
    ],
}

# Survivors that change nothing that counts: (file, part of the line, label) -> why.
RANKS = "as it is on one rank; tests/mpi runs several"
KNOWN = {
    ("tokenizer/bpe.cpp", "if (!begins_[", "guard dropped"): "only time: no added token begins with such a byte",
    ("tokenizer/unicode.cpp", "if (byte < 0x80) return 0;", "guard dropped"): "an ASCII character is not cut either way",
    ("tokenizer/tokenizer_json.cpp", "for (int b = 0; b < 256; b++)", "constant"):
        "256 is byte 0 again",
    ("model/learner_update.cpp", "begin - trained_.own_begin(), count", "sign"): RANKS,
    ("model/learner_update.cpp", "trained_.own_begin() - begin", "limit dropped"): RANKS,
    ("model/learner_update.cpp", "std::min(count - skipped, trained_.own() - begin)", "limit dropped"): RANKS,
    ("model/learner_update.cpp", "std::min(count - skipped, trained_.own() - begin)", "sign"): RANKS,
    ("model/learner_update.cpp", "std::min(count, kPiece)", "limit dropped"): "a buffer larger than its use",
    ("model/parameters.cpp", "std::max(begin, own_begin())", "limit dropped"): RANKS,
    ("model/parameters.cpp", "int64_t largest = 0, longest = 0", "constant"): "every matrix is larger than 1",
    ("src/run/ranks.cpp", "for (size_t r = 0; r < all.size(); r++)", "last skipped"): RANKS,
    ("src/rollout/rollout.cpp", "if (comm.ranks() == 1) return sample", "guard dropped"):
        "of one rank the parts are the whole: only a copy",
    ("src/rollout/rollout.cpp", "comm.waited - before", "cumulative over steps"): RANKS,
    ("model/packed.cpp", "MicroBatch batch{g, g + 1, {}};", "sign"): "the end of a group that is cut is not read",
    ("model/packed.cpp", "b.segments.assign(segments,", "constant"):
        "the last number, of keys: the largest batches are planned for their memory, never computed, and one key more "
        "takes no more of it",
    ("model/packed.cpp", "int64_t used = 0;", "constant"): "written before it is read",
    ("model/hf/config.cpp", 'j["attention_bias"] = false', "never"): "the meaning of the absent key",
    ("model/hf/safetensors.cpp", "if (window == MAP_FAILED)", "guard dropped"): "an open file cannot be mapped without address space",
    ("src/run/config.cpp", "s.name.size() > best->name.size()", "bound"):
        "two sections that hold the same key have names of different lengths",
    ("src/run/sft_training.cpp", "Rng rng(rng_key(0, RngStream::data, 0))", "other stream"): "at ramp 0 nothing is drawn",
    ("src/run/sft_training.cpp", "Rng rng(rng_key(0, RngStream::data, 0))", "part of a key dropped"):
        "at ramp 0 nothing is drawn",
    ("data/jsonl.cpp", "if (rows->bad())", "sign"): "an error of the disk, in the sentence that reports it",
    ("tokenizer/bpe.cpp", "if (word.size() > WordCache::Slot::kBytes)", "guard dropped"):
        "what it overwrites is compared, differs, and is computed anew",
    ("model/lora.cpp", "rng_key(seed, RngStream::lora, 0)", "other stream"):
        "step 0 of the other stream is of `pare generate` alone",
    ("model/parts.cpp", "in_turn[i] = static_cast<int>", "constant"): "the first is in shard 0 as the list begins",
    ("src/run/sft_training.cpp", "uids.push_back(sequence_uid(", "part of a key dropped"):
        "names within a hash, the same in every run that is compared",
    ("src/base/thread_pool.cpp", "spins < kSpins", "operand dropped"): "only time",
    ("src/base/thread_pool.cpp", "while (state & kOpen && state / kJob == seen", "operand dropped"):
        "the second comparison of jobs counts if the next job opens between the load and the exchange of a worker: a "
        "window of a few instructions",
    ("src/base/thread_pool.cpp", "if (inside || n <= grain || threads() == 1)", "operand dropped"):
        "the test for one thread only saves time: without workers the caller runs every range itself",
    ("src/base/thread_pool.cpp", "__builtin_ia32_pause();", "statement dropped"): "only time",
    ("src/base/thread_pool.cpp", "std::min<int64_t>((n + grain - 1) / grain", "limit dropped"): "only time",
    ("src/rollout/planning.cpp", "batch.keep = 0;", "statement dropped"):
        "less than the run of one more sequence, which no pass with a kept row has",
    ("src/rl/prefix_cache.cpp", "uniform_open(rng.next()) > keys.epsilon", "bound"):
        "at most one of 2^23 values equals epsilon",
    ("src/rl/rewards.cpp", "if (excess <= 0) return 0;", "bound"): "an excess of 0 costs 0 either way",
    ("src/run/checkpoint.cpp", "set.master ? ParameterReader() : set.reader()", "choice"): RANKS,
    ("src/run/fit.cpp", "if (left >= machine)", "bound"): "a limit of exactly the machine's memory, in the name of the limit",
    ("src/run/plan.cpp", "memory < SIZE_MAX / 64", "bound"): "a memory of exactly 2^58 bytes, which no machine has",
    ("model/packed.cpp", "std::min(rows, longest)", "limit dropped"): "contexts of no token and less, which read no list",
    ("model/parameters.cpp", "std::min(largest, kPiece) + 2 * longest", "factor dropped"):
        "more and smaller pieces: no matrix has rows of 2^18 elements",
    ("src/base/progress.cpp", "now - drawn_ < wait", "bound"): "a line that is drawn a tick later",
    ("src/base/memory.cpp", "if (front < kLargePage) munmap", "statement dropped"): "address space, no memory",
    ("data/math_value/answer.cpp", "const bool negative = !t.empty()", "operand dropped"):
        "the token after an empty factor is the \\begin of its matrix, never a minus sign",
    ("src/base/file.cpp", "std::chrono::milliseconds(f.what - 1000)", "sign"):
        "a longer pause of the test hook, which tests/mpi uses",
    ("data/math_value/answer.cpp", "right = read(t.subspan(at + 1), nesting + 1)", "sign"):
        "a bound on recursion: brackets around what is taken away may nest two deeper",
    ("data/math_value/same.cpp", "|| comma == 0 ||", "operand dropped"):
        "the place of a comma in front is 0, which is returned either way: it only keeps the next line within the text",
    ("tokenizer/chat.cpp", "if (!in || !std::filesystem::is_regular_file(path", "operand dropped"):
        "a file without the right to read it, which no test of root has: Chat.* holds the folder",
    ("model/hf/safetensors.cpp", '{"F8_E5M2", 8}, {"F8_E4M3", 8}', "constant"):
        "Safetensors.EveryTypeHasItsSize notices it, unseen by the record: the table is made before any test",
    ("data/math_value/extract.cpp", "if (std::min(boxed.from(0), fbox.from(0)) == none)", "guard dropped"):
        "only time: the loop returns the same",
    ("data/math_value/extract.cpp", "s.size() <= 300", "bound"): "a bound on work: 299 bytes would do as well",
    ("data/math_value/number.cpp", "std::max(a.error, b.error) + 1);", "sign"):
        "an error bound two bits too small, far less than the 32 bits of kSlack",
}

# Those of a clean build: (file, part of the line, label, the tests that notice it).
SAMPLE = [
    ("src/kv/spec.cpp", "if (first > fed) return start + fed;", "guard dropped", "KvResidency.PeaksAreThoseOfALife"),
    ("src/rl/aggregate.cpp", "1 / (n_sequences * static_cast", "divisor dropped", "Aggregate.Golden"),
    ("src/rl/advantages.cpp", "AdvStd::sample ? count - 1", "sign", "Advantages.Golden"),
    ("src/rl/corrections.cpp", "double mean(", "divisor dropped", "Corrections.GoldenRatios"),
    ("src/rollout/rollout.cpp", "if (!batch.draws.empty()) draw(", "never", "Rollout.PairsAreCountedOncePerSharedPrompt*"),
    ("src/run/hints.cpp", "if (applies && said_", "operand dropped", "Hints.OnlyWhatApplies"),
    ("model/parts.cpp", "cuts.push_back(std::min(", "limit dropped", "Parts.CoverEveryElementOnce"),
    ("tokenizer/sentencepiece.cpp", "for (int32_t id = kEos + 1;", "sign",
     "SentencePieceFile.SpecialPiecesDoNotComeOutOfText"),
    ("tokenizer/bpe.cpp", "for (uint32_t i = 0; i + 1 < n; i++) {", "sign", "BpeFile.MergesByRankLeftmostFirst"),
    ("data/verify/dapo.cpp", "last = i;", "never", "Dapo.ReadsTheLastAnswerLine"),
]
