#include "transport/shared_memory.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace adasum_hvd {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int64_t kPageBytes = 4096;

std::mutex regions_mutex;
std::map<uintptr_t, std::shared_ptr<const SharedRegion>> regions; // by the first byte

int64_t WholePages(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Of tensors: large, and read from end to end.
char* MapRegion(int descriptor, int64_t bytes) {
  char* memory = MapSharedMemory(descriptor, bytes);
  madvise(memory, bytes, MADV_HUGEPAGE); // a hint: where it is refused, small pages do
  return memory;
}

uint64_t NextNumber() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

} // namespace

Descriptor MakeSharedMemory(int64_t bytes) {
  Descriptor memory(memfd_create("adasum_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.value() < 0) {
    ThrowErrno("memfd_create");
  }
  if (ftruncate(memory.value(), bytes) != 0 || fcntl(memory.value(), F_ADD_SEALS, kSeals) != 0) {
    ThrowErrno("size of shared memory");
  }
  return memory;
}

void CheckSharedMemory(int descriptor, int64_t bytes) {
  struct stat status;
  if (fstat(descriptor, &status) != 0 || status.st_size != bytes) {
    throw std::runtime_error("shared memory of another size than agreed");
  }
  if (const int seals = fcntl(descriptor, F_GET_SEALS); seals < 0 || (seals & kSeals) != kSeals) {
    throw std::runtime_error("shared memory whose size may still change");
  }
}

char* MapSharedMemory(int descriptor, int64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    ThrowErrno("mapping of shared memory");
  }
  return static_cast<char*>(memory);
}

SharedRegion::SharedRegion(int64_t bytes)
    : bytes_(WholePages(bytes)), descriptor_(MakeSharedMemory(bytes_)), number_(NextNumber()),
      owner_(getpid()), begin_(MapRegion(descriptor(), bytes_)) {}

SharedRegion::~SharedRegion() {
  if (getpid() == owner_) {
    fallocate(descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes_);
  }
  munmap(begin_, bytes_);
}

bool SharedRegion::Holds(const void* at, int64_t bytes) const {
  const auto* first = static_cast<const char*>(at);
  return first >= begin_ && bytes <= bytes_ && first - begin_ <= bytes_ - bytes;
}

MappedRegion::MappedRegion(int descriptor, int64_t bytes) : span_{nullptr, bytes} {
  CheckSharedMemory(descriptor, bytes);
  span_.begin = MapRegion(descriptor, bytes);
}

MappedRegion::~MappedRegion() { munmap(span_.begin, span_.bytes); }

char* MemorySpan::At(uint64_t offset, int64_t count) const {
  const auto all = static_cast<uint64_t>(bytes);
  if (offset > all || static_cast<uint64_t>(count) > all - offset) {
    throw std::runtime_error("AdaSum: a rank of this host names memory that it has not offered");
  }
  return begin + offset;
}

void* AllocateShared(int64_t bytes) {
  auto region = std::make_shared<const SharedRegion>(bytes);
  char* begin = region->begin();
  std::lock_guard<std::mutex> guard(regions_mutex);
  regions[reinterpret_cast<uintptr_t>(begin)] = std::move(region);
  return begin;
}

void FreeShared(void* at) {
  std::shared_ptr<const SharedRegion> last; // outlives the lock
  std::lock_guard<std::mutex> guard(regions_mutex);
  const auto found = regions.find(reinterpret_cast<uintptr_t>(at));
  if (found != regions.end()) {
    last = std::move(found->second);
    regions.erase(found);
  }
}

std::shared_ptr<const SharedRegion> FindShared(const void* at, int64_t bytes) {
  std::lock_guard<std::mutex> guard(regions_mutex);
  auto after = regions.upper_bound(reinterpret_cast<uintptr_t>(at));
  if (after == regions.begin() || !std::prev(after)->second->Holds(at, bytes)) {
    return nullptr;
  }
  return std::prev(after)->second;
}

} // namespace adasum_hvd
