// A framework for Horovod whose device is simulated: with Horovod's own sources and simulated_cuda it makes a
// library in which real ranks run the op for device tensors end to end. Device memory is memory, so NumPy
// arrays are device tensors. tests/parallel/harness/simulated_horovod.py builds and calls it.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "horovod/common/operations.h"
#include "horovod/common/ops/cuda/cuda_kernels.h"

namespace hvd = horovod::common;

namespace {

class DeviceTensor : public hvd::Tensor {
public:
  DeviceTensor(void* memory, int64_t elements, hvd::DataType dtype)
      : memory_(memory), elements_(elements), dtype_(dtype) {}
  const hvd::DataType dtype() const override { return dtype_; }
  const hvd::TensorShape shape() const override { return hvd::TensorShape({elements_}); }
  const void* data() const override { return memory_; }
  int64_t size() const override { return elements_ * hvd::DataType_Size(dtype_); }

private:
  void* memory_;
  int64_t elements_;
  hvd::DataType dtype_;
};

class OwnedTensor : public DeviceTensor {
public:
  OwnedTensor(std::shared_ptr<std::vector<char>> bytes, int64_t elements, hvd::DataType dtype)
      : DeviceTensor(bytes->data(), elements, dtype), bytes_(std::move(bytes)) {}

private:
  std::shared_ptr<std::vector<char>> bytes_;
};

class DeviceBuffer : public hvd::PersistentBuffer {
public:
  explicit DeviceBuffer(int64_t bytes) : bytes_(bytes) {}
  const void* AccessData(std::shared_ptr<hvd::OpContext>) const override { return bytes_.data(); }

private:
  std::vector<char> bytes_;
};

class Context : public hvd::OpContext {
public:
  hvd::Status AllocatePersistent(int64_t bytes, std::shared_ptr<hvd::PersistentBuffer>* buffer) override {
    *buffer = std::make_shared<DeviceBuffer>(bytes);
    return hvd::Status::OK();
  }
  hvd::Status AllocateOutput(hvd::TensorShape, std::shared_ptr<hvd::Tensor>*,
                             std::shared_ptr<hvd::ReadyEvent>*) override {
    return hvd::Status::UnknownError("outputs are the caller's");
  }
  hvd::Status AllocateZeros(int64_t elements, hvd::DataType dtype,
                            std::shared_ptr<hvd::Tensor>* zeros) override {
    // Never freed: with HOROVOD_ENABLE_ASYNC_COMPLETION Horovod lets go of them while streams still read.
    static std::vector<std::shared_ptr<std::vector<char>>> all;
    auto bytes = std::make_shared<std::vector<char>>(elements * hvd::DataType_Size(dtype));
    all.push_back(bytes);
    *zeros = std::make_shared<OwnedTensor>(bytes, elements, dtype);
    return hvd::Status::OK();
  }
  hvd::Framework framework() const override { return hvd::Framework::PYTORCH; }
};

// What a framework's kernels are to its tensors: they are ready when its stream has come so far.
class Produced : public hvd::ReadyEvent {
public:
  explicit Produced(cudaStream_t stream) {
    cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
    cudaEventRecord(event_, stream);
  }
  bool Ready() const override { return cudaEventQuery(event_) == cudaSuccess; }
  gpuEvent_t event() const override { return event_; }

private:
  cudaEvent_t event_ = nullptr; // lives on: the op's stream may still have to come to it
};

cudaStream_t FrameworksStream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    cudaStreamCreate(&made);
    return made;
  }();
  return stream;
}

struct Copy {
  const void* from;
  void* to;
  size_t bytes;
};

// A kernel that takes 20 ms.
void Produce(void* copy) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::unique_ptr<Copy> one(static_cast<Copy*>(copy));
  std::memcpy(one->to, one->from, one->bytes);
}

struct Handle {
  int open = 0;
  hvd::Status failed = hvd::Status::OK();
};
std::mutex mutex;
std::condition_variable changed;
std::map<int, Handle> handles;

int Open(int callbacks) {
  std::lock_guard<std::mutex> guard(mutex);
  static int last = 0;
  handles[++last].open = callbacks;
  return last;
}

hvd::StatusCallback Close(int handle) {
  return [handle](const hvd::Status& status) {
    if (status.event.event) { // the results are to come: with HOROVOD_ENABLE_ASYNC_COMPLETION
      cudaStreamWaitEvent(FrameworksStream(), *status.event.event, 0);
    }
    std::lock_guard<std::mutex> guard(mutex);
    Handle& one = handles[handle];
    one.open -= 1;
    if (!status.ok()) {
      one.failed = status;
    }
    changed.notify_all();
  };
}

} // namespace

namespace horovod {
namespace common {

// Horovod's own kernels: only its own reductions call them.
void BatchedD2DMemcpyCudaImpl(BatchedD2DParams&, int, cudaStream_t) { std::abort(); }
void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams&, int, double, DataType, cudaStream_t) { std::abort(); }
void ScaleBufferCudaImpl(const void*, void*, const int64_t, double, DataType, cudaStream_t) { std::abort(); }

} // namespace common
} // namespace horovod

#define EXPORTED extern "C" __attribute__((visibility("default")))

// AdaSum of `count` tensors of one group; outputs[k] holds the result, and before it what inputs[k] held once
// a kernel that takes a while has copied it there. Returns a handle for horovod_simulated_wait.
EXPORTED int horovod_simulated_adasum(int count, const char* const* names, void* const* inputs,
                                      void* const* outputs, const int64_t* elements, int dtype, int device,
                                      double prescale, double postscale, int process_set_id) {
  std::vector<std::shared_ptr<hvd::OpContext>> contexts;
  std::vector<std::shared_ptr<hvd::Tensor>> tensors, results;
  std::vector<hvd::ReadyEventList> events(count);
  std::vector<std::string> all_names(names, names + count);
  std::vector<hvd::StatusCallback> callbacks;
  const int handle = Open(count);
  for (int k = 0; k < count; ++k) {
    auto tensor = std::make_shared<DeviceTensor>(outputs[k], elements[k], static_cast<hvd::DataType>(dtype));
    if (device == CPU_DEVICE_ID) {
      std::memcpy(outputs[k], inputs[k], tensor->size());
    } else {
      cudaLaunchHostFunc(FrameworksStream(), Produce,
                         new Copy{inputs[k], outputs[k], static_cast<size_t>(tensor->size())});
      events[k].AddReadyEvent(std::make_shared<Produced>(FrameworksStream()));
    }
    contexts.push_back(std::make_shared<Context>());
    tensors.push_back(tensor);
    results.push_back(tensor);
    callbacks.push_back(Close(handle));
  }
  const hvd::Status status =
      hvd::EnqueueTensorAllreduces(contexts, tensors, results, events, all_names, device, callbacks,
                                   hvd::ReduceOp::ADASUM, prescale, postscale, process_set_id);
  if (!status.ok()) {
    std::lock_guard<std::mutex> guard(mutex);
    handles[handle] = {0, status};
  }
  return handle;
}

// Like Horovod's join: `device` is where the zeros are that stand in for this rank's tensors.
EXPORTED int horovod_simulated_join(int device) {
  static int last_rank;
  const int handle = Open(1);
  const auto output = std::make_shared<DeviceTensor>(&last_rank, 1, hvd::HOROVOD_INT32);
  const hvd::Status status = hvd::EnqueueJoin(std::make_shared<Context>(), output, hvd::ReadyEventList(),
                                              JOIN_TENSOR_NAME, device, Close(handle), 0);
  if (!status.ok()) {
    std::lock_guard<std::mutex> guard(mutex);
    handles[handle] = {0, status};
  }
  return handle;
}

EXPORTED void horovod_simulated_memory_limit(size_t bytes) { SimulatedMemoryLimit(bytes); }

// Blocks; returns why it failed, or an empty string, valid until the next call; and whether its arguments are
// to blame, which frameworks report as another type of error.
EXPORTED const char* horovod_simulated_wait(int handle, bool* invalid) {
  static std::string error;
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [=] { return handles[handle].open <= 0; });
  cudaStreamSynchronize(FrameworksStream());
  const hvd::Status failed = handles[handle].failed;
  error = failed.reason();
  *invalid = failed.type() == hvd::StatusType::INVALID_ARGUMENT;
  handles.erase(handle);
  return error.c_str();
}
