// File descriptors, and messages with descriptors between processes over unix sockets.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

namespace adasum_hvd {

// Throws std::system_error of errno.
[[noreturn]] void ThrowErrno(const char* what);

// A descriptor that its owner closes.
class Descriptor {
public:
  explicit Descriptor(int value = -1) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int value() const { return value_; }

private:
  int value_;
};

constexpr size_t kAttached = 2; // descriptors of a message, at most

// Sends `count` bytes as one message of a SOCK_SEQPACKET, with the descriptors attached that are not -1. Does
// not block; throws std::system_error.
void SendBytes(int socket, const void* bytes, size_t count, const std::array<int, kAttached>& attached);
// Receives such a message, and returns its descriptors, if any. Does not block; throws std::system_error if
// there is no message, or it has another length.
std::array<Descriptor, kAttached> ReceiveBytes(int socket, void* bytes, size_t count);

template <class Words>
void Send(int socket, const Words& words, const std::array<int, kAttached>& attached = {-1, -1}) {
  SendBytes(socket, &words, sizeof words, attached);
}

template <class Words> std::array<Descriptor, kAttached> Receive(int socket, Words& words) {
  return ReceiveBytes(socket, &words, sizeof words);
}

} // namespace adasum_hvd
