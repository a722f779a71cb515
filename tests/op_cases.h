// The rows of the op test: one op at one shape.
#pragma once
#include <functional>

#include "op_harness.h"

namespace pare::test {

struct OpCase {
  std::string op, shape;  // the op's name in PARE_OPS; letters, digits and underscores
  std::function<void(OpRun&)> body;
};

inline void PrintTo(const OpCase& c, std::ostream* out) { *out << c.op << " " << c.shape; }

void add_data_cases(std::vector<OpCase>& cases);       // movement, embedding, optimizer
void add_layer_cases(std::vector<OpCase>& cases);      // norm, linear, rope, swiglu
void add_attention_cases(std::vector<OpCase>& cases);  // packed and paged
void add_block_cases(std::vector<OpCase>& cases);      // block-sparse reads
void add_kv_cases(std::vector<OpCase>& cases);         // a cache that evicts
void add_logits_cases(std::vector<OpCase>& cases);     // log-probs, losses, sampling

inline std::vector<OpCase> all_cases() {
  std::vector<OpCase> cases;
  add_data_cases(cases);
  add_layer_cases(cases);
  add_attention_cases(cases);
  add_block_cases(cases);
  add_kv_cases(cases);
  add_logits_cases(cases);
  return cases;
}

}  // namespace pare::test
