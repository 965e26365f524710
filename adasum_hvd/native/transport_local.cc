#include "transport_local.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace adasum_hvd {
namespace {

constexpr int64_t kDirectBytes = 16 << 10; // longer messages are read from the sender's memory
constexpr int64_t kPieceBytes = 64 << 10;  // of a long message, so that both sides copy at the same time
constexpr int kSleepMilliseconds = 50;     // between two looks at whether the peers live
constexpr int kSpins = 2000;               // some 50 us, about what a sleep and a wake-up cost

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spinning only takes a processor from the rank that is waited for when there are fewer than ranks.
int SpinsFor(int ranks) {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) >= ranks ? kSpins : 0;
}

void CopyIntoRing(char* ring, int64_t capacity, uint64_t position, const char* from, int64_t bytes) {
  const int64_t offset = static_cast<int64_t>(position % capacity);
  const int64_t first = std::min(bytes, capacity - offset);
  std::memcpy(ring + offset, from, first);
  std::memcpy(ring, from + first, bytes - first);
}

void CopyOutOfRing(const char* ring, int64_t capacity, uint64_t position, char* to, int64_t bytes) {
  const int64_t offset = static_cast<int64_t>(position % capacity);
  const int64_t first = std::min(bytes, capacity - offset);
  std::memcpy(to, ring + offset, first);
  std::memcpy(to + first, ring, bytes - first);
}

} // namespace

LocalTransport::LocalTransport(std::unique_ptr<LocalGroup> group)
    : group_(std::move(group)), lanes_(group_->peers.size()), spins_(SpinsFor(size())) {}

void LocalTransport::Start(const std::vector<Message>& messages) {
  if (!broken_.empty()) {
    throw std::runtime_error(broken_);
  }
  const uint64_t exchange = first_open_ + open_parts_.size();
  open_parts_.push_back(0);
  auto add = [&](std::deque<Part>& parts, const void* at, int64_t bytes) {
    if (bytes > 0) {
      const bool direct = group_->direct && bytes > kDirectBytes;
      parts.push_back({static_cast<char*>(const_cast<void*>(at)), bytes, direct, exchange});
      ++open_parts_.back();
    }
  };
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    add(lanes_[peer].incoming, messages[peer].receive, messages[peer].receive_bytes);
    add(lanes_[peer].outgoing, messages[peer].send, messages[peer].send_bytes);
    if (Send(peer)) {
      group_->peers[peer].segment->header().bell.Ring();
    }
  }
}

void LocalTransport::Wait() {
  if (!broken_.empty()) {
    throw std::runtime_error(broken_);
  }
  int spins = 0;
  while (open_parts_.front() > 0) {
    if (AdvanceAll()) {
      idle_milliseconds_ = 0;
      spins = 0;
    } else if (spins < spins_) {
      ++spins;
      Pause();
    } else {
      Sleep();
    }
  }
  open_parts_.pop_front();
  ++first_open_;
}

bool LocalTransport::AdvanceAll() {
  bool moved = false;
  for (int step = 1; step < size(); ++step) {
    moved = Advance((rank() + step) % size()) || moved;
  }
  return moved;
}

bool LocalTransport::Advance(int peer) {
  const bool noted = NoteReads(peer);
  const bool sent = Send(peer);
  const bool received = Receive(peer);
  if (sent || received) {
    group_->peers[peer].segment->header().bell.Ring();
  }
  return noted || sent || received;
}

bool LocalTransport::Send(int peer) {
  Lane& lane = lanes_[peer];
  RingPositions& positions = group_->mine->positions(peer);
  char* ring = group_->mine->ring(peer);
  bool moved = false;
  while (!lane.outgoing.empty()) {
    Part& part = lane.outgoing.front();
    const uint64_t written = positions.written.load(std::memory_order_relaxed);
    const uint64_t unread = written - positions.read.load(std::memory_order_acquire);
    const int64_t space = group_->ring_bytes - static_cast<int64_t>(unread);
    int64_t bytes = std::min({space, part.left, kPieceBytes});
    if (part.direct) {
      const auto address = reinterpret_cast<uint64_t>(part.at);
      bytes = sizeof address;
      if (space < bytes) {
        break;
      }
      CopyIntoRing(ring, group_->ring_bytes, written, reinterpret_cast<const char*>(&address), bytes);
      lane.unread.push_back({written + bytes, part.exchange});
      lane.outgoing.pop_front();
    } else if (bytes == 0) {
      break;
    } else {
      CopyIntoRing(ring, group_->ring_bytes, written, part.at, bytes);
      part.at += bytes;
      part.left -= bytes;
      if (part.left == 0) {
        Finish(part.exchange);
        lane.outgoing.pop_front();
      }
    }
    positions.written.store(written + bytes, std::memory_order_release);
    moved = true;
  }
  return moved;
}

bool LocalTransport::NoteReads(int peer) {
  Lane& lane = lanes_[peer];
  const uint64_t read = group_->mine->positions(peer).read.load(std::memory_order_acquire);
  bool noted = false;
  while (!lane.unread.empty() && lane.unread.front().position <= read) {
    Finish(lane.unread.front().exchange);
    lane.unread.pop_front();
    noted = true;
  }
  return noted;
}

bool LocalTransport::Receive(int peer) {
  Lane& lane = lanes_[peer];
  LocalSegment& segment = *group_->peers[peer].segment;
  RingPositions& positions = segment.positions(rank());
  const char* ring = segment.ring(rank());
  bool moved = false;
  while (!lane.incoming.empty()) {
    Part& part = lane.incoming.front();
    const uint64_t read = positions.read.load(std::memory_order_relaxed);
    const auto here = static_cast<int64_t>(positions.written.load(std::memory_order_acquire) - read);
    int64_t bytes = std::min({here, part.left, kPieceBytes});
    if (part.direct) {
      uint64_t address;
      bytes = sizeof address;
      if (here < bytes) {
        break;
      }
      CopyOutOfRing(ring, group_->ring_bytes, read, reinterpret_cast<char*>(&address), bytes);
      ReadMemoryOf(peer, part, address);
      part.left = 0;
    } else if (bytes == 0) {
      break;
    } else {
      CopyOutOfRing(ring, group_->ring_bytes, read, part.at, bytes);
      part.at += bytes;
      part.left -= bytes;
    }
    if (part.left == 0) {
      Finish(part.exchange);
      lane.incoming.pop_front();
    }
    positions.read.store(read + bytes, std::memory_order_release);
    moved = true;
  }
  return moved;
}

void LocalTransport::ReadMemoryOf(int peer, const Part& part, uint64_t address) {
  const auto process_id = static_cast<pid_t>(group_->peers[peer].segment->header().process_id);
  for (int64_t done = 0; done < part.left;) {
    iovec here = {part.at + done, static_cast<size_t>(part.left - done)};
    iovec there = {reinterpret_cast<void*>(address + done), static_cast<size_t>(part.left - done)};
    const ssize_t bytes = process_vm_readv(process_id, &here, 1, &there, 1, 0);
    if (bytes <= 0) {
      Fail(peer, std::string("its memory cannot be read: ") + std::strerror(errno));
    }
    done += bytes;
  }
}

void LocalTransport::Sleep() {
  Bell& bell = group_->mine->header().bell;
  const uint32_t seen = bell.rings.load(std::memory_order_seq_cst);
  bell.asleep.store(1, std::memory_order_seq_cst);
  const bool moved = AdvanceAll();
  if (!moved) {
    bell.SleepUnlessRung(seen, kSleepMilliseconds);
  }
  bell.asleep.store(0, std::memory_order_relaxed);
  if (moved || bell.rings.load(std::memory_order_relaxed) != seen) {
    return;
  }
  idle_milliseconds_ += kSleepMilliseconds;
  for (int peer = 0; peer < size(); ++peer) {
    const Lane& lane = lanes_[peer];
    if (lane.incoming.empty() && lane.outgoing.empty() && lane.unread.empty()) {
      continue;
    }
    pollfd watched[] = {{group_->peers[peer].socket.value(), POLLIN, 0},
                        {group_->peers[peer].process.value(), POLLIN, 0}};
    // What a peer wrote before it ended is still taken; it cannot be when this rank found nothing to do.
    if (poll(watched, 2, 0) > 0 && !AdvanceAll()) {
      Fail(peer, "the process has ended");
    }
    if (idle_milliseconds_ >= 1000 * group_->timeout_seconds) {
      Fail(peer, "nothing came from it for " + std::to_string(group_->timeout_seconds) +
                     " s (ADASUM_HVD_TIMEOUT_SECONDS); see what it does");
    }
  }
}

void LocalTransport::Fail(int peer, const std::string& what) {
  broken_ = "AdaSum: required every rank of this host to take part, got none of rank " +
            std::to_string(group_->global_ranks[peer]) + " on rank " +
            std::to_string(group_->global_ranks[rank()]) + ": " + what;
  for (LocalPeer& one : group_->peers) { // the others learn of it at once
    if (one.socket.value() >= 0) {
      shutdown(one.socket.value(), SHUT_RDWR);
    }
  }
  throw std::runtime_error(broken_);
}

} // namespace adasum_hvd
