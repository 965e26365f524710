#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"
#include "transport/network.h"

namespace adasum_hvd {

// Point-to-point messages over a Gloo context, of which there may be one such transport at a time.
//
// A wait that Gloo itself ends for its length closes all connections, and nobody can be told any more. So
// Look ends it, a little earlier than Gloo would. Memory that messages are under way to or from cannot be
// taken back: a rank that gives up closes the connections when it has told the others, and with that
// Horovod's own loop ends.
class GlooTransport : public NetworkTransport {
public:
  GlooTransport(std::shared_ptr<gloo::Context> context, NetworkSettings settings);

  int rank() const override { return context_->rank; }
  int size() const override { return context_->size; }
  void BeginOperation() override;

  // Throw SilentRank.
  void Start(const std::vector<Message>& messages) override;
  void Wait() override;

  std::vector<int> Tell(const LastWords& words) override;
  void GiveUp(const LastWords& words) override;
  void Close() override;
  const Heard& Listen() override;
  void Look() override;
  std::vector<int> ExchangeBeats(bool say) override;

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
  // What a peer says when it gives up: a receive that is open from the beginning.
  struct Mailbox {
    LastWords words;
    std::unique_ptr<Buffer> buffer;
  };

  // A byte each way, sent and received again and again.
  struct Beats {
    char sent = 1;
    char received = 0;
    std::unique_ptr<Buffer> sending;
    std::unique_ptr<Buffer> receiving;
    int count = 0;
  };

  void Post(const Pending& pending, uint64_t slot);
  bool IsCutOff(int peer);
  void WaitFor(const Pending& pending);
  [[noreturn]] void Fail(int peer, const std::string& why);

  std::shared_ptr<gloo::Context> context_;
  std::deque<Started> started_;
  std::vector<uint64_t> sent_;     // per peer: how many messages so far in this reduction
  std::vector<uint64_t> received_; // per peer
  std::vector<Mailbox> mailboxes_; // per peer
  Heard heard_;
  LastWords said_;
  std::vector<std::unique_ptr<Buffer>> saying_; // to each peer, once something is said
  bool closed_ = false;
  std::vector<Beats> beats_; // per peer, from the first exchange on

  std::mutex waiting_; // guards what Look reads and writes
  const Pending* awaited_ = nullptr;
  std::string cut_off_; // what Gloo says of the connection to the rank that is awaited
  IdleClock idle_;
};

} // namespace adasum_hvd
