#include "network/gloo.h"

#include <algorithm>
#include <string>
#include <thread>

namespace adasum_hvd {
namespace {

// Gloo distinguishes messages between two ranks by a 64-bit slot, whose top byte names the collective. Gloo's
// own collectives use none of these.
constexpr uint64_t kSlotPrefix = uint64_t{0xad} << 56;
constexpr uint64_t kNoticeSlot = uint64_t{0xae} << 56;
constexpr uint64_t kHeartbeatSlot = uint64_t{0xaf} << 56;
constexpr int32_t kNoNotice = -2;
constexpr std::chrono::milliseconds kNow{1};
constexpr std::chrono::seconds kShowAfter{1};      // of waiting, the awaited rank is shown to the host
constexpr std::chrono::seconds kGloosExtraTime{5}; // Gloo's timeout minus ours

bool HasArrived(const AbortNotice& notice) {
  return __atomic_load_n(&notice.suspects[0], __ATOMIC_ACQUIRE) != kNoNotice; // written by Gloo's thread
}

// Gloo's errors begin with "[file:line] ".
std::string WithoutLocation(const std::string& error) {
  const size_t end = error.rfind('[', 0) == 0 ? error.find("] ") : std::string::npos;
  return end == std::string::npos ? error : error.substr(end + 2);
}

std::string Disconnected(const std::string& error) { return "is disconnected: " + error; }

} // namespace

GlooTransport::GlooTransport(std::shared_ptr<gloo::Context> context, NetworkSettings settings)
    : NetworkTransport(std::move(settings)), context_(std::move(context)), sent_(size()), received_(size()),
      mailboxes_(size()) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      Mailbox& mailbox = mailboxes_[peer];
      mailbox.notice.suspects[0] = kNoNotice;
      mailbox.buffer = context_->createUnboundBuffer(&mailbox.notice, sizeof mailbox.notice);
      try {
        mailbox.buffer->recv(peer, kNoticeSlot);
      } catch (const std::exception&) { // disconnected: the next wait for it fails
        mailbox.buffer.reset();
      }
    }
  }
}

void GlooTransport::BeginOperation() {
  std::fill(sent_.begin(), sent_.end(), 0);
  std::fill(received_.begin(), received_.end(), 0);
}

void GlooTransport::Start(const std::vector<Message>& messages) {
  Started started;
  for (int step = 1; step < size(); ++step) {
    const int to = (rank() + step) % size();
    const int from = (rank() + size() - step) % size();
    if (messages[from].receive_bytes > 0) {
      started.receives.push_back(
          {from, context_->createUnboundBuffer(messages[from].receive, messages[from].receive_bytes), true});
      Post(started.receives.back(), kSlotPrefix | received_[from]++);
    }
    if (messages[to].send_bytes > 0) {
      started.sends.push_back(
          {to, context_->createUnboundBuffer(const_cast<void*>(messages[to].send), messages[to].send_bytes),
           false});
      Post(started.sends.back(), kSlotPrefix | sent_[to]++);
    }
  }
  started_.push_back(std::move(started));
}

void GlooTransport::Post(const Pending& pending, uint64_t slot) {
  std::string error_text;
  try {
    pending.receives ? pending.buffer->recv(pending.peer, slot) : pending.buffer->send(pending.peer, slot);
    return;
  } catch (const std::exception& error) {
    error_text = WithoutLocation(error.what());
  }
  Fail(pending.peer, Disconnected(error_text));
}

void GlooTransport::Wait() {
  const Started oldest = std::move(started_.front());
  started_.pop_front();
  for (const Pending& pending : oldest.receives) {
    WaitFor(pending);
  }
  for (const Pending& pending : oldest.sends) {
    WaitFor(pending);
  }
  ShowNoneAwaited();
}

void GlooTransport::WaitFor(const Pending& pending) {
  const auto await = [this](const Pending* one) {
    std::lock_guard<std::mutex> guard(waiting_);
    awaited_ = one;
    idle_.Reset();
  };
  const std::chrono::milliseconds limit = settings_.timeout + kGloosExtraTime;
  bool done = false;
  std::string problem = TimedOut();
  await(&pending);
  try {
    done = pending.receives ? pending.buffer->waitRecv(limit) : pending.buffer->waitSend(limit);
  } catch (const std::exception& error) {
    problem = Disconnected(WithoutLocation(error.what()));
  }
  await(nullptr);
  if (!done) {
    Fail(pending.peer, disconnected_.empty() ? problem : Disconnected(disconnected_));
  }
}

void GlooTransport::Poll() {
  std::lock_guard<std::mutex> guard(waiting_);
  if (awaited_ == nullptr) {
    return;
  }
  const auto elapsed = idle_.Elapsed();
  if (elapsed >= kShowAfter) {
    ShowAwaited(awaited_->peer);
  }
  const bool notified = std::any_of(mailboxes_.begin(), mailboxes_.end(), [](const Mailbox& mailbox) {
    return mailbox.buffer != nullptr && HasArrived(mailbox.notice);
  });
  if (notified || elapsed >= settings_.timeout || IsDisconnected(awaited_->peer)) {
    awaited_->receives ? awaited_->buffer->abortWaitRecv() : awaited_->buffer->abortWaitSend();
  }
}

// When a connection ends, Gloo fails the operations that wait for their first byte, but not one in the middle
// of a message. So this checks the receive of the peer's notice.
bool GlooTransport::IsDisconnected(int peer) {
  const std::unique_ptr<Buffer>& notice = mailboxes_[peer].buffer;
  if (notice == nullptr) {
    return false;
  }
  try {
    notice->abortWaitRecv(); // so that the next wait returns at once, and receives nothing
    notice->waitRecv(kNow);
  } catch (const std::exception& error) {
    disconnected_ = WithoutLocation(error.what());
  }
  return !disconnected_.empty();
}

// A wait that times out ends all others, which closing connections does not.
void GlooTransport::EndWaits() {
  try {
    context_->createUnboundBuffer(nullptr, 0)->waitRecv(kNow);
  } catch (const std::exception&) { // that of the timeout
  }
}

std::vector<int> GlooTransport::ExchangeHeartbeats(bool send) {
  const bool first = heartbeats_.empty();
  std::vector<int> counts(size());
  if (first) {
    heartbeats_ = std::vector<Heartbeats>(size());
  }
  for (int peer = 0; peer < size(); ++peer) {
    Heartbeats& beats = heartbeats_[peer];
    if (peer == rank()) {
      continue;
    }
    try {
      if (first) {
        beats.sending = context_->createUnboundBuffer(&beats.sent, sizeof beats.sent);
        beats.receiving = context_->createUnboundBuffer(&beats.received, sizeof beats.received);
      }
      // Without a wait, because a wait that times out closes all connections.
      const bool arrived = __atomic_exchange_n(&beats.received, char{0}, __ATOMIC_ACQUIRE) != 0;
      beats.count += arrived ? 1 : 0;
      if (first || arrived) {
        beats.receiving->recv(peer, kHeartbeatSlot);
      }
      if (send) {
        beats.sending->send(peer, kHeartbeatSlot);
      }
    } catch (const std::exception&) { // the connection is closed, so the peer receives no heartbeats either
    }
    counts[peer] = beats.count;
  }
  return counts;
}

const AbortNotices& GlooTransport::Notices() {
  for (int peer = 0; peer < size(); ++peer) {
    Mailbox& mailbox = mailboxes_[peer];
    if (mailbox.buffer == nullptr || !HasArrived(mailbox.notice)) {
      continue;
    }
    try {
      mailbox.buffer->waitRecv(kAbortGrace); // for the rest of it
      notices_[settings_.global_ranks[peer]] = mailbox.notice;
    } catch (const std::exception&) { // the connection ended in the middle
    }
    mailbox.buffer.reset();
  }
  return notices_;
}

void GlooTransport::Fail(int peer, const std::string& problem) {
  const std::vector<int> awaited{settings_.global_ranks[peer]};
  const RootCause early = FindRootCause(Notices(), here(), awaited, problem);
  Abort({awaited, RankList(awaited) + " " + problem});
  // A rank that was stopped and runs again then reports that it waits for others.
  const RootCause late = FindRootCause(notices_, here(), awaited, problem);
  throw UnresponsiveRank(late.circular ? early : late);
}

std::vector<int> GlooTransport::Notify(const AbortNotice& notice) {
  std::vector<int> disconnected;
  if (!notifying_.empty()) {
    return disconnected;
  }
  sent_notice_ = notice;
  for (int peer = 0; peer < size(); ++peer) {
    notifying_.push_back(context_->createUnboundBuffer(&sent_notice_, sizeof sent_notice_));
    if (peer != rank()) {
      try {
        notifying_.back()->send(peer, kNoticeSlot);
      } catch (const std::exception& error) {
        // After a timeout of one rank Gloo closes the connections to all.
        if (std::string(error.what()).find("timeout") == std::string::npos) {
          disconnected.push_back(settings_.global_ranks[peer]);
        }
      }
    }
  }
  return disconnected;
}

void GlooTransport::Abort(const AbortNotice& notice) {
  Notify(notice);
  Close();
}

void GlooTransport::Close() {
  if (closed_) {
    return;
  }
  closed_ = true;
  // Closing discards messages that have not been read. Every rank that has read the notice sends its own.
  for (IdleClock grace; static_cast<int>(Notices().size()) < size() - 1 && grace.Elapsed() < kAbortGrace;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  context_->closeConnections();
  started_.clear();
}

} // namespace adasum_hvd
