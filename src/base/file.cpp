#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/progress.h"
#include "base/rng.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

constexpr size_t buffer_bytes = 1 << 20;

[[noreturn]] void fail_io(const std::string& path, const char* what) {
  const int error = errno;
  throw Error(Exit::failed, cat(path, ": cannot be ", what, ": ", std::strerror(error)));
}

// PARE_FAULT.
struct Fault {
  long long at = 0, calls = 0;
  int what = 0;
  Fault() {
    const char* text = std::getenv("PARE_FAULT");
    if (text && std::sscanf(text, "%lld:%d", &at, &what) != 2)
      fail("PARE_FAULT is \"", text, "\", expected N:E (base/file.h)");
  }
};

// True: the call must fail, with errno as set here.  `part` does part of the work before a signal is raised.
bool fault(const std::function<void(uint64_t seed)>& part) {
  static Fault f;
  f.calls++;
  if (f.at == 0 || f.calls < f.at) return false;
  if (f.what >= 1000) {
    if (f.calls == f.at) std::this_thread::sleep_for(std::chrono::milliseconds(f.what - 1000));
    return false;
  }
  if (f.what > 0) return errno = f.what, true;
  if (f.calls == f.at) {
    part(static_cast<uint64_t>(f.at));
    std::raise(-f.what);
  }
  return false;
}
bool fault() {
  return fault([](uint64_t) {});
}

void raw_write(int fd, const std::string& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io(path, "written");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void write_all(int fd, const std::string& path, std::string_view bytes) {
  const Activity writing("writing " + path);
  const bool failed = fault([&](uint64_t seed) {
    const size_t part = mix64(seed) % (bytes.size() + 1);
    raw_write(fd, path, bytes.substr(0, part));
    bytes.remove_prefix(part);
  });
  if (failed) fail_io(path, "written");
  raw_write(fd, path, bytes);
}

void sync_fd(int fd, const std::string& path) {
  const Activity flushing("flushing " + path);
  if (fault() || ::fsync(fd) != 0) fail_io(path, "brought to the disk");
}

void sync_folder(const fs::path& folder) {
  const std::string path = folder.empty() ? "." : folder.string();
  const Activity flushing("flushing " + path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io(path, "opened");
  const bool good = !fault() && ::fsync(fd) == 0;
  const int error = errno;
  ::close(fd);
  errno = error;
  // Some file systems cannot sync a folder and say so.
  if (!good && error != EINVAL) fail_io(path, "brought to the disk");
}

// A new file in the place of what was left there: a link is removed, never followed.
int open_new(const std::string& path) {
  ::unlink(path.c_str());
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
}

void rename_path(const std::string& from, const std::string& to) {
  if (fault() || ::rename(from.c_str(), to.c_str()) != 0) fail_io(to, "replaced");
}

void remove_quietly(const std::string& path) {
  const Activity removing("removing " + path);
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

// Removes what `owned` names at `path` below `from`, and moves the rest to the same place below `to`.
void clear(const fs::path& from, const fs::path& to, const std::string& path, const Owned& owned) {
  std::vector<fs::directory_entry> entries;
  for (const auto& entry : fs::directory_iterator(from / path)) entries.push_back(entry);
  for (const auto& entry : entries) {
    const bool folder = entry.is_directory() && !entry.is_symlink();
    const std::string name = path + entry.path().filename().string() + (folder ? "/" : "");
    const fs::path target = to / (path + entry.path().filename().string());
    const bool taken = fs::exists(fs::symlink_status(target));
    if (folder && (owned(name) || (taken && fs::is_directory(target)))) {
      clear(from, to, name, owned);
    } else if (!folder && owned(name)) {
      if (!fault()) remove_quietly(entry.path());
    } else if (taken) {
      throw Error(Exit::failed, cat(entry.path().string(), " and ", target.string(),
                                    " have the same name; move one of them to another place"));
    } else {
      fs::create_directories(target.parent_path());
      rename_path(entry.path(), target);
      sync_folder(target.parent_path());
    }
  }
  std::error_code ignored;
  fs::remove(from / path, ignored);
}

// Removes the folder `from`, whose place `to` takes, but for what is not the program's.
void retire(const std::string& from, const std::string& to, const Owned& owned) {
  if (!fs::is_directory(fs::symlink_status(from))) return;
  if (!owned) return remove_quietly(from);
  try {
    clear(from, to, "", owned);
  } catch (const fs::filesystem_error& e) {
    throw Error(Exit::failed, cat(from, ": cannot be emptied: ", e.code().message()));
  }
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

FileWriter::FileWriter(std::string path) : path_(std::move(path)), beside_(path_ + ".tmp"), fd_(open_new(beside_)) {
  if (fd_ < 0) fail_io(path_, "written");
}

FileWriter::~FileWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(beside_.c_str());
}

void FileWriter::flush() {
  if (!buffer_.empty()) write_all(fd_, path_, buffer_);
  buffer_.clear();
}

void FileWriter::write(const void* data, size_t bytes) {
  const std::string_view view(static_cast<const char*>(data), bytes);
  hasher_.add(data, bytes);
  bytes_ += bytes;
  if (buffer_.size() + bytes > buffer_bytes) flush();
  if (bytes > buffer_bytes)
    write_all(fd_, path_, view);
  else
    buffer_ += view;
}

FileSum FileWriter::finish() {
  const Activity writing("writing " + path_);  // a network disk writes when the file is closed
  flush();
  sync_fd(fd_, path_);
  rename_path(beside_, path_);
  if (::close(std::exchange(fd_, -1)) != 0) fail_io(path_, "written");
  sync_folder(fs::path(path_).parent_path());
  return {bytes_, hasher_.digits()};
}

FileSum write_file(const std::string& path, std::string_view content) {
  FileWriter file(path);
  file.write(content.data(), content.size());
  return file.finish();
}

FileSum copy_file(const std::string& from, const std::string& to) {
  const Activity copying("copying " + from);
  std::ifstream in(from, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), {}};
  if (!in) fail(from, ": cannot be read");
  return write_file(to, content);
}

FileSum read_sum(const std::string& path) {
  const Activity hashing("hashing " + path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_io(path, "opened");
  std::string buffer(buffer_bytes, '\0');
  Hasher hasher;
  uint64_t bytes = 0;
  ssize_t n = 0;
  while ((n = ::read(fd, buffer.data(), buffer.size())) > 0 || (n < 0 && errno == EINTR))
    if (n > 0) {
      hasher.add(buffer.data(), static_cast<size_t>(n));
      bytes += static_cast<uint64_t>(n);
    }
  const int error = errno;
  ::close(fd);
  errno = error;
  if (n < 0) fail_io(path, "read");
  return {bytes, hasher.digits()};
}

AppendFile::AppendFile(std::string path, uint64_t keep)
    : path_(std::move(path)),
      // Neither through a link, nor waiting for the reader of a pipe.
      fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666)),
      size_(keep) {
  if (fd_ < 0 && errno == ELOOP)
    throw Error(Exit::failed, cat(path_, ": a symbolic link, which a log is not written through; move the file here"));
  if (fd_ < 0) fail_io(path_, "written");
  try {
    struct stat status;
    if (::fstat(fd_, &status) != 0) fail_io(path_, "read");
    if (!S_ISREG(status.st_mode)) throw Error(Exit::failed, cat(path_, ": not a regular file"));
    if (static_cast<uint64_t>(status.st_size) < keep)
      fail(path_, ": has ", status.st_size, " bytes, but ", keep,
           " when the checkpoint was written; the file was changed since");
    if (fault() || ::ftruncate(fd_, static_cast<off_t>(keep)) != 0) fail_io(path_, "truncated");
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

AppendFile::~AppendFile() { ::close(fd_); }

void AppendFile::append(std::string_view bytes) {
  try {
    write_all(fd_, path_, bytes);
  } catch (const Error&) {  // leave no half line behind, if possible
    [[maybe_unused]] const int ignored = ::ftruncate(fd_, static_cast<off_t>(size_));
    throw;
  }
  size_ += bytes.size();
}

void AppendFile::sync() { sync_fd(fd_, path_); }

void write_folder(const std::string& path, const std::function<void(const std::string& folder)>& fill,
                  const Owned& owned) {
  const std::string target = without_slash(path), beside = target + ".tmp", old = target + ".old";
  try {
    remove_leftovers(target, owned);
    fs::create_directories(fs::path(target).parent_path().empty() ? "." : fs::path(target).parent_path());
    if (fault() || ::mkdir(beside.c_str(), 0777) != 0) fail_io(beside, "made");
    fill(beside);
    const bool replace = fs::exists(target);
    if (replace) rename_path(target, old);
    try {
      rename_path(beside, target);
    } catch (const Error&) {
      if (replace) ::rename(old.c_str(), target.c_str());
      throw;
    }
    sync_folder(fs::path(target).parent_path());
    retire(old, target, owned);
  } catch (const fs::filesystem_error& e) {
    remove_quietly(beside);
    throw Error(Exit::failed, cat(target, ": cannot be written: ", e.code().message()));
  } catch (...) {
    remove_quietly(beside);
    throw;
  }
}

void remove_folder(const std::string& path, const Owned& owned) {
  const std::string target = without_slash(path), old = target + ".old";
  if (!fs::is_directory(fs::symlink_status(target))) return;
  remove_leftovers(target, owned);
  rename_path(target, old);
  sync_folder(fs::path(target).parent_path());
  retire(old, target, owned);
}

void remove_leftovers(const std::string& path, const Owned& owned) {
  for (const char* suffix : {".tmp", ".old"}) retire(path + suffix, path, owned);
}

FolderLock::FolderLock(const std::string& folder)
    : folder_(folder), fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0) fail_io(folder, "opened");
  // A file system without locks has other errors: go on without one.
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(fd_);
  fail(folder, ": another process writes this run; wait for it or end it");
}

FolderLock::~FolderLock() { ::close(fd_); }

bool FolderLock::in_place() const {
  struct stat held, found;
  return ::fstat(fd_, &held) == 0 && ::stat(folder_.c_str(), &found) == 0 && held.st_dev == found.st_dev &&
         held.st_ino == found.st_ino;
}

}  // namespace pare
