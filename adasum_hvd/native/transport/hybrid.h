// Ranks on hosts of different sizes: messages inside a host go through shared memory, the others over the
// network.
#pragma once

#include <algorithm>
#include <vector>

#include "transport/local/transport.h"
#include "transport/network.h"

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

  // In this order on every rank, so no two can wait for each other: who waits for the network in an exchange
  // has done what its host needs of it in that one.
  void Wait() override {
    Inside([this] { local_.WaitAnd([this] { network_.Progress(); }); });
    network_.Wait();
  }

private:
  // Where the host fails, nothing may come over the network any more: the caller's buffers go.
  template <class Work> void Inside(const Work& work) {
    try {
      work();
    } catch (const SilentRank& error) {
      network_.GiveUp({{error.rank}, error.what()});
      throw;
    }
  }

  LocalTransport& local_;
  NetworkTransport& network_;
  const std::vector<int>& host_;
};

} // namespace adasum_hvd
