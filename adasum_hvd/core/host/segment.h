// The memory that one rank shares with the other ranks of its host: a bell and one ring of bytes per peer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include <sched.h>

#include "host/abort_notice.h"
#include "host/descriptors.h"
#include "host/processor_quota.h"

namespace adasum_hvd {

// In place of a count of heartbeats: the rank has shut down, and sends none.
constexpr uint32_t kHasLeft = UINT32_MAX;

// Wakes the rank that owns it. Futexes work across processes on shared memory.
struct alignas(64) Bell {
  std::atomic<uint32_t> wakes{0};
  std::atomic<uint32_t> asleep{0};

  void Wake();
  // Sleeps until the count differs from `seen`, at most for `limit`.
  void SleepUnlessWoken(uint32_t seen, std::chrono::milliseconds limit);
};

// The positions of a ring's writer and reader. They only grow.
struct RingPositions {
  alignas(64) std::atomic<uint64_t> written{0};
  std::atomic<uint32_t> awaits{0}; // whether the writer waits for the reader, for some time
  alignas(64) std::atomic<uint64_t> read{0};
};

// Bytes from a segment's owner, the only writer, to one peer, the only reader.
class Ring {
public:
  Ring(char* memory, int64_t capacity, RingPositions& positions)
      : memory_(memory), capacity_(capacity), positions_(positions) {}

  // Throws, as Unread does, if the positions are invalid.
  int64_t Space() const; // for the writer
  void Write(const void* from, int64_t bytes);
  uint64_t written() const { return positions_.written.load(std::memory_order_relaxed); }

  int64_t Unread() const; // for the reader
  void Peek(void* to, int64_t bytes) const;
  void Skip(int64_t bytes); // bytes that were read; the writer may overwrite them
  uint64_t read() const { return positions_.read.load(std::memory_order_acquire); }

private:
  int64_t Filled(uint64_t written, uint64_t read) const;

  char* memory_;
  int64_t capacity_;
  RingPositions& positions_;
};

struct SegmentHeader {
  Bell bell;
  std::atomic<bool> aborted{false};         // the owner has left a reduction, and all later ones
  AbortNotice notice;                       // written before that
  std::atomic<int32_t> awaits_elsewhere{0}; // 1 + a global rank that the owner waits for over the network
  std::atomic<uint32_t> heartbeats{0};      // grows while the owner's process runs; 0: it is not monitored
  std::atomic<int32_t> processor{-1};       // on which the owner last ran in a reduction
  cpu_set_t allowed = {};                   // the processors on which the owner may run
  ProcessorQuota quota;                     // of their time
};

class LocalSegment {
public:
  // Makes the segment of this rank; throws std::system_error.
  LocalSegment(int ranks, int64_t ring_bytes);
  // Maps the segment that a peer made with the same arguments; std::runtime_error if its size is wrong.
  LocalSegment(int descriptor, int ranks, int64_t ring_bytes);
  ~LocalSegment();
  LocalSegment(const LocalSegment&) = delete;
  LocalSegment& operator=(const LocalSegment&) = delete;

  int descriptor() const { return descriptor_.value(); }
  void CloseDescriptor() { descriptor_ = Descriptor(); } // the mapping stays
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(memory_); }
  Ring ring(int peer);
  std::atomic<uint32_t>& awaits(int peer) { return positions(peer).awaits; } // the owner awaits the peer

private:
  static int64_t Bytes(int ranks, int64_t ring_bytes);
  RingPositions& positions(int peer);

  Descriptor descriptor_; // only of this rank's own segment
  int ranks_;
  int64_t ring_bytes_;
  char* memory_;
};

} // namespace adasum_hvd
