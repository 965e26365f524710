#include "op/settings.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <mutex>
#include <optional>
#include <sstream>

namespace adasum_hvd {
namespace {

constexpr int64_t kRingGranule = 64; // bytes, so that positions are on cache lines
constexpr int64_t kMost = int64_t{1} << 30;
constexpr int64_t kMostThreads = 1024;

// By the values of `off`, of GroupOp and of LocalMode.
constexpr const char* kOps[] = {"on", "off"};
constexpr const char* kGroupOps[] = {"adasum", "average", "sum"};
constexpr const char* kLocalModes[] = {"auto", "staged", "off"};

std::mutex in_force_mutex;
std::optional<Settings> in_force;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void Refuse(Settings& settings, const std::string& name, const std::string& expected,
            const std::string& actual) {
  if (settings.error.empty()) {
    settings.error =
        name + ": expected " + expected + ", but got \"" + actual + "\"; unset it or fix it on all ranks";
  }
}

template <class Integer>
void ReadInteger(Settings& settings, const char* name, int64_t smallest, Integer& target,
                 int64_t largest = kMost) {
  const std::string text = Variable(name);
  if (text.empty()) {
    return;
  }
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || *end != '\0' || value < smallest || value > largest) {
    Refuse(settings, name,
           "an integer from " + std::to_string(smallest) + " to " +
               (largest == kMost ? "2^30" : std::to_string(largest)),
           text);
    return;
  }
  target = static_cast<Integer>(value);
}

template <class Choice, size_t N>
void ReadChoice(Settings& settings, const char* name, const char* const (&choices)[N], const char* expected,
                Choice& target) {
  const std::string text = Variable(name);
  const auto found = std::find(std::begin(choices), std::end(choices), text);
  if (found != std::end(choices)) {
    target = static_cast<Choice>(found - choices);
  } else if (!text.empty()) {
    Refuse(settings, name, expected, text);
  }
}

// "4x2" is {4, 2}; returns false for any other syntax.
bool ReadRadices(const std::string& text, std::vector<int>& radices) {
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, 'x');) {
    if (one.empty() || one.size() > 6 || one.find_first_not_of("0123456789") != std::string::npos ||
        std::stoi(one) < 2) {
      return false;
    }
    radices.push_back(std::stoi(one));
  }
  return !radices.empty() && text.back() != 'x';
}

} // namespace

std::string RadicesText(const std::vector<int>& radices) {
  std::string text;
  for (int radix : radices) {
    text += (text.empty() ? "" : "x") + std::to_string(radix);
  }
  return radices.empty() ? "auto" : radices[0] == 0 ? "flat" : text;
}

Settings Settings::Begin() {
  std::lock_guard<std::mutex> guard(in_force_mutex);
  in_force = FromEnvironment();
  return *in_force;
}

Settings Settings::InForce() {
  std::lock_guard<std::mutex> guard(in_force_mutex);
  return in_force ? *in_force : FromEnvironment();
}

Settings Settings::FromEnvironment() {
  Settings settings;
  ReadChoice(settings, "ADASUM_HVD_OP", kOps, "on or off", settings.off);
  ReadInteger(settings, "ADASUM_HVD_CHUNK_BYTES", 1, settings.reduce.chunk_bytes);
  ReadInteger(settings, "ADASUM_HVD_REPLICATE_BYTES", 0, settings.reduce.replicate_bytes);
  ReadInteger(settings, "ADASUM_HVD_MAX_MESSAGE_BYTES", 1, settings.max_message_bytes);
  ReadInteger(settings, "ADASUM_HVD_GROUP_SIZE", 0, settings.group_size);
  ReadChoice(settings, "ADASUM_HVD_GROUP_OP", kGroupOps, "adasum, average or sum", settings.group_op);
  const std::string radices = Variable("ADASUM_HVD_RADICES");
  if (radices == "flat") {
    settings.radices = {0};
  } else if (!radices.empty() && radices != "auto" && !ReadRadices(radices, settings.radices)) {
    Refuse(settings, "ADASUM_HVD_RADICES", "auto, flat or the sizes of levels, such as 4x2", radices);
  }
  ReadInteger(settings, "ADASUM_HVD_NUM_THREADS", 1, settings.threads, kMostThreads);
  ReadInteger(settings, "ADASUM_HVD_TIMEOUT_SECONDS", 1, settings.local.timeout_seconds);
  ReadInteger(settings, "ADASUM_HVD_STALL_SECONDS", 0, settings.stall_seconds);
  ReadInteger(settings, "ADASUM_HVD_CHECKPOINT_SECONDS", 1, settings.checkpoint_seconds);
  ReadInteger(settings, "ADASUM_HVD_LOCAL_RING_BYTES", 1, settings.local.ring_bytes);
  settings.local.ring_bytes = (settings.local.ring_bytes + kRingGranule - 1) / kRingGranule * kRingGranule;
  ReadChoice(settings, "ADASUM_HVD_LOCAL", kLocalModes, "auto, staged or off", settings.local.mode);
  const std::string streams = Variable("HOROVOD_NUM_NCCL_STREAMS");
  if (kOnDevices && std::atoi(streams.c_str()) > 1 &&
      std::atoi(Variable("HOROVOD_ENABLE_ASYNC_COMPLETION").c_str()) > 0) {
    Refuse(settings, "HOROVOD_NUM_NCCL_STREAMS",
           "1 with HOROVOD_ENABLE_ASYNC_COMPLETION, because kernels of two communicators may wait for each "
           "other",
           streams);
  }
  const std::string kernels = Variable("ADASUM_HVD_KERNELS");
  settings.kernels = ChooseKernels(kernels.c_str());
  if (settings.kernels == nullptr) {
    Refuse(settings, "ADASUM_HVD_KERNELS", "portable, or avx2 or avx512 on a processor that has it", kernels);
    settings.kernels = &kPortableKernels;
  }
  return settings;
}

int Settings::Fingerprint() const {
  std::ostringstream text; // kernels and threads may differ: they give the same bits
  text << kVersion << ' ' << off << ' ' << reduce.chunk_bytes << ' ' << reduce.replicate_bytes << ' '
       << max_message_bytes << ' ' << kGroupOps[static_cast<int>(group_op)] << ' ' << group_size << ' '
       << RadicesText(radices) << ' ' << kLocalModes[static_cast<int>(local.mode)] << ' ' << local.ring_bytes
       << ' ' << error;
  return static_cast<int>(std::hash<std::string>()(text.str()) & 0x7fffffff);
}

std::string Settings::Json() const {
  std::ostringstream text;
  text << "{\"op\": \"" << kOps[off] << "\", \"kernels\": \"" << kernels->name << "\", \"group_op\": \""
       << kGroupOps[static_cast<int>(group_op)] << "\", \"group_size\": " << group_size << ", \"radices\": \""
       << RadicesText(radices) << "\", \"threads\": " << threads
       << ", \"chunk_bytes\": " << reduce.chunk_bytes << ", \"replicate_bytes\": " << reduce.replicate_bytes
       << ", \"max_message_bytes\": " << max_message_bytes << ", \"local\": \""
       << kLocalModes[static_cast<int>(local.mode)] << "\", \"local_ring_bytes\": " << local.ring_bytes
       << ", \"timeout_seconds\": " << local.timeout_seconds << ", \"stall_seconds\": " << stall_seconds
       << ", \"checkpoint_seconds\": " << checkpoint_seconds << "}";
  return text.str();
}

} // namespace adasum_hvd
