#include "base/foreign_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "base/json.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

constexpr uintmax_t most_read = 1 << 30;  // bytes of a file that is read whole, to find out what it is

std::string head_of(const std::string& path, size_t bytes) {
  std::ifstream in(path, std::ios::binary);
  std::string head(bytes, '\0');
  in.read(head.data(), static_cast<std::streamsize>(bytes));
  head.resize(static_cast<size_t>(std::max<std::streamsize>(in.gcount(), 0)));
  return head;
}

// `path` with another ending; never `path` itself, which a shell would empty before the command reads it.
std::string renamed(const std::string& path, const std::string& ending) {
  const std::string to = fs::path(path).replace_extension(ending).string();
  return to == path ? fs::path(path).replace_extension(".converted" + ending).string() : to;
}

std::string convert(const std::string& what, const std::string& command) {
  return cat(what, "; convert it with\n  ", command);
}
// A line of Python that prints rows, each as JSON.
std::string by_python(const std::string& what, const std::string& imports, const std::string& rows,
                      const std::string& path) {
  return convert(what, cat("python3 -c \"import json, sys, ", imports, "; [print(json.dumps(r, default=str)) for r in ",
                           rows, "]\" ", shell_word(path), " > ", shell_word(renamed(path, ".jsonl"))));
}

// Tables in binary files.
struct Tabular {
  std::string_view magic, what, imports, rows;
};
constexpr std::array tabular_formats = {
    Tabular{"PAR1", "is a parquet file (pip install pyarrow)", "pyarrow.parquet as p",
            "p.read_table(sys.argv[1]).to_pylist()"},
    Tabular{"ARROW1", "is an Arrow file (pip install pyarrow)", "pyarrow as a",
            "a.ipc.open_file(sys.argv[1]).read_all().to_pylist()"},
    Tabular{"\xff\xff\xff\xff", "is an Arrow stream (pip install pyarrow)", "pyarrow as a",
            "a.ipc.open_stream(sys.argv[1]).read_all().to_pylist()"},
    Tabular{"Obj\x01", "is an Avro file (pip install fastavro)", "fastavro",
            "fastavro.reader(open(sys.argv[1], 'rb'))"},
    Tabular{"\x89HDF", "is an HDF5 file (pip install pandas tables)", "pandas",
            "pandas.read_hdf(sys.argv[1]).to_dict('records')"},
    Tabular{"SQLite format 3", "is an SQLite database", "sqlite3; d = sqlite3.connect(sys.argv[1])",
            "[dict(zip([c[0] for c in t.description], v)) for (n,) in d.execute('select name from sqlite_master where "
            "type = \\'table\\'') for t in [d.execute('select * from ' + n)] for v in t]"},
};
std::string tabular(const std::string& path, const std::string& head) {
  for (const Tabular& t : tabular_formats)
    if (head.starts_with(t.magic))
      return by_python(std::string(t.what), std::string(t.imports), std::string(t.rows), path);
  const std::string ending = fs::path(path).extension().string();
  const bool protocol = head.size() > 1 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5;
  if (protocol || ending == ".pkl" || ending == ".pickle")
    return by_python("is a pickle, which runs code when it is loaded: only if you trust it",
                     "pickle; d = pickle.load(open(sys.argv[1], 'rb'))",
                     "(d.to_dict('records') if hasattr(d, 'to_dict') else d)", path);
  return "";
}

struct Packed {
  std::string_view magic, name, unpack, ending;
};
constexpr std::array packed_formats = {
    Packed{"\x1f\x8b", "gzip", "gunzip -k", ".gz"},
    Packed{"\x28\xb5\x2f\xfd", "zstd", "zstd -d", ".zst"},
    Packed{"BZh", "bzip2", "bunzip2 -k", ".bz2"},
    Packed{"\xfd"
           "7zXZ",
           "xz", "unxz -k", ".xz"},
    Packed{"\x04\x22\x4d\x18", "lz4", "lz4 -d", ".lz4"},
};
std::string packed(const std::string& path, const std::string& head) {
  for (const Packed& p : packed_formats)
    if (head.starts_with(p.magic)) {
      // These programs insist on their ending.
      const bool named = path.ends_with(p.ending);
      return cat("is compressed by ", p.name, "; unpack it with\n  ", named ? "" : cat("mv ", shell_word(path), " "),
                 named ? "" : cat(shell_word(path + std::string(p.ending)), " && "), p.unpack, " ",
                 shell_word(named ? path : path + std::string(p.ending)));
    }
  if (head.starts_with("PK\x03\x04")) {
    if (path.ends_with(".xlsx"))
      return convert("is an Excel workbook", cat("python3 -c \"import pandas, sys; pandas.read_excel(sys.argv[1])"
                                                 ".to_json(sys.argv[2], orient='records', lines=True)\" ",
                                                 shell_word(path), " ", shell_word(renamed(path, ".jsonl"))));
    return cat("is a ZIP archive; unpack it with\n  unzip ", shell_word(path));
  }
  if (head.size() > 262 && head.compare(257, 5, "ustar") == 0)
    return cat("is a tar archive; unpack it with\n  tar -xf ", shell_word(path));
  return "";
}

// The encoding as iconv calls it, or an empty text.
std::string utf16(const std::string& head) {
  if (head.starts_with("\xff\xfe") || head.starts_with("\xfe\xff")) return "UTF-16";
  // Without a mark: ASCII with a zero beside every character.
  const size_t n = std::min<size_t>(head.size() / 2 * 2, 64);
  for (const size_t zero : {0, 1}) {
    bool all = n >= 4;
    for (size_t i = zero; i < n; i += 2) all = all && head[i] == '\0' && head[i ^ 1] != '\0';
    if (all) return zero ? "UTF-16LE" : "UTF-16BE";
  }
  return "";
}

// A table of text: named as one, or its first line has a separator.  `line`: the first.
std::string table(const std::string& path, const std::string& line) {
  std::string ending = fs::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(), [](unsigned char c) { return std::tolower(c); });
  const bool named = ending == ".csv" || ending == ".tsv";
  char best = ending == ".tsv" ? '\t' : ',';
  for (const char c : {',', '\t', ';', '|'})
    if (std::count(line.begin(), line.end(), c) > std::count(line.begin(), line.end(), best)) best = c;
  if (line.empty() || (!named && std::count(line.begin(), line.end(), best) == 0)) return "";
  const std::string kind = best == ',' ? "CSV file" : best == '\t' ? "TSV file" : cat("table separated by ", best);
  const std::string mark = best == '\t' ? "\\t" : std::string(1, best);
  return by_python(cat(named ? "is a " : "looks like a ", kind), "csv",
                   cat("csv.DictReader(open(sys.argv[1], newline='', encoding='utf-8-sig'), delimiter='", mark, "')"),
                   path);
}

// A single JSON value over all of the file.
std::string one_value(const std::string& path, const std::string& text) {
  const nlohmann::json value = try_parse_json(text);
  if (value.is_array() && !value.empty() && value[0].is_object())
    return by_python("is one JSON array", "io", "json.load(open(sys.argv[1], encoding='utf-8-sig'))", path);
  if (!value.is_object()) return "";
  for (const char* key : {"data", "train", "test", "validation", "rows", "examples", "instances"})
    if (value.contains(key) && value[key].is_array() && !value[key].empty() && value[key][0].is_object())
      return by_python(cat("is one JSON object with its rows under \"", key, "\""), "io",
                       cat("json.load(open(sys.argv[1], encoding='utf-8-sig'))['", key, "']"), path);
  // As pandas writes a table: {"prompt": {"0": …}, …}.
  const auto column = [](const nlohmann::json& v) { return v.is_object() && v.contains("0"); };
  if (std::all_of(value.begin(), value.end(), column) && !value.empty())
    return by_python("is one JSON object of columns", "io",
                     "(lambda d: [dict(zip(d, v)) for v in zip(*(c.values() for c in d.values()))])(json.load("
                     "open(sys.argv[1], encoding='utf-8-sig')))",
                     path);
  if (text.find('\n') < text.find_last_not_of(" \t\r\n"))
    return by_python("is one JSON object over several lines, expected one a line", "io",
                     "[json.load(open(sys.argv[1], encoding='utf-8-sig'))]", path);
  return "";
}

std::string foreign_folder(const std::string& path) {
  std::error_code ignored;
  if (fs::exists(fs::path(path) / "dataset_info.json", ignored) ||
      fs::exists(fs::path(path) / "dataset_dict.json", ignored))
    return convert("is a folder of the library datasets",
                   cat("python3 -c \"import datasets, sys; d = datasets.load_from_disk(sys.argv[1]); "
                       "[s.to_json(f'{n}.jsonl') for n, s in (d.items() if hasattr(d, 'items') else [('rows', d)])]\" ",
                       shell_word(path)));
  return "is a folder, expected a file of JSON lines";
}

// A model folder.
std::string by_transformers(const std::string& what, const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string(), from = folder.empty() ? "." : folder;
  return convert(what,
                 cat("python3 -c \"import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as "
                     "T; [c.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2]) for c in (M, T)]\" ",
                     shell_word(from), " ", shell_word(fs::path(from).filename().string() + "-safetensors")));
}

}  // namespace

std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) || std::string_view("_-./=+,:@%").find(c) != std::string::npos;
  };
  if (!word.empty() && word[0] != '-' && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string quoted = word.starts_with('-') ? "./'" : "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string hub_name(const std::string& text) {
  std::string name = text;
  for (const std::string_view prefix : {"https://", "http://", "huggingface.co/", "hf.co/", "hf://", "datasets/"})
    if (name.starts_with(prefix)) name.erase(0, prefix.size());
  const bool address = name != text;
  const size_t slash = name.find('/'), end = std::min(name.find('/', slash + 1), name.size());
  if (slash == std::string::npos || slash == 0 || slash + 1 >= end || name[0] == '.' || name[0] == '~') return "";
  if (!address && end + 1 < name.size()) return "";  // a path of several folders
  name.resize(end);                                  // without /tree/main
  const auto valid = [](unsigned char c) {
    return std::isalnum(c) || std::string_view("-_./").find(c) != std::string_view::npos;
  };
  return std::all_of(name.begin(), name.end(), valid) ? name : "";
}

std::string lfs_pointer(const std::string& path, std::string_view text) {
  if (!text.starts_with("version https://git-lfs.github.com/spec/")) return "";
  const std::string folder = fs::path(path).parent_path().string();
  return cat("is a pointer of Git LFS, the file itself was not downloaded; fetch it with\n  git -C ",
             shell_word(folder.empty() ? "." : folder), " lfs pull");
}

std::string foreign_rows(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return foreign_folder(path);
  if (!fs::exists(path, ignored)) {
    const std::string name = hub_name(path);
    if (name.empty() || name.ends_with(".jsonl") || fs::is_directory(fs::path(path).parent_path(), ignored)) return "";
    return cat("no such file; if it is a data set of the Hugging Face Hub, download it with\n  hf download ", name,
               " --repo-type dataset --local-dir ", name.substr(name.find('/') + 1));
  }
  const std::string head = head_of(path, 1 << 16);
  if (const std::string pointer = lfs_pointer(path, head); !pointer.empty()) return pointer;
  if (const std::string t = tabular(path, head); !t.empty()) return t;
  if (const std::string p = packed(path, head); !p.empty()) return p;
  if (const std::string encoding = utf16(head); !encoding.empty())
    return convert("is UTF-16, expected UTF-8", cat("iconv -f ", encoding, " -t UTF-8 ", shell_word(path), " > ",
                                                    shell_word(renamed(path, ".jsonl"))));
  std::string text = head.starts_with("\xef\xbb\xbf") ? head.substr(3) : head;
  text.erase(0, text.find_first_not_of(" \t\r\n"));
  std::string lower = text.substr(0, 16);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (lower.starts_with("<!doctype") || lower.starts_with("<html"))
    return "is an HTML page: the download went wrong (a login, a licence, a link to a page in place of the file)";
  if (text.starts_with('[') || text.starts_with('{')) {
    if (fs::file_size(path, ignored) > most_read) return "";
    std::ifstream in(path, std::ios::binary);
    const std::string all{std::istreambuf_iterator<char>(in), {}};
    return one_value(path, all.substr(all.starts_with("\xef\xbb\xbf") ? 3 : 0));
  }
  if (head.find('\0') != std::string::npos)
    return "is a binary file of an unknown format, expected JSON lines (pare help data)";
  const std::string ending = fs::path(path).extension().string();
  if (text.starts_with("---") || text.starts_with("- ") || ending == ".yaml" || ending == ".yml")
    return by_python("is a YAML file (pip install pyyaml)", "yaml",
                     "(r for d in yaml.safe_load_all(open(sys.argv[1], encoding='utf-8-sig')) for r in (d if "
                     "isinstance(d, list) else [d]))",
                     path);
  return table(path, text.substr(0, text.find_first_of("\r\n")));
}

std::string foreign_model_file(const std::string& path) {
  const std::string head = head_of(path, 512), ending = fs::path(path).extension().string();
  if (const std::string pointer = lfs_pointer(path, head); !pointer.empty()) return pointer;
  if (head.starts_with("GGUF") || ending == ".gguf")
    return "is GGUF, weights for llama.cpp; pare reads safetensors: download the folder that they were made from with\n"
           "  hf download OWNER/NAME --local-dir DIR";
  if (ending == ".bin" || ending == ".pt" || ending == ".pth" || ending == ".ckpt")
    return by_transformers("is a checkpoint of PyTorch, pare reads safetensors", path);
  if (head.starts_with("\x89HDF") || ending == ".h5" || ending == ".msgpack")
    return by_transformers("is a checkpoint of TensorFlow or Flax, pare reads safetensors", path);
  return packed(path, head);
}

}  // namespace pare
