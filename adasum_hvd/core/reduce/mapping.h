// Gathers and barriers, and the mapping of the shared memory of a host's ranks before they reduce in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "host/transport.h"

namespace adasum_hvd {

// Returns the values of every rank, by rank; all ranks have equally many. Collective.
template <class T> std::vector<T> Gathered(Transport& transport, const std::vector<T>& mine) {
  std::vector<T> all(mine.size() * transport.size());
  std::vector<Message> messages;
  const auto bytes = static_cast<int64_t>(mine.size() * sizeof(T));
  for (int rank = 0; rank < transport.size(); ++rank) {
    messages.push_back({mine.data(), bytes, all.data() + rank * mine.size(), bytes});
  }
  transport.Exchange(messages);
  std::copy(mine.begin(), mine.end(), all.begin() + transport.rank() * mine.size());
  return all;
}

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
