#include "host/local_transport.h"

#include <algorithm>
#include <stdexcept>

#include <sched.h>

#include "host/pause.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kPieceBytes = 64 << 10; // of a long message, so that both ranks copy at the same time
constexpr std::chrono::milliseconds kCheckPeriod{50}; // of whether the peers respond
constexpr std::chrono::milliseconds kShortSleep{1};   // if the caller has other work in the meantime
constexpr int kSpins = 2000;                          // checks of a peer: about 50 us, the cost of sleeping
constexpr int kYields = 16;                           // yields to other ranks before this one sleeps

} // namespace

LocalTransport::LocalTransport(std::shared_ptr<LocalGroup> group)
    : group_(std::move(group)), lanes_(group_->peers.size()), memory_(group_->peers.size()),
      heartbeats_(group_->peers.size()),
      // With fewer processors than ranks, spinning takes a processor from the rank that is awaited.
      spins_(group_->Crowded() ? 0 : kSpins / std::max(1, size() - 1)) {}

void LocalTransport::Start(const std::vector<Message>& messages) {
  if (aborted_) {
    throw UnresponsiveRank(*aborted_);
  }
  SpreadOverProcessors();
  const uint64_t exchange = first_open_ + open_parts_.size();
  open_parts_.push_back(0);
  auto add = [&](std::deque<Part>& parts, const void* at, int64_t bytes) {
    if (bytes > 0) {
      parts.push_back({static_cast<char*>(const_cast<void*>(at)), bytes, exchange, operation_, false});
      ++open_parts_.back();
    }
  };
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    add(lanes_[peer].incoming, messages[peer].receive, messages[peer].receive_bytes);
    add(lanes_[peer].outgoing, messages[peer].send, messages[peer].send_bytes);
    if (Send(peer)) {
      group_->peers[peer].segment->header().bell.Wake();
    }
  }
}

void LocalTransport::WaitAnd(const std::function<void()>& meanwhile) {
  if (aborted_) {
    throw UnresponsiveRank(*aborted_);
  }
  int spins = 0, yields = 0;
  Moved();
  while (open_parts_.front() > 0) {
    if (AdvanceAll()) {
      spins = yields = 0;
    } else if (spins < spins_) {
      ++spins;
      Pause();
    } else if (yields < kYields) {
      ++yields;
      sched_yield();
    } else {
      Sleep(meanwhile ? kShortSleep : kCheckPeriod);
      if (meanwhile) {
        meanwhile();
      }
    }
  }
  ShowAwaited(false);
  open_parts_.pop_front();
  ++first_open_;
}

bool LocalTransport::AdvanceAll() {
  bool moved = false;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    const bool sent = Send(peer), received = Receive(peer);
    if (sent || received) {
      group_->peers[peer].segment->header().bell.Wake();
      moved = true;
    }
  }
  if (moved) {
    Moved();
  }
  return moved;
}

void LocalTransport::Moved() {
  idle_.Reset();
  next_check_ = kCheckPeriod;
}

bool LocalTransport::SendTag(Ring& ring, Part& part) {
  const Tag tag = {part.operation, static_cast<uint64_t>(part.left)};
  if (ring.Space() < static_cast<int64_t>(sizeof tag)) {
    return false;
  }
  ring.Write(&tag, sizeof tag);
  part.tagged = true;
  return true;
}

bool LocalTransport::Send(int peer) {
  Lane& lane = lanes_[peer];
  Ring ring = group_->mine->ring(peer);
  bool moved = false;
  for (; !lane.outgoing.empty(); moved = true) {
    Part& part = lane.outgoing.front();
    if (!part.tagged && !SendTag(ring, part)) {
      break;
    }
    const int64_t bytes = std::min({ring.Space(), part.left, kPieceBytes});
    if (bytes == 0) {
      break;
    }
    ring.Write(part.at, bytes);
    part.at += bytes;
    part.left -= bytes;
    if (part.left == 0) {
      Finish(part.exchange);
      lane.outgoing.pop_front();
    }
  }
  return moved;
}

bool LocalTransport::ReceiveTag(int peer, Ring& ring, Part& part) {
  Tag tag;
  if (ring.Unread() < static_cast<int64_t>(sizeof tag)) {
    return false;
  }
  ring.Peek(&tag, sizeof tag);
  if (tag.operation != part.operation || tag.bytes != static_cast<uint64_t>(part.left)) {
    Fail(peer, "is in another reduction, or reduces tensors of other sizes");
  }
  ring.Skip(sizeof tag);
  part.tagged = true;
  return true;
}

bool LocalTransport::Receive(int peer) {
  Lane& lane = lanes_[peer];
  Ring ring = group_->peers[peer].segment->ring(rank());
  bool moved = false;
  for (; !lane.incoming.empty(); moved = true) {
    Part& part = lane.incoming.front();
    if (!part.tagged && !ReceiveTag(peer, ring, part)) {
      break;
    }
    const int64_t bytes = std::min({ring.Unread(), part.left, kPieceBytes});
    if (bytes == 0) {
      break;
    }
    ring.Peek(part.at, bytes);
    part.at += bytes;
    part.left -= bytes;
    if (part.left == 0) {
      Finish(part.exchange);
      lane.incoming.pop_front();
    }
    ring.Skip(bytes); // notifies the peer, which may then reuse its memory
  }
  return moved;
}

void LocalTransport::Offer(int peer, const std::shared_ptr<const SharedRegion>& region) {
  memory_[peer].Offer(group_->peers[peer].socket.value(), region);
}

MemorySpan LocalTransport::Reach(int peer, int64_t offset, int64_t bytes) {
  const LocalPeer& one = group_->peers[peer];
  return memory_[peer].Reach(one.socket.value(), one.file.value(), offset, bytes);
}

void LocalTransport::StopSharing(const std::string& why) {
  group_->shares = false;
  why_not_shared_ = why;
  memory_ = std::vector<PeerMemory>(group_->peers.size()); // frees their address space
}

void LocalTransport::Sleep(std::chrono::milliseconds most) {
  Bell& bell = group_->mine->header().bell;
  const uint32_t seen = bell.wakes.load(std::memory_order_seq_cst);
  bell.asleep.store(1, std::memory_order_seq_cst);
  const bool moved = AdvanceAll();
  if (!moved) {
    bell.SleepUnlessWoken(seen, most);
  }
  bell.asleep.store(0, std::memory_order_relaxed);
  SpreadOverProcessors();
  if (!moved && idle_.Elapsed() >= next_check_) {
    next_check_ = idle_.Elapsed() + kCheckPeriod;
    CheckPeers();
  }
}

} // namespace adasum_hvd
