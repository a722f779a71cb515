#include "model/hf/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>

#include "base/foreign_file.h"
#include "base/half.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/thread_pool.h"

static_assert(std::endian::native == std::endian::little, "the format is little endian");

namespace pare {

using nlohmann::json;

namespace {

constexpr uint64_t max_header = 100'000'000;  // the limit of the reference reader
constexpr size_t max_rank = 64;
constexpr int max_depth = 64;                // of values under keys that the format does not define
constexpr int64_t piece_elements = 1 << 18;  // written at a time
constexpr uint64_t window_bytes = 1 << 21;   // read at a time

// Bits of an element, by type.
const std::map<std::string, uint64_t> dtype_bits = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
};

std::string in_quotes(const std::string& s) {
  const std::string text = json(s).dump();
  return text.size() > 200 ? text.substr(0, 200) + "..." : text;
}

// Builds the list of tensors while parsing, so that a malicious header takes no more memory than its tensors.
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  HeaderHandler(const std::string& path, std::vector<SafetensorsTensor>& tensors,
                std::unordered_map<std::string, size_t>& index, std::map<std::string, std::string>& metadata)
      : path_(path), tensors_(tensors), index_(index), metadata_(metadata) {}

  bool null() override {
    if (at_ == At::top && key_ == "__metadata__") return true;
    return scalar("null");
  }
  bool boolean(bool) override { return scalar("a boolean"); }
  bool number_integer(number_integer_t) override { return scalar("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override { return scalar("the number " + text); }
  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::shape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) bad("a dimension is too large");
      if (tensor().shape.size() == max_rank) bad(cat("more than ", max_rank, " dimensions"));
      tensor().shape.push_back(static_cast<int64_t>(value));
    } else if (at_ == At::offsets) {
      if (offsets_ == 2) bad("\"data_offsets\" has more than two numbers");
      (offsets_++ ? end_ : tensor().begin) = value;
    } else {
      return scalar("a number");
    }
    return true;
  }
  bool string(string_t& value) override {
    if (at_ == At::metadata) {
      metadata_[key_] = value;
    } else if (at_ == At::tensor && key_ == "dtype") {
      if (!dtype_bits.contains(value)) bad(cat("unknown dtype ", in_quotes(value)));
      tensor().dtype = value;
    } else {
      return scalar("a string");
    }
    return true;
  }
  bool binary(binary_t&) override { return false; }  // JSON has none

  bool start_object(size_t) override {
    if (at_ == At::start) {
      at_ = At::top;
    } else if (at_ == At::top && key_ == "__metadata__") {
      at_ = At::metadata;
    } else if (at_ == At::top) {
      at_ = At::tensor;
      seen_.clear();
      offsets_ = 0;
    } else {
      open("an object");
    }
    return true;
  }
  bool end_object() override {
    if (depth_) return --depth_, true;
    if (at_ == At::tensor) finish_tensor();
    at_ = at_ == At::top ? At::end : At::top;
    return true;
  }
  bool start_array(size_t) override {
    if (at_ == At::tensor && !depth_ && key_ == "shape") {
      at_ = At::shape;
    } else if (at_ == At::tensor && !depth_ && key_ == "data_offsets") {
      at_ = At::offsets;
    } else {
      open("an array");
    }
    return true;
  }
  bool end_array() override {
    if (depth_) return --depth_, true;
    at_ = At::tensor;
    return true;
  }
  bool key(string_t& key) override {
    if (depth_) return true;
    key_ = key;
    if (at_ == At::top) {
      if (key == "__metadata__" ? std::exchange(has_metadata_, true) : !index_.emplace(key, tensors_.size()).second)
        fail(path_, ": ", in_quotes(key), " occurs twice in the header");
      if (key != "__metadata__") tensors_.push_back({key, "", {}, 0, 0});
    } else if (at_ == At::metadata) {
      if (metadata_.contains(key)) bad(cat("key ", in_quotes(key), " occurs twice"));
    } else if (std::find(seen_.begin(), seen_.end(), key) != seen_.end()) {
      bad(cat("key ", in_quotes(key), " occurs twice"));
    } else {
      if (seen_.size() == 64) bad("more than 64 keys");
      seen_.push_back(key);
    }
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    fail(path_, ": the header is not valid JSON: ", json_error(e));
  }

 private:
  enum class At { start, top, metadata, tensor, shape, offsets, end };

  SafetensorsTensor& tensor() { return tensors_.back(); }

  // A value where none of the rules above applies: ignored under unknown keys of a tensor, as the reference reader
  // does.
  bool ignored() const {
    return at_ == At::tensor && (depth_ || (key_ != "dtype" && key_ != "shape" && key_ != "data_offsets"));
  }
  bool scalar(const std::string& found) {
    if (!ignored()) unexpected(found);
    return true;
  }
  void open(const std::string& found) {
    if (!ignored()) unexpected(found);
    if (++depth_ > max_depth) bad("nested too deeply");
  }
  [[noreturn]] void unexpected(const std::string& found) {
    if (at_ == At::start) fail(path_, ": the header is ", found, ", expected a JSON object");
    if (at_ == At::top) bad(cat("expected an object, found ", found));
    if (at_ == At::metadata) bad(cat("value of ", in_quotes(key_), " is ", found, ", expected a string"));
    bad(cat(in_quotes(key_), ": unexpected ", found));
  }
  [[noreturn]] void bad(const std::string& what) {
    const bool metadata = at_ == At::metadata || (at_ == At::top && key_ == "__metadata__");
    fail(path_, ": ", metadata ? "\"__metadata__\"" : "tensor " + in_quotes(tensor().name), ": ", what);
  }

  // The bytes of the shape must match the offsets, without overflow.
  void finish_tensor() {
    for (const char* needed : {"dtype", "shape", "data_offsets"})
      if (std::find(seen_.begin(), seen_.end(), needed) == seen_.end()) bad(cat("\"", needed, "\" is missing"));
    if (offsets_ != 2) bad("\"data_offsets\" needs two numbers");
    SafetensorsTensor& t = tensor();
    if (end_ < t.begin) bad(cat("ends at ", end_, ", before its beginning at ", t.begin));
    t.bytes = end_ - t.begin;
    uint64_t bits = 1;
    bool overflow = false;
    for (int64_t n : t.shape) overflow |= __builtin_mul_overflow(bits, static_cast<uint64_t>(n), &bits);
    overflow |= __builtin_mul_overflow(bits, dtype_bits.at(t.dtype), &bits);
    if (overflow) bad(cat("the size of shape ", shape_string(t.shape), " overflows"));
    if (bits % 8) bad(cat(t.dtype, shape_string(t.shape), " does not fill whole bytes"));
    if (bits / 8 != t.bytes)
      bad(cat(t.dtype, shape_string(t.shape), " needs ", bits / 8, " bytes, its offsets give ", t.bytes));
  }

  const std::string& path_;
  std::vector<SafetensorsTensor>& tensors_;
  std::unordered_map<std::string, size_t>& index_;
  std::map<std::string, std::string>& metadata_;
  At at_ = At::start;
  std::string key_;
  bool has_metadata_ = false;
  std::vector<std::string> seen_;  // keys of the tensor being read
  int offsets_ = 0;                // numbers of data_offsets read
  uint64_t end_ = 0;
  int depth_ = 0;  // inside an ignored value
};

// Sorted by offset, the tensors must fill [0, size) without gap or overlap.
void check_layout(const std::string& path, const std::vector<SafetensorsTensor>& tensors, uint64_t size) {
  uint64_t position = 0;
  for (const SafetensorsTensor& t : tensors) {
    if (t.begin != position)
      fail(path, ": tensor ", in_quotes(t.name), " begins at byte ", t.begin, ", expected ", position,
           t.begin > position ? " (a hole)" : " (an overlap)");
    position += t.bytes;
  }
  if (position != size)
    fail(path, ": the tensors take ", position, " bytes, but ", size, " follow the header; the file is ",
         position > size ? "cut short" : "too long");
}

}  // namespace

int64_t SafetensorsTensor::size() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

std::string shape_string(const std::vector<int64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); i++) s += cat(i ? ", " : "", shape[i]);
  return s + "]";
}

// An open file, closed by its last owner.
static std::shared_ptr<const int> open_file(const std::string& path, uint64_t* size) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) fail(path, ": no such file");
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(path, ": cannot be opened for reading");
  std::shared_ptr<const int> file(new int(fd), [](const int* p) {
    ::close(*p);
    delete p;
  });
  struct stat status = {};
  if (::fstat(fd, &status) != 0) fail(path, ": cannot be read");
  *size = static_cast<uint64_t>(status.st_size);
  return file;
}

// Calls f(data, offset, n) for the windows of bytes [at, at + bytes): n of them lie, mapped, at data; offset counts
// from `at`.  Windows are short, and the file's size is checked before each is mapped: touching memory past the end of
// a truncated file would end the process by SIGBUS.
template <class F>
void SafetensorsFile::for_windows(uint64_t at, uint64_t bytes, F f) const {
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const Activity reading("reading " + path_);
  for (uint64_t done = 0, n = 0; done < bytes; done += n) {
    n = std::min(bytes - done, window_bytes);
    const uint64_t begin = at + done, skip = begin % page;
    struct stat status = {};
    if (::fstat(*file_, &status) != 0) fail(path_, ": cannot be read: ", std::strerror(errno));
    if (const auto size = static_cast<uint64_t>(status.st_size); size < begin + n)
      fail(path_, ": ends at byte ", size, ", in the middle of its tensors: it was truncated while being read");
    void* const window =
        ::mmap(nullptr, skip + n, PROT_READ, MAP_SHARED | MAP_POPULATE, *file_, static_cast<off_t>(begin - skip));
    if (window == MAP_FAILED) fail(path_, ": cannot be mapped: ", std::strerror(errno));
    f(static_cast<const char*>(window) + skip, done, n);
    ::munmap(window, skip + n);
  }
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  uint64_t size = 0, length = 0;
  file_ = open_file(path, &size);
  if (const std::string foreign = foreign_model_file(path); !foreign.empty()) fail(path, ": ", foreign);
  if (size < sizeof length) fail(path, ": ", size, " bytes are too few for a safetensors file");
  const auto read = [&](uint64_t at, uint64_t bytes, void* out) {
    for_windows(at, bytes, [&](const char* data, uint64_t offset, uint64_t n) {
      std::memcpy(static_cast<char*>(out) + offset, data, n);
    });
  };
  read(0, sizeof length, &length);
  if (length > max_header) fail(path, ": the header claims ", length, " bytes, more than the ", max_header, " allowed");
  if (length > size - sizeof length)
    fail(path, ": the header claims ", length, " bytes, but only ", size - sizeof length, " follow");
  std::string header(length, '\0');
  read(sizeof length, length, header.data());
  data_ = sizeof length + length;
  // The JSON parser would skip a byte-order mark and end at a zero byte.
  if (const size_t start = header.find_first_not_of(" \t\r\n"); start == header.npos || header[start] != '{')
    fail(path, ": the header is not a JSON object");
  if (header.find('\0') != header.npos) fail(path, ": the header is not valid JSON: it holds a zero byte");
  HeaderHandler handler(path, tensors_, index_, metadata_);
  json::sax_parse(header, &handler);
  std::sort(tensors_.begin(), tensors_.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::tie(a.begin, a.bytes, a.name) < std::tie(b.begin, b.bytes, b.name);
  });
  for (size_t i = 0; i < tensors_.size(); i++) index_[tensors_[i].name] = i;
  check_layout(path, tensors_, size - data_);
}

const SafetensorsTensor* SafetensorsFile::find(const std::string& name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

void SafetensorsFile::read_f32(const SafetensorsTensor& tensor, float* out, int64_t begin, int64_t count) const {
  const bool wide = tensor.dtype == "F32", brain = tensor.dtype == "BF16";
  if (!wide && !brain && tensor.dtype != "F16")
    fail(path_, ": tensor ", in_quotes(tensor.name), " is ", tensor.dtype, ", expected F32, BF16 or F16");
  if (count < 0) count = tensor.size() - begin;
  expect(begin >= 0 && begin + count <= tensor.size(), path_, ": ", tensor.name, ": elements ", begin, " to ",
         begin + count, " of ", tensor.size());
  const uint64_t width = wide ? 4 : 2, at = data_ + tensor.begin + static_cast<uint64_t>(begin) * width;
  // Tensors may be unaligned: elements are copied before use.
  const auto convert = [&](auto narrow, auto to_f32) {
    for_windows(at, static_cast<uint64_t>(count) * width, [&](const char* data, uint64_t offset, uint64_t n) {
      float* const to = out + offset / width;
      for (uint64_t i = 0; i < n / width; i++) {
        std::memcpy(&narrow, data + i * width, sizeof narrow);
        to[i] = to_f32(narrow);
      }
    });
  };
  if (wide)
    convert(float{}, [](float x) { return x; });
  else if (brain)
    convert(uint16_t{}, [](uint16_t h) { return bf16_to_f32(h); });
  else
    convert(uint16_t{}, [](uint16_t h) { return f16_to_f32(h); });
}

// ---- writing

static const char* dtype_word(DType dtype) {
  return dtype == DType::f32 ? "F32" : dtype == DType::bf16 ? "BF16" : "F16";
}

static std::string header_text(const std::vector<NamedTensor>& tensors, DType dtype) {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t offset = 0;
  for (const NamedTensor& t : tensors) {
    uint64_t bytes = dtype_size(dtype);
    for (int64_t n : t.shape) bytes *= static_cast<uint64_t>(n);
    expect(!header.contains(t.name), "tensor ", t.name, " is written twice");
    header[t.name] = {{"dtype", dtype_word(dtype)}, {"shape", t.shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // so that the tensors are aligned
  return text;
}

static int64_t elements(const NamedTensor& t) {
  int64_t size = 1;
  for (int64_t n : t.shape) size *= n;
  return size;
}

TensorReader values_at(const float* data) {
  return [data](int64_t begin, int64_t count, float* out) { std::copy_n(data + begin, count, out); };
}

// Converts `wide`, the elements of a tensor from `begin` on.
static void narrow_values(const std::string& path, const NamedTensor& t, int64_t begin, std::span<const float> wide,
                          DType dtype, uint16_t* out) {
  const auto convert = [&](auto to_narrow, uint16_t infinite) {
    parallel_for(static_cast<int64_t>(wide.size()), 1 << 14, [&](int64_t b, int64_t e) {
      bool infinities = false;
      for (int64_t i = b; i < e; i++) {
        out[i] = to_narrow(wide[i]);
        infinities |= (out[i] & 0x7fffu) == infinite;
      }
      for (int64_t i = b; i < e && infinities; i++)
        if ((out[i] & 0x7fffu) == infinite && std::isfinite(wide[i]))
          throw Error(Exit::failed,
                      cat(path, ": tensor ", t.name, " holds ", wide[i], " at element ", begin + i, ", too large for ",
                          dtype_word(dtype), "; save it as F32 or BF16 (trainer.save_dtype)"));
    });
  };
  if (dtype == DType::bf16)
    convert([](float x) { return f32_to_bf16(x); }, 0x7f80);
  else
    convert([](float x) { return f32_to_f16(x); }, 0x7c00);
}

FileSum write_safetensors(const std::string& path, std::vector<NamedTensor> tensors, DType dtype) {
  expect(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
         "safetensors are written as f32, bf16 or f16");
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  const std::string header = header_text(tensors, dtype);
  const uint64_t length = header.size();
  FileWriter out(path);
  out.write(&length, sizeof length);
  out.write(header.data(), header.size());
  int64_t all = 0, done = 0;
  for (const NamedTensor& t : tensors) all += elements(t);
  ProgressLine work("writing " + path, all);
  std::vector<float> wide(static_cast<size_t>(std::min(all, piece_elements)));
  std::vector<uint16_t> narrow(dtype == DType::f32 ? 0 : wide.size());
  for (const NamedTensor& t : tensors) {
    const int64_t size = elements(t);
    for (int64_t begin = 0, n = 0; begin < size; begin += n) {
      n = std::min(piece_elements, size - begin);
      t.read(begin, n, wide.data());
      if (dtype != DType::f32)
        narrow_values(path, t, begin, {wide.data(), static_cast<size_t>(n)}, dtype, narrow.data());
      out.write(narrow.empty() ? static_cast<const void*>(wide.data()) : narrow.data(),
                static_cast<size_t>(n) * dtype_size(dtype));
      work.done(done += n);
    }
  }
  return out.finish();
}

}  // namespace pare
