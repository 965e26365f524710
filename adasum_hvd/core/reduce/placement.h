// The addresses of all data that a reduction moves, on hosts and on devices: computed from the tensors'
// addresses and sizes, before any transfer.
//
//   1. in every level the elements are cut into one slice per rank of the group (layout.h);
//   2. a slice that is contiguous in the caller's memory is sent from there and received there. Other slices,
//      and changes of weights, are copied to the staging memory: `packs` lists the copies before sending,
//      `unpacks` the copies back;
//   3. the other ranks' elements of this rank's slices are received in separate memory;
//   4. the slices of the next level are parts of this rank's result in the level before.
//
// If the ranks of a group share memory, nothing is sent or received: tensors in shared memory are reduced
// there, others in a copy in shared staging memory. Each rank reads its slice in the memory of the others,
// and writes the result there.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reduce/layout.h"
#include "reduce/mapping.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

// A level (reduce.h) on this rank.
struct PlacedLevel {
  Transport* transport; // of its group
  const Tree* tree;
  double scale; // that the result is multiplied by
  Shares shares;
  // Per rank of the group:
  std::vector<char*> send;    // this rank's elements of its slice
  std::vector<char*> receive; // its elements of this rank's slice
  std::vector<char*> result;  // its slice of the result
  // Per run of this rank's slice:
  std::vector<char*> own; // this rank's elements
  std::vector<char*> out; // the result, which may be the same place

  // If the group's ranks share memory: per run of this rank's slice and rank of the group, the address of the
  // run in that rank's memory. Known after MapPeers.
  bool shared = false;
  std::vector<char*> by_rank;

  int rank() const { return transport->rank(); }
  int size() const { return transport->size(); }
  const Slice& slice(int rank) const { return shares.slices[rank]; }
  const Slice& mine() const { return slice(rank()); }
};

// Whether ranks that share memory reduce a tensor in place. Not changes of weights, which have yet to be
// formed, and no input that must not be overwritten.
bool LiesInSharedMemory(const TensorView& tensor, int64_t element_bytes);

// Whether no level has another rank.
bool IsAlone(const std::vector<ReduceLevel>& levels);

class Placement {
public:
  // Returns memory for `bytes` bytes.
  using Reserve = std::function<char*(int64_t bytes)>;
  // Per run of a slice; `to` is null if the run is not copied. Empty if no run is.
  using Copies = std::vector<Copy>;

  Placement(const std::vector<TensorView>& tensors, ElementType type, const std::vector<ReduceLevel>& levels,
            double scale, const ReduceSettings& settings, const Reserve& staging,
            const Reserve& shared_staging, const Reserve& received);

  // Maps this rank's slices in the memory of groups that share memory. Returns false on all ranks if one of
  // them cannot share or map memory; that rank sets `why_not`. Collective, with a barrier of the first level.
  bool MapPeers(std::string& why_not);

  bool alone() const { return alone_; }                              // one rank
  bool replicates() const { return replicate_; }                     // every rank reduces everything
  const std::vector<PlacedLevel>& levels() const { return levels_; } // outwards
  // Per rank of the first level's group.
  const std::vector<Copies>& packs() const { return packs_; }
  const std::vector<Copies>& unpacks() const { return unpacks_; }

private:
  void CutLevels(const std::vector<ReduceLevel>& levels, const Slice& everything, double scale,
                 bool everywhere);
  void PlaceFirst(const Reserve& staging);
  void PlaceFirstShared(const Reserve& staging);
  std::vector<MemoryPiece> MyPieces(size_t level) const;
  void PointAtTheirs(size_t level, const std::vector<std::vector<char*>>& pieces);
  void PlaceNext();
  void PlaceReceived(const Reserve& received);
  void PlaceRuns();
  // A run's place in the staging memory, and whether it is copied there and back.
  struct Staged {
    char* at;
    bool sent;
    bool received;
  };
  void AddCopies(int rank, const std::function<Staged(const Run& run)>& stage);
  bool StaysInPlace(const Run& run) const;

  bool IsDelta(const Run& run) const { return tensors_[run.tensor].start != nullptr; }
  char* Input(const Run& run) const { return At(tensors_[run.tensor].input, run); }
  char* Home(const Run& run) const { return homes_[run.tensor] + run.first * element_bytes_; }
  char* Output(const Run& run) const { return At(tensors_[run.tensor].output, run); }
  char* At(const void* tensor, const Run& run) const;
  bool IsContiguous(const Slice& slice, char* (Placement::*where)(const Run& run) const) const;

  const std::vector<TensorView>& tensors_;
  const int64_t element_bytes_;
  bool any_delta_ = false;
  const bool alone_;
  bool replicate_ = false;
  std::vector<char*> homes_; // per tensor, where the first level's ranks share memory: where it is reduced
  std::vector<PlacedLevel> levels_;
  std::vector<Copies> packs_;
  std::vector<Copies> unpacks_;
};

} // namespace adasum_hvd
