// Barriers of the ranks of a host, and the mapping of their shared memory before they reduce in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/transport.h"

namespace adasum_hvd {

// Memory in a shared region of a rank, for the other ranks of its group to read and write.
struct MemoryPiece {
  char* at;
  int64_t bytes;
};

// Returns the addresses of every rank's pieces in this rank's memory, by rank and piece. All ranks have
// pieces of the same number and sizes. If this rank cannot share or map one, it sets `why_not`, and the
// result is incomplete. Collective.
std::vector<std::vector<char*>> MapPieces(Transport& transport, const std::vector<MemoryPiece>& mine,
                                          std::string& why_not);

// Returns after every rank has called it. Collective.
void Barrier(Transport& transport);

// Returns whether `mine` is true on any rank. Collective.
bool AnyRank(Transport& transport, bool mine);

} // namespace adasum_hvd
