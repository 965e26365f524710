// Ranks on hosts of different sizes: messages inside a host use shared memory, the others the network.
#pragma once

#include <algorithm>
#include <vector>

#include "host/local_transport.h"
#include "network/network.h"

namespace adasum_hvd {

class HybridTransport : public Transport {
public:
  // `host` lists the ranks of `network` that are the ranks 0, 1, ... of `local`.
  HybridTransport(LocalTransport& local, NetworkTransport& network, const std::vector<int>& host)
      : local_(local), network_(network), host_(host) {}

  int rank() const override { return network_.rank(); }
  int size() const override { return network_.size(); }

  void Start(const std::vector<Message>& messages) override {
    std::vector<Message> inside(host_.size()), outside = messages;
    for (size_t place = 0; place < host_.size(); ++place) {
      std::swap(inside[place], outside[host_[place]]);
    }
    network_.Start(outside);
    Inside([&] { local_.Start(inside); });
  }

  // In this order on every rank, so that no two ranks wait for each other: a rank that waits for the network
  // has completed its part of the exchange inside the host.
  void Wait() override {
    Inside([this] { local_.WaitAnd([this] { network_.Progress(); }); });
    network_.Wait();
  }

private:
  // If a rank of the host fails, the network must not write to the caller's buffers any more.
  template <class Work> void Inside(const Work& work) {
    try {
      work();
    } catch (const UnresponsiveRank& error) {
      network_.Abort({{error.cause.rank}, error.cause.reason});
      throw;
    }
  }

  LocalTransport& local_;
  NetworkTransport& network_;
  const std::vector<int>& host_;
};

} // namespace adasum_hvd
