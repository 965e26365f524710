#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"
#include "transport/transport.h"

namespace adasum_hvd {

// Point-to-point messages over a Gloo context; Gloo's own timeout bounds every wait.
class GlooTransport : public Transport {
public:
  GlooTransport(std::shared_ptr<gloo::Context> context, std::vector<int> global_ranks)
      : context_(std::move(context)), global_ranks_(std::move(global_ranks)), sent_(context_->size),
        received_(context_->size) {}

  int rank() const override { return context_->rank; }
  int size() const override { return context_->size; }
  void Start(const std::vector<Message>& messages) override;
  void Wait() override;

private:
  struct Pending {
    int peer;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  };
  using Buffers = std::vector<Pending>;
  struct Started {
    Buffers sends;
    Buffers receives;
  };

  void WaitFor(const Pending& pending, bool receives);

  std::shared_ptr<gloo::Context> context_;
  std::vector<int> global_ranks_; // by rank, as errors name them
  std::deque<Started> started_;
  std::vector<uint64_t> sent_;     // per peer: how many messages so far
  std::vector<uint64_t> received_; // per peer
};

} // namespace adasum_hvd
