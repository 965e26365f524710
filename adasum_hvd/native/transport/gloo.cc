#include "transport/gloo.h"

#include <algorithm>
#include <string>
#include <thread>

namespace adasum_hvd {
namespace {

// Gloo keeps messages between two ranks apart by a 64-bit slot whose top byte names the collective; none of
// Gloo's own uses these.
constexpr uint64_t kSlotPrefix = uint64_t{0xad} << 56;
constexpr uint64_t kLastWordsSlot = uint64_t{0xae} << 56;
constexpr uint64_t kBeatsSlot = uint64_t{0xaf} << 56;
constexpr int32_t kNothingSaid = -2;
constexpr std::chrono::milliseconds kNow{1};
constexpr std::chrono::seconds kShow{1};        // after so long others are shown who is awaited
constexpr std::chrono::seconds kGloosOwnEnd{5}; // behind ours

bool HasSpoken(const LastWords& words) {
  return __atomic_load_n(&words.blamed[0], __ATOMIC_ACQUIRE) != kNothingSaid; // written by Gloo's thread
}

// Gloo's errors begin with "[file:line] ".
std::string WithoutPlace(const std::string& error) {
  const size_t end = error.rfind('[', 0) == 0 ? error.find("] ") : std::string::npos;
  return end == std::string::npos ? error : error.substr(end + 2);
}

} // namespace

GlooTransport::GlooTransport(std::shared_ptr<gloo::Context> context, NetworkSettings settings)
    : NetworkTransport(std::move(settings)), context_(std::move(context)), sent_(size()), received_(size()),
      mailboxes_(size()) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      Mailbox& mailbox = mailboxes_[peer];
      mailbox.words.blamed[0] = kNothingSaid;
      mailbox.buffer = context_->createUnboundBuffer(&mailbox.words, sizeof mailbox.words);
      try {
        mailbox.buffer->recv(peer, kLastWordsSlot);
      } catch (const std::exception&) { // it has gone; whoever waits for it next hears so
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
  std::string why;
  try {
    pending.receives ? pending.buffer->recv(pending.peer, slot) : pending.buffer->send(pending.peer, slot);
    return;
  } catch (const std::exception& error) {
    why = WithoutPlace(error.what());
  }
  Fail(pending.peer, why);
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
    idle_.Moved();
  };
  const std::chrono::milliseconds limit = settings_.timeout + kGloosOwnEnd;
  bool done = false;
  std::string why = Silence();
  await(&pending);
  try {
    done = pending.receives ? pending.buffer->waitRecv(limit) : pending.buffer->waitSend(limit);
  } catch (const std::exception& error) {
    why = WithoutPlace(error.what());
  }
  await(nullptr);
  if (!done) {
    Fail(pending.peer, cut_off_.empty() ? why : cut_off_);
  }
}

void GlooTransport::Look() {
  std::lock_guard<std::mutex> guard(waiting_);
  if (awaited_ == nullptr) {
    return;
  }
  const auto elapsed = idle_.Elapsed();
  if (elapsed >= kShow) {
    ShowAwaited(awaited_->peer);
  }
  const bool told = std::any_of(mailboxes_.begin(), mailboxes_.end(), [](const Mailbox& mailbox) {
    return mailbox.buffer != nullptr && HasSpoken(mailbox.words);
  });
  if (told || elapsed >= settings_.timeout || IsCutOff(awaited_->peer)) {
    awaited_->receives ? awaited_->buffer->abortWaitRecv() : awaited_->buffer->abortWaitSend();
  }
}

// Gloo tells operations that wait for their first byte when a connection ends, and not one in the middle of
// a message: so this asks the one that waits for the peer's last words.
bool GlooTransport::IsCutOff(int peer) {
  const std::unique_ptr<Buffer>& waits = mailboxes_[peer].buffer;
  if (waits == nullptr) {
    return false;
  }
  try {
    waits->abortWaitRecv(); // so that the next wait returns at once, and takes nothing
    waits->waitRecv(kNow);
  } catch (const std::exception& error) {
    cut_off_ = WithoutPlace(error.what());
  }
  return !cut_off_.empty();
}

std::vector<int> GlooTransport::ExchangeBeats(bool say) {
  const bool first = beats_.empty();
  std::vector<int> counts(size());
  if (first) {
    beats_ = std::vector<Beats>(size());
  }
  for (int peer = 0; peer < size(); ++peer) {
    Beats& beats = beats_[peer];
    if (peer == rank()) {
      continue;
    }
    try {
      if (first) {
        beats.sending = context_->createUnboundBuffer(&beats.sent, sizeof beats.sent);
        beats.receiving = context_->createUnboundBuffer(&beats.received, sizeof beats.received);
      }
      // Never waited for: a wait that ends for its length would close all connections.
      const bool came = __atomic_exchange_n(&beats.received, char{0}, __ATOMIC_ACQUIRE) != 0;
      beats.count += came ? 1 : 0;
      if (first || came) {
        beats.receiving->recv(peer, kBeatsSlot);
      }
      if (say) {
        beats.sending->send(peer, kBeatsSlot);
      }
    } catch (const std::exception&) { // the connection is closed; so the others hear nothing either
    }
    counts[peer] = beats.count;
  }
  return counts;
}

const Heard& GlooTransport::Listen() {
  for (int peer = 0; peer < size(); ++peer) {
    Mailbox& mailbox = mailboxes_[peer];
    if (mailbox.buffer == nullptr || !HasSpoken(mailbox.words)) {
      continue;
    }
    try {
      mailbox.buffer->waitRecv(kToHear); // for the rest of it
      heard_[settings_.global_ranks[peer]] = mailbox.words;
    } catch (const std::exception&) { // cut off in the middle
    }
    mailbox.buffer.reset();
  }
  return heard_;
}

void GlooTransport::Fail(int peer, const std::string& why) {
  const std::vector<int> awaited{settings_.global_ranks[peer]};
  GiveUp({awaited, why});
  const Verdict blame = FindBlame(heard_, here(), awaited, why);
  throw SilentRank(blame.rank, here(), blame.why);
}

std::vector<int> GlooTransport::Tell(const LastWords& words) {
  std::vector<int> unreachable;
  if (!saying_.empty()) {
    return unreachable;
  }
  said_ = words;
  for (int peer = 0; peer < size(); ++peer) {
    saying_.push_back(context_->createUnboundBuffer(&said_, sizeof said_));
    if (peer != rank()) {
      try {
        saying_.back()->send(peer, kLastWordsSlot);
      } catch (const std::exception& error) {
        // Where Gloo has waited for one rank for too long, it closes the connections to all.
        if (std::string(error.what()).find("timeout") == std::string::npos) {
          unreachable.push_back(settings_.global_ranks[peer]);
        }
      }
    }
  }
  return unreachable;
}

void GlooTransport::GiveUp(const LastWords& words) {
  Tell(words);
  Close();
}

void GlooTransport::Close() {
  if (closed_) {
    return;
  }
  closed_ = true;
  // Closing takes back what has not been read: until then every rank that lives has heard, and says so.
  for (IdleClock listening;
       static_cast<int>(Listen().size()) < size() - 1 && listening.Elapsed() < kToHear;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  context_->closeConnections();
  started_.clear();
}

} // namespace adasum_hvd
