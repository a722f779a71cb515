// Small tensors that the host fills anew for every pass: one upload brings all of them to the device.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "base/arena.h"
#include "ops/data.h"
#include "ops/device.h"

namespace pare {

class Inputs {
 public:
  // Until upload() nobody else may allocate from `arena`, which decides how long the tensors last.
  explicit Inputs(Arena& arena) : arena_(arena), begin_(arena.mark()) {}

  // i32 `shape`: those of `host`, which are copied.
  Tensor add(const std::string& name, std::initializer_list<int64_t> shape, const int32_t* host) {
    expect(arena_.mark() == begin_ + host_.size() * sizeof(int32_t), "inputs: ", name, " does not follow the others");
    const size_t at = host_.size();
    const Tensor t = arena_.alloc(name, DType::i32, shape);
    if (at == 0) all_ = t.flat();
    host_.resize((arena_.mark() - begin_) / sizeof(int32_t));
    if (t.size() > 0) std::memcpy(host_.data() + at, host, t.bytes());
    return t;
  }

  void upload(Device& device) {
    if (host_.empty()) return;
    all_.shape[0] = static_cast<int64_t>(host_.size());
    device.upload({.dst = all_, .src = host_.data()});
  }

 private:
  Arena& arena_;
  const size_t begin_;
  Tensor all_;
  std::vector<int32_t> host_;  // with the gaps between tensors
};

}  // namespace pare
