#include "transport/local/transport.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "transport/local/pause.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kDirectBytes = 16 << 10;     // longer messages are read from the sender's memory
constexpr int64_t kPieceBytes = 64 << 10;      // of a long message, so that both sides copy at the same time
constexpr std::chrono::milliseconds kLook{50}; // between two looks at whether the peers live
constexpr int kSpins = 2000;                   // looks at a peer: some 50 us, about what sleeping costs
constexpr int kYields = 16;                    // then as many turns for other ranks before it sleeps

} // namespace

LocalTransport::LocalTransport(std::shared_ptr<LocalGroup> group)
    : group_(std::move(group)), lanes_(group_->peers.size()), beats_(group_->peers.size()),
      // Spinning only takes a processor from the rank that is waited for when they have to take turns.
      spins_(group_->crowded ? 0 : kSpins / std::max(1, size() - 1)) {}

double LocalTransport::ShareOfProcessors() const {
  const SegmentHeader& mine = group_->header(rank());
  double share = 0;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &mine.allowed)) {
      int users = 0;
      for (int one = 0; one < size(); ++one) {
        users += CPU_ISSET(processor, &group_->header(one).allowed) ? 1 : 0;
      }
      share += 1.0 / users;
    }
  }
  share = std::min(share, mine.quota.processors / group_->RanksUnder(mine.quota));
  return share + 1e-9; // a third three times is one
}

void LocalTransport::Start(const std::vector<Message>& messages) {
  if (!broken_.empty()) {
    throw SilentRank(blamed_, broken_);
  }
  KeepApart();
  const uint64_t exchange = first_open_ + open_parts_.size();
  open_parts_.push_back(0);
  auto add = [&](std::deque<Part>& parts, const void* at, int64_t bytes) {
    if (bytes > 0) {
      const bool direct = group_->direct && bytes > kDirectBytes;
      parts.push_back(
          {static_cast<char*>(const_cast<void*>(at)), bytes, direct, exchange, operation_, false});
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

void LocalTransport::Wait() {
  if (!broken_.empty()) {
    throw SilentRank(blamed_, broken_);
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
      Sleep();
    }
  }
  ShowWhomIAwait(false);
  open_parts_.pop_front();
  ++first_open_;
}

bool LocalTransport::AdvanceAll() {
  bool moved = false;
  for (int step = 1; step < size(); ++step) {
    moved = Advance((rank() + step) % size()) || moved;
  }
  if (moved) {
    Moved();
  }
  return moved;
}

void LocalTransport::Moved() {
  idle_.Moved();
  next_look_ = kLook;
}

bool LocalTransport::Advance(int peer) {
  const bool noted = NoteReads(peer);
  const bool sent = Send(peer);
  const bool received = Receive(peer);
  if (sent || received) {
    group_->peers[peer].segment->header().bell.Wake();
  }
  return noted || sent || received;
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
    if (part.direct) {
      const auto address = reinterpret_cast<uint64_t>(part.at);
      if (ring.Space() < static_cast<int64_t>(sizeof address)) {
        break;
      }
      lane.unread.push_back({ring.written() + sizeof address, part.exchange});
      lane.outgoing.pop_front();
      ring.Write(&address, sizeof address);
      continue;
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

bool LocalTransport::NoteReads(int peer) {
  Lane& lane = lanes_[peer];
  const uint64_t read = group_->mine->ring(peer).read();
  bool noted = false;
  while (!lane.unread.empty() && lane.unread.front().position <= read) {
    Finish(lane.unread.front().exchange);
    lane.unread.pop_front();
    noted = true;
  }
  return noted;
}

bool LocalTransport::ReceiveTag(int peer, Ring& ring, Part& part) {
  Tag tag;
  if (ring.Unread() < static_cast<int64_t>(sizeof tag)) {
    return false;
  }
  ring.Peek(&tag, sizeof tag);
  if (tag.operation != part.operation || tag.bytes != static_cast<uint64_t>(part.left)) {
    Fail(peer, "it is in another reduction, or reduces tensors of other sizes");
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
    uint64_t address;
    int64_t bytes = part.direct ? sizeof address : std::min(part.left, kPieceBytes);
    if (part.direct && ring.Unread() < bytes) {
      break;
    }
    bytes = std::min(bytes, ring.Unread());
    if (bytes == 0) {
      break;
    }
    if (part.direct) {
      ring.Peek(&address, bytes);
      ReadMemoryOf(peer, part, address);
      part.left = 0;
    } else {
      ring.Peek(part.at, bytes);
      part.at += bytes;
      part.left -= bytes;
    }
    if (part.left == 0) {
      Finish(part.exchange);
      lane.incoming.pop_front();
    }
    ring.Skip(bytes); // tells the peer, which may then reuse its memory
  }
  return moved;
}

void LocalTransport::ReadMemoryOf(int peer, const Part& part, uint64_t address) {
  for (int64_t done = 0; done < part.left;) {
    iovec here = {part.at + done, static_cast<size_t>(part.left - done)};
    iovec there = {reinterpret_cast<void*>(address + done), static_cast<size_t>(part.left - done)};
    const ssize_t bytes = process_vm_readv(group_->peers[peer].process_id, &here, 1, &there, 1, 0);
    if (bytes == 0) {
      Fail(peer, "its memory cannot be read: nothing came");
    }
    if (bytes < 0) {
      const char* remedy = errno == EFAULT ? "; ADASUM_HVD_LOCAL=staged does without" : "";
      Fail(peer, std::string("its memory cannot be read: ") + std::strerror(errno) + remedy);
    }
    done += bytes;
  }
  // A peer that stopped meanwhile may have used its memory for something else.
  CheckStopped(peer);
}

void LocalTransport::CheckStopped(int peer) {
  const int stopped = group_->peers[peer].segment->header().gave_up.load();
  if (stopped != 0) {
    FailForRank(stopped - 1,
                stopped - 1 == group_->global_ranks[peer]
                    ? "a reduction failed there"
                    : "rank " + std::to_string(group_->global_ranks[peer]) + " has given up on it");
  }
}

// A rank that wakes another draws it to its own processor, and the two then take turns there for a second
// while the next processor is idle (Linux 6.18, as many ranks as processors: twice the time). A rank that is
// beside more lower ranks than its share moves to the emptiest processor it may use. It is not bound there.
void LocalTransport::KeepApart() {
  const auto processor = [this](int one) -> std::atomic<int32_t>& { return group_->header(one).processor; };
  const int here = sched_getcpu();
  processor(rank()).store(here, std::memory_order_relaxed);
  if (here < 0 || here >= CPU_SETSIZE) { // not to be had, or more processors than a cpu_set_t has
    return;
  }
  int lower = 0;
  for (int peer = 0; peer < rank(); ++peer) {
    lower += processor(peer).load(std::memory_order_relaxed) == here ? 1 : 0;
  }
  cpu_set_t allowed;
  if (lower == 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
      lower < (size() + CPU_COUNT(&allowed) - 1) / CPU_COUNT(&allowed)) {
    return;
  }
  std::array<int, CPU_SETSIZE> ranks_on = {};
  for (int peer = 0; peer < size(); ++peer) {
    const int32_t there = processor(peer).load(std::memory_order_relaxed);
    if (there >= 0 && there < CPU_SETSIZE) {
      ++ranks_on[there];
    }
  }
  int emptiest = here;
  for (int one = 0; one < CPU_SETSIZE; ++one) {
    if (CPU_ISSET(one, &allowed) && ranks_on[one] < ranks_on[emptiest]) {
      emptiest = one;
    }
  }
  cpu_set_t target;
  CPU_ZERO(&target);
  CPU_SET(emptiest, &target);
  if (sched_setaffinity(0, sizeof target, &target) == 0) {
    processor(rank()).store(emptiest, std::memory_order_relaxed);
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
}

void LocalTransport::Sleep() {
  Bell& bell = group_->mine->header().bell;
  const uint32_t seen = bell.wakes.load(std::memory_order_seq_cst);
  bell.asleep.store(1, std::memory_order_seq_cst);
  const bool moved = AdvanceAll();
  if (!moved) {
    bell.SleepUnlessWoken(seen, kLook);
  }
  bell.asleep.store(0, std::memory_order_relaxed);
  KeepApart();
  if (!moved && idle_.Elapsed() >= next_look_) {
    next_look_ = idle_.Elapsed() + kLook;
    CheckPeers();
  }
}

// Whether the oldest exchange still needs that rank.
bool LocalTransport::IsDue(int peer) const {
  const auto due = [this](const auto& parts) {
    return !parts.empty() && parts.front().exchange == first_open_;
  };
  const Lane& lane = lanes_[peer];
  return due(lane.incoming) || due(lane.outgoing) || due(lane.unread);
}

void LocalTransport::ShowWhomIAwait(bool show) {
  if (!show && !shown_) {
    return;
  }
  for (int peer = 0; peer < size(); ++peer) {
    group_->mine->awaits(peer).store(show && IsDue(peer), std::memory_order_relaxed);
    if (show && !shown_) {
      beats_[peer] = group_->header(peer).beats.load(std::memory_order_relaxed);
    }
  }
  shown_ = show;
}

// Throws when a peer that this rank waits for has stopped, has ended or is silent for too long.
void LocalTransport::CheckPeers() {
  ShowWhomIAwait(true);
  for (int peer = 0; peer < size(); ++peer) {
    if (!IsDue(peer)) {
      continue;
    }
    CheckStopped(peer);
    pollfd watched[] = {{group_->peers[peer].socket.value(), POLLIN, 0},
                        {group_->peers[peer].process.value(), POLLIN, 0}};
    // What a peer wrote before it ended is still taken; it cannot be when this rank found nothing to do.
    if (poll(watched, 2, 0) > 0 && !AdvanceAll()) {
      CheckStopped(peer);
      Fail(peer, "the process has ended");
    }
  }
  if (idle_.Elapsed() >= std::chrono::seconds(group_->timeout_seconds)) {
    FailForSilence();
  }
}

// Names a rank whose process does not run, or the end of a chain of ranks that wait for one another.
void LocalTransport::FailForSilence() {
  const std::string seconds = std::to_string(group_->timeout_seconds) + " s (ADASUM_HVD_TIMEOUT_SECONDS)";
  std::vector<int> chain;
  for (int peer = 0; peer < size(); ++peer) {
    const uint32_t beats = group_->header(peer).beats.load(std::memory_order_relaxed);
    if (peer != rank() && beats != 0 && beats == beats_[peer]) {
      Fail(peer, "its process does not run for " + seconds);
    }
    if (IsDue(peer)) {
      chain.push_back(peer);
    }
  }
  for (size_t k = 0; k < chain.size(); ++k) { // which grows
    bool waits = false;
    for (int next = 0; next < size(); ++next) {
      if (group_->segment(chain[k]).awaits(next).load(std::memory_order_relaxed) != 0) {
        waits = true;
        if (next != rank() && std::find(chain.begin(), chain.end(), next) == chain.end()) {
          chain.push_back(next);
        }
      }
    }
    if (const int elsewhere = group_->header(chain[k]).awaits_elsewhere.load(); !waits && elsewhere != 0) {
      FailForRank(elsewhere - 1, "rank " + std::to_string(group_->global_ranks[chain[k]]) +
                                     " waits for it over the network, for " + seconds);
    }
    if (!waits) {
      Fail(chain[k], "nothing came from it for " + seconds + "; see what it does");
    }
  }
  Fail(chain.front(), "the ranks wait for one another for " + seconds);
}

void LocalTransport::Fail(int peer, const std::string& what) {
  FailForRank(group_->global_ranks[peer], what);
}

void LocalTransport::FailForRank(int global_rank, const std::string& what) {
  const SilentRank error(global_rank, group_->global_ranks[rank()], what);
  Stop(error.what(), global_rank);
  throw error;
}

void LocalTransport::Break(const std::string& why) { Stop(why, group_->global_ranks[rank()]); }

void LocalTransport::Stop(const std::string& why, int blamed) {
  if (!broken_.empty()) {
    return;
  }
  broken_ = why;
  blamed_ = blamed;
  group_->mine->header().gave_up.store(1 + blamed, std::memory_order_seq_cst);
  lanes_.assign(lanes_.size(), Lane()); // no address outlives the caller's buffers
  open_parts_.clear();
  for (LocalPeer& one : group_->peers) { // the others learn of it at once
    if (one.segment != nullptr) {
      one.segment->header().bell.Wake();
    }
    if (one.socket.value() >= 0) {
      shutdown(one.socket.value(), SHUT_RDWR);
    }
  }
}

} // namespace adasum_hvd
