// Recognises files of other formats by their content, to say how to convert them.
#pragma once
#include <string>
#include <string_view>

namespace pare {

// For a file that should hold JSON lines: what it is instead and the command that converts it ("is a parquet file;
// convert it with\n  python3 -c ..."), or an empty text if it may hold JSON lines.  A folder, and a path that does not
// exist but could be the name of a data set of the Hugging Face Hub, count as well.
std::string foreign_rows(const std::string& path);

// The same for a file of a model folder: a pointer of Git LFS in place of the file, a pickle of PyTorch, GGUF, GGML,
// HDF5, an archive.
std::string foreign_model_file(const std::string& path);

// The same for a pointer of Git LFS alone, by the beginning of the file at `path`.
std::string lfs_pointer(const std::string& path, std::string_view text);

// OWNER/NAME of a name or address on the Hugging Face Hub; empty: the text is neither.
std::string hub_name(const std::string& text);

// The word as a POSIX shell reads it back.
std::string shell_word(const std::string& word);

}  // namespace pare
