#include "host/shared_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace adasum_hvd {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;
constexpr int64_t kHugePageBytes = 2 << 20;  // regions are aligned to it
constexpr int64_t kReserveAtOnce = 64 << 20; // a signal that interrupts a reservation undoes at most this
constexpr unsigned kNoExecution = 0x0008U;   // MFD_NOEXEC_SEAL, Linux 6.3; older headers lack it

std::mutex file_mutex;
std::weak_ptr<SharedFile> file_of_this_process;

std::mutex regions_mutex;
std::map<uintptr_t, std::shared_ptr<const SharedRegion>> regions; // by the first byte

// For tensors, which are large, and read sequentially.
char* MapRegion(int descriptor, int64_t offset, int64_t bytes) {
  char* memory = MapSharedMemory(descriptor, offset, bytes);
  madvise(memory, bytes, MADV_HUGEPAGE); // a hint; small pages are also correct
  return memory;
}

int64_t AvailableBytes() {
  std::ifstream lines("/proc/meminfo");
  int64_t kibibytes = 0;
  for (std::string word; lines >> word;) {
    if (word == "MemAvailable:" && lines >> kibibytes) {
      return kibibytes << 10;
    }
  }
  return std::numeric_limits<int64_t>::max(); // unknown
}

[[noreturn]] void ThrowNoMemory(int error, int64_t bytes, int64_t available) {
  throw std::system_error(error, std::generic_category(),
                          "shared memory: expected " + std::to_string(bytes) + " bytes, but the system has " +
                              std::to_string(available) + " available");
}

void PunchHole(int descriptor, int64_t offset, int64_t bytes) {
  fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

} // namespace

// Systems with vm.memfd_noexec=2 require the flag, and older systems do not know it.
Descriptor MakeSharedMemory() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Descriptor memory(memfd_create("adasum_hvd", kFlags | kNoExecution));
  if (memory.value() < 0 && errno == EINVAL) {
    memory = Descriptor(memfd_create("adasum_hvd", kFlags));
  }
  if (memory.value() < 0 || fcntl(memory.value(), F_ADD_SEALS, kSeals) != 0) {
    ThrowErrno("memfd_create");
  }
  return memory;
}

void Reserve(int descriptor, int64_t offset, int64_t bytes) {
  const int64_t available = AvailableBytes();
  if (bytes > available) { // without this check the system would kill processes instead
    ThrowNoMemory(ENOMEM, bytes, available);
  }
  // It also extends the file; ftruncate would fail if an earlier attempt had extended it further.
  for (int64_t done = 0; done < bytes;) {
    const int64_t part = std::min(bytes - done, kReserveAtOnce);
    if (fallocate(descriptor, 0, offset + done, part) == 0) {
      done += part;
    } else if (errno != EINTR) {
      const int error = errno;
      PunchHole(descriptor, offset, bytes);
      ThrowNoMemory(error, bytes, available);
    }
  }
}

void CheckSharedMemory(int descriptor, int64_t bytes) {
  struct stat status;
  if (fstat(descriptor, &status) != 0 || status.st_size < bytes) {
    throw std::runtime_error("shared memory of another size than agreed");
  }
  if (const int seals = fcntl(descriptor, F_GET_SEALS); seals < 0 || (seals & kSeals) != kSeals) {
    throw std::runtime_error("shared memory whose size may still shrink");
  }
}

char* MapSharedMemory(int descriptor, int64_t offset, int64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, offset);
  if (memory == MAP_FAILED) {
    ThrowErrno("mapping of shared memory");
  }
  return static_cast<char*>(memory);
}

int64_t WholePages(int64_t bytes, int64_t page_bytes) {
  return (std::max<int64_t>(bytes, 1) + page_bytes - 1) / page_bytes * page_bytes;
}

// A forked child makes its own file.
std::shared_ptr<SharedFile> SharedFile::OfThisProcess() {
  std::lock_guard<std::mutex> guard(file_mutex);
  std::shared_ptr<SharedFile> file = file_of_this_process.lock();
  if (file == nullptr || !file->IsMine()) {
    file = std::make_shared<SharedFile>();
    file_of_this_process = file;
  }
  return file;
}

SharedFile::SharedFile() : descriptor_(MakeSharedMemory()), owner_(getpid()) {}

bool SharedFile::IsMine() const { return getpid() == owner_; }

int64_t SharedFile::Append(int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const int64_t offset = end_;
  Reserve(descriptor(), offset, bytes);
  end_ = WholePages(offset + bytes, kHugePageBytes);
  return offset;
}

void SharedFile::Free(int64_t offset, int64_t bytes) { PunchHole(descriptor(), offset, bytes); }

SharedRegion::SharedRegion(int64_t bytes)
    : bytes_(WholePages(bytes, sysconf(_SC_PAGESIZE))), file_(SharedFile::OfThisProcess()),
      offset_(file_->Append(bytes_)) {
  try {
    begin_ = MapRegion(file_->descriptor(), offset_, bytes_);
  } catch (const std::exception&) {
    file_->Free(offset_, bytes_);
    throw;
  }
}

SharedRegion::~SharedRegion() {
  if (file_->IsMine()) {
    file_->Free(offset_, bytes_);
  }
  munmap(begin_, bytes_);
}

bool SharedRegion::Holds(const void* at, int64_t bytes) const {
  const auto* first = static_cast<const char*>(at);
  return first >= begin_ && bytes <= bytes_ && first - begin_ <= bytes_ - bytes;
}

MappedRegion::MappedRegion(int descriptor, int64_t offset, int64_t bytes) : span_{nullptr, bytes} {
  if (offset < 0 || bytes <= 0 || bytes > std::numeric_limits<int64_t>::max() - offset) {
    throw std::runtime_error("shared memory of another size than agreed");
  }
  CheckSharedMemory(descriptor, offset + bytes);
  span_.begin = MapRegion(descriptor, offset, bytes);
}

MappedRegion::~MappedRegion() { munmap(span_.begin, span_.bytes); }

char* MemorySpan::At(uint64_t offset, int64_t count) const {
  const auto all = static_cast<uint64_t>(bytes);
  if (offset > all || static_cast<uint64_t>(count) > all - offset) {
    throw std::runtime_error("AdaSum: a rank of this host names memory that it has not offered");
  }
  return begin + offset;
}

void PeerMemory::Offer(int socket, const std::shared_ptr<const SharedRegion>& region) {
  if (offered_.count(region->offset()) != 0) {
    return;
  }
  for (auto one = offered_.begin(); one != offered_.end();) {
    if (!one->second.expired()) {
      ++one;
      continue;
    }
    try {
      Send(socket, one->first);
    } catch (const std::system_error&) {
      break; // the socket is full, or the peer has ended, which the next wait detects
    }
    one = offered_.erase(one);
  }
  offered_[region->offset()] = region;
}

MemorySpan PeerMemory::Reach(int socket, int file, int64_t offset, int64_t bytes) {
  const auto found = mapped_.find(offset);
  if (found != mapped_.end() && found->second->span().bytes == bytes) {
    return found->second->span();
  }
  UnmapFreed(socket);
  mapped_[offset] = std::make_unique<MappedRegion>(file, offset, bytes);
  return mapped_[offset]->span();
}

void PeerMemory::UnmapFreed(int socket) {
  try {
    for (int64_t freed = 0;;) {
      Receive(socket, freed);
      mapped_.erase(freed);
    }
  } catch (const std::system_error&) { // no more messages
  }
}

void* AllocateShared(int64_t bytes) {
  auto region = std::make_shared<const SharedRegion>(bytes);
  char* begin = region->begin();
  std::lock_guard<std::mutex> guard(regions_mutex);
  regions[reinterpret_cast<uintptr_t>(begin)] = std::move(region);
  return begin;
}

void* ShareUnder(void* at, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % sysconf(_SC_PAGESIZE) != 0) {
    throw std::invalid_argument("shared memory: expected a mapping that begins at a page");
  }
  void* other = AllocateShared(bytes);
  const auto region = FindShared(other, bytes);
  std::memcpy(other, at, bytes);
  if (mmap(at, region->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, region->file().descriptor(),
           region->offset()) == MAP_FAILED) {
    FreeShared(other);
    ThrowErrno("mapping of shared memory");
  }
  madvise(at, region->bytes(), MADV_HUGEPAGE);
  return other;
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
  if (after == regions.begin() || !std::prev(after)->second->Holds(at, bytes) ||
      !std::prev(after)->second->file().IsMine()) { // a forked child's peers know its own file only
    return nullptr;
  }
  return std::prev(after)->second;
}

} // namespace adasum_hvd
