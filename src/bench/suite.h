// Efficiency of the `cpu` table on this machine, measured in one run.
#pragma once

namespace pare {

// Prints ratios to what the machine can do, with one thread and with two: products, rows, attention, logits, a GRPO
// step, rollouts with each KV cache, the tokenizer, verifiers.  Writes build/bench.json.
void bench_suite();

}  // namespace pare
