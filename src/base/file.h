// Crash-safe writing: files and folders appear whole or not at all, logs are only appended to.  Every system call is
// checked; a failure throws Error(Exit::failed) with the file and the reason.  No file is written through a symbolic
// link; the folders on the way to it may be links.
//
// Test hook, read once from the environment: PARE_FAULT=N:E counts the calls that change the disk (write, truncate,
// sync, rename, making a folder, removing a file of a folder that is replaced).  E > 0: the N-th and all later ones
// fail with errno E.  E < 0: the N-th raises signal -E, a write after a part of its bytes.  E >= 1000: the N-th takes
// E - 1000 milliseconds longer.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/hash.h"

namespace pare {

// Size and hash of a file, to detect damage.
struct FileSum {
  uint64_t bytes = 0;
  std::string xxh128;  // Hasher::digits of them
};
using FileSums = std::map<std::string, FileSum>;  // of the files of a folder, by name

// Writes to PATH.tmp; `finish` syncs the file to disk and renames it, replacing PATH.
class FileWriter {
 public:
  explicit FileWriter(std::string path);
  ~FileWriter();  // without finish(): removes PATH.tmp and leaves PATH as it was
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t bytes);
  FileSum finish();  // returns the sum of the bytes passed in, not of those on disk

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
FileSum read_sum(const std::string& path);  // of the bytes on disk

// A log.  What was appended survives a crash of the process; `sync` makes it survive a crash of the machine.
class AppendFile {
 public:
  // Creates the file, or truncates it to `keep` bytes.  Throws an Error if it has fewer.
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

// True for a path relative to a folder, with a '/' at its end if it is a folder's, that the program writes there
// itself. Other files are somebody else's: they are moved to the folder that takes the place of theirs, and never
// removed. Empty: all are the program's.
using Owned = std::function<bool(const std::string& path)>;

// `fill` writes into PATH.tmp, which is then renamed to PATH.  An existing PATH is first renamed to PATH.old and
// removed at the end; a crash between the two renames leaves only PATH.old.
void write_folder(const std::string& path, const std::function<void(const std::string& folder)>& fill,
                  const Owned& owned = {});
// Renames the folder to PATH.old before removing it, so that no PATH is ever half removed; then PATH holds what is
// somebody else's, if anything is.  Does nothing if there is none.
void remove_folder(const std::string& path, const Owned& owned = {});
// Removes what a crash left behind: PATH.tmp and PATH.old.  Throws if a file of somebody else's in them has the name of
// one in PATH.
void remove_leftovers(const std::string& path, const Owned& owned = {});

// Exclusive lock of an existing folder, against other processes and other locks of this one.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);  // throws if the folder is locked
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  bool in_place() const;  // the path still leads to the folder: it was neither moved nor removed

 private:
  const std::string folder_;
  const int fd_;
};

}  // namespace pare
