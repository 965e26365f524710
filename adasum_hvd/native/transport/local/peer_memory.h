// What two ranks of a host have mapped of each other's shared memory. Descriptors go over the socket that
// they met on, ahead of the message that first names the region.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "transport/shared_memory.h"

namespace adasum_hvd {

class PeerMemory {
public:
  // Lets the peer map a region, and unmap those that have been freed. Throws std::system_error when the peer
  // is gone.
  void Offer(int socket, const std::shared_ptr<const SharedRegion>& region);

  // What the peer has offered, here. Throws std::runtime_error for what it has not.
  const MemorySpan& Reach(int socket, uint64_t region);

private:
  void TakeOffer(int socket);

  std::map<uint64_t, std::weak_ptr<const SharedRegion>> offered_;
  std::map<uint64_t, std::unique_ptr<MappedRegion>> mapped_;
};

} // namespace adasum_hvd
