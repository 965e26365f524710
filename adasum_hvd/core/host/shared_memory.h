// Memory of this process that the other ranks of its host can map, read and write.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include <sys/types.h>

#include "host/descriptors.h"

namespace adasum_hvd {

// Makes a memfd that no process can shrink. After a peer shrinks memory that others have mapped, their access
// to it would be a SIGBUS. Throws std::system_error.
//
// A memfd, not a file in /dev/shm, which containers limit to 64 MB, and which stays after a crash.
Descriptor MakeSharedMemory();
// Extends the memfd by `bytes` from `offset`, and reserves the memory, so that exhaustion is an error here
// instead of a signal later. Throws std::system_error with the sizes.
void Reserve(int descriptor, int64_t offset, int64_t bytes);
// Throws std::runtime_error if a peer's memfd has fewer bytes, or may shrink.
void CheckSharedMemory(int descriptor, int64_t bytes);
// Maps it for reading and writing; munmap frees the mapping. Throws std::system_error.
char* MapSharedMemory(int descriptor, int64_t offset, int64_t bytes);

// Rounds up to whole pages, in bytes: the system frees only whole pages.
int64_t WholePages(int64_t bytes, int64_t page_bytes);

struct MemorySpan {
  char* begin;
  int64_t bytes;

  // Throws std::runtime_error if the range is not inside.
  char* At(uint64_t offset, int64_t count) const;
};

// The memfd with all regions of this process, so that each peer needs one descriptor. It grows, and no offset
// is used twice; freed regions are holes.
class SharedFile {
public:
  // The one file of this process, while any object holds it; throws std::system_error.
  static std::shared_ptr<SharedFile> OfThisProcess();
  SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  // Returns the offset of the new bytes; throws std::system_error. Thread-safe.
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

// A part of the file. Freeing it returns its pages to the system, also if peers have mapped it.
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

// The mapping of a peer's region.
class MappedRegion {
public:
  // Throws std::runtime_error if the file has no such region.
  MappedRegion(int descriptor, int64_t offset, int64_t bytes);
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  const MemorySpan& span() const { return span_; }

private:
  MemorySpan span_;
};

// The regions that this rank and one peer, connected by a socket, have mapped of each other's memory. No
// function blocks: the message that a region has been freed may arrive late, because no offset of a file is
// used twice.
class PeerMemory {
public:
  // Notes that the peer may map a region, and notifies it of those that have been freed.
  void Offer(int socket, const std::shared_ptr<const SharedRegion>& region);

  // Maps the region at `offset` of the peer's file. Throws std::runtime_error if it cannot be mapped.
  MemorySpan Reach(int socket, int file, int64_t offset, int64_t bytes);

private:
  void UnmapFreed(int socket);

  std::map<int64_t, std::weak_ptr<const SharedRegion>> offered_; // by offset
  std::map<int64_t, std::unique_ptr<MappedRegion>> mapped_;
};

// Memory for tensors, in regions that FindShared finds by address. Thread-safe. Throws std::system_error.
void* AllocateShared(int64_t bytes);
void FreeShared(void* at);
// Puts such memory under a mapping `at`, which begins at a page; address and content stay. Returns another
// address of it, of AllocateShared; FreeShared may follow when the mapping is gone. Throws std::exception.
void* ShareUnder(void* at, int64_t bytes);
// The region of AllocateShared that contains these bytes, or null.
std::shared_ptr<const SharedRegion> FindShared(const void* at, int64_t bytes);

} // namespace adasum_hvd
