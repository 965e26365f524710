// Descriptors of files, and sending them to other processes over unix sockets.
#pragma once

#include <cstddef>
#include <utility>

namespace adasum_hvd {

// Throws std::system_error of errno.
[[noreturn]] void ThrowErrno(const char* what);

// A descriptor that is closed with its owner.
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

// Sends so many bytes as one message of a SOCK_SEQPACKET, with a descriptor attached unless it is -1; throws
// std::system_error.
void SendBytesWithDescriptor(int socket, const void* bytes, size_t count, int descriptor);
// Receives such a message, without waiting for one; returns the descriptor, or none. Throws std::system_error
// where there is none or it does not have so many bytes.
Descriptor ReceiveBytesWithDescriptor(int socket, void* bytes, size_t count);

template <class Words> void SendWithDescriptor(int socket, const Words& words, int descriptor) {
  SendBytesWithDescriptor(socket, &words, sizeof words, descriptor);
}

template <class Words> Descriptor ReceiveWithDescriptor(int socket, Words& words) {
  return ReceiveBytesWithDescriptor(socket, &words, sizeof words);
}

} // namespace adasum_hvd
