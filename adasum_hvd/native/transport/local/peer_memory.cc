#include "transport/local/peer_memory.h"

#include <cerrno>
#include <system_error>

#include "transport/descriptors.h"

namespace adasum_hvd {
namespace {

// With a descriptor attached: that of a new region. Without: the region is no more.
struct Note {
  uint64_t region;
  int64_t bytes;
};

} // namespace

void PeerMemory::Offer(int socket, const std::shared_ptr<const SharedRegion>& region) {
  if (offered_.count(region->number()) != 0) {
    return;
  }
  for (auto one = offered_.begin(); one != offered_.end();) {
    if (!one->second.expired()) {
      ++one;
      continue;
    }
    SendWithDescriptor(socket, Note{one->first, 0}, -1);
    one = offered_.erase(one);
  }
  SendWithDescriptor(socket, Note{region->number(), region->bytes()}, region->descriptor());
  offered_[region->number()] = region;
}

const MemorySpan& PeerMemory::Reach(int socket, uint64_t region) {
  while (mapped_.count(region) == 0) {
    TakeOffer(socket);
  }
  return mapped_.at(region)->span();
}

// A process may have only so many descriptors under way, and a socket holds only so much.
bool PeerMemory::IsForLater(const std::runtime_error& error) {
  const auto* failed = dynamic_cast<const std::system_error*>(&error);
  const int code = failed == nullptr ? 0 : failed->code().value();
  return code == EAGAIN || code == EWOULDBLOCK || code == ETOOMANYREFS;
}

void PeerMemory::TakeOffer(int socket) {
  Note note = {};
  const Descriptor descriptor = ReceiveWithDescriptor(socket, note);
  if (note.bytes == 0) {
    mapped_.erase(note.region);
  } else if (descriptor.value() < 0) {
    throw std::runtime_error("shared memory did not come along; see ulimit -n");
  } else {
    mapped_[note.region] = std::make_unique<MappedRegion>(descriptor.value(), note.bytes);
  }
}

} // namespace adasum_hvd
