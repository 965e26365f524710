// What two ranks of a host have mapped of each other's shared memory. Descriptors go over the socket that
// they met on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>

#include "transport/shared_memory.h"

namespace adasum_hvd {

class PeerMemory {
public:
  // Lets the peer map a region, and unmap those that have been freed. Throws std::system_error when the peer
  // is gone, or (IsForLater) has not yet taken what is under way.
  void Offer(int socket, const std::shared_ptr<const SharedRegion>& region);

  // What the peer has offered, here. Throws std::system_error (IsForLater) for what it has not yet, and
  // std::runtime_error for what it cannot.
  const MemorySpan& Reach(int socket, uint64_t region);

  // The next thing that the peer has offered or freed. Throws as Reach does.
  void TakeOffer(int socket);

  static bool IsForLater(const std::runtime_error& error);

private:
  std::map<uint64_t, std::weak_ptr<const SharedRegion>> offered_;
  std::map<uint64_t, std::unique_ptr<MappedRegion>> mapped_;
};

} // namespace adasum_hvd
