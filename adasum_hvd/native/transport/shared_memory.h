// Memory of this process that the other ranks of its host can map, and then read and write where it lies.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include <sys/types.h>

#include "transport/descriptors.h"

namespace adasum_hvd {

// Makes a memfd that nobody can shrink any more: a peer that could shrink what others have mapped could end
// them, because access to what is gone is a SIGBUS. Throws std::system_error.
//
// A memfd, not a file under /dev/shm: containers limit that to 64 MB, and a crash leaves it behind.
Descriptor MakeSharedMemory();
// Makes the memfd longer, by `bytes` from `offset` on that the system has reserved: exhaustion is an error
// here, and no signal later. Throws std::system_error that has the sizes.
void Reserve(int descriptor, int64_t offset, int64_t bytes);
// Throws std::runtime_error where a peer's memfd does not hold so many bytes, or may shrink.
void CheckSharedMemory(int descriptor, int64_t bytes);
// Maps it for reading and writing, to be given to munmap. Throws std::system_error.
char* MapSharedMemory(int descriptor, int64_t offset, int64_t bytes);

// The least number of whole pages that hold so many bytes, in bytes: the system frees no less than a page.
int64_t WholePages(int64_t bytes, int64_t page_bytes);

struct MemorySpan {
  char* begin;
  int64_t bytes;

  // Throws std::runtime_error where that is not inside.
  char* At(uint64_t offset, int64_t count) const;
};

// The memfd in which all regions of this process lie, so that each peer needs one descriptor for all of them.
// It grows, and no place in it is used twice; freed regions are holes.
class SharedFile {
public:
  // The one of this process, while anybody holds it; throws std::system_error.
  static std::shared_ptr<SharedFile> OfThisProcess();
  SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  // Returns where the bytes lie; throws std::system_error. Thread-safe.
  int64_t Append(int64_t bytes);
  void Free(int64_t offset, int64_t bytes);

  int descriptor() const { return descriptor_.value(); }
  bool IsMine() const; // false in a forked child

private:
  const Descriptor descriptor_;
  const pid_t owner_;
  std::mutex mutex_;
  int64_t end_ = 0;
};

// A stretch of it. Its pages are given back when it is freed, also where others have it mapped.
class SharedRegion {
public:
  explicit SharedRegion(int64_t bytes); // of zeros; throws std::system_error
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  char* begin() const { return begin_; }
  int64_t bytes() const { return bytes_; }
  int64_t offset() const { return offset_; } // in the file; never used twice
  const SharedFile& file() const { return *file_; }
  bool Holds(const void* at, int64_t bytes) const;

private:
  int64_t bytes_;
  std::shared_ptr<SharedFile> file_;
  int64_t offset_;
  char* begin_;
};

// A region that a peer has made, mapped here.
class MappedRegion {
public:
  // Throws std::runtime_error where the file holds no such region.
  MappedRegion(int descriptor, int64_t offset, int64_t bytes);
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
// The region of this process that these bytes lie in, or null. No other region than those above is found.
std::shared_ptr<const SharedRegion> FindShared(const void* at, int64_t bytes);

} // namespace adasum_hvd
