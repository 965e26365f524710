// Connects the ranks of a host over unix sockets, and exchanges their shared memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/descriptors.h"
#include "host/segment.h"
#include "host/shared_memory.h"

namespace adasum_hvd {

enum class LocalMode {
  kAuto,   // ranks map the memory that holds the tensors; short messages go through rings
  kStaged, // all data goes through the rings
  kOff,    // the network transport, also inside a host
};

struct LocalSettings {
  LocalMode mode = LocalMode::kAuto;
  int64_t ring_bytes = 0;   // shared memory per ordered pair of ranks, a multiple of 64; 0: RingBytes
  int timeout_seconds = 30; // without any progress, until a wait fails
  std::string limit = kTimeoutVariable; // what sets this timeout, for messages
  bool moves_threads = true;            // the calling thread may be moved to another processor
  int handshake_seconds = 10;           // for connecting, but at most half of the timeout
};

// The default for `ranks` ranks of a host: all rings together have at most 64 MiB, for up to 128 ranks.
int64_t RingBytes(int ranks);

struct LocalPeer {
  std::unique_ptr<LocalSegment> segment; // null for this rank itself, whose segment is LocalGroup::mine
  Descriptor socket;                     // closed by the kernel when the peer ends
  Descriptor file;                       // with its regions, if memory is shared
  Descriptor process;                    // pidfd, if the kernel supports it and the id is visible
};

constexpr int kNoName = -1;

struct LocalGroup {
  int rank = 0; // of this process among the ranks of the host
  std::unique_ptr<LocalSegment> mine;
  std::vector<LocalPeer> peers;     // by rank on the host
  std::vector<int> global_ranks;    // by rank on the host, for errors
  bool shares = false;              // the ranks map one another's shared memory
  std::shared_ptr<SharedFile> file; // with this rank's regions, if so
  LocalSettings settings;
  Descriptor listening; // until the peers are connected
  int name = kNoName;   // on which it listens
  int nonce = 0;        // that a peer must know to connect

  LocalSegment& segment(int one) const { return one == rank ? *mine : *peers[one].segment; }
  SegmentHeader& header(int one) const { return segment(one).header(); }
  bool Crowded() const; // whether ranks have to share processors; the same on all of them
  int RanksUnder(const ProcessorQuota& quota) const; // the number of ranks of the host that share the quota
};

// Returns what rank `rank` of a host shares before it is connected; it listens. Throws std::exception.
std::unique_ptr<LocalGroup> MakeLocalGroup(int rank, const std::vector<int>& global_ranks,
                                           const LocalSettings& settings);

// Listens on a free name.
Descriptor Listen(int backlog, int& name);

// Connects the peers by their names and nonces, by rank of the host. Throws std::exception if not all have
// connected in time; it listens no longer in any case.
void ConnectPeers(LocalGroup& group, const std::vector<int>& names, const std::vector<int>& nonces);

// Gathers two integers of every rank of the process set, in rank order. Collective.
using AllgatherTwo = std::function<std::vector<int>(int first, int second)>;

// Connects the ranks `members` of a process set, all on this host; `member` is this rank's index among them,
// and `global_ranks` has their ranks in Horovod. The set's other ranks connect on their own hosts at the same
// time.
//
// Collective over the process set; the handshake succeeds or fails within its limit. If any rank
// failed, returns null on every rank of the set, and sets `why_not` to the reason that this rank knows.
std::unique_ptr<LocalGroup> ConnectLocalRanks(const std::vector<int>& members, int member,
                                              const std::vector<int>& global_ranks,
                                              const LocalSettings& settings, const AllgatherTwo& allgather,
                                              std::string& why_not);

} // namespace adasum_hvd
