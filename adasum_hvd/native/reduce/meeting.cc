#include "reduce/meeting.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace adasum_hvd {
namespace {

// Where something lies; meaningful with its owner's rank. No region: it is empty, or not shared.
struct Place {
  int64_t region = 0;
  int64_t region_bytes = 0;
  uint64_t offset = 0; // bytes, in the region
};

// `bytes` to and from every other rank.
void Share(Transport& transport, const void* send, std::vector<void*> receive, int64_t bytes) {
  std::vector<Message> messages;
  for (void* from : receive) {
    messages.push_back({send, bytes, from, bytes});
  }
  messages[transport.rank()] = {};
  transport.Exchange(messages);
}

using Regions = std::vector<std::shared_ptr<const SharedRegion>>;

// The region that each piece lies in; null for an empty one, and where there is none.
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

std::vector<Place> PlacesOf(const Regions& regions, const std::vector<MemoryPiece>& mine) {
  std::vector<Place> places;
  for (size_t piece = 0; piece < mine.size(); ++piece) {
    const SharedRegion* region = regions[piece].get();
    places.push_back(region == nullptr ? Place()
                                       : Place{region->offset(), region->bytes(),
                                               static_cast<uint64_t>(mine[piece].at - region->begin())});
  }
  return places;
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

// The pieces of one other rank.
std::vector<char*> Map(Transport& transport, int rank, const std::vector<Place>& places,
                       const std::vector<MemoryPiece>& mine) {
  std::vector<char*> pieces;
  MemorySpan span = {};
  for (size_t piece = 0; piece < mine.size(); ++piece) {
    const Place& place = places[piece];
    if (mine[piece].bytes == 0 || place.region_bytes == 0) {
      pieces.push_back(nullptr);
      continue;
    }
    if (piece == 0 || span.begin == nullptr || place.region != places[piece - 1].region) {
      span = transport.Reach(rank, place.region, place.region_bytes);
    }
    pieces.push_back(span.At(place.offset, mine[piece].bytes));
  }
  return pieces;
}

} // namespace

std::vector<std::vector<char*>> MapPieces(Transport& transport, const std::vector<MemoryPiece>& mine,
                                          std::string& why_not) {
  const Regions regions = RegionsOf(mine, why_not);
  const std::vector<Place> places = PlacesOf(regions, mine);
  OfferAll(transport, regions); // before the others hear of them, so that they unmap first
  std::vector<std::vector<Place>> all(transport.size(), std::vector<Place>(mine.size()));
  std::vector<void*> receive;
  for (std::vector<Place>& of_rank : all) {
    receive.push_back(of_rank.data());
  }
  Share(transport, places.data(), receive, static_cast<int64_t>(mine.size() * sizeof(Place)));
  std::vector<std::vector<char*>> pieces(transport.size());
  try {
    for (int rank = 0; rank < transport.size() && why_not.empty(); ++rank) {
      if (rank != transport.rank()) {
        pieces[rank] = Map(transport, rank, all[rank], mine);
      } else {
        std::transform(mine.begin(), mine.end(), std::back_inserter(pieces[rank]),
                       [](const MemoryPiece& piece) { return piece.bytes == 0 ? nullptr : piece.at; });
      }
    }
  } catch (const SilentRank&) {
    throw;
  } catch (const std::exception& error) {
    why_not = error.what();
  }
  return pieces;
}

void Meet(Transport& transport) { AnyRank(transport, false); }

bool AnyRank(Transport& transport, bool mine) {
  const char here = mine;
  std::vector<char> there(transport.size());
  std::vector<void*> receive;
  for (char& of_rank : there) {
    receive.push_back(&of_rank);
  }
  Share(transport, &here, receive, 1);
  return mine || std::any_of(there.begin(), there.end(), [](char said) { return said != 0; });
}

} // namespace adasum_hvd
