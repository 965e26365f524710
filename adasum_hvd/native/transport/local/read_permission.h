// Who may read the memory of this process. Where Linux's Yama module lets only ancestors, a process has to
// allow others, and it can only name one of them or allow all of the same user.
#pragma once

#include <memory>

namespace adasum_hvd {

// Others of the same user may read this process's memory as long as one of these exists.
class ReadPermission {
public:
  // Null where the kernel has nothing to allow.
  static std::unique_ptr<ReadPermission> Take();
  // One more, if this process holds one already; else null.
  static std::unique_ptr<ReadPermission> Share();

  ~ReadPermission();
  ReadPermission(const ReadPermission&) = delete;
  ReadPermission& operator=(const ReadPermission&) = delete;

private:
  ReadPermission() = default;
};

} // namespace adasum_hvd
