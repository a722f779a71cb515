// Partition of the optimizer over ranks (ZeRO stage 1; Rajbhandari et al. 2020): weights are whole on every rank,
// master parameters, moments and the summed gradient lie in parts.  Also deals the groups of an update to shards.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/comm.h"
#include "ops/linear.h"

namespace pare {

// Where parameters lie: one or more that follow one another in the layout, as a vector or as the rows of a weight.
struct ParameterBlock {
  int64_t offset;     // of the first, as in Parameter
  Tensor vector;      // act [n]; or absent, and
  Weight weight;      // [O, I]
  double rate = 1;    // of learning, relative to the optimizer's
  int64_t place = 0;  // byte of Parameters::packed at which it begins
  int64_t size() const { return vector ? vector.size() : weight.size(); }
  // Elements between two places where it may be cut: at panels; a vector is whole.
  int64_t run() const { return vector ? vector.size() : kPanel * weight.inputs(); }
};

// [ranks + 1]: rank r keeps elements [cuts[r], cuts[r + 1]) of the blocks, as many as any other but for a run.
std::vector<int64_t> part_cuts(const std::vector<ParameterBlock>& blocks, int ranks);
// Returns the parts of the blocks between two cuts.
std::vector<ParameterBlock> blocks_between(const std::vector<ParameterBlock>& blocks, int64_t begin, int64_t end);
// Byte of Parameters::packed, which has `bytes`, at a cut.
int64_t place_of(const std::vector<ParameterBlock>& blocks, int64_t cut, int64_t bytes);

// Elements of several arrays that lie in parts on the ranks.  Any ranks read at the same time, and all of them answer.
class PartReader {
 public:
  struct Array {
    std::vector<int64_t> cuts;  // part_cuts
    // Reads elements [begin, begin + count), which are this rank's.
    std::function<void(int64_t begin, int64_t count, float* out)> own;
  };
  PartReader(Comm& comm, std::vector<Array> arrays) : comm_(comm), arrays_(std::move(arrays)) {}

  void read(size_t array, int64_t begin, int64_t count, float* out);  // of any rank's elements
  // Answers the other ranks until no one reads any more.  All ranks call it after their last read().
  void finish();

 private:
  struct Question {
    size_t array;
    int64_t begin, count;  // count 0: finished
  };
  bool round(const Question& own, float* out);

  Comm& comm_;
  const std::vector<Array> arrays_;
};

// Returns the shard of each item: items by falling cost, ties to the lower index, each to the shard with the least so
// far, ties to the lower shard; or in turn, item i to shard i mod shards, if its largest shard is no larger.  Depends
// on its arguments only.
std::vector<int> deal(const std::vector<int64_t>& costs, int64_t shards);

}  // namespace pare
