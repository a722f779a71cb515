#include "rl/plan.h"

#include "rl/trainer.h"

namespace pare {

Plan plan_step(const Config& config) {
  Session session(config, table_null);
  Trainer trainer(session);
  trainer.worst_case_step();
  Plan plan;
  for (const Arena* a : session.arenas()) plan.memory.push_back({a->name(), a->peak(), a->entries()});
  plan.ledger = session.ledger;
  return plan;
}

}  // namespace pare
