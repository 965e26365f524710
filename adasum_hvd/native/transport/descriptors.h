// Descriptors of files, and sending them to other processes over unix sockets.
#pragma once

#include <array>
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

constexpr size_t kAttached = 2; // descriptors of a message, at most

// Sends so many bytes as one message of a SOCK_SEQPACKET, without waiting, with those descriptors attached
// that are not -1; throws std::system_error.
void SendBytes(int socket, const void* bytes, size_t count, const std::array<int, kAttached>& attached);
// Receives such a message, without waiting for one; returns its descriptors, or none. Throws
// std::system_error where there is none or it does not have so many bytes.
std::array<Descriptor, kAttached> ReceiveBytes(int socket, void* bytes, size_t count);

template <class Words>
void Send(int socket, const Words& words, const std::array<int, kAttached>& attached = {-1, -1}) {
  SendBytes(socket, &words, sizeof words, attached);
}

template <class Words> std::array<Descriptor, kAttached> Receive(int socket, Words& words) {
  return ReceiveBytes(socket, &words, sizeof words);
}

} // namespace adasum_hvd
