// Moves bytes between the ranks of one process set; knows no tensor.
#pragma once

#include <cstdint>
#include <vector>

namespace adasum_hvd {

// What this rank sends to one peer and receives from it, in bytes.
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

  // Starts one exchange with all peers; messages[p] is for rank p, this rank's own entry is ignored. The
  // buffers belong to the exchange until Wait has returned for it.
  // Collective: every rank starts the same exchanges in the same order, and what p sends to q is as long
  // as what q receives from p. Throws std::exception when a peer is gone.
  virtual void Start(const std::vector<Message>& messages) = 0;

  // Blocks until the oldest exchange not yet waited for is complete.
  virtual void Wait() = 0;

  void Exchange(const std::vector<Message>& messages) {
    Start(messages);
    Wait();
  }
};

} // namespace adasum_hvd
