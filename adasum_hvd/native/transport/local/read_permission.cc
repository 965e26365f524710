#include "transport/local/read_permission.h"

#include <mutex>

#include <sys/prctl.h>

namespace adasum_hvd {
namespace {

struct Living {
  std::mutex mutex;
  int count = 0;
};

Living& AllLiving() {
  static Living living;
  return living;
}

} // namespace

std::unique_ptr<ReadPermission> ReadPermission::Take() {
  Living& living = AllLiving();
  std::lock_guard<std::mutex> guard(living.mutex);
  if (living.count == 0 && prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) != 0) {
    return nullptr;
  }
  ++living.count;
  return std::unique_ptr<ReadPermission>(new ReadPermission());
}

std::unique_ptr<ReadPermission> ReadPermission::Share() {
  {
    Living& living = AllLiving();
    std::lock_guard<std::mutex> guard(living.mutex);
    if (living.count == 0) {
      return nullptr;
    }
  }
  return Take();
}

ReadPermission::~ReadPermission() {
  Living& living = AllLiving();
  std::lock_guard<std::mutex> guard(living.mutex);
  if (--living.count == 0) {
    prctl(PR_SET_PTRACER, 0, 0, 0, 0);
  }
}

} // namespace adasum_hvd
