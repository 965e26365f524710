#include "host/segment.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "host/shared_memory.h"

namespace adasum_hvd {

void Bell::Wake() {
  wakes.fetch_add(1, std::memory_order_seq_cst);
  if (asleep.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &wakes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Bell::SleepUnlessWoken(uint32_t seen, std::chrono::milliseconds limit) {
  const timespec longest = {limit.count() / 1000, limit.count() % 1000 * 1000000L};
  syscall(SYS_futex, &wakes, FUTEX_WAIT, seen, &longest, nullptr, 0);
}

// What a peer has written into its own positions is not trusted to stay inside the ring.
int64_t Ring::Filled(uint64_t written, uint64_t read) const {
  if (written - read > static_cast<uint64_t>(capacity_)) {
    throw std::runtime_error("shared memory holds positions that no rank has written");
  }
  return static_cast<int64_t>(written - read);
}

int64_t Ring::Space() const { return capacity_ - Filled(written(), read()); }

void Ring::Write(const void* from, int64_t bytes) {
  const int64_t offset = static_cast<int64_t>(written() % capacity_);
  const int64_t first = std::min(bytes, capacity_ - offset);
  std::memcpy(memory_ + offset, from, first);
  std::memcpy(memory_, static_cast<const char*>(from) + first, bytes - first);
  positions_.written.store(written() + bytes, std::memory_order_release);
}

int64_t Ring::Unread() const { return Filled(positions_.written.load(std::memory_order_acquire), read()); }

void Ring::Peek(void* to, int64_t bytes) const {
  const int64_t offset = static_cast<int64_t>(read() % capacity_);
  const int64_t first = std::min(bytes, capacity_ - offset);
  std::memcpy(to, memory_ + offset, first);
  std::memcpy(static_cast<char*>(to) + first, memory_, bytes - first);
}

void Ring::Skip(int64_t bytes) { positions_.read.store(read() + bytes, std::memory_order_release); }

int64_t LocalSegment::Bytes(int ranks, int64_t ring_bytes) {
  return sizeof(SegmentHeader) + ranks * (static_cast<int64_t>(sizeof(RingPositions)) + ring_bytes);
}

LocalSegment::LocalSegment(int ranks, int64_t ring_bytes)
    : descriptor_(MakeSharedMemory()), ranks_(ranks), ring_bytes_(ring_bytes) {
  Reserve(descriptor(), 0, Bytes(ranks, ring_bytes));
  memory_ = MapSharedMemory(descriptor(), 0, Bytes(ranks, ring_bytes));
  new (memory_) SegmentHeader();
  if (sched_getaffinity(0, sizeof header().allowed, &header().allowed) != 0) {
    CPU_SET(0, &header().allowed); // more processors than a cpu_set_t has: count on one, and sleep early
  }
  header().quota = ReadProcessorQuota();
  for (int peer = 0; peer < ranks; ++peer) {
    new (&positions(peer)) RingPositions();
  }
}

LocalSegment::LocalSegment(int descriptor, int ranks, int64_t ring_bytes)
    : ranks_(ranks), ring_bytes_(ring_bytes) {
  CheckSharedMemory(descriptor, Bytes(ranks, ring_bytes));
  memory_ = MapSharedMemory(descriptor, 0, Bytes(ranks, ring_bytes));
}

LocalSegment::~LocalSegment() { munmap(memory_, Bytes(ranks_, ring_bytes_)); }

RingPositions& LocalSegment::positions(int peer) {
  return reinterpret_cast<RingPositions*>(memory_ + sizeof(SegmentHeader))[peer];
}

Ring LocalSegment::ring(int peer) {
  char* first = memory_ + sizeof(SegmentHeader) + ranks_ * sizeof(RingPositions);
  return Ring(first + peer * ring_bytes_, ring_bytes_, positions(peer));
}

} // namespace adasum_hvd
