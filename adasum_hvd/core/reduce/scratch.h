// Memory for the work of reductions, kept as long as the op.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include <sys/mman.h>

#include "host/shared_memory.h"

namespace adasum_hvd {

constexpr int64_t kHugePageBytes = 2 << 20;

struct PrivateMemory {
  static void* Allocate(int64_t bytes) { // of whole huge pages
    void* memory = std::aligned_alloc(kHugePageBytes, bytes);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    madvise(memory, bytes, MADV_HUGEPAGE); // a hint; small pages are also correct
    return memory;
  }
  void operator()(char* memory) const { std::free(memory); }
};

// Memory that the other ranks of the host can map.
struct SharedMemory {
  static void* Allocate(int64_t bytes) { return AllocateShared(bytes); }
  void operator()(char* memory) const { FreeShared(memory); }
};

// Grows if needed, and then loses its content.
template <class Memory> class ScratchBuffer {
public:
  char* Reserve(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0; // in case the next line throws
      const int64_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
      memory_.reset(static_cast<char*>(Memory::Allocate(rounded)));
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
