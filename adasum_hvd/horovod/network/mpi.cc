#include "network/mpi.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>

#include <sched.h>

#include "host/pause.h"

namespace adasum_hvd {
namespace {

constexpr int kTag = 0xada;
constexpr int kNoticeTag = 0xadb;
constexpr int kHeartbeatTag = 0xadc;
constexpr int kSpins = 2000;                           // tests, each of which advances pending messages
constexpr std::chrono::milliseconds kYieldTime{20};    // then this rank yields to others
constexpr std::chrono::microseconds kSleep{100};       // then it sleeps: the peer is late, not the message
constexpr std::chrono::milliseconds kCancelLimit{200}; // for messages of a reduction that has failed

void Check(int result, const char* what) {
  if (result != MPI_SUCCESS) {
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(result, text, &length);
    throw std::runtime_error(std::string(what) + " failed: " + std::string(text, length));
  }
}

} // namespace

MPI_Request* MpiTransport::Exchange::Add(int peer) {
  peers.push_back(peer);
  requests.push_back(MPI_REQUEST_NULL);
  return &requests.back();
}

std::vector<int> MpiTransport::Exchange::Pending() const {
  std::vector<int> pending;
  for (size_t k = 0; k < requests.size(); ++k) {
    if (requests[k] != MPI_REQUEST_NULL) {
      pending.push_back(peers[k]);
    }
  }
  return pending;
}

MpiTransport::MpiTransport(MPI_Comm communicator, NetworkSettings settings)
    : NetworkTransport(std::move(settings)), communicator_(communicator) {
  Check(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
  Check(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
}

void MpiTransport::Start(const std::vector<Message>& messages) {
  // One tag is enough: MPI keeps the messages between two ranks in order, and both ranks split them equally.
  Exchange exchange;
  auto for_each_part = [this](int64_t bytes, auto start) {
    for (int64_t offset = 0; offset < bytes; offset += settings_.max_message_bytes) {
      start(offset, static_cast<int>(std::min(settings_.max_message_bytes, bytes - offset)));
    }
  };
  for (int step = 1; step < size_; ++step) {
    const int to = (rank_ + step) % size_;
    const int from = (rank_ + size_ - step) % size_;
    for_each_part(messages[from].receive_bytes, [&](int64_t offset, int count) {
      Check(MPI_Irecv(static_cast<char*>(messages[from].receive) + offset, count, MPI_BYTE, from, kTag,
                      communicator_, exchange.Add(from)),
            "MPI_Irecv");
    });
    for_each_part(messages[to].send_bytes, [&](int64_t offset, int count) {
      Check(MPI_Isend(static_cast<const char*>(messages[to].send) + offset, count, MPI_BYTE, to, kTag,
                      communicator_, exchange.Add(to)),
            "MPI_Isend");
    });
  }
  started_.push_back(std::move(exchange));
}

void MpiTransport::Wait() {
  Exchange exchange = std::move(started_.front());
  started_.pop_front();
  std::vector<int> indices(exchange.requests.size());
  IdleClock idle;
  for (int spins = 0;; ++spins) {
    int done = 0;
    Check(MPI_Testsome(static_cast<int>(exchange.requests.size()), exchange.requests.data(), &done,
                       indices.data(), MPI_STATUSES_IGNORE),
          "MPI_Testsome");
    if (done == MPI_UNDEFINED) { // all are complete
      break;
    }
    if (done > 0) {
      spins = 0;
      idle.Reset();
      continue;
    }
    if (spins < kSpins) {
      Pause();
      continue;
    }
    const auto elapsed = idle.Elapsed();
    if (elapsed < kYieldTime) {
      sched_yield();
      continue;
    }
    ShowAwaited(exchange.Pending().front());
    if (elapsed >= settings_.timeout || !Notices().empty()) {
      started_.push_front(std::move(exchange));
      Fail();
    }
    std::this_thread::sleep_for(kSleep);
  }
  ShowNoneAwaited();
}

void MpiTransport::Progress() {
  int flag = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, kNoticeTag, communicator_, &flag, MPI_STATUS_IGNORE);
}

const AbortNotices& MpiTransport::Notices() {
  for (;;) {
    int there = 0;
    MPI_Status status;
    Check(MPI_Iprobe(MPI_ANY_SOURCE, kNoticeTag, communicator_, &there, &status), "MPI_Iprobe");
    if (there == 0) {
      return notices_;
    }
    AbortNotice& notice = notices_[settings_.global_ranks[status.MPI_SOURCE]];
    Check(MPI_Recv(&notice, sizeof notice, MPI_BYTE, status.MPI_SOURCE, kNoticeTag, communicator_,
                   MPI_STATUS_IGNORE),
          "MPI_Recv");
  }
}

std::vector<int> MpiTransport::ExchangeHeartbeats(bool send) {
  static const char heartbeat = 1;
  int provided = 0;
  heartbeats_.resize(size_);
  if (MPI_Query_thread(&provided) != MPI_SUCCESS || provided != MPI_THREAD_MULTIPLE) {
    return {}; // only one thread may call MPI, and Horovod's loop is in it
  }
  if (send) {
    SendToOthers(&heartbeat, sizeof heartbeat, kHeartbeatTag);
  }
  for (int there = 1; there != 0;) {
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, kHeartbeatTag, communicator_, &there, &status);
    if (there != 0) {
      char received = 0;
      MPI_Recv(&received, sizeof received, MPI_BYTE, status.MPI_SOURCE, kHeartbeatTag, communicator_,
               MPI_STATUS_IGNORE);
      ++heartbeats_[status.MPI_SOURCE];
    }
  }
  return heartbeats_;
}

// A message that has begun cannot be cancelled, so it gets some time to end. If it does not end, the caller
// must keep its buffers.
void MpiTransport::Cancel() {
  std::vector<MPI_Request> left;
  for (Exchange& exchange : started_) {
    for (MPI_Request request : exchange.requests) {
      if (request != MPI_REQUEST_NULL) {
        MPI_Cancel(&request);
        left.push_back(request);
      }
    }
  }
  started_.clear();
  int done = left.empty() ? 1 : 0;
  for (IdleClock waiting; done == 0 && waiting.Elapsed() < kCancelLimit;) {
    std::this_thread::sleep_for(kSleep);
    MPI_Testall(static_cast<int>(left.size()), left.data(), &done, MPI_STATUSES_IGNORE);
  }
  for (MPI_Request& request : left) {
    if (request != MPI_REQUEST_NULL) {
      may_still_receive_ = true;
      MPI_Request_free(&request);
    }
  }
}

void MpiTransport::Fail() {
  std::vector<int> awaited;
  for (int peer : started_.front().Pending()) {
    awaited.push_back(settings_.global_ranks[peer]);
  }
  Notify({awaited, RankList(awaited) + " " + TimedOut()});
  const auto find = [&] { return FindRootCause(Notices(), here(), awaited, TimedOut()); };
  RootCause cause = find();
  Cancel();
  for (IdleClock grace; !cause.final && grace.Elapsed() < kAbortGrace;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // mpirun wakes a stopped rank before it ends it, which then reports that it waits for others.
    if (const RootCause now = find(); !now.circular) {
      cause = now;
    }
  }
  throw UnresponsiveRank(cause);
}

std::vector<int> MpiTransport::Notify(const AbortNotice& notice) {
  if (notified_) {
    return {};
  }
  notified_ = true;
  // Neither waited for nor freed, because a rank that has ended receives nothing. So few bytes do not block.
  SendToOthers(new AbortNotice(notice), sizeof notice, kNoticeTag);
  return {}; // MPI ends a job that loses a rank
}

void MpiTransport::SendToOthers(const void* bytes, int count, int tag) {
  for (int peer = 0; peer < size_; ++peer) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (peer != rank_ &&
        MPI_Isend(bytes, count, MPI_BYTE, peer, tag, communicator_, &request) == MPI_SUCCESS) {
      MPI_Request_free(&request);
    }
  }
}

} // namespace adasum_hvd
