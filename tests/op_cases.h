// The rows of the op test: the cases of src/cases at odd sizes.
#pragma once
#include <set>

#include "op_harness.h"

namespace pare::test {

void run(OpRun& r, const cases::Call& call);  // and states the bounds of its outputs

struct OpRow {
  const cases::OpCase* op;
  std::string size;           // as Dims takes it
  std::string shape() const;  // in letters, digits and underscores
  void run(OpRun& r) const;
};
inline void PrintTo(const OpRow& row, std::ostream* out) { *out << row.op->op << " " << row.size; }

std::vector<OpRow> op_rows(const std::set<std::string>& ops = {});  // of these ops; none: of all

}  // namespace pare::test
