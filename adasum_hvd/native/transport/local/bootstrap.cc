#include "transport/local/bootstrap.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace adasum_hvd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMostSilent = 128; // callers that have yet to say who they are, kept at a time
constexpr int kNoName = -1;

// The first words on a socket, with the sender's shared memory attached. The nonce went over Horovod's own
// network, so a stranger's process, or a rank of an earlier job, does not know it.
struct Hello {
  int nonce_of_receiver;
  int sender;
};

struct Stranger : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The kernel picks a free name in the abstract namespace: a zero byte and five hexadecimal digits.
Descriptor Listen(int backlog, int& name) {
  Descriptor socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof(sa_family_t);
  if (socket_.value() < 0 || bind(socket_.value(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(socket_.value(), backlog) != 0) {
    ThrowErrno("unix socket");
  }
  length = sizeof(address);
  if (getsockname(socket_.value(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    ThrowErrno("name of a unix socket");
  }
  const std::string digits(address.sun_path + 1, length - sizeof(sa_family_t) - 1);
  name = static_cast<int>(std::stoul(digits, nullptr, 16));
  return socket_;
}

ucred PeerOf(int socket_) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  if (getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    ThrowErrno("identity of a rank of this host");
  }
  return peer;
}

Descriptor ConnectTo(int name, int seconds) {
  Descriptor socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const int digits = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "%05x", name);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + digits);
  const timeval limit = {seconds, 0}; // a full queue of callers would block for ever
  if (socket_.value() < 0 ||
      setsockopt(socket_.value(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
    ThrowErrno("unix socket");
  }
  int connected;
  do {
    connected = connect(socket_.value(), reinterpret_cast<sockaddr*>(&address), length);
  } while (connected != 0 && errno == EINTR);
  if (connected != 0) {
    ThrowErrno("connection to a rank of this host");
  }
  if (PeerOf(socket_.value()).uid != geteuid()) {
    throw Stranger("another user's process answers for a rank of this host");
  }
  return socket_;
}

// Blocks until one of `watched` is readable.
void WaitReadable(std::vector<pollfd>& watched, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    const int ready = poll(watched.data(), watched.size(), static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready > 0) {
      return;
    }
    if (ready == 0) {
      errno = ETIMEDOUT;
    }
    if (errno != EINTR) {
      ThrowErrno("answer of a rank of this host");
    }
  }
}

// Takes what has come: returns the attached descriptor and the sender; throws when the words are not those of
// this job.
std::pair<Descriptor, int> ReceiveHello(int socket_, int my_nonce) {
  Hello hello = {};
  Descriptor descriptor;
  try {
    descriptor = ReceiveWithDescriptor(socket_, hello);
  } catch (const std::system_error&) {
    throw Stranger("a process that is not a rank of this job called");
  }
  if (hello.nonce_of_receiver != my_nonce) {
    throw Stranger("a process that is not a rank of this job called");
  }
  if (descriptor.value() < 0) {
    throw std::runtime_error("shared memory did not come along; see ulimit -n");
  }
  return {std::move(descriptor), hello.sender};
}

Descriptor WatchProcess(int process_id) {
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 // the same on x86-64 and arm64; older headers lack it
#endif
  return Descriptor(process_id > 0 ? static_cast<int>(syscall(SYS_pidfd_open, process_id, 0)) : -1);
}

// A descriptor of a caller; none where it hung up, or is another user's process.
Descriptor Accept(int listening) {
  Descriptor socket_(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket_.value() < 0 && errno != EINTR && errno != ECONNABORTED) {
    ThrowErrno("call of a rank of this host");
  }
  return socket_.value() < 0 || PeerOf(socket_.value()).uid == geteuid() ? std::move(socket_) : Descriptor();
}

// Calls `meet` with the socket of every caller that says something, until it has returned true `ranks` times.
// Anybody may call and stay silent; the ranks still come.
void MeetCallers(int listening, int ranks, Clock::time_point until,
                 const std::function<bool(Descriptor& caller)>& meet) {
  std::vector<Descriptor> silent;
  while (ranks > 0) {
    std::vector<pollfd> watched = {{listening, POLLIN, 0}};
    for (const Descriptor& caller : silent) {
      watched.push_back({caller.value(), POLLIN, 0});
    }
    WaitReadable(watched, until);
    for (size_t k = silent.size(); k-- > 0;) {
      if (watched[k + 1].revents != 0) {
        ranks -= meet(silent[k]) ? 1 : 0;
        silent.erase(silent.begin() + k);
      }
    }
    if (watched[0].revents != 0) {
      silent.push_back(Accept(listening));
    }
    if (!silent.empty() && (silent.back().value() < 0 || silent.size() > kMostSilent)) {
      silent.erase(silent.back().value() < 0 ? silent.end() - 1 : silent.begin());
    }
  }
}

void Join(LocalGroup& group, int listening, const std::vector<int>& names, const std::vector<int>& nonces) {
  const int size = static_cast<int>(names.size());
  const Clock::time_point until = Clock::now() + std::chrono::seconds(group.settings.handshake_seconds);
  auto keep = [&](int peer, Descriptor& socket_, const Descriptor& memory) {
    group.peers[peer].segment =
        std::make_unique<LocalSegment>(memory.value(), size, group.settings.ring_bytes);
    group.peers[peer].process_id = PeerOf(socket_.value()).pid;
    group.peers[peer].process = WatchProcess(group.peers[peer].process_id);
    group.peers[peer].socket = std::move(socket_);
  };
  // A connection is complete as soon as it waits in the listener's queue, so nobody blocks anybody.
  std::vector<Descriptor> called(group.rank);
  for (int peer = 0; peer < group.rank; ++peer) {
    called[peer] = ConnectTo(names[peer], group.settings.handshake_seconds);
    SendWithDescriptor(called[peer].value(), Hello{nonces[peer], group.rank}, group.mine->descriptor());
  }
  MeetCallers(listening, size - 1 - group.rank, until, [&](Descriptor& caller) {
    try {
      auto [memory, peer] = ReceiveHello(caller.value(), nonces[group.rank]);
      if (peer <= group.rank || peer >= size || group.peers[peer].segment != nullptr) {
        throw std::runtime_error("a rank of this host called twice");
      }
      SendWithDescriptor(caller.value(), Hello{nonces[peer], group.rank}, group.mine->descriptor());
      keep(peer, caller, memory);
      return true;
    } catch (const Stranger&) {
      return false;
    }
  });
  for (int peer = 0; peer < group.rank; ++peer) {
    std::vector<pollfd> watched = {{called[peer].value(), POLLIN, 0}};
    WaitReadable(watched, until);
    auto [memory, sender] = ReceiveHello(called[peer].value(), nonces[group.rank]);
    keep(peer, called[peer], memory);
  }
  group.mine->CloseDescriptor();
}

} // namespace

int64_t RingBytes(int ranks) {
  constexpr int64_t kGranule = 64, kAllRings = 64 << 20;
  const int64_t share = kAllRings / ranks / ranks / kGranule * kGranule;
  return std::clamp<int64_t>(share, 4 << 10, 256 << 10);
}

bool LocalGroup::Crowded() const {
  cpu_set_t together = {};
  for (int one = 0; one < static_cast<int>(peers.size()); ++one) {
    CPU_OR(&together, &together, &header(one).allowed);
    if (header(one).quota.processors < RanksUnder(header(one).quota)) {
      return true;
    }
  }
  return CPU_COUNT(&together) < static_cast<int>(peers.size());
}

int LocalGroup::RanksUnder(const ProcessorQuota& quota) const {
  int ranks = 0;
  for (int one = 0; one < static_cast<int>(peers.size()); ++one) {
    ranks += header(one).quota.group == quota.group ? 1 : 0;
  }
  return ranks;
}

std::unique_ptr<LocalGroup> ConnectLocalRanks(const std::vector<int>& members, int member,
                                              const std::vector<int>& global_ranks,
                                              const LocalSettings& settings, const AllgatherTwo& allgather,
                                              std::string& why_not) {
  auto group = std::make_unique<LocalGroup>();
  const int size = static_cast<int>(members.size());
  group->rank = member;
  group->peers.resize(size);
  group->global_ranks = global_ranks;
  group->settings = settings;
  group->shares = settings.mode == LocalMode::kAuto;
  group->settings.ring_bytes = settings.ring_bytes > 0 ? settings.ring_bytes : RingBytes(size);

  int name = kNoName;
  Descriptor listening;
  const int nonce = static_cast<int>(std::random_device()() & 0x7fffffff);
  try {
    group->mine = std::make_unique<LocalSegment>(size, group->settings.ring_bytes);
    listening = Listen(size, name);
  } catch (const std::exception& error) {
    why_not = error.what();
  }
  const std::vector<int> all = allgather(name, nonce);
  std::vector<int> names, nonces;
  for (int rank : members) {
    names.push_back(all[2 * rank]);
    nonces.push_back(all[2 * rank + 1]);
  }

  bool joined = std::find(names.begin(), names.end(), kNoName) == names.end();
  try {
    if (joined) {
      Join(*group, listening.value(), names, nonces);
      group->crowded = group->Crowded();
    }
  } catch (const std::exception& error) {
    joined = false;
    why_not = error.what();
  }
  const std::vector<int> outcomes = allgather(joined, 0);
  bool all_joined = true;
  for (size_t k = 0; k < outcomes.size(); k += 2) {
    all_joined = all_joined && outcomes[k] != 0;
  }
  if (!all_joined && why_not.empty()) {
    why_not = "another rank could not connect";
  }
  return all_joined ? std::move(group) : nullptr;
}

} // namespace adasum_hvd
