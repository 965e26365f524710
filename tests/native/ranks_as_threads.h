// A transport between threads of one process, so that the op's arithmetic runs under sanitizers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "host/transport.h"
#include "testing.h"

namespace adasum_hvd {

class Mailboxes {
public:
  void Put(int from, int to, std::vector<char> bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    boxes_[{from, to}].push_back(std::move(bytes));
    arrived_.notify_all();
  }
  std::vector<char> Take(int from, int to) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& box = boxes_[{from, to}];
    if (!arrived_.wait_for(lock, std::chrono::seconds(60), [&] { return !box.empty(); })) {
      throw std::runtime_error("no message from rank " + std::to_string(from));
    }
    std::vector<char> bytes = std::move(box.front());
    box.pop_front();
    return bytes;
  }
  void Offer(const std::shared_ptr<const SharedRegion>& region) {
    std::lock_guard<std::mutex> guard(mutex_);
    regions_[region->offset()] = {region->begin(), region->bytes()};
    arrived_.notify_all();
  }
  MemorySpan Reach(int64_t region) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!arrived_.wait_for(lock, std::chrono::seconds(60), [&] { return regions_.count(region) != 0; })) {
      throw std::runtime_error("no region " + std::to_string(region));
    }
    return regions_.at(region);
  }

private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<int64_t, MemorySpan> regions_; // that some rank has offered
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> boxes_;
};

class ThreadTransport : public Transport {
public:
  ThreadTransport(Mailboxes& mail, int rank, int size, bool shares = false)
      : mail_(mail), rank_(rank), size_(size), shares_(shares), sent_bytes_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void Start(const std::vector<Message>& messages) override {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && messages[peer].send_bytes > 0) {
        const char* from = static_cast<const char*>(messages[peer].send);
        mail_.Put(rank_, peer, std::vector<char>(from, from + messages[peer].send_bytes));
        sent_bytes_[peer] += messages[peer].send_bytes;
      }
    }
    exchanges_ += 1;
    started_.push_back(messages);
  }

  void Wait() override {
    const std::vector<Message> oldest = started_.front();
    started_.pop_front();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && oldest[peer].receive_bytes > 0) {
        const std::vector<char> bytes = mail_.Take(peer, rank_);
        if (static_cast<int64_t>(bytes.size()) != oldest[peer].receive_bytes) {
          throw std::runtime_error("message of another length than expected");
        }
        std::memcpy(oldest[peer].receive, bytes.data(), bytes.size());
      }
    }
  }

  bool shares_memory() const override { return shares_; }
  void Offer(int, const std::shared_ptr<const SharedRegion>& region) override { mail_.Offer(region); }
  MemorySpan Reach(int, int64_t offset, int64_t) override { return mail_.Reach(offset); }
  void StopSharing(const std::string& why) override {
    shares_ = false;
    why_not_shared_ = why;
  }

  int64_t sent_bytes(int peer) const { return sent_bytes_[peer]; }
  int64_t sent_bytes() const { return std::accumulate(sent_bytes_.begin(), sent_bytes_.end(), int64_t{0}); }
  int64_t exchanges() const { return exchanges_; }
  const std::string& why_not_shared() const { return why_not_shared_; }

private:
  Mailboxes& mail_;
  int rank_;
  int size_;
  bool shares_;
  std::string why_not_shared_;
  std::deque<std::vector<Message>> started_;
  std::vector<int64_t> sent_bytes_; // per peer
  int64_t exchanges_ = 0;
};

// Runs body(transport) on `size` threads, which may share memory, and rethrows the first exception.
inline void RunRanks(int size, const std::function<void(ThreadTransport&)>& body, bool share = false) {
  Mailboxes mail;
  InThreads(size, [&](int rank) {
    ThreadTransport transport(mail, rank, size, share);
    body(transport);
  });
}

} // namespace adasum_hvd
