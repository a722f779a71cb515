// The update of a learner: the sum of the gradients of shards, its norm, the optimizer step.
#include <cmath>

#include "base/half.h"
#include "base/rng.h"
#include "base/text.h"
#include "model/learner.h"
#include "ops/data.h"
#include "ops/optimizer.h"

namespace pare {

// Not at the end of the update before: until now the memory may have held something else.
void Learner::begin_update() {
  if (update_) return;
  update_.emplace(activations_);
  model_.device.zero({flat_});
  if (own_head_) model_.device.zero({head_});
  if (sum_) model_.device.zero({sum_});
  head_pending_ = false;
}

// Adds the gradients of one shard of each rank to the sums.
void Learner::add_shards(int64_t round) {
  add_head_gradient();
  if (model_.device.comm.ranks() == 1)
    add(round, flat_, 0);
  else if (by_machine_)
    add_shards_by_machine();
  else
    add_shards_of_ranks(round);
  model_.device.zero({flat_});
}

// `gradient`: of elements from `first` on of this rank's.
void Learner::add(int64_t shard, const Tensor& gradient, int64_t first) {
  const auto part = [&](const Tensor& t) { return t.rows(first, gradient.size()); };
  const bool later = shard >= kShardBlock;  // than the first block
  if (later && shard % kShardBlock == 0) model_.device.zero({part(block_)});
  model_.device.accumulate({.y = part(later ? block_ : sum_), .x = gradient});
  if (later && (shard % kShardBlock == kShardBlock - 1 || shard == options_.shards - 1))
    model_.device.accumulate({.y = part(sum_), .x = part(block_)});
}

// The embedding's gradient gets the head's, once, after all micro-batches (tied embeddings).
void Learner::add_head_gradient() {
  if (!head_pending_) return;
  model_.device.accumulate({.y = views_.embedding.flat(), .x = head_.flat()});
  model_.device.zero({head_});
  head_pending_ = false;
}

// Of a tensor of this rank's elements, or of flat_ where that is what it updates from.
Tensor Learner::own(const ParameterBlock& b, const Tensor& part) const {
  const Tensor t = part.rows(b.offset - trained_.own_begin(), b.size());
  return b.vector ? t : t.matrix(b.weight.inputs());
}

// Returns the norm of the gradient over the elements of all ranks.
double Learner::gradient_norm() {
  Device& device = model_.device;
  const ArenaScope scope(activations_);
  int64_t blocks = 0;
  for (const ParameterBlock& b : own_) blocks += norm_blocks(b.size(), b.run());
  const Tensor sums = activations_.alloc("squares of the gradient", model_.stat, {blocks});
  blocks = 0;
  for (const ParameterBlock& b : own_) {
    const int64_t n = norm_blocks(b.size(), b.run());
    device.square_sums({.sums = sums.rows(blocks, n), .x = own(b, gradient()).flat(), .run = b.run()});
    blocks += n;
  }
  Packed own;
  own.put_all(download_stat(model_.device, sums));
  double squares = 0;
  for (std::string& bytes : device.comm.gather(own.bytes()))
    for (const double s : Packed(std::move(bytes)).take_all<std::vector<double>>()) squares += s;
  return std::sqrt(squares);
}

double Learner::step(const AdamWOptions& o) {
  Device& device = model_.device;
  begin_update();
  if (!sum_) add_head_gradient();
  double norm = gradient_norm();
  if (model_.stat == DType::f32) {
    const auto narrow = static_cast<float>(norm);
    device.upload({norm_, &narrow});
    norm = narrow;
  } else {
    device.upload({norm_, &norm});
  }
  // All ranks have the norm, so that all of them drop the update.
  if (!std::isfinite(norm)) {
    if (skipped_ >= o.skip_nonfinite)
      throw Error(Exit::non_finite, cat("the gradient norm is ", number_text(norm), " in optimizer step ", steps_ + 1,
                                        skipped_ > 0 ? cat(", after ", skipped_, " that were dropped") : ""));
    skipped_++;
    drop_gradients();
    return norm;
  }
  steps_++;
  skipped_ = 0;
  for (const ParameterBlock& b : own_)
    device.adamw({.p = b.vector ? b.vector : b.weight.packed,
                  .m = own(b, m_),
                  .v = own(b, v_),
                  .grad = own(b, gradient()),
                  .norm = norm_,
                  .max_norm = static_cast<float>(o.max_norm),
                  .lr = static_cast<float>(o.lr * b.rate),
                  .beta1 = static_cast<float>(o.beta1),
                  .beta2 = static_cast<float>(o.beta2),
                  .eps = static_cast<float>(o.eps),
                  .weight_decay = static_cast<float>(o.weight_decay / b.rate),
                  .step = steps_,
                  .key = rng_key(o.seed, RngStream::moments, static_cast<uint64_t>(steps_)),
                  .first = b.offset,
                  .master = trained_.master ? own(b, trained_.master) : Tensor{}});
  trained_.gather_parts();
  update_.reset();
  return norm;
}

void Learner::get_moment(Moment moment, int64_t begin, int64_t count, float* out) const {
  const Tensor t = (moment == Moment::m ? m_ : v_).rows(begin - trained_.own_begin(), count);
  expect(t.dtype != DType::f64, "optimizer states are saved in f32 or bf16");
  if (t.dtype == DType::f32) return model_.device.download({out, t});
  std::vector<uint16_t> narrow(static_cast<size_t>(count));
  model_.device.download({narrow.data(), t});
  std::transform(narrow.begin(), narrow.end(), out, bf16_to_f32);
}

void Learner::set_moment(Moment moment, int64_t begin, int64_t count, const TensorReader& read) {
  const Tensor& all = moment == Moment::m ? m_ : v_;
  expect(all.dtype != DType::f64, "optimizer states are saved in f32 or bf16");
  constexpr int64_t kPiece = 1 << 18;
  const int64_t skipped = std::max<int64_t>(0, trained_.own_begin() - begin);
  begin += skipped - trained_.own_begin();
  count = std::min(count - skipped, trained_.own() - begin);
  if (count <= 0) return;
  std::vector<float> host(static_cast<size_t>(std::min(count, kPiece)));
  std::vector<uint16_t> narrow(all.dtype == DType::bf16 ? host.size() : 0);
  for (int64_t first = 0, n = 0; first < count; first += n) {
    n = std::min(kPiece, count - first);
    read(skipped + first, n, host.data());
    if (!narrow.empty()) std::transform(host.begin(), host.begin() + n, narrow.begin(), f32_to_bf16);
    model_.device.upload(
        {all.rows(begin + first, n), narrow.empty() ? static_cast<void*>(host.data()) : narrow.data()});
    model_.device.wait();  // so that no more than this piece is under way
  }
}

std::vector<double> Learner::gradients() {
  begin_update();
  if (!sum_) add_head_gradient();
  return download_stat(model_.device, gradient());
}

}  // namespace pare
