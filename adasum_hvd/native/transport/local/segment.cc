#include "transport/local/segment.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace adasum_hvd {
namespace {

// A peer that could shrink what others have mapped could end them: touching what is gone is a SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

} // namespace

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
    throw std::runtime_error("AdaSum: shared memory holds positions that no rank has written");
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
    : descriptor_(memfd_create("adasum_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING)), ranks_(ranks),
      ring_bytes_(ring_bytes) {
  if (descriptor_ < 0) {
    ThrowErrno("memfd_create");
  }
  if (ftruncate(descriptor_, Bytes(ranks, ring_bytes)) != 0 || fcntl(descriptor_, F_ADD_SEALS, kSeals) != 0) {
    close(descriptor_);
    ThrowErrno("size of shared memory");
  }
  Map();
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
    : descriptor_(descriptor), ranks_(ranks), ring_bytes_(ring_bytes) {
  struct stat status;
  if (fstat(descriptor_, &status) != 0 || status.st_size != Bytes(ranks, ring_bytes)) {
    close(descriptor_);
    throw std::runtime_error("shared memory of another size than this rank's");
  }
  if (const int seals = fcntl(descriptor_, F_GET_SEALS); seals < 0 || (seals & kSeals) != kSeals) {
    close(descriptor_);
    throw std::runtime_error("shared memory whose size may still change");
  }
  Map();
  CloseDescriptor();
}

void LocalSegment::CloseDescriptor() {
  if (descriptor_ >= 0) {
    close(descriptor_);
    descriptor_ = -1;
  }
}

void LocalSegment::Map() {
  void* memory =
      mmap(nullptr, Bytes(ranks_, ring_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) {
    close(descriptor_);
    ThrowErrno("mapping of shared memory");
  }
  memory_ = static_cast<char*>(memory);
}

LocalSegment::~LocalSegment() {
  munmap(memory_, Bytes(ranks_, ring_bytes_));
  CloseDescriptor();
}

RingPositions& LocalSegment::positions(int peer) {
  return reinterpret_cast<RingPositions*>(memory_ + sizeof(SegmentHeader))[peer];
}

Ring LocalSegment::ring(int peer) {
  char* first = memory_ + sizeof(SegmentHeader) + ranks_ * sizeof(RingPositions);
  return Ring(first + peer * ring_bytes_, ring_bytes_, positions(peer));
}

} // namespace adasum_hvd
