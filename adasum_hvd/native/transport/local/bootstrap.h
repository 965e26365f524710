// Finds the other ranks of this host and exchanges shared memory with them, over unix sockets.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/descriptors.h"
#include "transport/local/segment.h"
#include "transport/shared_memory.h"

namespace adasum_hvd {

enum class LocalMode {
  kAuto,   // ranks map the memory that holds the tensors; short messages go through rings
  kStaged, // every byte goes through the rings
  kOff,    // the network transport, on one host too
};

struct LocalSettings {
  LocalMode mode = LocalMode::kAuto;
  int64_t ring_bytes = 0;     // shared memory per ordered pair of ranks, a multiple of 64; 0: RingBytes
  int timeout_seconds = 30;   // without any progress, before a wait ends in an error
  int handshake_seconds = 10; // for connecting
};

// What is good for so many ranks of a host: their rings have 64 MiB together at most, up to 128 ranks.
int64_t RingBytes(int ranks);

struct LocalPeer {
  std::unique_ptr<LocalSegment> segment; // null for this rank itself, whose segment is LocalGroup::mine
  int process_id = 0;                    // as this rank sees it; 0 where it does not
  Descriptor socket;                     // closed by the kernel when the peer ends
  Descriptor file;                       // in which its regions lie, where memory is shared
  Descriptor process;                    // pidfd, where the kernel has them and shows the peer's id
};

struct LocalGroup {
  int rank = 0; // of this process among the ranks of the host
  std::unique_ptr<LocalSegment> mine;
  std::vector<LocalPeer> peers;     // by rank on the host
  std::vector<int> global_ranks;    // by rank on the host, as errors name them
  bool crowded = false;             // more ranks than processors that they have together
  bool shares = false;              // the ranks map one another's shared memory
  std::shared_ptr<SharedFile> file; // in which this rank's regions lie, then
  LocalSettings settings;

  LocalSegment& segment(int one) const { return one == rank ? *mine : *peers[one].segment; }
  SegmentHeader& header(int one) const { return segment(one).header(); }
  bool Crowded() const; // whether the ranks have to take turns; the same answer on all of them
  int RanksUnder(const ProcessorQuota& quota) const; // of the host, that share it
};

// Gathers two integers of every rank of the process set, in rank order. Collective.
using AllgatherTwo = std::function<std::vector<int>(int first, int second)>;

// Connects the ranks `members` of a process set, all on this host; `member` is this rank's place among them,
// and `global_ranks` are theirs in Horovod. The set's other ranks connect on their own hosts meanwhile.
//
// Collective over the process set; the handshake ends after handshake_seconds, one way or the other. Returns
// null, on every rank of the set, when any rank failed, and then says in `why_not` what this rank knows of
// it.
std::unique_ptr<LocalGroup> ConnectLocalRanks(const std::vector<int>& members, int member,
                                              const std::vector<int>& global_ranks,
                                              const LocalSettings& settings, const AllgatherTwo& allgather,
                                              std::string& why_not);

} // namespace adasum_hvd
