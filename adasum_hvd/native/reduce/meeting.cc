#include "reduce/meeting.h"

#include <algorithm>
#include <stdexcept>

namespace adasum_hvd {
namespace {

// Where something lies; meaningful with its owner's rank.
struct Place {
  uint64_t region = 0;
  uint64_t offset = 0; // bytes
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

// The region that each piece lies in; null for an empty one.
Regions RegionsOf(const std::vector<MemoryPiece>& mine) {
  Regions regions;
  std::shared_ptr<const SharedRegion> region; // mostly the same for all
  for (const MemoryPiece& piece : mine) {
    if (piece.bytes > 0 && (region == nullptr || !region->Holds(piece.at, piece.bytes))) {
      region = FindShared(piece.at, piece.bytes);
      if (region == nullptr) {
        throw std::logic_error("AdaSum: memory that is to be shared is not");
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
    places.push_back(region == nullptr
                         ? Place()
                         : Place{region->number(), static_cast<uint64_t>(mine[piece].at - region->begin())});
  }
  return places;
}

} // namespace

// All offer and map regions in the same order, one piece at a time: so few descriptors are on their way at
// any time, of which the kernel allows only so many, and the same is true of what a socket holds.
std::vector<std::vector<char*>> MeetInMemory(Transport& transport, const std::vector<MemoryPiece>& mine) {
  const Regions regions = RegionsOf(mine);
  const std::vector<Place> places = PlacesOf(regions, mine);
  std::vector<std::vector<Place>> all(transport.size(), std::vector<Place>(mine.size()));
  std::vector<void*> receive;
  for (std::vector<Place>& of_rank : all) {
    receive.push_back(of_rank.data());
  }
  Share(transport, places.data(), receive, static_cast<int64_t>(mine.size() * sizeof(Place)));
  all[transport.rank()] = places;
  std::vector<MemorySpan> spans(transport.size());
  std::vector<std::vector<char*>> pieces(transport.size());
  for (size_t piece = 0; piece < mine.size(); ++piece) {
    const auto is_new = [&](int rank) {
      return mine[piece].bytes > 0 && (piece == 0 || all[rank][piece].region != all[rank][piece - 1].region);
    };
    for (int rank = 0; rank < transport.size(); ++rank) {
      if (rank != transport.rank() && is_new(transport.rank())) {
        transport.Offer(rank, regions[piece]);
      }
    }
    for (int rank = 0; rank < transport.size(); ++rank) {
      if (rank == transport.rank() || mine[piece].bytes == 0) {
        pieces[rank].push_back(mine[piece].bytes == 0 ? nullptr : mine[piece].at);
        continue;
      }
      if (is_new(rank)) {
        spans[rank] = transport.Reach(rank, all[rank][piece].region);
      }
      pieces[rank].push_back(spans[rank].At(all[rank][piece].offset, mine[piece].bytes));
    }
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
