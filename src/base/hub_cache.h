// The cache that huggingface_hub keeps of what it downloads.
#pragma once
#include <string>

namespace pare {

// HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub (XDG_CACHE_HOME/huggingface/hub).
std::string hub_cache();

// The folder of a model given as OWNER/NAME: the snapshot in the cache of what refs/main says.  A path that exists, and
// a text that is no such name or whose model is not there, comes back as it is.
std::string in_hub_cache(const std::string& model);

// For a path that does not exist but could be OWNER/NAME, the end of an error that says how to download it; else empty.
std::string how_to_download(const std::string& model);

}  // namespace pare
