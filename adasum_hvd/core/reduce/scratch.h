// Memory for the work of reductions, kept as long as the op.
#pragma once

#include <cstdint>
#include <memory>

namespace adasum_hvd {

constexpr int64_t kHugePageBytes = 2 << 20;

struct PrivateMemory {
  static char* Allocate(int64_t bytes); // of whole huge pages; never null
  void operator()(char* memory) const;  // frees it
};

// Memory that the other ranks of the host can map.
struct SharedMemory {
  static char* Allocate(int64_t bytes);
  void operator()(char* memory) const;
};

// Grows if needed, and then loses its content.
template <class Memory> class ScratchBuffer {
public:
  char* Reserve(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0; // in case the next line throws
      const int64_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
      memory_.reset(Memory::Allocate(rounded));
      bytes_ = rounded;
    }
    return memory_.get();
  }

private:
  std::unique_ptr<char, Memory> memory_;
  int64_t bytes_ = 0;
};

struct Scratch {
  ScratchBuffer<PrivateMemory> staging;       // for slices that are not contiguous in the caller's memory
  ScratchBuffer<PrivateMemory> received;      // the other ranks' elements of this rank's slices
  ScratchBuffer<SharedMemory> shared_staging; // for tensors that are not in shared memory
};

} // namespace adasum_hvd
