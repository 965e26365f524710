// Connects the ranks of a host over unix sockets, and exchanges the descriptors of their shared memory.
//
// The kernel limits the number of a user's descriptors in unread messages to the number that one process may
// have open. So each rank calls only a few others at a time, reads messages before it sends more, and repeats
// later what the kernel refuses. No rank blocks another.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "host/bootstrap.h"

namespace adasum_hvd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kCallsAtOnce = 2;
constexpr size_t kMostUnidentified = 128; // callers that have not sent a hello, in addition to ranks
constexpr size_t kAcceptedAtOnce = kMostUnidentified; // so that no caller is dropped before it was read once
constexpr std::chrono::milliseconds kAgain{1};

// The first message on a socket, with the descriptors of the sender's shared memory. The nonce was sent over
// Horovod's own network, so an unknown peer, or a rank of an earlier job, does not know it.
struct Hello {
  int nonce_of_receiver;
  int sender;
};

struct UnknownPeer : std::runtime_error {
  UnknownPeer() : std::runtime_error("a process that is not a rank of this job called") {}
};

// The peer closed the connection before it sent a hello: a rank drops callers if it has too many.
struct Dropped {};

ucred PeerOf(int socket_) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  if (getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    ThrowErrno("identity of a rank of this host");
  }
  return peer;
}

// A connection is complete as soon as it is in the listener's queue. Returns none if the queue is full.
Descriptor ConnectTo(int name) {
  Descriptor socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const int digits = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "%05x", name);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + digits);
  if (socket_.value() < 0) {
    ThrowErrno("unix socket");
  }
  if (connect(socket_.value(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno == EAGAIN || errno == EINTR) {
      return Descriptor();
    }
    ThrowErrno("connection to a rank of this host");
  }
  if (PeerOf(socket_.value()).uid != geteuid()) {
    throw std::runtime_error("another user's process answers for a rank of this host");
  }
  return socket_;
}

// Whether a limit of the kernel refused the message; it may be sent later.
bool IsForLater(const std::system_error& error) {
  const int code = error.code().value();
  return code == EAGAIN || code == EWOULDBLOCK || code == ETOOMANYREFS || code == ENOBUFS;
}

bool IsClosed(const std::system_error& error) {
  const int code = error.code().value();
  return code == EPIPE || code == ECONNRESET;
}

// The id is 0 if the process is not visible in this rank's namespace.
Descriptor WatchProcess(int process_id) {
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 // the same on x86-64 and arm64; older headers lack it
#endif
  return Descriptor(process_id > 0 ? static_cast<int>(syscall(SYS_pidfd_open, process_id, 0)) : -1);
}

// Ranks that have failed already wait for this one, and that wait must not time out.
Clock::duration LimitOf(const LocalSettings& settings) {
  return std::min<Clock::duration>(std::chrono::seconds(settings.handshake_seconds),
                                   std::chrono::milliseconds(500) * settings.timeout_seconds);
}

class Handshake {
public:
  Handshake(LocalGroup& group, const std::vector<int>& names, const std::vector<int>& nonces)
      : group_(group), listening_(std::move(group.listening)), names_(names), nonces_(nonces),
        until_(Clock::now() + LimitOf(group.settings)), to_call_(group.rank),
        left_(static_cast<int>(names.size()) - 1) {
    std::iota(to_call_.begin(), to_call_.end(), 0);
  }

  // Each rank calls the ranks before it, the nearest first, so that not all call the same one.
  void Run() {
    while (left_ > 0) {
      refused_ = false;
      CallMore();
      if (!AdvanceAll()) {
        WaitForMore();
      }
    }
    group_.mine->CloseDescriptor();
  }

private:
  struct Call {
    Call(int whom, Descriptor connected) : peer(whom), socket(std::move(connected)) {}

    int peer; // -1: not identified yet
    Descriptor socket;
    bool sent = false;                          // this rank's own hello
    bool received = false;                      // the peer's
    std::array<Descriptor, kAttached> attached; // to the peer's hello
  };

  // Returns whether any call has completed, so that the next one can be made.
  bool AdvanceAll() {
    const int before = left_;
    for (size_t k = calls_.size(); k-- > 0;) {
      if (IsOver(calls_[k])) {
        calls_.erase(calls_.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
    return left_ < before;
  }

  void CallMore() {
    for (; !to_call_.empty() && outgoing_ < kCallsAtOnce; to_call_.pop_back(), ++outgoing_) {
      Descriptor socket_ = ConnectTo(names_[to_call_.back()]);
      if (socket_.value() < 0) {
        refused_ = true;
        return;
      }
      calls_.emplace_back(to_call_.back(), std::move(socket_));
    }
  }

  // Blocks until a socket is readable; for kAgain if the kernel has refused a message, or a rank has dropped
  // this one.
  void WaitForMore() {
    std::vector<pollfd> watched = {{listening_.value(), POLLIN, 0}};
    for (const Call& call : calls_) {
      watched.push_back({call.socket.value(), POLLIN, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until_ - Clock::now());
    if (left.count() <= 0) {
      errno = ETIMEDOUT;
      ThrowErrno("answer of a rank of this host");
    }
    const auto limit = refused_ ? kAgain : left;
    const int ready = poll(watched.data(), watched.size(), static_cast<int>(limit.count()));
    if (ready < 0 && errno != EINTR) {
      ThrowErrno("answer of a rank of this host");
    }
    if (ready > 0 && watched[0].revents != 0) {
      Accept();
    }
  }

  // Accepts all callers but other users' processes. Callers that never send a hello do not keep ranks out.
  void Accept() {
    for (size_t accepted = 0; accepted < kAcceptedAtOnce; ++accepted) {
      Descriptor socket_(accept4(listening_.value(), nullptr, nullptr, SOCK_CLOEXEC));
      if (socket_.value() < 0 && (errno == EINTR || errno == ECONNABORTED)) {
        continue;
      }
      if (socket_.value() < 0 && errno != EAGAIN) {
        ThrowErrno("call of a rank of this host");
      }
      if (socket_.value() < 0) {
        return;
      }
      if (PeerOf(socket_.value()).uid == geteuid()) {
        calls_.emplace_back(-1, std::move(socket_));
        DropUnidentifiedCaller();
      }
    }
  }

  // Drops the oldest one if there are too many. A rank that is dropped calls again.
  void DropUnidentifiedCaller() {
    const auto unidentified = [](const Call& call) { return call.peer < 0; };
    if (std::count_if(calls_.begin(), calls_.end(), unidentified) >
        static_cast<std::ptrdiff_t>(kMostUnidentified + names_.size())) {
      calls_.erase(std::find_if(calls_.begin(), calls_.end(), unidentified));
    }
  }

  bool IsOver(Call& call) {
    try {
      const bool goes_first = call.peer >= 0;
      if ((goes_first && !SendHello(call)) || !ReceiveHello(call) || !SendHello(call)) {
        return false;
      }
    } catch (const UnknownPeer&) {
      if (call.peer >= 0) {
        throw;
      }
      return true;
    } catch (const Dropped&) {
      if (call.peer >= 0) {
        to_call_.push_back(call.peer);
        --outgoing_;
        refused_ = true;
      }
      return true;
    }
    Keep(call);
    return true;
  }

  // Returns false if the kernel refuses it temporarily.
  bool SendHello(Call& call) {
    try {
      if (!call.sent) {
        Send(call.socket.value(), Hello{nonces_[call.peer], group_.rank},
             {group_.mine->descriptor(), group_.file == nullptr ? -1 : group_.file->descriptor()});
        call.sent = true;
      }
    } catch (const std::system_error& error) {
      if (IsClosed(error) && !call.received) {
        throw Dropped();
      }
      if (!IsForLater(error)) {
        throw;
      }
      refused_ = true;
    }
    return call.sent;
  }

  // Returns false if there is none yet. Throws Dropped if there will be none, UnknownPeer if it is not of
  // this job.
  bool ReceiveHello(Call& call) {
    if (call.received) {
      return true;
    }
    Hello hello = {};
    try {
      call.attached = Receive(call.socket.value(), hello);
    } catch (const std::system_error& error) {
      if (IsForLater(error)) {
        return false;
      }
      if (call.peer >= 0 && !IsClosed(error)) {
        throw;
      }
      throw Dropped();
    }
    if (hello.nonce_of_receiver != nonces_[group_.rank]) {
      throw UnknownPeer();
    }
    if (call.attached[0].value() < 0 || (group_.shares && call.attached[1].value() < 0)) {
      throw std::runtime_error("shared memory did not come along; see ulimit -n");
    }
    const int size = static_cast<int>(names_.size());
    if (call.peer < 0 && (hello.sender <= group_.rank || hello.sender >= size ||
                          group_.peers[hello.sender].segment != nullptr)) {
      throw std::runtime_error("a rank of this host called twice");
    }
    call.peer = hello.sender;
    return call.received = true;
  }

  void Keep(Call& call) {
    LocalPeer& peer = group_.peers[call.peer];
    peer.segment = std::make_unique<LocalSegment>(call.attached[0].value(), static_cast<int>(names_.size()),
                                                  group_.settings.ring_bytes);
    peer.process = WatchProcess(PeerOf(call.socket.value()).pid);
    peer.file = std::move(call.attached[1]);
    peer.socket = std::move(call.socket);
    outgoing_ -= call.peer < group_.rank ? 1 : 0;
    --left_;
  }

  LocalGroup& group_;
  const Descriptor listening_;
  const std::vector<int>& names_;
  const std::vector<int>& nonces_;
  const Clock::time_point until_;
  std::vector<int> to_call_; // the next one is the last
  int left_;                 // peers not connected yet
  int outgoing_ = 0;         // calls of this rank that have not completed
  bool refused_ = false;     // temporarily, by the kernel or a peer
  std::vector<Call> calls_;
};

} // namespace

// The kernel picks a free name in the abstract namespace: a zero byte and five hexadecimal digits.
Descriptor Listen(int backlog, int& name) {
  Descriptor socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
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

void ConnectPeers(LocalGroup& group, const std::vector<int>& names, const std::vector<int>& nonces) {
  Handshake(group, names, nonces).Run();
}

} // namespace adasum_hvd
