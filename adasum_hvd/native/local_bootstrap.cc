#include "local_bootstrap.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

namespace adasum_hvd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kCaller{5}; // a caller that says nothing is not waited for longer
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

void WaitReadable(int socket_, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd waiting = {socket_, POLLIN, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::max<int64_t>(left, 0)));
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

void SendHello(int socket_, const Hello& hello, int descriptor) {
  iovec part = {const_cast<Hello*>(&hello), sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* attached = CMSG_FIRSTHDR(&message);
  attached->cmsg_level = SOL_SOCKET;
  attached->cmsg_type = SCM_RIGHTS;
  attached->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(attached), &descriptor, sizeof(int));
  if (sendmsg(socket_, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello)) {
    ThrowErrno("sending shared memory to a rank of this host");
  }
}

// Returns the attached descriptor and the sender; throws when the words are not those of this job.
std::pair<Descriptor, int> ReceiveHello(int socket_, int my_nonce, Clock::time_point until) {
  WaitReadable(socket_, until);
  Hello hello = {};
  iovec part = {&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof(int)); // room for one descriptor, not two
  ssize_t received;
  do {
    received = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  Descriptor descriptor;
  for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
    if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) {
      int value;
      std::memcpy(&value, CMSG_DATA(one), sizeof value);
      descriptor = Descriptor(value);
    }
  }
  if (received != static_cast<ssize_t>(sizeof hello) || hello.nonce_of_receiver != my_nonce ||
      PeerOf(socket_).uid != geteuid()) {
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

// The random number tells the peer from a process of the same id in another namespace.
bool MayRead(const LocalPeer& peer) {
  uint64_t found = 0;
  const SegmentHeader& header = peer.segment->header();
  iovec here = {&found, sizeof found};
  iovec there = {reinterpret_cast<void*>(header.probe_address), sizeof found};
  return peer.process_id > 0 &&
         process_vm_readv(peer.process_id, &here, 1, &there, 1, 0) == static_cast<ssize_t>(sizeof found) &&
         found == header.probe_value;
}

void Join(LocalGroup& group, int listening, const std::vector<int>& names, const std::vector<int>& nonces) {
  const int size = static_cast<int>(names.size());
  const Clock::time_point until = Clock::now() + std::chrono::seconds(group.handshake_seconds);
  auto keep = [&](int peer, Descriptor socket_, Descriptor memory) {
    group.peers[peer].segment = std::make_unique<LocalSegment>(memory.Release(), size, group.ring_bytes);
    group.peers[peer].process_id = PeerOf(socket_.value()).pid;
    group.peers[peer].process = WatchProcess(group.peers[peer].process_id);
    group.peers[peer].socket = std::move(socket_);
  };
  // A connection is complete as soon as it waits in the listener's queue, so nobody blocks anybody.
  std::vector<Descriptor> called(group.rank);
  for (int peer = 0; peer < group.rank; ++peer) {
    called[peer] = ConnectTo(names[peer], group.handshake_seconds);
    SendHello(called[peer].value(), {nonces[peer], group.rank}, group.mine->descriptor());
  }
  for (int callers = group.rank + 1; callers < size;) {
    WaitReadable(listening, until);
    Descriptor socket_(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
    if (socket_.value() < 0) {
      if (errno == EINTR || errno == ECONNABORTED) {
        continue;
      }
      ThrowErrno("call of a rank of this host");
    }
    try {
      auto [memory, peer] =
          ReceiveHello(socket_.value(), nonces[group.rank], std::min(until, Clock::now() + kCaller));
      if (peer <= group.rank || peer >= size || group.peers[peer].segment != nullptr) {
        throw std::runtime_error("a rank of this host called twice");
      }
      SendHello(socket_.value(), {nonces[peer], group.rank}, group.mine->descriptor());
      keep(peer, std::move(socket_), std::move(memory));
      ++callers;
    } catch (const Stranger&) { // anybody may call; the ranks still come
    }
  }
  for (int peer = 0; peer < group.rank; ++peer) {
    auto [memory, sender] = ReceiveHello(called[peer].value(), nonces[group.rank], until);
    keep(peer, std::move(called[peer]), std::move(memory));
  }
  group.mine->CloseDescriptor();
}

} // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

Descriptor::~Descriptor() {
  if (value_ >= 0) {
    close(value_);
  }
}

int Descriptor::Release() {
  const int value = value_;
  value_ = -1;
  return value;
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
  group->ring_bytes = settings.ring_bytes;
  group->timeout_seconds = settings.timeout_seconds;
  group->handshake_seconds = settings.handshake_seconds;

  int name = kNoName;
  Descriptor listening;
  const int nonce = static_cast<int>(std::random_device()() & 0x7fffffff);
  try {
    group->mine = std::make_unique<LocalSegment>(size, settings.ring_bytes);
    listening = Listen(size, name);
    if (settings.mode != LocalMode::kStaged) {
      // Where the kernel lets only parents read (Yama), allow this user's processes.
      prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    }
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
  bool readable = settings.mode != LocalMode::kStaged;
  try {
    if (joined) {
      Join(*group, listening.value(), names, nonces);
      group->crowded = group->Crowded();
      readable = readable && (settings.mode == LocalMode::kDirect || group->crowded);
      for (int peer = 0; peer < size; ++peer) {
        readable = readable && (peer == member || MayRead(group->peers[peer]));
      }
    }
  } catch (const std::exception& error) {
    joined = false;
    why_not = error.what();
  }
  const std::vector<int> outcomes = allgather(joined, readable);
  bool all_joined = true;
  group->direct = true;
  for (size_t rank = 0; rank < outcomes.size() / 2; ++rank) {
    all_joined = all_joined && outcomes[2 * rank] != 0;
    group->direct = group->direct && outcomes[2 * rank + 1] != 0;
  }
  if (all_joined && (group->direct || settings.mode != LocalMode::kDirect)) {
    return group;
  }
  if (why_not.empty()) {
    why_not = all_joined ? "a rank may not read the memory of another" : "another rank could not connect";
  }
  return nullptr;
}

} // namespace adasum_hvd
