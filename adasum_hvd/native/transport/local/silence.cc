// When nothing moves: which rank is to blame, and how the others learn that this one has stopped.
#include <algorithm>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>

#include "transport/local/transport.h"

namespace adasum_hvd {

void LocalTransport::CheckStopped(int peer) {
  const SegmentHeader& header = group_->peers[peer].segment->header();
  const int stopped = header.gave_up.load();
  if (stopped != 0) {
    const std::string why(header.why, strnlen(header.why, sizeof header.why));
    FailForRank(stopped - 1, stopped - 1 == group_->global_ranks[peer]
                                 ? "a reduction failed there: " + why
                                 : "rank " + std::to_string(group_->global_ranks[peer]) + " says: " + why);
  }
}

bool LocalTransport::HasEnded(int peer) const {
  pollfd watched[] = {{group_->peers[peer].socket.value(), POLLRDHUP, 0},
                      {group_->peers[peer].process.value(), POLLIN, 0}};
  return poll(watched, 2, 0) > 0;
}

// Whether the oldest exchange still needs that rank.
bool LocalTransport::IsDue(int peer) const {
  const auto due = [this](const auto& parts) {
    return !parts.empty() && parts.front().exchange == first_open_;
  };
  const Lane& lane = lanes_[peer];
  return due(lane.incoming) || due(lane.outgoing);
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
    // What a peer wrote before it ended is still taken; it cannot be when this rank found nothing to do.
    if (HasEnded(peer) && !AdvanceAll()) {
      CheckStopped(peer);
      Fail(peer, "the process has ended");
    }
  }
  if (idle_.Elapsed() >= std::chrono::seconds(group_->settings.timeout_seconds)) {
    FailForSilence();
  }
}

// Names a rank whose process does not run, or the end of a chain of ranks that wait for one another.
void LocalTransport::FailForSilence() {
  const std::string seconds =
      std::to_string(group_->settings.timeout_seconds) + " s (ADASUM_HVD_TIMEOUT_SECONDS)";
  std::vector<int> chain;
  for (int peer = 0; peer < size(); ++peer) {
    const uint32_t beats = group_->header(peer).beats.load(std::memory_order_relaxed);
    if (peer != rank() && beats != 0 && beats != kHasLeft && beats == beats_[peer]) {
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
  Stop(error, what);
  throw error;
}

void LocalTransport::Break(int blamed, const std::string& why) { Stop({blamed, why}, why); }

void LocalTransport::Stop(const SilentRank& error, const std::string& reason) {
  if (!broken_.empty()) {
    return;
  }
  broken_ = error.what();
  blamed_ = error.rank;
  SegmentHeader& mine = group_->mine->header();
  std::strncpy(mine.why, reason.c_str(), sizeof mine.why - 1);
  mine.gave_up.store(1 + error.rank, std::memory_order_seq_cst);
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
