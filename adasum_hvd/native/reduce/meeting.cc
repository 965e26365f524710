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

// Where the pieces are, after having offered the regions that hold them.
std::vector<Place> Offer(Transport& transport, const std::vector<MemoryPiece>& mine) {
  std::vector<Place> places;
  std::shared_ptr<const SharedRegion> region; // mostly the same for all
  for (const MemoryPiece& piece : mine) {
    if (piece.bytes == 0) {
      places.push_back({});
      continue;
    }
    if (region == nullptr || !region->Holds(piece.at, piece.bytes)) {
      region = FindShared(piece.at, piece.bytes);
      if (region == nullptr) {
        throw std::logic_error("AdaSum: memory that is to be shared is not");
      }
      for (int rank = 0; rank < transport.size(); ++rank) {
        if (rank != transport.rank()) {
          transport.Offer(rank, region);
        }
      }
    }
    places.push_back({region->number(), static_cast<uint64_t>(piece.at - region->begin())});
  }
  return places;
}

// Where a rank's pieces are in this rank's memory.
std::vector<char*> Reach(Transport& transport, int rank, const std::vector<Place>& places,
                         const std::vector<MemoryPiece>& mine) {
  std::vector<char*> pieces;
  MemorySpan span = {};
  uint64_t region = 0;
  for (size_t piece = 0; piece < mine.size(); ++piece) {
    const int64_t bytes = mine[piece].bytes;
    if (bytes > 0 && places[piece].region != region) {
      region = places[piece].region;
      span = transport.Reach(rank, region);
    }
    pieces.push_back(bytes == 0 ? nullptr : span.At(places[piece].offset, bytes));
  }
  return pieces;
}

} // namespace

std::vector<std::vector<char*>> MeetInMemory(Transport& transport, const std::vector<MemoryPiece>& mine) {
  const std::vector<Place> places = Offer(transport, mine);
  std::vector<std::vector<Place>> all(transport.size(), std::vector<Place>(mine.size()));
  std::vector<void*> receive;
  for (std::vector<Place>& of_rank : all) {
    receive.push_back(of_rank.data());
  }
  Share(transport, places.data(), receive, static_cast<int64_t>(mine.size() * sizeof(Place)));
  std::vector<std::vector<char*>> pieces(transport.size());
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (rank != transport.rank()) {
      pieces[rank] = Reach(transport, rank, all[rank], mine);
      continue;
    }
    for (const MemoryPiece& piece : mine) {
      pieces[rank].push_back(piece.at);
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
