// The notice that a rank sends before it leaves a reduction, and the search for the rank that failed first.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace adasum_hvd {

std::string RankList(const std::vector<int>& ranks); // "rank 1", "ranks 1, 2"

constexpr char kTimeoutVariable[] = "ADASUM_HVD_TIMEOUT_SECONDS";
// A predicate, to follow a RankList; `limit` is what sets the timeout.
std::string DidNotRespond(int64_t timeout_seconds, const std::string& limit = kTimeoutVariable);

// As it is sent to other processes. Its suspects are the ranks that the sender waited for, or the sender
// itself (a self-reported failure), or none, if the sender leaves for no failure that it knows of.
struct AbortNotice {
  int32_t suspects[32] = {-1}; // global ranks; -1 after the last
  char reason[384] = "";

  AbortNotice() = default;
  AbortNotice(const std::vector<int>& ranks, const std::string& text);
  std::vector<int> Suspects() const;
};

using AbortNotices = std::map<int, AbortNotice>; // by the sender's global rank

struct RootCause {
  int rank;
  int reporter;
  std::string reason;
  bool final = false;    // a rank has reported it of itself; else more notices may still arrive
  bool circular = false; // all ranks have sent notices, and wait for one another
};

RootCause OwnFailure(int rank, const std::exception& error); // of this rank

// Follows the notices from the ranks `awaited` by rank `here` to one that reports its own failure, suspects
// no rank, or has sent no notice. A self-reported failure anywhere has precedence over the last case.
// `problem` is the predicate for the ranks awaited: "did not respond for 30 s".
RootCause FindRootCause(const AbortNotices& notices, int here, const std::vector<int>& awaited,
                        const std::string& problem);

// Thrown if a rank does not participate any more.
struct UnresponsiveRank : std::runtime_error {
  explicit UnresponsiveRank(RootCause found, const std::string& during = "");
  RootCause cause;
};

} // namespace adasum_hvd
