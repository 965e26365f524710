#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"
#include "transport.h"

namespace adasum_hvd {

// Point-to-point messages over a Gloo context; Gloo's own timeout bounds every wait.
class GlooTransport : public Transport {
public:
  explicit GlooTransport(std::shared_ptr<gloo::Context> context)
      : context_(std::move(context)), sent_(context_->size), received_(context_->size) {}

  int rank() const override { return context_->rank; }
  int size() const override { return context_->size; }
  void Start(const std::vector<Message>& messages) override;
  void Wait() override;

private:
  using Buffers = std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>>;
  struct Started {
    Buffers sends;
    Buffers receives;
  };

  std::shared_ptr<gloo::Context> context_;
  std::deque<Started> started_;
  std::vector<uint64_t> sent_; // messages, per peer
  std::vector<uint64_t> received_;
};

} // namespace adasum_hvd
