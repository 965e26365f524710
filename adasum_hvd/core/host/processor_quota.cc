#include "host/processor_quota.h"

#include <fstream>
#include <sstream>
#include <vector>

#include <sys/stat.h>

namespace adasum_hvd {
namespace {

// The two numbers of v2's "200000 100000" ("max 100000": no limit), or of v1's two files (-1: no limit).
double ProcessorsOf(const std::string& folder) {
  double quota = 0, period = 0;
  std::ifstream both(folder + "/cpu.max");
  if (!(both >> quota >> period)) {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : ProcessorQuota().processors;
}

void Tighten(ProcessorQuota& quota, const std::string& folder) {
  const double processors = ProcessorsOf(folder);
  struct stat status;
  if (processors < quota.processors && stat(folder.c_str(), &status) == 0) {
    quota = {processors, static_cast<uint64_t>(status.st_ino)};
  }
}

bool NamesProcessors(const std::string& controllers) {
  std::istringstream in(controllers);
  for (std::string one; std::getline(in, one, ',');) {
    if (one == "cpu") {
      return true;
    }
  }
  return false;
}

} // namespace

ProcessorQuota ReadProcessorQuota(const std::string& membership, const std::string& mount) {
  ProcessorQuota quota;
  std::ifstream lines(membership);
  for (std::string line;
       std::getline(lines, line);) { // number:controllers:path; in v2 there are no controllers
    const size_t first = line.find(':');
    const size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::vector<std::string> bases;
    if (controllers.empty()) {
      bases = {mount, mount + "/unified"};
    } else if (NamesProcessors(controllers)) {
      bases = {mount + "/" + controllers, mount + "/cpu"};
    }
    // In a container the group is mounted as the root, but the path may be that of the host.
    for (const std::string& base : bases) {
      for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
        Tighten(quota, base + path);
        if (path.find('/') == std::string::npos) {
          break;
        }
      }
    }
  }
  return quota;
}

} // namespace adasum_hvd
