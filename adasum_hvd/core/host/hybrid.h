// Ranks of which some share a host: messages inside a host use shared memory, the others a network.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "host/abort_notice.h"
#include "host/local_transport.h"

namespace adasum_hvd {

// Messages between hosts.
class Network : public Transport {
public:
  // Sends a notice, and releases the caller's buffers. Blocks for a second at most.
  virtual void Abort(const AbortNotice& notice) = 0;

  // Advances pending messages. Does not block.
  virtual void Progress() {}
};

class HybridTransport : public Transport {
public:
  // `host` lists the ranks of `network` that are the ranks 0, 1, ... of `local`.
  HybridTransport(LocalTransport& local, Network& network, const std::vector<int>& host)
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

  // Returns the transport of some ranks, in this order, that uses what they need only.
  std::unique_ptr<Transport> Among(const std::vector<int>& ranks) {
    std::vector<int> places; // on this host, of the ranks that are there
    for (int rank : ranks) {
      const auto found = std::find(host_.begin(), host_.end(), rank);
      if (found != host_.end()) {
        places.push_back(static_cast<int>(found - host_.begin()));
      }
    }
    if (places.size() == ranks.size()) {
      return std::make_unique<GroupTransport>(local_, std::move(places));
    }
    Transport& all = places.size() > 1 ? static_cast<Transport&>(*this) : network_;
    return std::make_unique<GroupTransport>(all, ranks);
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
  Network& network_;
  const std::vector<int>& host_;
};

} // namespace adasum_hvd
