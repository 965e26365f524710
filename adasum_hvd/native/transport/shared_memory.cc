#include "transport/shared_memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace adasum_hvd {
namespace {

// A peer that could shrink what others have mapped could end them: touching what is gone is a SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int64_t kPageBytes = 4096;

std::mutex regions_mutex;
std::map<uintptr_t, std::shared_ptr<const SharedRegion>> regions; // by the first byte

char* MapAll(int descriptor, int64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    throw std::system_error(error, std::generic_category(), "mapping of shared memory");
  }
  madvise(memory, bytes, MADV_HUGEPAGE); // a hint: where it is refused, small pages do
  return static_cast<char*>(memory);
}

uint64_t NextNumber() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

} // namespace

SharedRegion::SharedRegion(int64_t bytes)
    : descriptor_(memfd_create("adasum_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING)),
      bytes_((std::max<int64_t>(bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes), number_(NextNumber()),
      owner_(getpid()) {
  if (descriptor_ < 0) {
    throw std::system_error(errno, std::generic_category(), "memfd_create");
  }
  if (ftruncate(descriptor_, bytes_) != 0 || fcntl(descriptor_, F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    close(descriptor_);
    throw std::system_error(error, std::generic_category(), "size of shared memory");
  }
  begin_ = MapAll(descriptor_, bytes_);
}

SharedRegion::~SharedRegion() {
  if (getpid() == owner_) {
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes_);
  }
  munmap(begin_, bytes_);
  close(descriptor_);
}

bool SharedRegion::Holds(const void* at, int64_t bytes) const {
  const auto* first = static_cast<const char*>(at);
  return first >= begin_ && bytes <= bytes_ && first - begin_ <= bytes_ - bytes;
}

MappedRegion::MappedRegion(int descriptor, int64_t bytes) : span_{nullptr, bytes} {
  struct stat status;
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (fstat(descriptor, &status) != 0 || status.st_size != bytes || seals < 0 || (seals & kSeals) != kSeals) {
    close(descriptor);
    throw std::runtime_error("AdaSum: a rank of this host offers memory that is not as ranks make it");
  }
  span_.begin = MapAll(descriptor, bytes);
  close(descriptor);
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
