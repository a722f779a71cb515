// The arguments of a call by their type, for code that handles every op.
#pragma once
#include <stdexcept>

#include "cases/cases.h"
#include "ops/families.h"

namespace pare::cases {

// f(args, op) for the op whose arguments `call` holds; `op` is its place in a table.
template <class F>
void visit(const Call& call, const F& f) {
#define X(op, Args) \
  if (const auto* args = std::any_cast<Args>(&call)) return f(*args, &Table::op);
  PARE_OPS(X)
#undef X
  throw std::logic_error("a case made no arguments of an op");
}

}  // namespace pare::cases
