// Files that are whole or not there.  What happens when the process dies or the disk is full: test_resume.cpp.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/progress.h"
#include "tests/program.h"

static std::string flushed;  // the activities in which fsync was called

// In place of the library's.
extern "C" int fsync(int fd) {
  flushed += pare::Activity::current() + "\n";
  return static_cast<int>(syscall(SYS_fsync, fd));
}

static bool without_locks = false;  // as some file systems are

extern "C" int flock(int fd, int operation) noexcept {
  if (without_locks) {
    errno = ENOLCK;
    return -1;
  }
  return static_cast<int>(syscall(SYS_flock, fd, operation));
}

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(at("")); }
  void TearDown() override { fs::remove_all(at("")); }
  static std::string at(const std::string& name) { return cat(testing::TempDir(), "pare_files_", getpid(), "/", name); }
  static size_t entries(const std::string& name = "") {
    return static_cast<size_t>(std::distance(fs::directory_iterator(at(name)), fs::directory_iterator()));
  }
  static void expect_failure(const std::function<void()>& what, Exit code, const std::string& part) {
    try {
      what();
      FAIL() << "no error with " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, code) << e.what();
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }
};

TEST_F(Files, AreOldOrNew) {
  write_file(at("a"), "old");
  {
    FileWriter w(at("a"));
    w.write("new", 3);
    EXPECT_EQ(read_text(at("a")), "old");
  }
  EXPECT_EQ(read_text(at("a")), "old");
  EXPECT_EQ(entries(), 1u);
  const std::string large(3'000'001, 'x');  // more than the buffer, in pieces of every kind
  FileWriter w(at("a"));
  w.write("y", 1);
  w.write(large.data(), large.size());
  w.write("z", 1);
  for (int i = 0; i < 7; i++) w.write(large.data(), 500'000);
  const FileSum sum = w.finish();
  EXPECT_EQ(read_text(at("a")), "y" + large + "z" + std::string(3'500'000, 'x'));
  EXPECT_EQ(entries(), 1u);
  EXPECT_EQ(sum.bytes, fs::file_size(at("a")));
  EXPECT_EQ(sum.xxh128, xxh128(read_text(at("a"))));
  EXPECT_EQ(copy_file(at("a"), at("b")).xxh128, sum.xxh128);
  EXPECT_EQ(read_text(at("b")), read_text(at("a")));
  EXPECT_EQ(read_sum(at("b")).bytes, sum.bytes);
  EXPECT_EQ(read_sum(at("b")).xxh128, sum.xxh128);
  expect_failure([] { write_file(at("none/a"), ""); }, Exit::failed, "none/a: cannot be written: No such file");
  fs::create_directories(at("folder/x"));
  expect_failure([] { write_file(at("folder"), ""); }, Exit::failed, "folder: cannot be replaced");
  EXPECT_FALSE(fs::exists(at("folder.tmp")));
}

// The digits that `xxh128sum` prints: hashes must be the same on every machine and with every version of the library.
TEST_F(Files, HashesAreThoseOfXxh128sum) {
  EXPECT_EQ(xxh128(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(xxh128("pare\n"), "cf00cc0f53c2f8511bc7f6fba3809d8e");
  EXPECT_EQ(xxh128(std::string(1000, 'a')), "b01da365eddaa29cb3e7af627147db7c");
  expect_failure([] { read_sum(at("none")); }, Exit::failed, "none: cannot be opened: No such file");
  expect_failure([] { read_sum(at("")); }, Exit::failed, "cannot be read: Is a directory");
}

TEST_F(Files, LogsKeepWhatTheyAreToldTo) {
  {
    AppendFile log(at("log"), 0);
    log.append("one\ntwo\n");
    log.append("thr");
    log.sync();
    EXPECT_EQ(log.size(), 11u);
  }
  {
    AppendFile log(at("log"), 4);
    EXPECT_EQ(read_text(at("log")), "one\n");
    log.append("2\n");
  }
  EXPECT_EQ(read_text(at("log")), "one\n2\n");
  expect_failure([] { AppendFile(at("log"), 7); }, Exit::usage, "has 6 bytes, but 7 when the checkpoint was written");
  EXPECT_EQ(read_text(at("log")), "one\n2\n");
  AppendFile(at("log"), 0);
  EXPECT_EQ(read_text(at("log")), "");
}

TEST_F(Files, FoldersAreOldOrNew) {
  const auto fill = [](const std::string& text) {
    return [text](const std::string& folder) { write_file(folder + "/" + text, text); };
  };
  write_folder(at("made/f/"), fill("old"));
  EXPECT_EQ(read_text(at("made/f/old")), "old");
  expect_failure([] { write_folder(at("made/f"), [](const std::string&) { fail("half way"); }); }, Exit::usage,
                 "half way");
  EXPECT_EQ(read_text(at("made/f/old")), "old");
  expect_failure([] { write_folder(at("made/f"), [](const std::string& folder) { fs::remove_all(folder); }); },
                 Exit::failed, "made/f: cannot be replaced: No such file");
  EXPECT_EQ(read_text(at("made/f/old")), "old") << "back in its place";
  fs::create_directories(at("made/f.tmp/garbage"));
  fs::create_directories(at("made/f.old/garbage"));
  write_folder(at("made/f"), fill("new"));
  EXPECT_EQ(entries("made/f"), 1u);
  EXPECT_EQ(read_text(at("made/f/new")), "new");
  EXPECT_EQ(entries("made"), 1u);
  fs::create_directories(at("made/f.tmp"));
  fs::create_directories(at("made/f.old/garbage"));
  remove_leftovers(at("made/f"));
  EXPECT_EQ(entries("made"), 1u);
  remove_folder(at("made/f/"));
  remove_folder(at("made/f"));
  EXPECT_EQ(entries("made"), 0u);
}

// Whoever may write into the folder of a run must not choose the file that pare overwrites elsewhere.
TEST_F(Files, LinksRedirectNothing) {
  write_file(at("other"), "theirs");
  fs::create_symlink(at("other"), at("a.tmp"));
  write_file(at("a"), "ours");
  EXPECT_EQ(read_text(at("a")), "ours");
  EXPECT_FALSE(fs::exists(fs::symlink_status(at("a.tmp"))));
  fs::create_symlink(at("other"), at("log"));
  expect_failure([] { AppendFile log(at("log"), 0); }, Exit::failed, "log: a symbolic link");
  fs::create_symlink(at("none"), at("dangling"));
  expect_failure([] { AppendFile log(at("dangling"), 0); }, Exit::failed, "dangling: a symbolic link");
  EXPECT_FALSE(fs::exists(at("none")));
  fs::create_symlink(at("other"), at("b"));  // replaced itself, not what it names
  write_file(at("b"), "ours");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(at("b"))));
  EXPECT_EQ(read_text(at("other")), "theirs");
  ASSERT_EQ(mkfifo(at("pipe").c_str(), 0600), 0);
  expect_failure([] { AppendFile log(at("pipe"), 0); }, Exit::failed, "pipe: ");
  // The folder may lie behind a link.
  fs::create_directories(at("far"));
  fs::create_directory_symlink(at("far"), at("near"));
  write_file(at("near/a"), "x");
  AppendFile(at("near/log"), 0).append("y");
  EXPECT_EQ(read_text(at("far/a")) + read_text(at("far/log")), "xy");
}

TEST_F(Files, WorkOnTheDiskIsAnActivity) {
  flushed.clear();
  write_file(at("a"), "x");
  EXPECT_EQ(flushed, "flushing " + at("a") + "\nflushing " + at("").substr(0, at("").size() - 1) + "\n");
  EXPECT_EQ(Activity::current(), "");
}

// Files that the program does not name stay: beside a new folder, where one is removed, and from what a crash left.
TEST_F(Files, FilesOfOthersKeepTheirPlace) {
  const Owned owned = [](const std::string& path) {
    return path == "a" || path == "b" || path == "sub/" || path == "sub/a";
  };
  const auto fill = [](const std::string& folder) {
    write_file(folder + "/b", "new");
    fs::create_directories(folder + "/sub");
    write_file(folder + "/sub/a", "new");
  };
  const auto put = [](const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(at(name)).parent_path());
    write_file(at(name), text);
  };
  const auto put_all = [&](const std::string& folder) {
    for (const char* name : {"a", "sub/a"}) put(folder + "/" + name, "old");
    for (const char* name : {"notes", "sub/notes", "plots/x/y", "sub/plots/z"}) put(folder + "/" + name, name);
    fs::create_directories(at(folder + "/empty"));
    fs::create_symlink("/nowhere", at(folder + "/link"));
  };
  const auto expect_others = [](size_t more) {
    for (const char* name : {"notes", "sub/notes", "plots/x/y", "sub/plots/z"})
      EXPECT_EQ(read_text(at(cat("f/", name))), name);
    EXPECT_TRUE(fs::is_directory(at("f/empty")));
    EXPECT_EQ(fs::read_symlink(at("f/link")), "/nowhere");
    EXPECT_EQ(entries("f"), 5 + more);
    EXPECT_EQ(entries(), 1u);
  };
  put_all("f");
  write_folder(at("f"), fill, owned);
  expect_others(1);
  EXPECT_EQ(read_text(at("f/sub/a")), "new");
  EXPECT_EQ(read_text(at("f/b")), "new");
  remove_folder(at("f/"), owned);
  expect_others(0);
  EXPECT_FALSE(fs::exists(at("f/sub/a")));

  for (const char* left : {"f.old", "f.tmp"}) {
    fs::remove_all(at("f"));
    put_all(left);
    remove_leftovers(at("f"), owned);
    expect_others(0);
  }
  put("f.old/plots/more", "more");  // folders that both have become one
  put("f.old/a", "old");
  write_folder(at("f"), fill, owned);
  expect_others(1);
  EXPECT_EQ(read_text(at("f/plots/more")), "more");
  EXPECT_FALSE(fs::exists(at("f/a")));

  put("f.old/notes", "others");  // two of one name: neither is lost
  expect_failure([&] { remove_leftovers(at("f"), owned); }, Exit::failed, "have the same name");
  EXPECT_EQ(read_text(at("f/notes")), "notes");
  EXPECT_EQ(read_text(at("f.old/notes")), "others");
}

TEST_F(Files, AMovedFolderIsNotInPlace) {
  fs::create_directories(at("run"));
  const FolderLock lock(at("run"));
  EXPECT_TRUE(lock.in_place());
  fs::rename(at("run"), at("moved"));
  EXPECT_FALSE(lock.in_place());
  fs::create_directories(at("run"));
  EXPECT_FALSE(lock.in_place()) << "another folder of the name";
  fs::remove_all(at("run"));
  fs::rename(at("moved"), at("run"));
  EXPECT_TRUE(lock.in_place());
}

TEST_F(Files, OneWriterAFolder) {
  {
    FolderLock lock(at(""));
    expect_failure([] { FolderLock other(at("")); }, Exit::usage, "another process writes this run");
  }
  FolderLock again(at(""));
  without_locks = true;
  EXPECT_NO_THROW(FolderLock(at(""))) << "goes on without";
  without_locks = false;
}

}  // namespace
}  // namespace pare::test
