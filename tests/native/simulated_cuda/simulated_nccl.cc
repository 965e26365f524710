#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

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
    simulated_cuda::WaitForDevice();
    ncclCommDestroy(communicator);
  }
  if (!group.messages.empty()) {
    simulated_cuda::Communicator* communicator = group.messages.front().communicator;
    simulated_cuda::MustLive(communicator);
    communicator->Begin();
    simulated_cuda::CountGroup();
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
