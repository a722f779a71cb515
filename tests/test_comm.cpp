// A rank that is alone, and what every backend shares; tests/mpi has those of several ranks.
#include <gtest/gtest.h>

#include "comm/comm.h"
#include "tests/program.h"

namespace pare::test {
namespace {

TEST(Comm, OfOneRank) {
  Comm& comm = self();
  EXPECT_EQ(comm.rank(), 0);
  EXPECT_EQ(comm.ranks(), 1);
  EXPECT_TRUE(comm.first());
  EXPECT_FALSE(comm.host().empty());
  EXPECT_EQ(comm.gather("own"), std::vector<std::string>{"own"});
  EXPECT_EQ(comm.gather(""), std::vector<std::string>{""});
  EXPECT_EQ(comm.broadcast("bytes"), "bytes");
  EXPECT_EQ(comm.sum(7), 7);
  EXPECT_EQ(comm.most(-3), -3);
  char x[3] = {1, 2, 3}, y[3] = {};
  Comm::Piece out{x, 3}, in{y, 2};
  EXPECT_THROW(comm.exchange({&out, 1}, {&in, 1}), std::logic_error) << "other sizes";
  in.bytes = 3;
  comm.exchange({&out, 1}, {&in, 1});
  EXPECT_EQ(y[2], 3);
}

TEST(Comm, PackedValuesComeBack) {
  Packed p;
  p.put(1.5);
  p.put_all(std::string("text"));
  p.put_all(std::vector<int32_t>{1, 2, 3});
  p.put_all(std::string());
  Packed q(p.bytes());
  EXPECT_EQ(q.take<double>(), 1.5);
  EXPECT_EQ(q.take_all<std::string>(), "text");
  EXPECT_EQ(q.take_all<std::vector<int32_t>>(), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(q.take_all<std::string>(), "");
  EXPECT_THROW(q.take<char>(), std::logic_error);
}

class WithoutMpi : public Program {};

// N runs would fight for one folder.
TEST_F(WithoutMpi, AProgramUnderMpirunSaysSo) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    setenv(name, "2", 1);
    const Outcome o = run("train quickstart --dry-run");
    unsetenv(name);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_NE(o.err.find("make mpi"), std::string::npos) << o.err;
  }
}

}  // namespace
}  // namespace pare::test
