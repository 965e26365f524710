// Failures among the ranks of a host: a peer that has aborted, has ended, or does not respond.
#include <poll.h>
#include <sys/socket.h>

#include "host/local_transport.h"

namespace adasum_hvd {

// The peer's notice names the root cause, which may be this rank.
void LocalTransport::CheckAborted(int peer) {
  const SegmentHeader& header = group_->header(peer);
  if (header.aborted.load()) {
    const int sender = group_->global_ranks[peer];
    Fail(FindRootCause({{sender, header.notice}}, /*here=*/-1, {sender}, ""));
  }
}

bool LocalTransport::HasEnded(int peer) const {
  pollfd files[] = {{group_->peers[peer].socket.value(), POLLRDHUP, 0},
                    {group_->peers[peer].process.value(), POLLIN, 0}};
  return poll(files, 2, 0) > 0;
}

// Whether the oldest exchange still needs that rank.
bool LocalTransport::IsAwaited(int peer) const {
  const auto awaited = [this](const auto& parts) {
    return !parts.empty() && parts.front().exchange == first_open_;
  };
  return awaited(lanes_[peer].incoming) || awaited(lanes_[peer].outgoing);
}

// Shows the other ranks of the host for which ranks this one waits, or that it waits for none.
void LocalTransport::ShowAwaited(bool waits) {
  if (!waits && !shown_) {
    return;
  }
  for (int peer = 0; peer < size(); ++peer) {
    group_->mine->awaits(peer).store(waits && IsAwaited(peer), std::memory_order_relaxed);
    if (waits && !shown_) {
      heartbeats_[peer] = group_->header(peer).heartbeats.load(std::memory_order_relaxed);
    }
  }
  shown_ = waits;
}

void LocalTransport::CheckPeers() {
  ShowAwaited(true);
  for (int peer = 0; peer < size(); ++peer) {
    if (!IsAwaited(peer)) {
      continue;
    }
    CheckAborted(peer);
    // Messages that a peer wrote before it ended are still valid: it failed only if none are left.
    if (HasEnded(peer) && !AdvanceAll()) {
      CheckAborted(peer);
      Fail(peer, "ended");
    }
  }
  if (idle_.Elapsed() >= std::chrono::seconds(group_->settings.timeout_seconds)) {
    FailForTimeout();
  }
}

std::vector<int> LocalTransport::AwaitedBy(int peer) const {
  std::vector<int> ranks;
  for (int other = 0; other < size(); ++other) {
    if (group_->segment(peer).awaits(other).load(std::memory_order_relaxed) != 0) {
      ranks.push_back(group_->global_ranks[other]);
    }
  }
  if (const int elsewhere = group_->header(peer).awaits_elsewhere.load(); ranks.empty() && elsewhere != 0) {
    ranks.push_back(elsewhere - 1);
  }
  return ranks;
}

// A peer without heartbeats is the cause. Else what peers show is read as notices: a peer that waits for no
// rank has sent none.
void LocalTransport::FailForTimeout() {
  const std::string timed_out = DidNotRespond(group_->settings.timeout_seconds, group_->settings.limit);
  AbortNotices waits;
  std::vector<int> awaited;
  for (int peer = 0; peer < size(); ++peer) {
    const uint32_t heartbeats = group_->header(peer).heartbeats.load(std::memory_order_relaxed);
    if (peer != rank() && heartbeats != 0 && heartbeats != kHasLeft && heartbeats == heartbeats_[peer]) {
      Fail(peer, timed_out + ": its process is stopped or gets no processor time");
    }
    if (IsAwaited(peer)) {
      awaited.push_back(group_->global_ranks[peer]);
    }
    if (const std::vector<int> ranks = AwaitedBy(peer); !ranks.empty()) {
      waits[group_->global_ranks[peer]] = {ranks, RankList(ranks) + " " + timed_out};
    }
  }
  Fail(FindRootCause(waits, group_->global_ranks[rank()], awaited, timed_out));
}

void LocalTransport::Fail(int peer, const std::string& problem) {
  const int at_fault = group_->global_ranks[peer];
  Fail({at_fault, group_->global_ranks[rank()], RankList({at_fault}) + " " + problem});
}

void LocalTransport::Fail(const RootCause& cause) {
  Abort(cause);
  throw UnresponsiveRank(cause);
}

void LocalTransport::Abort(const RootCause& cause) {
  if (aborted_) {
    return;
  }
  aborted_ = cause;
  SegmentHeader& mine = group_->mine->header();
  mine.notice = {{cause.rank}, cause.reason};
  mine.aborted.store(true, std::memory_order_seq_cst);
  lanes_.assign(lanes_.size(), Lane()); // no address outlives the caller's buffers
  open_parts_.clear();
  for (LocalPeer& peer : group_->peers) { // so that the others notice at once
    if (peer.segment != nullptr) {
      peer.segment->header().bell.Wake();
    }
    if (peer.socket.value() >= 0) {
      shutdown(peer.socket.value(), SHUT_RDWR);
    }
  }
}

} // namespace adasum_hvd
