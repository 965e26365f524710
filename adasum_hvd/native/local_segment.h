// The memory that one rank shares with the other ranks of its host: a bell and one ring of bytes per peer.
//
// A memfd, not a file under /dev/shm: containers limit that to 64 MB, and a crash leaves it behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace adasum_hvd {

// Wakes the rank that owns it. Futexes work across processes on shared memory.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> asleep{0};

  void Ring();
  // Sleeps until the count differs from `seen`; true when the time was over first.
  bool SleepUnlessRung(uint32_t seen, int milliseconds);
};

// Bytes on their way from the segment's owner to one peer. Positions only grow; one writer, one reader.
struct RingPositions {
  alignas(64) std::atomic<uint64_t> written{0};
  alignas(64) std::atomic<uint64_t> read{0};
};

struct SegmentHeader {
  Bell bell;
  std::atomic<int32_t> gave_up{0}; // 1 + the global rank for whose sake the owner has stopped
  uint64_t probe_address = 0;      // in the owner's memory, where a peer that may read it finds probe_value
  uint64_t probe_value = 0;        // a random number
};

class LocalSegment {
public:
  // Makes the segment of this rank; throws std::system_error.
  LocalSegment(int ranks, int64_t ring_bytes);
  // Maps the segment that a peer made with the same arguments; takes the descriptor over.
  LocalSegment(int descriptor, int ranks, int64_t ring_bytes);
  ~LocalSegment();
  LocalSegment(const LocalSegment&) = delete;
  LocalSegment& operator=(const LocalSegment&) = delete;

  int descriptor() const { return descriptor_; }
  void CloseDescriptor(); // the mapping stays
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(memory_); }
  RingPositions& positions(int peer);
  char* ring(int peer);

private:
  static int64_t Bytes(int ranks, int64_t ring_bytes);
  void Map();

  int descriptor_;
  int ranks_;
  int64_t ring_bytes_;
  char* memory_ = nullptr;
  std::unique_ptr<uint64_t> probe_;
};

} // namespace adasum_hvd
