#include "reduce/mapping.h"

#include <iterator>

#include "host/abort_notice.h"

namespace adasum_hvd {
namespace {

// The location of a piece in its owner's shared file. No region: it is empty, or not shared.
struct Location {
  int64_t region = 0;
  int64_t region_bytes = 0;
  uint64_t offset = 0; // bytes, in the region
};

// Offers the regions of the pieces to the other ranks, and returns where the pieces lie there.
std::vector<Location> OfferAll(Transport& transport, const std::vector<MemoryPiece>& mine,
                               std::string& why_not) {
  std::vector<Location> locations(mine.size());
  std::shared_ptr<const SharedRegion> region; // mostly the same for all
  for (size_t index = 0; index < mine.size(); ++index) {
    const MemoryPiece& piece = mine[index];
    if (piece.bytes > 0 && (region == nullptr || !region->Holds(piece.at, piece.bytes))) {
      region = FindShared(piece.at, piece.bytes);
      if (region == nullptr && why_not.empty()) {
        why_not = "a tensor lies in memory that is not shared";
      }
      for (int rank = 0; region != nullptr && rank < transport.size(); ++rank) {
        if (rank != transport.rank()) {
          transport.Offer(rank, region);
        }
      }
    }
    if (piece.bytes > 0 && region != nullptr) {
      locations[index] = {region->offset(), region->bytes(),
                          static_cast<uint64_t>(piece.at - region->begin())};
    }
  }
  return locations;
}

// Maps the pieces of one other rank.
std::vector<char*> Map(Transport& transport, int rank, const Location* locations,
                       const std::vector<MemoryPiece>& mine) {
  std::vector<char*> pieces;
  MemorySpan span = {};
  int64_t mapped = -1; // the region that `span` maps
  for (size_t piece = 0; piece < mine.size(); ++piece) {
    const Location& location = locations[piece];
    if (mine[piece].bytes == 0 || location.region_bytes == 0) {
      pieces.push_back(nullptr);
      continue;
    }
    if (location.region != mapped) {
      span = transport.Reach(rank, location.region, location.region_bytes);
      mapped = location.region;
    }
    pieces.push_back(span.At(location.offset, mine[piece].bytes));
  }
  return pieces;
}

} // namespace

std::vector<std::vector<char*>> MapPieces(Transport& transport, const std::vector<MemoryPiece>& mine,
                                          std::string& why_not) {
  // Offers come before locations, so that the others unmap freed regions first.
  const std::vector<Location> all = Gathered(transport, OfferAll(transport, mine, why_not));
  std::vector<std::vector<char*>> pieces(transport.size());
  try {
    for (int rank = 0; rank < transport.size() && why_not.empty(); ++rank) {
      if (rank != transport.rank()) {
        pieces[rank] = Map(transport, rank, all.data() + rank * mine.size(), mine);
      } else {
        std::transform(mine.begin(), mine.end(), std::back_inserter(pieces[rank]),
                       [](const MemoryPiece& piece) { return piece.bytes == 0 ? nullptr : piece.at; });
      }
    }
  } catch (const UnresponsiveRank&) {
    throw;
  } catch (const std::exception& error) {
    why_not = error.what();
  }
  return pieces;
}

void Barrier(Transport& transport) { AnyRank(transport, false); }

bool AnyRank(Transport& transport, bool mine) {
  const std::vector<char> all = Gathered(transport, std::vector<char>{mine});
  return std::find(all.begin(), all.end(), true) != all.end();
}

} // namespace adasum_hvd
