// Memory of this process that the other ranks of its host can map, and then read and write where it lies.
#pragma once

#include <cstdint>
#include <memory>

#include <sys/types.h>

namespace adasum_hvd {

struct MemorySpan {
  char* begin;
  int64_t bytes;

  // Throws std::runtime_error where that is not inside.
  char* At(uint64_t offset, int64_t count) const;
};

// A stretch of such memory: a memfd whose size nobody can change. Its pages are given back when it is freed,
// also where others have it mapped.
class SharedRegion {
public:
  explicit SharedRegion(int64_t bytes); // of zeros; throws std::system_error
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  char* begin() const { return begin_; }
  int64_t bytes() const { return bytes_; }
  uint64_t number() const { return number_; } // of this process; never used twice
  int descriptor() const { return descriptor_; }
  bool Holds(const void* at, int64_t bytes) const;

private:
  int descriptor_;
  int64_t bytes_;
  uint64_t number_;
  pid_t owner_; // a forked child frees nothing of its parent's
  char* begin_ = nullptr;
};

// A region that a peer has made, mapped here.
class MappedRegion {
public:
  // Takes the descriptor over. Throws std::runtime_error for what is no region of that many bytes.
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
