// Configuration keys that do not exist: what was meant.
#pragma once
#include <map>
#include <string>

namespace pare {

// Returns the text after the name of an unknown key in a message: what pare has for a key of verl, TRL or OpenRLHF (",
// which is actor.optim.lr here"), the key that is spelled nearly so ("; the nearest is trainer.seed"), or where keys
// are listed.
std::string about_unknown_key(const std::string& name);

// Names of other trainers, verl's without actor_rollout_ref: the key that takes its place or (with a blank in it) the
// rest of a sentence ("is not needed: ...").
const std::map<std::string, std::string>& foreign_keys();

}  // namespace pare
