#ifdef CUEMU_CHECK

#include "profile.h"

#include <algorithm>
#include <map>

#include "symbols.h"

namespace cuemu {
namespace profile {
namespace {

// The n-th execution of an instruction by each lane of a warp, since the lanes last met: taken for one access of the
// warp.
struct Request {
  uint32_t lanes = 0;
  uintptr_t address[kWarp];
};
struct Key {
  uint32_t place;
  unsigned bytes;
  bool write, shared;
  auto operator<=>(const Key&) const = default;
};
struct Pending {
  unsigned count[kWarp] = {};  // executions by each lane
  std::vector<Request> requests;
};
std::map<Key, Pending> g_pending[32 * kMostBlocks];  // per warp
std::map<Key, ProfileLine> g_lines;

// How many units of so many bytes the lanes touch.
template <class F>
size_t distinct(const Request& r, unsigned first, unsigned lanes, F units) {
  std::vector<uintptr_t> all;
  for (unsigned l = first; l < first + lanes; l++)
    if (r.lanes >> l & 1) units(r.address[l], all);
  std::sort(all.begin(), all.end());
  return static_cast<size_t>(std::unique(all.begin(), all.end()) - all.begin());
}

void count_global(ProfileLine& line, const Request& r, unsigned bytes) {
  line.used += distinct(r, 0, kWarp, [&](uintptr_t a, std::vector<uintptr_t>& out) {
    for (uintptr_t s = a / 32; s <= (a + bytes - 1) / 32; s++) out.push_back(s);
  });
  const size_t addresses = distinct(r, 0, kWarp, [](uintptr_t a, std::vector<uintptr_t>& out) { out.push_back(a); });
  line.ideal += (addresses * bytes + 31) / 32;
}

// Accesses of up to 4 bytes are served for the whole warp at once, of 8 by halves, of 16 by quarters; a wavefront takes
// one word from each of 32 banks.
void count_shared(ProfileLine& line, const Request& r, unsigned bytes) {
  const unsigned lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  for (unsigned first = 0; first < kWarp; first += lanes) {
    std::vector<uintptr_t> words;
    for (unsigned l = first; l < first + lanes; l++)
      if (r.lanes >> l & 1)
        for (uintptr_t w = r.address[l] / 4; w <= (r.address[l] + bytes - 1) / 4; w++) words.push_back(w);
    if (words.empty()) continue;
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    unsigned bank[32] = {}, most = 0;
    for (uintptr_t w : words) most = std::max(most, ++bank[w % 32]);
    line.used += most;
    line.ideal++;
  }
}

}  // namespace

void launch_begin() { g_lines.clear(); }

void access(uint32_t place, const void* p, size_t bytes, bool write, bool shared, unsigned thread) {
  if (!settings().profile) return;
  uintptr_t address = reinterpret_cast<uintptr_t>(p);
  if (const Block* b = shared ? g_cluster.holder(p) : nullptr) address -= reinterpret_cast<uintptr_t>(b->smem);
  Pending& x = g_pending[thread / kWarp][{place, static_cast<unsigned>(bytes), write, shared}];
  const unsigned lane = thread % kWarp, n = x.count[lane]++;
  if (n >= x.requests.size()) x.requests.resize(n + 1);
  x.requests[n].lanes |= 1u << lane;
  x.requests[n].address[lane] = address;
}

void meet(unsigned warp) {
  for (const auto& [key, pending] : g_pending[warp]) {
    ProfileLine& line = g_lines[key];
    line.write = key.write;
    line.shared = key.shared;
    for (const Request& r : pending.requests) {
      line.requests++;
      line.bytes += static_cast<uint64_t>(__builtin_popcount(r.lanes)) * key.bytes;
      key.shared ? count_shared(line, r, key.bytes) : count_global(line, r, key.bytes);
    }
  }
  g_pending[warp].clear();
}

}  // namespace profile

std::vector<ProfileLine> profile_lines() {
  std::vector<ProfileLine> all;
  for (const auto& [key, line] : profile::g_lines) {
    all.push_back(line);
    all.back().place = place_name(key.place);
  }
  return all;
}

}  // namespace cuemu

#else

#include "cuemu.h"

std::vector<cuemu::ProfileLine> cuemu::profile_lines() { return {}; }

#endif
