// Writing that survives a crash: a file or folder appears whole or not at all, a log is only ever appended to.  Every
// call to the system is checked; what fails is an Error(Exit::failed) that names the file and the reason.
//
// Test hook, read once from the environment: PARE_FAULT=N:E counts the calls that change the disk (write, truncate,
// sync, rename, making a folder).  E > 0: the N-th and all later ones fail with errno E.  E < 0: the N-th raises signal
// -E, a write after a part of its bytes.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/hash.h"

namespace pare {

// What a file holds, to notice damage.
struct FileSum {
  uint64_t bytes = 0;
  std::string xxh128;  // Hasher::digits of them
};
using FileSums = std::map<std::string, FileSum>;  // by the names of the files of a folder

// A file that is written to PATH.tmp; `finish` brings it to the disk and renames it, replacing what was at PATH.
class FileWriter {
 public:
  explicit FileWriter(std::string path);
  ~FileWriter();  // without finish(): PATH is as it was, and nothing is left beside it
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t bytes);
  FileSum finish();  // of what was to be written, whatever the disk makes of it

 private:
  void flush();
  const std::string path_, beside_;
  int fd_;
  std::string buffer_;
  Hasher hasher_;
  uint64_t bytes_ = 0;
};

FileSum write_file(const std::string& path, std::string_view content);
FileSum copy_file(const std::string& from, const std::string& to);
FileSum read_sum(const std::string& path);  // of what is on the disk

// A log.  What is in the system's hands survives the end of the process; `sync` makes it survive that of the machine.
class AppendFile {
 public:
  // Creates the file or cuts it to its first `keep` bytes; a file with fewer is an Error.
  AppendFile(std::string path, uint64_t keep);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void append(std::string_view bytes);
  void sync();
  uint64_t size() const { return size_; }

 private:
  const std::string path_;
  int fd_;
  uint64_t size_;
};

// `fill` writes into PATH.tmp, which is then renamed to PATH.  What was there is renamed to PATH.old first and removed
// at the end: between the two renames a crash leaves only that.
void write_folder(const std::string& path, const std::function<void(const std::string& folder)>& fill);
// No folder that is half removed: it is renamed to PATH.old first.  Nothing happens if there is none.
void remove_folder(const std::string& path);
// What a crash left of `path`: PATH.tmp and PATH.old.
void remove_leftovers(const std::string& path);

// While it lives, no other process (and no other lock of this one) has the folder, which exists.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);  // fails if it is taken
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

}  // namespace pare
