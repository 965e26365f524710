#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"
#include "network/network.h"

namespace adasum_hvd {

// Point-to-point messages over a Gloo context, of which there may be one such transport at a time.
//
// If a wait reaches Gloo's own timeout, Gloo closes all connections, and no notice can be sent any more. So
// Poll ends the wait a little earlier. Buffers of pending messages cannot be released in any other way than
// by closing the connections. A rank that aborts does so after it has notified the others, which also ends
// Horovod's own loop.
class GlooTransport : public NetworkTransport {
public:
  GlooTransport(std::shared_ptr<gloo::Context> context, NetworkSettings settings);

  int rank() const override { return context_->rank; }
  int size() const override { return context_->size; }
  void BeginOperation() override;

  // Throw UnresponsiveRank.
  void Start(const std::vector<Message>& messages) override;
  void Wait() override;

  std::vector<int> Notify(const AbortNotice& notice) override;
  void Abort(const AbortNotice& notice) override;
  void Close() override;
  const AbortNotices& Notices() override;
  void Poll() override;
  void EndWaits() override;
  std::vector<int> ExchangeHeartbeats(bool send) override;

private:
  using Buffer = gloo::transport::UnboundBuffer;
  struct Pending {
    int peer;
    std::unique_ptr<Buffer> buffer;
    bool receives;
  };
  struct Started {
    std::vector<Pending> sends;
    std::vector<Pending> receives;
  };
  // Of a peer's notice: a receive that is posted from the beginning.
  struct Mailbox {
    AbortNotice notice;
    std::unique_ptr<Buffer> buffer;
  };

  // A byte in each direction, sent and received repeatedly.
  struct Heartbeats {
    char sent = 1;
    char received = 0;
    std::unique_ptr<Buffer> sending;
    std::unique_ptr<Buffer> receiving;
    int count = 0;
  };

  void Post(const Pending& pending, uint64_t slot);
  bool IsDisconnected(int peer);
  void WaitFor(const Pending& pending);
  [[noreturn]] void Fail(int peer, const std::string& problem); // a predicate

  std::shared_ptr<gloo::Context> context_;
  std::deque<Started> started_;
  std::vector<uint64_t> sent_;     // per peer: how many messages so far in this reduction
  std::vector<uint64_t> received_; // per peer
  std::vector<Mailbox> mailboxes_; // per peer
  AbortNotices notices_;
  AbortNotice sent_notice_;
  std::vector<std::unique_ptr<Buffer>> notifying_; // per peer, once a notice is sent
  bool closed_ = false;
  std::vector<Heartbeats> heartbeats_; // per peer, from the first exchange on

  std::mutex waiting_; // guards the members that Poll reads and writes
  const Pending* awaited_ = nullptr;
  std::string disconnected_; // Gloo's error of the connection to the awaited rank
  IdleClock idle_;
};

} // namespace adasum_hvd
