// The processor time that the kernel grants to the control groups of this process: containers limit it by
// quotas (`docker --cpus 2`), which affinity masks do not show.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace adasum_hvd {

struct ProcessorQuota {
  double processors = std::numeric_limits<double>::infinity(); // no limit
  uint64_t group = 0; // inode of the control group: its processes share the quota
};

// The lowest quota between the groups that the file `membership` names and the root, of cgroup v2 (cpu.max)
// and v1 (cpu.cfs_quota_us, cpu.cfs_period_us) below `mount`. Missing files are no limit.
ProcessorQuota ReadProcessorQuota(const std::string& membership = "/proc/self/cgroup",
                                  const std::string& mount = "/sys/fs/cgroup");

} // namespace adasum_hvd
