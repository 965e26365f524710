#include "reduce/scratch.h"

#include <cstdlib>
#include <new>

#include <sys/mman.h>

#include "host/shared_memory.h"

namespace adasum_hvd {

char* PrivateMemory::Allocate(int64_t bytes) {
  void* memory = std::aligned_alloc(kHugePageBytes, bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  madvise(memory, bytes, MADV_HUGEPAGE); // a hint; small pages are also correct
  return static_cast<char*>(memory);
}

void PrivateMemory::operator()(char* memory) const { std::free(memory); }

char* SharedMemory::Allocate(int64_t bytes) { return static_cast<char*>(AllocateShared(bytes)); }

void SharedMemory::operator()(char* memory) const { FreeShared(memory); }

} // namespace adasum_hvd
