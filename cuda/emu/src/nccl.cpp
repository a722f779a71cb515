// Stand-in for NCCL: ranks are processes of one machine, with a socket between each two.
//
// A group, or a call outside of one, is a piece of work on its stream, and as late as any.  Two ranks that name one
// another in a group first tell each other what they are about to do.  Where that does not fit, both report it and
// leave all others, so that nobody waits for ever: NCCL would hang, or take what is not meant for it.
//
// Sums go around the ring as NCCL's do: the part of a root is begun by the rank behind it and ended by the root, each
// sum rounded to the type.
//
// A device gets on while its host waits for other ranks, which here it does when it is asked for errors.
#include "nccl.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "base/half.h"
#include "check.h"

namespace cuemu {
namespace {

using std::string;

enum Kind : int32_t { kSend, kReceive, kReduce };

// A call, as the other rank is told of it.
struct Words {
  Kind kind;
  ncclDataType_t type;
  int32_t root;  // of sums
  uint64_t count;
  bool operator==(const Words&) const = default;
  string of() const {
    const char* name = type == ncclInt8 ? "i8[" : type == ncclFloat32 ? "f32[" : "bf16[";
    return name + std::to_string(count) + "]";
  }
};
struct Call : Words {
  int peer;  // of sends and receives
  const char* from;
  char* to;
  size_t bytes() const { return count * (type == ncclInt8 ? 1 : type == ncclFloat32 ? 4 : 2); }
};

struct Group {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<Call> calls;
};
int g_depth = 0;
std::vector<Group> g_groups;  // of the group that is open, by communicator
string g_refused;             // why the last call was

ncclResult_t refuse(ncclResult_t result, const string& why) {
  g_refused = why;
  return result;
}

}  // namespace
}  // namespace cuemu

struct ncclComm {
  int rank, ranks;
  std::vector<int> sockets;  // by rank; -1: its own
  int64_t groups = 0;
  ncclResult_t state = ncclSuccess;
  void leave() {
    for (int& s : sockets)
      if (s >= 0) close(std::exchange(s, -1));
  }
};

namespace cuemu {
namespace {

struct Gone {
  int rank;
};

// Bytes to a rank and from it, at the same time as those of others.
struct Talk {
  int rank;
  const char* out;
  size_t out_left;
  char* in;
  size_t in_left;
};
void talk(const ncclComm& comm, std::vector<Talk> all) {
  for (;;) {
    std::vector<pollfd> waits;
    for (const Talk& t : all)
      if (t.out_left || t.in_left)
        waits.push_back({comm.sockets[static_cast<size_t>(t.rank)],
                         static_cast<short>((t.out_left ? POLLOUT : 0) | (t.in_left ? POLLIN : 0)), 0});
    if (waits.empty()) return;
    poll(waits.data(), waits.size(), -1);
    for (Talk& t : all) {
      const int s = comm.sockets[static_cast<size_t>(t.rank)];
      const auto moved = [&](ssize_t n, size_t& left) {
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) throw Gone{t.rank};
        left -= static_cast<size_t>(std::max<ssize_t>(n, 0));
        return std::max<ssize_t>(n, 0);
      };
      if (t.in_left) t.in += moved(recv(s, t.in, t.in_left, MSG_DONTWAIT), t.in_left);
      if (t.out_left) t.out += moved(send(s, t.out, t.out_left, MSG_DONTWAIT | MSG_NOSIGNAL), t.out_left);
    }
  }
}

// ---- what two ranks are about to do with one another

struct Plan {
  int rank = 0;
  std::vector<Call> calls;
  std::vector<Words> own, other;
  std::vector<Words> of(const std::vector<Words>& words, Kind kind) const {
    std::vector<Words> some;
    std::copy_if(words.begin(), words.end(), std::back_inserter(some), [&](const Words& w) { return w.kind == kind; });
    return some;
  }

  // "" if it fits.
  string fault() const {
    const auto name = "rank " + std::to_string(rank);
    const auto list = [](const std::vector<Words>& words, size_t i, const char* verb) {
      return i < words.size() ? verb + words[i].of() : verb + string("nothing more");
    };
    for (const bool sends : {true, false}) {
      const auto ours = of(own, sends ? kSend : kReceive), theirs = of(other, sends ? kReceive : kSend);
      for (size_t i = 0; i < std::max(ours.size(), theirs.size()); i++) {
        if (i < ours.size() && i < theirs.size() && ours[i].type == theirs[i].type && ours[i].count == theirs[i].count)
          continue;
        string text =
            sends ? "it " + list(ours, i, "sends ") + " to " + name + ", which " + list(theirs, i, "receives ")
                  : "it " + list(ours, i, "receives ") + " from " + name + ", which " + list(theirs, i, "sends ");
        if (!of(own, kSend).empty() && !of(other, kSend).empty() && of(own, kReceive).empty() &&
            of(other, kReceive).empty())
          text += ": each waits for the other to receive, a send and its receive belong in one group";
        return text;
      }
    }
    const auto ours = of(own, kReduce), theirs = of(other, kReduce);
    for (size_t i = 0; i < std::max(ours.size(), theirs.size()); i++) {
      const auto sum = [&](const std::vector<Words>& words) {
        return i < words.size() ? "adds " + words[i].of() + " for rank " + std::to_string(words[i].root)
                                : string("adds nothing more");
      };
      if (i >= ours.size() || i >= theirs.size() || !(ours[i] == theirs[i]))
        return "it " + sum(ours) + " where " + name + " " + sum(theirs);
    }
    return "";
  }
};

// ---- a group

void add(char* sum, const char* term, const Call& c) {
  for (uint64_t i = 0; i < c.count; i++)
    if (c.type == ncclFloat32) {
      float x, y;
      std::memcpy(&x, sum + 4 * i, 4), std::memcpy(&y, term + 4 * i, 4);
      x += y;
      std::memcpy(sum + 4 * i, &x, 4);
    } else {
      uint16_t x, y;
      std::memcpy(&x, sum + 2 * i, 2), std::memcpy(&y, term + 2 * i, 2);
      x = pare::f32_to_bf16(pare::bf16_to_f32(x) + pare::bf16_to_f32(y));
      std::memcpy(sum + 2 * i, &x, 2);
    }
}

void run(ncclComm& comm, const std::vector<Call>& calls) {
  if (g_error || comm.state) return;
  comm.groups++;
  const auto fails = [&](ncclResult_t state, const string& what) {
    comm.state = state;
    comm.leave();
    set_failed("NCCL: group " + std::to_string(comm.groups) + " of rank " + std::to_string(comm.rank) + ": " + what);
  };
  std::vector<Plan> plans;
  for (int q = 0; q < comm.ranks; q++) {
    Plan p{.rank = q, .calls = {}, .own = {}, .other = {}};
    for (const Call& c : calls)
      if (c.kind == kReduce || c.peer == q) p.calls.push_back(c), p.own.push_back(c);
    if (q != comm.rank && !p.calls.empty()) plans.push_back(std::move(p));
  }
  try {
    std::vector<uint64_t> sizes(2 * plans.size());
    std::vector<Talk> talks;
    for (size_t i = 0; i < plans.size(); i++) {
      sizes[2 * i] = plans[i].own.size();
      talks.push_back({plans[i].rank, reinterpret_cast<const char*>(&sizes[2 * i]), sizeof sizes[0],
                       reinterpret_cast<char*>(&sizes[2 * i + 1]), sizeof sizes[0]});
    }
    talk(comm, std::exchange(talks, {}));
    for (size_t i = 0; i < plans.size(); i++) {
      Plan& p = plans[i];
      p.other.resize(sizes[2 * i + 1]);
      talks.push_back({p.rank, reinterpret_cast<const char*>(p.own.data()), p.own.size() * sizeof(Words),
                       reinterpret_cast<char*>(p.other.data()), p.other.size() * sizeof(Words)});
    }
    talk(comm, std::exchange(talks, {}));
    for (const Plan& p : plans)
      if (const string fault = p.fault(); !fault.empty()) return fails(ncclInvalidUsage, fault);

    // Each call in turn: what is to be sent in one group may not be what is received in it.
    const auto peer = [&](const Call& c) { return c.kind == kReduce ? c.root : c.peer; };
    for (const Kind kind : {kSend, kReduce}) {
      std::vector<std::vector<char>> out(static_cast<size_t>(comm.ranks)), in(out);
      for (const Call& c : calls) {
        auto& to = out[static_cast<size_t>(peer(c))];
        if (c.kind == kind) to.insert(to.end(), c.from, c.from + c.bytes());
        const auto expect = [&](int q) {
          if (q != comm.rank) in[static_cast<size_t>(q)].resize(in[static_cast<size_t>(q)].size() + c.bytes());
        };
        if (kind == kSend && c.kind == kReceive) expect(c.peer);
        if (kind == kReduce && c.kind == kReduce && c.root == comm.rank)
          for (int q = 0; q < comm.ranks; q++) expect(q);
      }
      for (int q = 0; q < comm.ranks; q++) {
        auto &to = out[static_cast<size_t>(q)], &from = in[static_cast<size_t>(q)];
        if (q == comm.rank)
          from = to;
        else if (!to.empty() || !from.empty())
          talks.push_back({q, to.data(), to.size(), from.data(), from.size()});
      }
      talk(comm, std::exchange(talks, {}));
      std::vector<size_t> at(in.size());
      const auto next = [&](int q, const Call& c) {
        const char* const bytes = in[static_cast<size_t>(q)].data() + at[static_cast<size_t>(q)];
        at[static_cast<size_t>(q)] += c.bytes();
        return bytes;
      };
      for (const Call& c : calls) {
        if (kind == kSend && c.kind == kReceive) {
          std::memcpy(c.to, next(c.peer, c), c.bytes());
        } else if (kind == kReduce && c.kind == kReduce && c.root == comm.rank) {
          std::vector<char> sum;
          for (int k = 1; k <= comm.ranks; k++) {
            const char* const term = next((comm.rank + k) % comm.ranks, c);
            k == 1 ? void(sum.assign(term, term + c.bytes())) : add(sum.data(), term, c);
          }
          std::memcpy(c.to, sum.data(), sum.size());
        } else {
          continue;
        }
        check::host_wrote(c.to, c.bytes());
      }
    }
  } catch (const Gone& gone) {
    string what = "rank " + std::to_string(gone.rank) + " has left, which is expected to";
    for (const Plan& p : plans)
      for (const Call& c : p.calls)
        if (p.rank == gone.rank)
          what += (c.kind == kSend ? " receive " : c.kind == kReceive ? " send " : " add ") + c.of();
    fails(ncclRemoteError, what);
  }
}

void queue_group(const Group& g) {
  // The communicator lives until all of its work is done, or is told that it is aborted.
  queue(g.stream, [comm = g.comm, calls = g.calls] { run(*comm, calls); });
}

ncclResult_t add_call(ncclComm_t comm, cudaStream_t stream, const Call& c) {
  const char* const name = c.kind == kSend ? "ncclSend" : c.kind == kReceive ? "ncclRecv" : "ncclReduce";
  const int peer = c.kind == kReduce ? c.root : c.peer;
  if (!comm) return refuse(ncclInvalidArgument, string(name) + ": no communicator");
  if (peer < 0 || peer >= comm->ranks)
    return refuse(ncclInvalidArgument, string(name) + ": there is no rank " + std::to_string(peer));
  if (c.peer == comm->rank)
    return refuse(ncclInvalidArgument, string(name) + ": what a rank sends to itself is not emulated");
  if (c.type != ncclInt8 && c.type != ncclFloat32 && c.type != ncclBfloat16)
    return refuse(ncclInvalidArgument, string(name) + ": a type that is not emulated");
  const bool writes = c.kind == kReceive || (c.kind == kReduce && c.root == comm->rank);
  if ((c.kind != kReceive && !in_device_memory(c.from, c.bytes())) || (writes && !in_device_memory(c.to, c.bytes())))
    return refuse(ncclInvalidArgument, string(name) + " of " + c.of() + ": memory that is not the device's");
  auto g = std::find_if(g_groups.begin(), g_groups.end(), [&](const Group& x) { return x.comm == comm; });
  if (g == g_groups.end()) g = g_groups.insert(g, {comm, stream, {}});
  if (g->stream != stream) return refuse(ncclInvalidUsage, string(name) + ": another stream than before in its group");
  g->calls.push_back(c);
  if (g_depth == 0) queue_group(g_groups[0]), g_groups.clear();
  return ncclSuccess;
}

// ---- sockets, by names that no file has

sockaddr_un address(const ncclUniqueId& id, int rank, socklen_t& bytes) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  std::snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "cuemu-nccl-%.32s-%d", id.internal, rank);
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(a.sun_path + 1));
  return a;
}

struct Hello {
  int rank, ranks, device;
};

}  // namespace
}  // namespace cuemu

ncclResult_t ncclGetVersion(int* version) {
  *version = 22105;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return cuemu::g_error ? cuemu::last_report().c_str() : cuemu::g_refused.c_str();
    case ncclRemoteError:
      return cuemu::last_report().c_str();
    case ncclSystemError:
      return "unhandled system error";
    default:
      return "unknown error";
  }
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) return ncclSystemError;
  *id = {};
  for (size_t i = 0; i < sizeof bytes; i++) std::snprintf(id->internal + 2 * i, 3, "%02x", bytes[i]);
  return ncclSuccess;
}

// Of two ranks the later calls the earlier.
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  using cuemu::Hello;
  if (rank < 0 || rank >= ranks)
    return cuemu::refuse(ncclInvalidArgument,
                         "ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  auto made = std::make_unique<ncclComm>(ncclComm{.rank = rank, .ranks = ranks, .sockets = {}});
  made->sockets.assign(static_cast<size_t>(ranks), -1);
  Hello own{rank, ranks, 0};
  cudaGetDevice(&own.device);
  socklen_t bytes = 0;
  const sockaddr_un here = cuemu::address(id, rank, bytes);
  const int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (door < 0 || bind(door, reinterpret_cast<const sockaddr*>(&here), bytes) || listen(door, ranks)) {
    close(door);
    return ncclSystemError;
  }
  std::vector<Hello> all(static_cast<size_t>(ranks), own);
  const auto greet = [&](int s) {
    Hello other{};
    if (send(s, &own, sizeof own, MSG_NOSIGNAL) != sizeof own ||
        recv(s, &other, sizeof other, MSG_WAITALL) != sizeof other || other.rank < 0 || other.rank >= ranks)
      return false;
    made->sockets[static_cast<size_t>(other.rank)] = s, all[static_cast<size_t>(other.rank)] = other;
    return true;
  };
  bool fine = true;
  for (int r = 0; r < rank && fine; r++) {
    const sockaddr_un there = cuemu::address(id, r, bytes);
    const int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(s, reinterpret_cast<const sockaddr*>(&there), bytes)) usleep(1000);  // until it listens
    fine = greet(s);
  }
  for (int r = rank + 1; r < ranks && fine; r++) fine = greet(accept4(door, nullptr, nullptr, SOCK_CLOEXEC));
  close(door);
  for (size_t a = 0; a < all.size() && fine; a++)
    for (size_t b = 0; b < a; b++)
      if (all[a].ranks != ranks || all[a].device == all[b].device) {
        made->leave();
        return cuemu::refuse(ncclInvalidUsage, "ncclCommInitRank: ranks " + std::to_string(b) + " and " +
                                                   std::to_string(a) + " are on device " +
                                                   std::to_string(all[b].device) + ", or count other ranks");
      }
  if (!fine) {
    made->leave();
    return ncclSystemError;
  }
  *comm = made.release();
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  cuemu::finish_all();
  comm->leave();
  delete comm;
  return ncclSuccess;
}
// What is queued does nothing any more.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->state = ncclInvalidUsage;
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  cuemu::finish_all();
  *result = comm->state;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  cuemu::g_depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (cuemu::g_depth == 0) return cuemu::refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--cuemu::g_depth > 0) return ncclSuccess;
  for (const cuemu::Group& g : std::exchange(cuemu::g_groups, {})) cuemu::queue_group(g);
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                      cudaStream_t stream) {
  return cuemu::add_call(comm, stream, {{cuemu::kSend, type, 0, count}, to, static_cast<const char*>(from), nullptr});
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
  return cuemu::add_call(comm, stream, {{cuemu::kReceive, type, 0, count}, from, nullptr, static_cast<char*>(to)});
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return cuemu::add_call(
      comm, stream, {{cuemu::kReduce, type, root, count}, -1, static_cast<const char*>(from), static_cast<char*>(to)});
}
