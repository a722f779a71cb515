// Stand-in for NCCL: ranks are processes of one machine, with a socket between each two.
//
// A group, or a call outside of one, is a piece of work on its stream, and as late as any.  Two ranks that name one
// another in a group first tell each other what they are about to do.  Where that does not fit, both report it and
// leave all others, so that nobody waits for ever: NCCL would hang, or take what is not meant for it.
//
// A device gets on while its host waits for other ranks, which here it does when the thread that made the communicator
// asks for errors.  Other threads are told only what NCCL itself would report.  A rank that dies is no mistake of a
// call: as with NCCL, work that it does not answer never ends, and an asynchronous error tells of it.
//
// It takes memory as NCCL does, 1/256 of that on an H100, and hosts that have to do with one another for the first time
// meet in ncclGroupEnd.
//
// Variables of the environment make what a test needs:
//   CUEMU_NCCL_FAULT=1:7      the network of rank 1 fails in its group 7, which never ends; 1:init, 1:destroy: that
//   call
//                             of rank 1 never returns
//   CUEMU_NCCL_VERSION=22105  of the library
//   CUEMU_NCCL_WITHOUT=NAME   it lacks this function
//   CUEMU_NCCL_DELAY=20       work begins as many milliseconds late, or fewer, at random
//   CUEMU_NCCL_PATIENCE=1     seconds until it reports a rank for which NCCL would wait for ever; 60
#include "runtime/nccl.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "check.h"

namespace cuemu {
namespace {

using std::string;

enum Kind : int32_t { kSend, kReceive, kBroadcast };

// A call, as the other rank is told of it.
struct Words {
  Kind kind;
  ncclDataType_t type;
  int32_t root;  // of broadcasts
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
string g_last_error;          // in words

ncclResult_t refuse(ncclResult_t result, const string& why) {
  g_last_error = why;
  return result;
}

// Is this the place at which CUEMU_NCCL_FAULT wants a fault of this rank?
bool fails_at(int rank, const string& place) {
  const char* const fault = std::getenv("CUEMU_NCCL_FAULT");
  return fault && fault == std::to_string(rank) + ":" + place;
}
[[noreturn]] void hang() {
  for (;;) pause();
}
int number(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

// Bytes of a device; on an H100 1 GB, 32 channels of 12 MiB, and 0.3 GB.
constexpr size_t kToBegin = 4 << 20, kPerPeer = 3 << 19, kForRings = 5 << 18;
constexpr size_t kLong = 64 << 10;  // of a piece for which it matters that NCCL moves 16 bytes at a time

// An open group would be waited for by the others.
struct AtExit {
  ~AtExit() {
    if (g_depth == 0) return;
    std::fprintf(stderr, "cuemu: the program ends within a group of NCCL calls\n");
    _exit(EXIT_FAILURE);
  }
} at_exit;

}  // namespace
}  // namespace cuemu

struct ncclComm {
  ncclComm(int rank, int ranks) : rank(rank), ranks(ranks), sockets(static_cast<size_t>(ranks), -1) {}
  const int rank, ranks;
  int device = 0;
  std::vector<int> sockets;  // by rank; -1: its own
  std::vector<void*> memory;
  std::vector<bool> met = std::vector<bool>(static_cast<size_t>(ranks));  // by rank: in a group with it
  bool rings = false;
  std::thread::id owner = std::this_thread::get_id();
  int64_t groups = 0;
  ncclResult_t state = ncclSuccess;                 // of the calls, as only the stand-in knows it
  std::atomic<ncclResult_t> network = ncclSuccess;  // as NCCL's own threads report it
  // Others learn that nothing more comes.  The sockets stay open, by which they know that this rank lives.
  void leave() const {
    for (const int s : sockets)
      if (s >= 0) shutdown(s, SHUT_WR);
  }
  void close_all() {
    for (int& s : sockets)
      if (s >= 0) close(std::exchange(s, -1));
  }
  bool take(size_t bytes) { return cudaMalloc(&memory.emplace_back(), bytes) == cudaSuccess; }
  void give_back() {
    for (void* p : std::exchange(memory, {})) cudaFree(p);
  }
};

namespace cuemu {
namespace {

struct Gone {  // has left in order, or after a mistake
  int rank;
};
struct Dead {
  int rank;
};
struct Late {
  int rank;
};
constexpr uint64_t kMeet = ~uint64_t{1};  // before the first number of calls: the host of the rank is in a group, too
constexpr uint64_t kBye = ~uint64_t{0};   // in place of the number of calls: the rank destroys its communicator

// Was the other end of a socket from which nothing more comes closed by the end of its process?
bool is_closed(int socket) {
  pollfd p{socket, 0, 0};
  return poll(&p, 1, 0) > 0 && (p.revents & POLLHUP);
}

// Bytes to a rank and from it, at the same time as those of others.
struct Talk {
  int rank;
  const char* out;
  size_t out_left;
  char* in;
  size_t in_left;
};
void talk(const ncclComm& comm, std::vector<Talk> all, int patience = -1) {
  for (const auto begin = std::chrono::steady_clock::now();;) {
    std::vector<pollfd> waits;
    for (const Talk& t : all)
      if (t.out_left || t.in_left)
        waits.push_back({comm.sockets[static_cast<size_t>(t.rank)],
                         static_cast<short>((t.out_left ? POLLOUT : 0) | (t.in_left ? POLLIN : 0)), 0});
    if (waits.empty()) return;
    poll(waits.data(), waits.size(), patience < 0 ? -1 : 100);
    for (const Talk& t : all)
      if (patience >= 0 && t.in_left && std::chrono::steady_clock::now() - begin > std::chrono::seconds(patience))
        throw Late{t.rank};
    for (Talk& t : all) {
      const int s = comm.sockets[static_cast<size_t>(t.rank)];
      const auto moved = [&](ssize_t n, size_t& left) {
        const bool ended = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
        if (ended && is_closed(s)) throw Dead{t.rank};
        if (ended) throw Gone{t.rank};
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
    const auto ours = of(own, kBroadcast), theirs = of(other, kBroadcast);
    for (size_t i = 0; i < std::max(ours.size(), theirs.size()); i++) {
      const auto call = [&](const std::vector<Words>& words) {
        return "broadcasts " +
               (i < words.size() ? words[i].of() + " of rank " + std::to_string(words[i].root) : "nothing more");
      };
      if (i >= ours.size() || i >= theirs.size() || !(ours[i] == theirs[i]))
        return "it " + call(ours) + " where " + name + " " + call(theirs);
    }
    return "";
  }
};

// ---- a group

// The work of a device that never ends.  The host, which waits for it, is not told: a thread of NCCL finds the reason.
[[noreturn]] void stand_still(ncclComm& comm, ncclResult_t reason, const string& why) {
  std::thread([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    g_last_error = why;
    comm.network = reason;
  }).detach();
  hang();
}

void run(ncclComm& comm, const std::vector<Call>& calls) {
  if (g_error || comm.state) return;
  comm.groups++;
  if (const auto delay = static_cast<uint64_t>(number("CUEMU_NCCL_DELAY", 0)); delay > 0) {
    const uint64_t drawn =
        (static_cast<uint64_t>(comm.groups) * 31 + static_cast<uint64_t>(comm.rank)) * 0x9e3779b97f4a7c15;
    usleep(static_cast<useconds_t>((drawn >> 32) % (1000 * delay)));
  }
  if (fails_at(comm.rank, std::to_string(comm.groups)))
    stand_still(comm, ncclSystemError, "the network of rank " + std::to_string(comm.rank) + " failed");
  const auto fails = [&](ncclResult_t state, const string& what) {
    comm.state = state;
    comm.leave();
    g_last_error = "NCCL: group " + std::to_string(comm.groups) + " of rank " + std::to_string(comm.rank) + ": " + what;
    set_failed(g_last_error);
  };
  std::vector<Plan> plans;
  for (int q = 0; q < comm.ranks; q++) {
    Plan p{.rank = q, .calls = {}, .own = {}, .other = {}};
    for (const Call& c : calls)
      if (c.kind == kBroadcast || c.peer == q) {
        p.calls.push_back(c);
        p.own.push_back(c);
      }
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
      if (sizes[2 * i + 1] == kBye) throw Gone{p.rank};
      p.other.resize(sizes[2 * i + 1]);
      talks.push_back({p.rank, reinterpret_cast<const char*>(p.own.data()), p.own.size() * sizeof(Words),
                       reinterpret_cast<char*>(p.other.data()), p.other.size() * sizeof(Words)});
    }
    talk(comm, std::exchange(talks, {}));
    for (const Plan& p : plans)
      if (const string fault = p.fault(); !fault.empty()) return fails(ncclInvalidUsage, fault);

    // Each call in turn: what is to be sent in one group may not be what is received in it.
    for (const Kind kind : {kSend, kBroadcast}) {
      std::vector<std::vector<char>> out(static_cast<size_t>(comm.ranks)), in(out);
      for (const Call& c : calls) {
        const auto send = [&](std::vector<char>& to) { to.insert(to.end(), c.from, c.from + c.bytes()); };
        if (c.kind == kind && kind == kSend) send(out[static_cast<size_t>(c.peer)]);
        for (size_t q = 0; q < out.size() && c.kind == kind && kind == kBroadcast && c.root == comm.rank; q++)
          send(out[q]);
        const auto expect = [&](int q) {
          if (q != comm.rank) in[static_cast<size_t>(q)].resize(in[static_cast<size_t>(q)].size() + c.bytes());
        };
        if (kind == kSend && c.kind == kReceive) expect(c.peer);
        if (kind == kBroadcast && c.kind == kBroadcast) expect(c.root);
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
        } else if (kind == kBroadcast && c.kind == kBroadcast) {
          std::memcpy(c.to, next(c.root, c), c.bytes());
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
          what += (c.kind == kSend ? " receive " : c.kind == kReceive ? " send " : " take part in ") + c.of();
    fails(ncclRemoteError, what);
  } catch (const Dead& dead) {
    stand_still(comm, ncclRemoteError, "rank " + std::to_string(dead.rank) + " has died");
  }
}

// ---- calls, by the host

// All words of 8 bytes that others send in answer to `word`; their ranks.
std::vector<uint64_t> exchange_words(const ncclComm& comm, const std::vector<int>& peers, uint64_t word) {
  std::vector<uint64_t> words(peers.size());
  std::vector<Talk> talks;
  for (size_t i = 0; i < peers.size(); i++)
    talks.push_back(
        {peers[i], reinterpret_cast<const char*>(&word), sizeof word, reinterpret_cast<char*>(&words[i]), sizeof word});
  talk(comm, std::move(talks), number("CUEMU_NCCL_PATIENCE", 60));
  return words;
}

// NCCL connects two ranks when they first have to do with one another, in which their hosts wait for each other.
ncclResult_t meet(ncclComm& comm, const std::vector<Call>& calls) {
  std::vector<int> peers;
  bool all = false;
  size_t bytes = 0;
  for (const Call& c : calls) all = all || c.kind == kBroadcast;
  for (int q = 0; q < comm.ranks; q++) {
    const bool named = std::any_of(calls.begin(), calls.end(), [&](const Call& c) { return c.peer == q; });
    if (q == comm.rank || comm.met[static_cast<size_t>(q)] || !(all || named)) continue;
    peers.push_back(q);
    bytes += named ? kPerPeer : 0;
  }
  if (all && !std::exchange(comm.rings, true)) bytes += kForRings;
  if (bytes > 0 && !comm.take(bytes))
    return refuse(ncclUnhandledCudaError, "connecting the ranks: " + std::to_string(bytes) + " bytes of the device");
  const auto fails = [&](int rank, const char* what) {
    comm.state = ncclInternalError;
    return refuse(ncclInternalError, "ncclGroupEnd: rank " + std::to_string(rank) + what);
  };
  try {
    const std::vector<uint64_t> words = exchange_words(comm, peers, kMeet);
    for (size_t i = 0; i < peers.size(); i++) {
      if (words[i] != kMeet) return fails(peers[i], " has left");
      comm.met[static_cast<size_t>(peers[i])] = true;
    }
  } catch (const Late& late) {
    return fails(late.rank, " is in no group with this one, for which NCCL waits as they connect");
  } catch (const Gone& gone) {
    return fails(gone.rank, " has left");
  } catch (const Dead& dead) {
    return fails(dead.rank, " has died");
  }
  return ncclSuccess;
}

ncclResult_t queue_group(const Group& g) {
  if (const ncclResult_t result = g.comm->state ? ncclSuccess : meet(*g.comm, g.calls)) return result;
  // The communicator lives until all of its work is done, or is told that it is aborted.
  queue(g.stream, [comm = g.comm, calls = g.calls] { run(*comm, calls); });
  return ncclSuccess;
}

ncclResult_t add_call(ncclComm_t comm, cudaStream_t stream, const Call& c) {
  const string name = std::array{"ncclSend", "ncclRecv", "ncclBroadcast"}[c.kind];
  const int peer = c.kind == kBroadcast ? c.root : c.peer;
  if (!comm) return refuse(ncclInvalidArgument, name + ": no communicator");
  if (peer < 0 || peer >= comm->ranks)
    return refuse(ncclInvalidArgument, name + ": there is no rank " + std::to_string(peer));
  if (c.peer == comm->rank) return refuse(ncclInvalidArgument, name + ": what a rank sends to itself is not emulated");
  if (c.type != ncclInt8 && c.type != ncclFloat32 && c.type != ncclBfloat16)
    return refuse(ncclInvalidArgument, name + ": a type that is not emulated");
  int device = 0;
  cudaGetDevice(&device);
  if (device != comm->device)
    return refuse(ncclInvalidUsage, name + ": the device is " + std::to_string(device) + ", the communicator's is " +
                                        std::to_string(comm->device));
  const bool is_root = c.root == comm->rank;
  const bool reads = c.kind == kBroadcast ? is_root : c.kind != kReceive, writes = c.kind != kSend;
  if ((reads && !in_device_memory(c.from, c.bytes())) || (writes && !in_device_memory(c.to, c.bytes())))
    return refuse(ncclInvalidArgument, name + " of " + c.of() + ": memory that is not the device's");
  const auto is_odd = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  if (c.bytes() >= kLong && ((reads && is_odd(c.from)) || (writes && is_odd(c.to))))
    return refuse(ncclInvalidUsage,
                  name + " of " + c.of() + ": it begins at no multiple of 16 bytes, and NCCL moves it byte by byte");
  auto g = std::find_if(g_groups.begin(), g_groups.end(), [&](const Group& x) { return x.comm == comm; });
  if (g == g_groups.end()) g = g_groups.insert(g, {comm, stream, {}});
  if (g->stream != stream) return refuse(ncclInvalidUsage, name + ": another stream than before in its group");
  g->calls.push_back(c);
  return g_depth == 0 ? queue_group(std::exchange(g_groups, {})[0]) : ncclSuccess;
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
  int rank, ranks, device, node;
};

}  // namespace
}  // namespace cuemu

ncclResult_t ncclGetVersion(int* version) {
  *version = cuemu::number("CUEMU_NCCL_VERSION", 22105);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown error";
  }
}
const char* ncclGetLastError(ncclComm_t) { return cuemu::g_last_error.c_str(); }

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
  if (cuemu::fails_at(rank, "init")) cuemu::hang();
  auto made = std::make_unique<ncclComm>(rank, ranks);
  Hello own{rank, ranks, 0, rank / cuemu::number("PARE_NODE_RANKS", ranks)};
  cudaGetDevice(&own.device);
  made->device = own.device;
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
    made->sockets[static_cast<size_t>(other.rank)] = s;
    all[static_cast<size_t>(other.rank)] = other;
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
  int version = 0;
  ncclGetVersion(&version);
  const bool shares = version >= 23000 && cuemu::number("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1;
  for (size_t a = 0; a < all.size() && fine; a++)
    for (size_t b = 0; b < a; b++)
      if (all[a].ranks != ranks || (!shares && all[a].device == all[b].device && all[a].node == all[b].node)) {
        made->close_all();
        return cuemu::refuse(ncclInvalidUsage, "ncclCommInitRank: ranks " + std::to_string(b) + " and " +
                                                   std::to_string(a) + " are on device " +
                                                   std::to_string(all[b].device) + ", or count other ranks");
      }
  if (!fine) {
    made->close_all();
    return ncclSystemError;
  }
  if (!made->take(cuemu::kToBegin))
    return cuemu::refuse(ncclUnhandledCudaError, "ncclCommInitRank: the device has no memory left");
  *comm = made.release();
  return cuemu::number("NCCL_COMM_BLOCKING", 1) == 0 ? ncclInProgress : ncclSuccess;
}

// All ranks meet.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  using cuemu::kBye;
  if (cuemu::fails_at(comm->rank, "destroy")) cuemu::hang();
  cuemu::finish_all();
  if (comm->state) return ncclCommAbort(comm);
  if (cuemu::g_depth > 0) return cuemu::refuse(ncclInvalidUsage, "ncclCommDestroy: a group is open");
  std::vector<int> others;
  for (int q = 0; q < comm->ranks; q++)
    if (q != comm->rank) others.push_back(q);
  const auto missing = [](int rank) {
    return cuemu::refuse(ncclRemoteError, "ncclCommDestroy: rank " + std::to_string(rank) + " does not call it");
  };
  try {
    const std::vector<uint64_t> words = cuemu::exchange_words(*comm, others, kBye);
    for (size_t i = 0; i < others.size(); i++)
      if (words[i] != kBye) return missing(others[i]);
  } catch (const cuemu::Late& late) {
    return missing(late.rank);
  } catch (const cuemu::Gone& gone) {
    return missing(gone.rank);
  } catch (const cuemu::Dead& dead) {
    return missing(dead.rank);
  }
  comm->give_back();
  comm->close_all();
  delete comm;
  return ncclSuccess;
}
// Queued work no longer does anything.  The sockets stay open, so that other ranks do not notice.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->state = ncclInvalidUsage;
  cuemu::finish_all();
  comm->give_back();
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  *result = comm->network;
  if (comm->owner != std::this_thread::get_id()) return ncclSuccess;
  cuemu::finish_all();
  *result = comm->state ? comm->state : comm->network.load();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  cuemu::g_depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (cuemu::g_depth == 0) return cuemu::refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--cuemu::g_depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (const cuemu::Group& g : std::exchange(cuemu::g_groups, {}))
    if (const ncclResult_t r = cuemu::queue_group(g)) result = r;
  return result;
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                      cudaStream_t stream) {
  return cuemu::add_call(comm, stream, {{cuemu::kSend, type, 0, count}, to, static_cast<const char*>(from), nullptr});
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
  return cuemu::add_call(comm, stream, {{cuemu::kReceive, type, 0, count}, from, nullptr, static_cast<char*>(to)});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return cuemu::add_call(
      comm, stream,
      {{cuemu::kBroadcast, type, root, count}, -1, static_cast<const char*>(from), static_cast<char*>(to)});
}

void* cuemu_nccl_symbol(const char* name) {
  const char* const without = std::getenv("CUEMU_NCCL_WITHOUT");
  if (without && std::string(without) == name) return nullptr;
#define X(f) \
  if (!std::strcmp(name, #f)) return reinterpret_cast<void*>(f);
  X(ncclGetVersion)
  X(ncclGetErrorString)
  X(ncclGetLastError)
  X(ncclGetUniqueId)
  X(ncclCommInitRank)
  X(ncclCommDestroy)
  X(ncclCommAbort)
  X(ncclCommGetAsyncError)
  X(ncclGroupStart)
  X(ncclGroupEnd)
  X(ncclSend)
  X(ncclRecv)
  X(ncclBroadcast)
#undef X
  return nullptr;
}
