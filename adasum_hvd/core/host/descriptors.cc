#include "host/descriptors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace adasum_hvd {

[[noreturn]] void ThrowErrno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

Descriptor::~Descriptor() {
  if (value_ >= 0) {
    close(value_);
  }
}

void SendBytes(int socket, const void* bytes, size_t count, const std::array<int, kAttached>& attached) {
  iovec part = {const_cast<void*>(bytes), count};
  alignas(cmsghdr) char control[CMSG_SPACE(kAttached * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  int values[kAttached];
  const auto end = std::copy_if(attached.begin(), attached.end(), values, [](int one) { return one >= 0; });
  if (const size_t there = (end - values) * sizeof(int); there > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(there);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(there);
    std::memcpy(CMSG_DATA(header), values, there);
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(count)) {
    ThrowErrno("message to a rank of this host");
  }
}

std::array<Descriptor, kAttached> ReceiveBytes(int socket, void* bytes, size_t count) {
  iovec part = {bytes, count};
  alignas(cmsghdr) char control[CMSG_SPACE(kAttached * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control; // limits the number of descriptors
  ssize_t received;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  std::array<Descriptor, kAttached> attached;
  for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
    if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) {
      int values[kAttached];
      const size_t there = std::min(one->cmsg_len - CMSG_LEN(0), sizeof values);
      std::memcpy(values, CMSG_DATA(one), there);
      std::transform(values, values + there / sizeof(int), attached.begin(),
                     [](int value) { return Descriptor(value); });
    }
  }
  if (received != static_cast<ssize_t>(count)) {
    errno = received < 0 ? errno : received == 0 ? ECONNRESET : EPROTO;
    ThrowErrno("message of a rank of this host");
  }
  return attached;
}

} // namespace adasum_hvd
