#include "host/peer_memory.h"

#include <system_error>

#include "host/descriptors.h"

namespace adasum_hvd {

void PeerMemory::Offer(int socket, const std::shared_ptr<const SharedRegion>& region) {
  if (offered_.count(region->offset()) != 0) {
    return;
  }
  for (auto one = offered_.begin(); one != offered_.end();) {
    if (!one->second.expired()) {
      ++one;
      continue;
    }
    try {
      Send(socket, one->first);
    } catch (
        const std::system_error&) { // the socket is full, or the peer has ended, which the next wait detects
      break;
    }
    one = offered_.erase(one);
  }
  offered_[region->offset()] = region;
}

MemorySpan PeerMemory::Reach(int socket, int file, int64_t offset, int64_t bytes) {
  const auto found = mapped_.find(offset);
  if (found != mapped_.end() && found->second->span().bytes == bytes) {
    return found->second->span();
  }
  UnmapFreed(socket);
  mapped_[offset] = std::make_unique<MappedRegion>(file, offset, bytes);
  return mapped_[offset]->span();
}

void PeerMemory::UnmapFreed(int socket) {
  try {
    for (int64_t freed = 0;;) {
      Receive(socket, freed);
      mapped_.erase(freed);
    }
  } catch (const std::system_error&) { // no more messages
  }
}

} // namespace adasum_hvd
