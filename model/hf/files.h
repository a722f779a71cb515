// Files of a Hugging Face folder: who reads each, and which folders that pare writes have it.
#pragma once
#include <span>
#include <string>

namespace pare {

struct FolderFile {
  // Owner: a model, its tokenizer, or an adapter.  A saved model has the files of model and tokenizer, a saved
  // adapter those of adapter and tokenizer.
  enum class Part { model, tokenizer, adapter, none };
  enum class Saved { written, copied, no };

  const char* name;  // `*`: any text
  Part part;
  Saved saved;
  const char* read;  // what is read, and what has precedence; as data/README.md says it
};

// The table of data/README.md.  A file that is not in it is neither read nor copied.
std::span<const FolderFile> folder_files();

}  // namespace pare
