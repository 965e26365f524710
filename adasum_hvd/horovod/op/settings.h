// The settings in the environment at init. All ranks must have equal ones (agreement.cc).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/bootstrap.h"
#include "kernels/kernels.h"
#include "reduce/reduce.h"
#include "reduce/tree.h"

// Whether this Horovod reduces tensors on CUDA devices, over NCCL: then so does the op.
#define ADASUM_ON_DEVICES (HAVE_NCCL && HAVE_CUDA && HOROVOD_GPU_ALLREDUCE == 'N')

namespace adasum_hvd {

#if ADASUM_ON_DEVICES
constexpr bool kOnDevices = true;
#else
constexpr bool kOnDevices = false;
#endif

constexpr char kVersion[] = "0.3.0";

struct Settings {
  bool off = false;                    // ADASUM_HVD_OP=off: hand every call to Horovod's own op
  ReduceSettings reduce;               // ADASUM_HVD_CHUNK_BYTES, ADASUM_HVD_REPLICATE_BYTES
  int64_t max_message_bytes = 1 << 30; // ADASUM_HVD_MAX_MESSAGE_BYTES: the longest single MPI message
  GroupOp group_op = GroupOp::kAdasum; // ADASUM_HVD_GROUP_OP: adasum, average or sum
  int group_size = 0;                  // ADASUM_HVD_GROUP_SIZE: ranks in a group; 0 is a host
  std::vector<int> radices;            // ADASUM_HVD_RADICES: empty for auto, {0} for flat, {4, 2} for 4x2
  int threads = 0;                     // ADASUM_HVD_NUM_THREADS; 0: this rank's share of the processors
  LocalSettings local;                 // ADASUM_HVD_LOCAL, ADASUM_HVD_LOCAL_RING_BYTES,
                                       // ADASUM_HVD_TIMEOUT_SECONDS
  int stall_seconds = 600;     // ADASUM_HVD_STALL_SECONDS: limit of the wait for a tensor; 0: no limit
  int checkpoint_seconds = 60; // ADASUM_HVD_CHECKPOINT_SECONDS: for a script, before its process is ended
  const Kernels* kernels = nullptr; // ADASUM_HVD_KERNELS: portable, avx2 or avx512
  std::string error;                // the first variable with an invalid value, and the reason

  static Settings FromEnvironment();
  static Settings Begin();   // reads the environment for an op, at Horovod's init
  static Settings InForce(); // as read by the last Begin, or else the environment's
  int Fingerprint() const;   // equal on ranks with compatible settings
  std::string Json() const;
};

std::string RadicesText(const std::vector<int>& radices); // as in the variable

} // namespace adasum_hvd
