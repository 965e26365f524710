// For ctypes. Horovod's link map exports names that contain "horovod", and nothing else.
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "failure/shut_down.h"
#include "horovod/common/logging.h"
#include "host/shared_memory.h"
#include "op/fused_tensors.h"
#include "op/observations.h"
#include "op/settings.h"
#include "op/statistics.h"
#include "op/weights.h"

#define EXPORT __attribute__((visibility("default")))

using namespace adasum_hvd;

namespace {

// Valid until the next call on the same thread.
const char* Kept(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

} // namespace

extern "C" {

EXPORT const char* horovod_adasum_version() { return kVersion; }

// The settings of the running op as JSON, before init those of the environment.
EXPORT const char* horovod_adasum_settings() { return Kept(Settings::InForce().Json()); }

// The first invalid ADASUM_HVD_* variable and the reason, or an empty string.
EXPORT const char* horovod_adasum_settings_error() { return Kept(Settings::FromEnvironment().error); }

// Fills eight counters: calls, tensors, delta tensors, bytes, tensors with an ill-conditioned node, and the
// nanoseconds of the three phases.
EXPORT void horovod_adasum_counters(int64_t* values) { ReadCounters(values); }

// Sets the reason why this process is about to shut down, for the errors of the other ranks.
EXPORT void horovod_adasum_leave(const char* why) { SetLeaveReason(why); }

// Requests an observation of the next reduction of the tensor `name`; horovod_adasum_observed returns it.
EXPORT void horovod_adasum_observe(const char* name) { RequestObservation(name); }

// Returns the number of the latest observation of the tensor `name`, from 1, or 0 if there was none or its
// device has not completed it. Sets pointers to its rows, by segment (reduce/observation.h); valid until the
// next call on the same thread.
EXPORT int64_t horovod_adasum_observed(const char* name, const int** sizes, int64_t* levels,
                                       const double** rows, int64_t* doubles) {
  static thread_local std::shared_ptr<const ObservationRecord> latest;
  latest = LatestObservation(name);
  if (latest == nullptr || (latest->write && !latest->write())) {
    return 0;
  }
  *sizes = latest->sizes.data();
  *levels = static_cast<int64_t>(latest->sizes.size());
  *rows = latest->rows.data();
  *doubles = static_cast<int64_t>(latest->rows.size());
  return latest->number;
}

// How the ranks of a process set reach each other; empty before the first reduction in it.
EXPORT const char* horovod_adasum_path(int process_set_id) { return Kept(PathOf(process_set_id)); }

// Whether tensors on CUDA devices are reduced there, over NCCL.
EXPORT bool horovod_adasum_on_devices() { return kOnDevices; }

// Registers that the tensor `name` at address `start` holds weights, and that weights[k] points to newer ones
// of the same type, as many as segment k has elements; without segments in its name, the tensor is segment 0.
// The change is reduced: each newer weight becomes the older one plus the AdaSum of the changes, and the
// tensor itself is not written. count 0 removes the registration.
EXPORT void horovod_adasum_register_weights(const char* name, const int64_t* elements, int count, void* start,
                                            void* const* weights) {
  RegisterWeights(name, {elements, elements + count}, start, {weights, weights + count});
}

// Returns a checksum of registered weights as the latest reduction on the host wrote them.
EXPORT uint64_t horovod_adasum_weights_checksum(const char* name) { return ChecksumOfWeights(name); }

// Copies registered weights, which are of that ElementType, to the older ones, and returns their checksum.
EXPORT uint64_t horovod_adasum_record_weights(const char* name, int type, int threads) {
  return RecordWeights(name, static_cast<ElementType>(type), threads);
}

// Allocates zeroed memory that the other ranks of this host can map; tensors in it are reduced without a
// copy. Null if there is none.
EXPORT void* horovod_adasum_allocate(int64_t bytes) {
  try {
    return AllocateShared(bytes);
  } catch (const std::exception& error) {
    static std::once_flag warned;
    std::call_once(warned, [&] {
      hvd::LogMessage(__FILE__, __LINE__, hvd::LogLevel::WARNING)
          << "AdaSum: " << error.what()
          << "; these tensors are copied to be reduced: slower, but the same results";
    });
    return nullptr;
  }
}

EXPORT void horovod_adasum_free(void* memory) { FreeShared(memory); }

} // extern "C"
