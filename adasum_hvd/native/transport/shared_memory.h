// Memory of this process that the other ranks of its host can map, and then read and write where it lies.
#pragma once

#include <cstdint>
#include <memory>

#include <sys/types.h>

#include "transport/descriptors.h"

namespace adasum_hvd {

// Makes a memfd of zeros whose size nobody can change any more: a peer that could shrink what others have
// mapped could end them, for touching what is gone is a SIGBUS. Throws std::system_error.
//
// A memfd, not a file under /dev/shm: containers limit that to 64 MB, and a crash leaves it behind.
Descriptor MakeSharedMemory(int64_t bytes);
// Throws std::runtime_error for what is not as a peer makes that many bytes.
void CheckSharedMemory(int descriptor, int64_t bytes);
// Maps it for reading and writing, to be given to munmap. Throws std::system_error.
char* MapSharedMemory(int descriptor, int64_t bytes);

struct MemorySpan {
  char* begin;
  int64_t bytes;

  // Throws std::runtime_error where that is not inside.
  char* At(uint64_t offset, int64_t count) const;
};

// A stretch of such memory. Its pages are given back when it is freed, also where others have it mapped.
class SharedRegion {
public:
  explicit SharedRegion(int64_t bytes); // of zeros; throws std::system_error
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  char* begin() const { return begin_; }
  int64_t bytes() const { return bytes_; }
  uint64_t number() const { return number_; } // of this process; never used twice
  int descriptor() const { return descriptor_.value(); }
  bool Holds(const void* at, int64_t bytes) const;

private:
  int64_t bytes_;
  Descriptor descriptor_;
  uint64_t number_;
  pid_t owner_; // a forked child frees nothing of its parent's
  char* begin_;
};

// A region that a peer has made, mapped here.
class MappedRegion {
public:
  // Throws std::runtime_error for what is no region of that many bytes.
  MappedRegion(int descriptor, int64_t bytes);
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  const MemorySpan& span() const { return span_; }

private:
  MemorySpan span_;
};

// Memory for tensors, to be found by its address. Thread-safe. Throws std::system_error.
void* AllocateShared(int64_t bytes);
void FreeShared(void* at);
// The region that these bytes lie in, or null. No other region than those above is found.
std::shared_ptr<const SharedRegion> FindShared(const void* at, int64_t bytes);

} // namespace adasum_hvd
