// How the ranks of a host come together before they reduce in shared memory, and after it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace adasum_hvd {

// Memory that a rank lets the others of its group read and write, in a region that it shares.
struct MemoryPiece {
  char* at;
  int64_t bytes;
};

// Returns where every rank's pieces are in this rank's memory, by rank and piece: as many of the same sizes
// on every rank. Where this rank cannot share or map one, it says in `why_not` why, and what it returns is
// incomplete. Collective.
std::vector<std::vector<char*>> MapPieces(Transport& transport, const std::vector<MemoryPiece>& mine,
                                          std::string& why_not);

// Returns when every rank has come here. Collective.
void Meet(Transport& transport);

// Returns whether any rank says so. Collective.
bool AnyRank(Transport& transport, bool mine);

} // namespace adasum_hvd
