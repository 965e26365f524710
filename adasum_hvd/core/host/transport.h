// Moves bytes between the ranks of one process set; knows no tensor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/shared_memory.h"

namespace adasum_hvd {

// The bytes that this rank sends to one peer and receives from it.
struct Message {
  const void* send = nullptr;
  int64_t send_bytes = 0;
  void* receive = nullptr;
  int64_t receive_bytes = 0;
};

class Transport {
public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Starts one exchange with all peers; messages[p] is for rank p, and this rank's own entry is ignored. The
  // buffers belong to the exchange until Wait has returned for it.
  // Any two ranks start their common exchanges in the same order, and the message from p to q has the same
  // length on both. Throws std::exception if a peer has ended.
  virtual void Start(const std::vector<Message>& messages) = 0;

  // Blocks until the oldest exchange not yet waited for is complete.
  virtual void Wait() = 0;

  void Exchange(const std::vector<Message>& messages) {
    Start(messages);
    Wait();
  }

  // Whether the ranks map one another's shared memory. The same on all ranks.
  virtual bool shares_memory() const { return false; }

  // Ends the sharing on all ranks, because one of them cannot share memory; only that one has a reason.
  virtual void StopSharing(const std::string& /*why*/) {}

  // Lets a rank map a region.
  virtual void Offer(int /*rank*/, const std::shared_ptr<const SharedRegion>&) {
    throw std::logic_error("this transport shares no memory");
  }

  // Maps a region that a rank has offered, by its offset; valid until that rank frees it. Throws
  // std::exception if it cannot be mapped.
  virtual MemorySpan Reach(int /*rank*/, int64_t /*offset*/, int64_t /*bytes*/) {
    throw std::logic_error("this transport shares no memory");
  }
};

// Some ranks of a transport, renumbered in the order of `members`; this rank is one of them. The exchanges of
// all groups of a transport complete in the order in which they were started.
class GroupTransport : public Transport {
public:
  GroupTransport(Transport& everyone, std::vector<int> members)
      : everyone_(everyone), members_(std::move(members)),
        rank_(static_cast<int>(std::find(members_.begin(), members_.end(), everyone.rank()) -
                               members_.begin())) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }

  void Start(const std::vector<Message>& messages) override {
    std::vector<Message> all(everyone_.size());
    for (size_t member = 0; member < members_.size(); ++member) {
      all[members_[member]] = messages[member];
    }
    everyone_.Start(all);
  }

  void Wait() override { everyone_.Wait(); }

  bool shares_memory() const override { return everyone_.shares_memory(); }
  void StopSharing(const std::string& why) override { everyone_.StopSharing(why); }
  void Offer(int rank, const std::shared_ptr<const SharedRegion>& region) override {
    everyone_.Offer(members_[rank], region);
  }
  MemorySpan Reach(int rank, int64_t offset, int64_t bytes) override {
    return everyone_.Reach(members_[rank], offset, bytes);
  }

private:
  Transport& everyone_;
  std::vector<int> members_;
  int rank_;
};

} // namespace adasum_hvd
