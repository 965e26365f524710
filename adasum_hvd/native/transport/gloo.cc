#include "transport/gloo.h"

namespace adasum_hvd {
namespace {

// Gloo keeps messages between two ranks apart by a 64-bit slot whose top byte names the collective; none of
// Gloo's own uses this one.
constexpr uint64_t kSlotPrefix = uint64_t{0xad} << 56;

} // namespace

void GlooTransport::Start(const std::vector<Message>& messages) {
  Started started;
  for (int step = 1; step < size(); ++step) {
    const int to = (rank() + step) % size();
    const int from = (rank() + size() - step) % size();
    if (messages[from].receive_bytes > 0) {
      started.receives.push_back(
          {from, context_->createUnboundBuffer(messages[from].receive, messages[from].receive_bytes)});
      started.receives.back().buffer->recv(from, kSlotPrefix | received_[from]++);
    }
    if (messages[to].send_bytes > 0) {
      started.sends.push_back(
          {to, context_->createUnboundBuffer(const_cast<void*>(messages[to].send), messages[to].send_bytes)});
      started.sends.back().buffer->send(to, kSlotPrefix | sent_[to]++);
    }
  }
  started_.push_back(std::move(started));
}

void GlooTransport::Wait() {
  Started oldest = std::move(started_.front());
  started_.pop_front();
  for (const Pending& pending : oldest.receives) {
    WaitFor(pending, true);
  }
  for (const Pending& pending : oldest.sends) {
    WaitFor(pending, false);
  }
}

void GlooTransport::WaitFor(const Pending& pending, bool receives) {
  try {
    if (receives) {
      pending.buffer->waitRecv(context_->getTimeout());
    } else {
      pending.buffer->waitSend(context_->getTimeout());
    }
  } catch (const std::exception& error) {
    throw SilentRank(global_ranks_[pending.peer], global_ranks_[rank()], error.what());
  }
}

} // namespace adasum_hvd
