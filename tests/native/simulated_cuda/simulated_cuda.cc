#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "kernels/kernels.h"
#include "nccl.h"

#if !defined(__x86_64__)
#error "fibers are switched in x86-64 assembly"
#endif

// Saves the callee-saved registers on the running stack, leaves its top in *from and goes on with `to`.
extern "C" void simulated_cuda_switch(void** from, void* to);
asm(R"(
.text
.globl simulated_cuda_switch
.type simulated_cuda_switch, @function
simulated_cuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simulated_cuda_switch, .-simulated_cuda_switch
)");

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simulated_cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMostShuffled = 16; // bytes

struct Barrier {
  unsigned arrived = 0;
  uint64_t passed = 0;
};

struct Warp {
  Barrier barrier;
  char values[2][kWarp][kMostShuffled]; // written for the next shuffle while the last is still read
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* top = nullptr;
  bool ended = false;
  unsigned shuffles = 0;
};

struct Processor {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier block;
  void* scheduler = nullptr;
  Fiber* running = nullptr;
  const std::function<void()>* body = nullptr;
  bool progress = false;

  void Yield() { simulated_cuda_switch(&running->top, scheduler); }

  void Wait(Barrier& barrier, unsigned expected) {
    const uint64_t mine = barrier.passed;
    if (++barrier.arrived == expected) {
      barrier.arrived = 0;
      barrier.passed += 1;
      progress = true;
    }
    while (barrier.passed == mine) {
      Yield();
    }
  }
};

Processor& processor() {
  static thread_local Processor one;
  return one;
}

void RunFiber() {
  Processor& here = processor();
  (*here.body)();
  here.running->ended = true;
  here.progress = true;
  here.Yield();
  std::abort(); // an ended fiber is not run again
}

void Prepare(Fiber& fiber) {
  fiber.ended = false;
  fiber.shuffles = 0;
  // Where `ret` finds RunFiber, with the stack as after a call: 16-byte aligned but for the return address.
  uintptr_t end = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) & ~uintptr_t{15};
  void** at = reinterpret_cast<void**>(end) - 2;
  *at = reinterpret_cast<void*>(&RunFiber);
  at[1] = nullptr;
  for (int saved = 0; saved < 6; ++saved) {
    *--at = nullptr;
  }
  fiber.top = at;
}

} // namespace

void WaitForBlock() { processor().Wait(processor().block, blockDim.x); }

void WaitForWarp() {
  Processor& here = processor();
  here.Wait(here.warps[threadIdx.x / kWarp].barrier, kWarp);
}

void Shuffle(void* value, size_t bytes, unsigned from) {
  Processor& here = processor();
  Warp& warp = here.warps[threadIdx.x / kWarp];
  const unsigned lane = threadIdx.x % kWarp, parity = here.running->shuffles++ % 2;
  std::memcpy(warp.values[parity][lane], value, bytes);
  WaitForWarp();
  std::memcpy(value, warp.values[parity][from], bytes);
}

void RunKernel(dim3 blocks, dim3 threads, const std::function<void()>& body) {
  Processor& here = processor();
  while (here.fibers.size() < threads.x) {
    here.fibers.push_back(std::make_unique<Fiber>());
  }
  here.warps.resize((threads.x + kWarp - 1) / kWarp);
  here.body = &body;
  blockDim = threads;
  gridDim = blocks;
  for (unsigned block = 0; block < blocks.x * blocks.y; ++block) {
    blockIdx = dim3(block % blocks.x, block / blocks.x);
    here.block = Barrier();
    for (Warp& warp : here.warps) {
      warp.barrier = Barrier();
    }
    for (unsigned thread = 0; thread < threads.x; ++thread) {
      Prepare(*here.fibers[thread]);
    }
    for (unsigned live = threads.x; live > 0;) {
      here.progress = false;
      for (unsigned thread = 0; thread < threads.x; ++thread) {
        Fiber& fiber = *here.fibers[thread];
        if (!fiber.ended) {
          threadIdx = dim3(thread);
          here.running = &fiber;
          simulated_cuda_switch(&here.scheduler, fiber.top);
          live -= fiber.ended ? 1 : 0;
        }
      }
      if (!here.progress) {
        std::fprintf(stderr, "a kernel hangs: some threads of a block never reach a barrier\n");
        std::abort();
      }
    }
  }
}

// ---- streams ----

namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
};
Streams& streams() {
  static Streams everywhere;
  return everywhere;
}

} // namespace

namespace {

std::atomic<int64_t> kernels, uploads, groups; // enqueued

struct Kernels {
  std::mutex mutex;
  std::set<const void*> loaded;
};
Kernels& loaded_kernels() {
  static Kernels everywhere;
  return everywhere;
}

} // namespace

void Load(const void* kernel) {
  {
    std::lock_guard<std::mutex> guard(loaded_kernels().mutex);
    if (!loaded_kernels().loaded.insert(kernel).second) {
      return;
    }
  }
  std::lock_guard<std::mutex> guard(streams().mutex);
  for (Stream* stream : streams().all) {
    stream->Synchronize();
  }
}

cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> body) {
  constexpr unsigned kMostAcross = 65535, kMostThreads = 1024;
  const dim3 blocks = config.gridDim, threads = config.blockDim;
  if (blocks.x == 0 || blocks.x > 0x7fffffff || blocks.y == 0 || blocks.y > kMostAcross || blocks.z != 1 ||
      threads.x == 0 || threads.x > kMostThreads) {
    return cudaErrorInvalidConfiguration;
  }
  kernels += 1;
  config.stream->Enqueue([=] { RunKernel(blocks, threads, body); });
  return cudaSuccess;
}

Stream::Stream() : thread_([this] { Work(); }) {}

Stream::~Stream() {
  Synchronize();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::Enqueue(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !working_; });
}

bool Stream::IsBusy() {
  std::lock_guard<std::mutex> guard(mutex_);
  return working_ || !queue_.empty();
}

void Stream::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ended_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    working_ = true;
    lock.unlock();
    work();
    lock.lock();
    working_ = false;
    changed_.notify_all();
  }
}

} // namespace simulated_cuda

using simulated_cuda::streams;

SimulatedCounts SimulatedEnqueued() {
  return {simulated_cuda::kernels, simulated_cuda::uploads, simulated_cuda::groups};
}

// ---- the functions of CUDA ----

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidConfiguration: return "invalid configuration argument";
  case cudaErrorNotReady: return "device not ready";
  case cudaErrorNotSupported: return "operation not supported";
  }
  return "unknown error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace {

std::atomic<size_t> memory_limit{SIZE_MAX};
std::atomic<bool> has_pools{true};

struct Pool {
  std::mutex mutex;
  std::set<void*> memory;
};
Pool& pool() {
  static Pool one;
  return one;
}

bool IsOfPool(void* memory) {
  std::lock_guard<std::mutex> guard(pool().mutex);
  return pool().memory.count(memory) != 0;
}

} // namespace

void SimulatedMemoryLimit(size_t bytes) { memory_limit = bytes; }
void SimulatedMemoryPools(bool supported) { has_pools = supported; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = has_pools ? 1 : 0;
  return attribute == cudaDevAttrMemoryPoolsSupported ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (bytes > memory_limit) {
    return cudaErrorMemoryAllocation;
  }
  *memory = std::malloc(bytes);
  if (*memory == nullptr && bytes > 0) {
    return cudaErrorMemoryAllocation;
  }
  std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) {
    return cudaSuccess;
  }
  const bool waits = !IsOfPool(memory);
  {
    std::lock_guard<std::mutex> guard(streams().mutex);
    for (simulated_cuda::Stream* stream : streams().all) {
      if (waits) {
        stream->Synchronize();
      } else if (stream->IsBusy()) {
        std::fprintf(stderr, "cudaFree of a pool's memory while a stream works: nothing waits\n");
        std::abort();
      }
    }
  }
  {
    std::lock_guard<std::mutex> guard(pool().mutex);
    pool().memory.erase(memory);
  }
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  if (!has_pools) {
    return cudaErrorNotSupported;
  }
  const cudaError_t error = cudaMalloc(memory, bytes);
  if (error == cudaSuccess) {
    std::lock_guard<std::mutex> guard(pool().mutex);
    pool().memory.insert(*memory);
  }
  return error;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (!IsOfPool(memory)) {
    return cudaErrorInvalidValue;
  }
  stream->Enqueue([=] {
    {
      std::lock_guard<std::mutex> guard(pool().mutex);
      pool().memory.erase(memory);
    }
    std::free(memory);
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  simulated_cuda::uploads += kind == cudaMemcpyHostToDevice ? 1 : 0;
  stream->Enqueue([=] { std::copy_n(static_cast<const char*>(from), bytes, static_cast<char*>(to)); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  stream->Enqueue([=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new simulated_cuda::Stream();
  std::lock_guard<std::mutex> guard(streams().mutex);
  streams().all.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard<std::mutex> guard(streams().mutex);
    streams().all.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->Synchronize();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
  stream->Enqueue([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new simulated_cuda::Event();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int64_t number;
  {
    std::lock_guard<std::mutex> guard(event->mutex);
    number = ++event->recorded;
  }
  stream->Enqueue([=] {
    std::lock_guard<std::mutex> guard(event->mutex);
    event->done = number;
    event->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::mutex> guard(event->mutex);
  return event->done == event->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(event->mutex);
  const int64_t wanted = event->recorded;
  event->changed.wait(lock, [=] { return event->done >= wanted; });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::mutex> guard(event->mutex);
  stream->Enqueue([event, wanted = event->recorded] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [=] { return event->done >= wanted; });
  });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) {
    *least = 0;
  }
  *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

namespace {

float Widened(const void* value, adasum_hvd::ElementType type) {
  double wide;
  adasum_hvd::kPortableKernels.widen[type](value, 1, 1.0, &wide);
  return static_cast<float>(wide);
}

} // namespace

float __half2float(__half value) { return Widened(&value, adasum_hvd::kFloat16); }
__half __double2half(double value) {
  __half half;
  adasum_hvd::kPortableKernels.narrow[adasum_hvd::kFloat16](&value, 1, 1.0, &half);
  return half;
}
float __bfloat162float(__nv_bfloat16 value) { return Widened(&value, adasum_hvd::kBfloat16); }
__nv_bfloat16 __double2bfloat16(double value) {
  __nv_bfloat16 narrow;
  adasum_hvd::kPortableKernels.narrow[adasum_hvd::kBfloat16](&value, 1, 1.0, &narrow);
  return narrow;
}

// ---- NCCL ----

namespace simulated_cuda {

class Communicator;

namespace {

struct Communicators {
  std::mutex mutex;
  std::set<Communicator*> living;
};
Communicators& communicators() {
  static Communicators everywhere;
  return everywhere;
}

void MustLive(Communicator* communicator) {
  std::lock_guard<std::mutex> guard(communicators().mutex);
  if (communicators().living.count(communicator) == 0) {
    std::fprintf(stderr, "NCCL is asked of a communicator that has ended\n");
    std::abort();
  }
}

} // namespace

// A rank's datagram socket, named after the job and the rank, and a thread that sorts what arrives by sender.
class Communicator {
public:
  Communicator(const std::string& job, int rank, int size)
      : job_(job), rank_(rank), size_(size), socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
        arrived_(size) {
    const Address mine = AddressOf(rank);
    if (socket_ < 0 || bind(socket_, mine.generic(), mine.length) != 0) {
      std::perror("simulated NCCL");
      std::abort();
    }
    reader_ = std::thread([this] { Read(); });
  }

  // Every rank's, as NCCL does inside a host: a rank that ends its communicator alone waits for the others.
  ~Communicator() {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return under_way_ == 0; });
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        Deliver(peer, Datagram(kEnds), true);
      }
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!changed_.wait_for(lock, kPatience, [this] { return ended_ == size_ - 1; })) {
        std::fprintf(stderr, "NCCL hangs: rank %d ends its communicator, and %d others do not\n", rank_,
                     size_ - 1 - ended_);
        std::abort();
      }
    }
    Deliver(rank_, Datagram(kReaderEnds), true);
    reader_.join();
    close(socket_);
  }

  // What waits for a message or is still to come does so no more, and finds anything.
  void Abort() {
    std::lock_guard<std::mutex> guard(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

  int size() const { return size_; }

  // Of exchanges that a stream has yet to come to the end of.
  void Begin() {
    std::lock_guard<std::mutex> guard(mutex_);
    under_way_ += 1;
  }
  void Finish() {
    std::lock_guard<std::mutex> guard(mutex_);
    under_way_ -= 1;
    changed_.notify_all();
  }

  void Send(const char* from, size_t bytes, int peer) {
    for (size_t sent = 0; sent < bytes; sent += kMostBytes) {
      std::string datagram = Datagram(kMessage);
      datagram.append(from + sent, std::min(kMostBytes, bytes - sent));
      Deliver(peer, datagram);
    }
  }

  void Receive(char* to, size_t bytes, int peer) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::string& box = arrived_[peer];
    if (!changed_.wait_for(lock, kPatience, [&] { return aborted_ || box.size() >= bytes; })) {
      std::fprintf(stderr, "NCCL hangs: rank %d expects %zu bytes of rank %d and has %zu\n", rank_, bytes,
                   peer, box.size());
      std::abort();
    }
    if (aborted_) {
      return;
    }
    std::copy_n(box.data(), bytes, to);
    box.erase(0, bytes);
  }

private:
  static constexpr size_t kMostBytes = 64 << 10;

  static constexpr std::chrono::seconds kPatience{60};

  enum Kind { kMessage, kEnds, kReaderEnds };
  struct Header {
    Kind kind;
    int from;
  };
  struct Address {
    sockaddr_un name = {};
    socklen_t length = 0;
    const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&name); }
  };

  Address AddressOf(int rank) const {
    Address address;
    address.name.sun_family = AF_UNIX;
    const std::string path = job_ + "-" + std::to_string(rank); // behind a zero: in no folder
    path.copy(address.name.sun_path + 1, sizeof address.name.sun_path - 1);
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
    return address;
  }

  std::string Datagram(Kind kind) const {
    const Header header = {kind, rank_};
    return {reinterpret_cast<const char*>(&header), sizeof header};
  }

  void Deliver(int peer, const std::string& datagram, bool last = false) {
    const Address address = AddressOf(peer);
    for (int tries = 0; tries < 60000; ++tries) { // the peer may not be there yet
      if (aborted_ && !last) {
        return;
      }
      if (sendto(socket_, datagram.data(), datagram.size(), 0, address.generic(), address.length) >= 0) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::perror("simulated NCCL cannot send");
    std::abort();
  }

  void Read() {
    std::vector<char> datagram(sizeof(Header) + kMostBytes);
    while (true) {
      const ssize_t got = recv(socket_, datagram.data(), datagram.size(), 0);
      Header header = {kReaderEnds, rank_};
      if (got >= static_cast<ssize_t>(sizeof header)) {
        std::memcpy(&header, datagram.data(), sizeof header);
      }
      if (header.kind == kReaderEnds) {
        return;
      }
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ += header.kind == kEnds ? 1 : 0;
      arrived_[header.from].append(datagram.data() + sizeof header, static_cast<size_t>(got) - sizeof header);
      changed_.notify_all();
    }
  }

  const std::string job_;
  const int rank_;
  const int size_;
  const int socket_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> arrived_; // per sender
  int under_way_ = 0;
  int ended_ = 0; // other ranks
  std::atomic<bool> aborted_{false};
  std::thread reader_;
};

namespace {

struct Message {
  bool send;
  void* at;
  size_t bytes;
  int peer;
  Communicator* communicator;
  cudaStream_t stream;
};

struct Group {
  int depth = 0;
  std::vector<Message> messages;
  std::vector<Communicator*> aborted;
};
Group& group() {
  static thread_local Group mine;
  return mine;
}

void Exchange(const std::vector<Message>& messages) {
  for (const Message& message : messages) {
    if (message.send) {
      message.communicator->Send(static_cast<const char*>(message.at), message.bytes, message.peer);
    }
  }
  for (const Message& message : messages) {
    if (!message.send) {
      message.communicator->Receive(static_cast<char*>(message.at), message.bytes, message.peer);
    }
  }
}

ncclResult_t Add(Message message) {
  if (group().depth == 0 || message.peer < 0 || message.peer >= message.communicator->size()) {
    return ncclInvalidUsage;
  }
  group().messages.push_back(message);
  return ncclSuccess;
}

} // namespace
} // namespace simulated_cuda

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "invalid usage";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made{0};
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "simulated-nccl-%d-%d", static_cast<int>(getpid()),
                ++made);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId id, int rank) {
  *communicator = new simulated_cuda::Communicator(id.internal, rank, size);
  std::lock_guard<std::mutex> guard(simulated_cuda::communicators().mutex);
  simulated_cuda::communicators().living.insert(*communicator);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  simulated_cuda::MustLive(communicator);
  {
    std::lock_guard<std::mutex> guard(simulated_cuda::communicators().mutex);
    simulated_cuda::communicators().living.erase(communicator);
  }
  delete communicator;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  simulated_cuda::group().depth += 1;
  return ncclSuccess;
}

// It frees device memory, for which CUDA waits for all streams.
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  simulated_cuda::MustLive(communicator);
  communicator->Abort();
  ncclGroupStart();
  simulated_cuda::group().aborted.push_back(communicator);
  return ncclGroupEnd();
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  simulated_cuda::MustLive(communicator);
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  simulated_cuda::Group& group = simulated_cuda::group();
  if (--group.depth > 0) {
    return ncclSuccess;
  }
  for (simulated_cuda::Communicator* communicator : std::exchange(group.aborted, {})) {
    std::lock_guard<std::mutex> guard(streams().mutex);
    for (simulated_cuda::Stream* stream : streams().all) {
      stream->Synchronize();
    }
    ncclCommDestroy(communicator);
  }
  if (!group.messages.empty()) {
    simulated_cuda::Communicator* communicator = group.messages.front().communicator;
    simulated_cuda::MustLive(communicator);
    communicator->Begin();
    simulated_cuda::groups += 1;
    group.messages.front().stream->Enqueue([communicator, messages = std::move(group.messages)] {
      simulated_cuda::Exchange(messages);
      communicator->Finish();
    });
    group.messages.clear();
  }
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return simulated_cuda::Add({true, const_cast<void*>(from), count, peer, communicator, stream});
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return simulated_cuda::Add({false, to, count, peer, communicator, stream});
}

// Horovod's own reductions are not run on simulated devices.
ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclReduceScatter(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t,
                        cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclBcast(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
