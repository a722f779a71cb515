// Shared code of the ops of a compression event.
#pragma once
#include <vector>

#include "ops/events.h"
#include "ref/ref.h"

namespace pare::ref {

// The pages of one event: where its slots lie.
struct EventPages {
  View<int32_t> table;
  int64_t event;
  int64_t operator()(int64_t slot) const { return table(event, slot / kPageSlots); }
};

// The events, checked: their numbers, `work`, and, where the page lists are given, that each names pages in [0, pages)
// for the slots that lie there (before: `slots` of them; after: first + keep).
std::vector<KvEvent> read_events(const char* op, const Tensor& events, const KvWork& work);
void expect_event_pages(const char* op, const char* name, const Tensor& list, int64_t event, int64_t slots,
                        int64_t pages);
// Checks the data of the arguments of KvCompact.
void expect_compact(const char* op, const KvCompact& a, const std::vector<KvEvent>& events);
}  // namespace pare::ref
