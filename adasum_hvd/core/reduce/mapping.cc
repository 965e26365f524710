#include "reduce/mapping.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "host/abort_notice.h"

namespace adasum_hvd {
namespace {

// The location of a piece in its owner's shared file. No region: it is empty, or not shared.
struct Location {
  int64_t region = 0;
  int64_t region_bytes = 0;
  uint64_t offset = 0; // bytes, in the region
};

using Regions = std::vector<std::shared_ptr<const SharedRegion>>;

// The region of each piece; null for an empty one, and for one that is not shared.
Regions RegionsOf(const std::vector<MemoryPiece>& mine, std::string& why_not) {
  Regions regions;
  std::shared_ptr<const SharedRegion> region; // mostly the same for all
  for (const MemoryPiece& piece : mine) {
    if (piece.bytes > 0 && (region == nullptr || !region->Holds(piece.at, piece.bytes))) {
      region = FindShared(piece.at, piece.bytes);
      if (region == nullptr && why_not.empty()) {
        why_not = "a tensor lies in memory that is not shared";
      }
    }
    regions.push_back(piece.bytes > 0 ? region : nullptr);
  }
  return regions;
}

std::vector<Location> LocationsOf(const Regions& regions, const std::vector<MemoryPiece>& mine) {
  std::vector<Location> locations;
  for (size_t piece = 0; piece < mine.size(); ++piece) {
    const SharedRegion* region = regions[piece].get();
    locations.push_back(region == nullptr
                            ? Location()
                            : Location{region->offset(), region->bytes(),
                                       static_cast<uint64_t>(mine[piece].at - region->begin())});
  }
  return locations;
}

void OfferAll(Transport& transport, const Regions& regions) {
  for (size_t piece = 0; piece < regions.size(); ++piece) {
    const bool is_new = regions[piece] != nullptr && (piece == 0 || regions[piece] != regions[piece - 1]);
    for (int rank = 0; is_new && rank < transport.size(); ++rank) {
      if (rank != transport.rank()) {
        transport.Offer(rank, regions[piece]);
      }
    }
  }
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
  const Regions regions = RegionsOf(mine, why_not);
  const std::vector<Location> locations = LocationsOf(regions, mine);
  OfferAll(transport, regions); // before the locations are sent, so that the others unmap freed regions first
  const std::vector<Location> all = Gathered(transport, locations);
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
