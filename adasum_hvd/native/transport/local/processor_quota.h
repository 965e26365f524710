// How much processor time the kernel grants to the control groups of this process: containers limit it by
// quotas (`docker --cpus 2`), which no affinity mask shows.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace adasum_hvd {

struct ProcessorQuota {
  double processors = std::numeric_limits<double>::infinity(); // no limit
  uint64_t group = 0; // inode of the group that has it: processes of one group share what it grants
};

// The tightest quota on the way from the groups that the file `membership` names up to the root, of cgroup v2
// (cpu.max) and v1 (cpu.cfs_quota_us, cpu.cfs_period_us) below `mount`. What is not there limits nothing.
ProcessorQuota ReadProcessorQuota(const std::string& membership = "/proc/self/cgroup",
                                  const std::string& mount = "/sys/fs/cgroup");

} // namespace adasum_hvd
