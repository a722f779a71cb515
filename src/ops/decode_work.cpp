#include "ops/decode_work.h"

#include <algorithm>

#include "ops/inputs.h"
#include "ops/paged.h"

namespace pare {

std::vector<PagedPiece> paged_work(std::span<const PagedRow> entries, std::span<const int64_t> reads) {
  struct Piece : PagedPiece {
    int64_t slots;
  };
  std::vector<Piece> pieces;
  for (size_t i = 0; i < entries.size(); i++) {
    if (entries[i].rows > 1) continue;
    const auto entry = static_cast<int32_t>(i);
    const int64_t slots = entries[i].slots;
    if (reads[i] < slots) {
      pieces.push_back({{entry, 0}, reads[i]});
      continue;
    }
    for (int32_t cut = 0; cut < paged_cuts(slots); cut++)
      pieces.push_back({{entry, cut}, std::min(kAttnCut, slots - cut * kAttnCut)});
  }
  std::ranges::stable_sort(pieces, std::greater(), &Piece::slots);
  return {pieces.begin(), pieces.end()};
}

DecodeWork::DecodeWork(Inputs& inputs, int64_t layers, std::span<const PagedRow> entries,
                       std::span<const int64_t> reads)
    : ends_{0} {
  const size_t runs = entries.size() / static_cast<size_t>(layers);
  std::vector<PagedPiece> work;
  size_t most = 0;
  for (const PagedRow& e : entries)
    if (e.rows == 1) most += static_cast<size_t>(paged_cuts(e.slots));
  for (size_t first = 0; first < entries.size(); first += runs) {
    const auto pieces = paged_work(entries.subspan(first, runs), reads.subspan(first, runs));
    work.insert(work.end(), pieces.begin(), pieces.end());
    ends_.push_back(std::ssize(work));
  }
  work.resize(most);
  static_assert(sizeof(PagedPiece) == 2 * sizeof(int32_t));
  all_ = inputs.add("kv.work", {std::ssize(work), 2}, work.empty() ? nullptr : &work[0].entry);
}

}  // namespace pare
