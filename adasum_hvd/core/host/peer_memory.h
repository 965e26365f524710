// The regions that two ranks of a host have mapped of each other's shared memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "host/shared_memory.h"

namespace adasum_hvd {

// Of one peer, connected by a socket. No function blocks: the message that a region has been freed may arrive
// late, because no offset of a file is used twice.
class PeerMemory {
public:
  // Notes that the peer may map a region, and notifies it of those that have been freed.
  void Offer(int socket, const std::shared_ptr<const SharedRegion>& region);

  // Maps the region at `offset` of the peer's file. Throws std::runtime_error if it cannot be mapped.
  MemorySpan Reach(int socket, int file, int64_t offset, int64_t bytes);

private:
  void UnmapFreed(int socket);

  std::map<int64_t, std::weak_ptr<const SharedRegion>> offered_; // by offset
  std::map<int64_t, std::unique_ptr<MappedRegion>> mapped_;
};

} // namespace adasum_hvd
