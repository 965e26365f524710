#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <new>
#include <numeric>
#include <set>

#include <sys/mman.h>

#include "gram.h"
#include "layout.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;

// The coefficients of the two sides of every merge of an explicitly walked tree.
struct Sides {
  double left = 1;
  double right = 1;
};
using ExplicitTree = std::vector<Sides>;

class Reduction {
public:
  Reduction(const std::vector<TensorView>& tensors, ElementType type, const Tree& tree, double scale,
            const ReduceSettings& settings, const Kernels& kernels, Transport& transport, Scratch& scratch);
  ReduceResult Execute(const PhaseObserver& observer);

private:
  // 1. exchange
  void Pack();
  void ReceiveAll(const std::function<void(int64_t)>& on_received);
  void StartReceiving(int64_t chunk);
  // 2. Gram
  void FindScales();
  void GramUpTo(int64_t received);
  void FinishRun(size_t run);
  // 3. tensors that cross slice borders
  using Payload = std::vector<DoubleDouble>;
  std::map<int, Payload> SumOverRanks(const std::map<int, Payload>& mine, const std::set<int>& tensors,
                                      size_t entries);
  void SolveSharedTensors();
  // 4. ill-conditioned tensors: the tree walked on vectors instead of the Gram matrix
  void SolveExplicitly(const std::set<int>& tensors, bool shared);
  void EvaluateNodes(const Run& run, int64_t position, int64_t n, size_t levels, double scale,
                     const std::vector<double>& leaves, const ExplicitTree& sides);
  Payload LevelSums(const Run& run, size_t level, const ExplicitTree& sides);
  // 5. combine
  void CombineAndGather();
  void Combine(int64_t begin, int64_t end);
  void Unpack();

  void PointAt(const Run& run, int64_t position, std::vector<const void*>& vectors) const;
  const char* Input(const Run& run) const;
  char* Output(const Run& run) const;
  bool Contiguous(const Slice& slice) const { return slice.runs.size() <= 1; }
  std::vector<const Run*> PartialRuns(const Slice& slice) const;
  int64_t ChunkEnd(int64_t chunk, const Slice& slice) const;
  const Slice& Mine() const { return slices_[rank_]; }
  double* CoefficientsOf(size_t run) { return &coefficients_[run * size_]; }

  const std::vector<TensorView>& tensors_;
  const ElementType type_;
  const int64_t element_bytes_;
  const Tree& tree_;
  const double scale_;
  const Kernels& kernels_;
  Transport& transport_;
  const int rank_;
  const int size_;
  bool replicate_ = false;
  std::vector<Slice> slices_;
  int64_t chunk_elements_ = 0;
  int64_t chunks_ = 0;
  std::vector<const char*> send_;     // per rank: its slice of this rank's input
  std::vector<char*> receive_;        // per rank: its input, of this rank's slice
  std::vector<char*> result_;         // per rank: where its slice of the result goes
  std::vector<double> coefficients_;  // per run of this rank's slice and rank
  std::vector<double> tensor_scales_; // per tensor: the power of two that float64 input is scaled by
  const ExplicitTree plain_sum_;      // all coefficients 1
  std::map<int, ExplicitTree> explicit_;
  std::map<int, Payload> partial_grams_;
  size_t gram_run_ = 0; // the run and the position in it up to which the Gram matrices are summed
  int64_t gram_position_ = 0;
  GramSum gram_;
  std::vector<double> block_sums_;
  std::vector<std::vector<double>> nodes_; // one block per rank, for EvaluateNodes
};

Reduction::Reduction(const std::vector<TensorView>& tensors, ElementType type, const Tree& tree, double scale,
                     const ReduceSettings& settings, const Kernels& kernels, Transport& transport,
                     Scratch& scratch)
    : tensors_(tensors), type_(type), element_bytes_(ElementBytes(type)), tree_(tree), scale_(scale),
      kernels_(kernels), transport_(transport), rank_(transport.rank()), size_(transport.size()),
      plain_sum_(tree.merges.size()) {
  std::vector<int64_t> elements;
  for (const TensorView& tensor : tensors_) {
    elements.push_back(tensor.elements);
  }
  const int64_t total = std::accumulate(elements.begin(), elements.end(), int64_t{0});
  replicate_ = total * element_bytes_ * size_ <= settings.replicate_bytes || size_ == 1;
  slices_ = MakeSlices(elements, size_, replicate_);

  const int64_t blocks = settings.chunk_bytes / element_bytes_ / kBlockElements;
  chunk_elements_ = std::max<int64_t>(blocks, 1) * kBlockElements;
  for (const Slice& slice : slices_) {
    chunks_ = std::max(chunks_, (slice.elements + chunk_elements_ - 1) / chunk_elements_);
  }

  bool staged = std::any_of(slices_.begin(), slices_.end(), [&](const Slice& s) { return !Contiguous(s); });
  char* staging = staged ? scratch.staging.Reserve(total * element_bytes_) : nullptr;
  char* received = scratch.received.Reserve((size_ - 1) * Mine().elements * element_bytes_);
  for (int rank = 0; rank < size_; ++rank) {
    const Slice& slice = slices_[rank];
    const bool direct = Contiguous(slice) && !slice.runs.empty();
    send_.push_back(direct ? Input(slice.runs.front()) : staging);
    result_.push_back(direct ? Output(slice.runs.front()) : staging);
    receive_.push_back(rank == rank_ ? nullptr : received);
    if (!replicate_ && staging != nullptr) {
      staging += slice.elements * element_bytes_;
    }
    if (rank != rank_) {
      received += Mine().elements * element_bytes_;
    }
  }
  coefficients_.resize(Mine().runs.size() * size_);
  tensor_scales_.assign(tensors_.size(), 1.0);
  block_sums_.resize(std::max<int64_t>(GramSize(size_), 3));
}

ReduceResult Reduction::Execute(const PhaseObserver& observer) {
  if (size_ == 1) {
    coefficients_.assign(coefficients_.size(), scale_);
    Combine(0, Mine().elements);
    return {};
  }
  observer(Phase::kPack);
  Pack();
  observer(Phase::kExchangeAndGram);
  if (type_ == kFloat64) {
    ReceiveAll([](int64_t) {});
    FindScales();
    GramUpTo(Mine().elements);
  } else {
    ReceiveAll([this](int64_t received) { GramUpTo(received); });
  }
  observer(Phase::kSharedTensors);
  SolveSharedTensors();
  observer(Phase::kCombineAndGather);
  CombineAndGather();
  observer(Phase::kUnpack);
  Unpack();
  return {static_cast<int64_t>(explicit_.size())};
}

// ---- where things are ----

const char* Reduction::Input(const Run& run) const {
  return static_cast<const char*>(tensors_[run.tensor].input) + run.first * element_bytes_;
}

char* Reduction::Output(const Run& run) const {
  return static_cast<char*>(tensors_[run.tensor].output) + run.first * element_bytes_;
}

// All ranks' elements of this rank's slice, from `position` of `run` on.
void Reduction::PointAt(const Run& run, int64_t position, std::vector<const void*>& vectors) const {
  for (int rank = 0; rank < size_; ++rank) {
    vectors[rank] = rank == rank_ ? Input(run) + position * element_bytes_
                                  : receive_[rank] + (run.offset + position) * element_bytes_;
  }
}

int64_t Reduction::ChunkEnd(int64_t chunk, const Slice& slice) const {
  return std::min((chunk + 1) * chunk_elements_, slice.elements);
}

// The runs that are not whole tensors: at most the first and the last.
std::vector<const Run*> Reduction::PartialRuns(const Slice& slice) const {
  std::vector<const Run*> partial;
  if (!slice.runs.empty() && !slice.runs.front().whole) {
    partial.push_back(&slice.runs.front());
  }
  if (slice.runs.size() > 1 && !slice.runs.back().whole) {
    partial.push_back(&slice.runs.back());
  }
  return partial;
}

// ---- exchange and Gram ----

void Reduction::Pack() {
  for (int rank = 0; rank < size_; ++rank) {
    const Slice& slice = slices_[rank];
    if (Contiguous(slice) || (replicate_ ? rank != 0 : rank == rank_)) {
      continue;
    }
    char* to = const_cast<char*>(send_[rank]);
    for (const Run& run : slice.runs) {
      std::memcpy(to + run.offset * element_bytes_, Input(run), run.count * element_bytes_);
    }
  }
}

void Reduction::StartReceiving(int64_t chunk) {
  std::vector<Message> messages(size_);
  const int64_t begin = chunk * chunk_elements_;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) {
      messages[rank].send = send_[rank] + begin * element_bytes_;
      messages[rank].send_bytes =
          std::max<int64_t>(ChunkEnd(chunk, slices_[rank]) - begin, 0) * element_bytes_;
      messages[rank].receive = receive_[rank] + begin * element_bytes_;
      messages[rank].receive_bytes = std::max<int64_t>(ChunkEnd(chunk, Mine()) - begin, 0) * element_bytes_;
    }
  }
  transport_.Start(messages);
}

// Calls on_received(elements of this rank's slice that are here) while the next chunk is on its way.
void Reduction::ReceiveAll(const std::function<void(int64_t)>& on_received) {
  if (chunks_ > 0) {
    StartReceiving(0);
  }
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    if (chunk + 1 < chunks_) {
      StartReceiving(chunk + 1);
    }
    transport_.Wait();
    on_received(ChunkEnd(chunk, Mine()));
  }
}

void Reduction::GramUpTo(int64_t received) {
  std::vector<const void*> vectors(size_);
  for (; gram_run_ < Mine().runs.size(); ++gram_run_, gram_position_ = 0) {
    const Run& run = Mine().runs[gram_run_];
    if (gram_position_ == 0) {
      gram_.assign(GramSize(size_), DoubleDouble());
    }
    while (gram_position_ < run.count) {
      const int64_t n = std::min(kBlockElements, run.count - gram_position_);
      if (run.offset + gram_position_ + n > received) {
        return;
      }
      PointAt(run, gram_position_, vectors);
      kernels_.gram[type_](vectors.data(), size_, n, tensor_scales_[run.tensor], block_sums_.data());
      Add(block_sums_.data(), gram_);
      gram_position_ += n;
    }
    FinishRun(gram_run_);
  }
}

void Reduction::FinishRun(size_t run_index) {
  const Run& run = Mine().runs[run_index];
  if (!run.whole) {
    partial_grams_[run.tensor] = gram_;
  } else if (!SolveCoefficients(tree_, Rounded(gram_).data(), CoefficientsOf(run_index))) {
    SolveExplicitly({run.tensor}, /*shared=*/false);
  }
}

// float64 products overflow and underflow where their inputs do not, so each tensor is scaled by a power of
// two that brings its largest element, over all ranks, to about 1.
void Reduction::FindScales() {
  std::map<int, Payload> partial;
  std::vector<const void*> vectors(size_);
  auto set_scale = [this](int tensor, double largest) {
    int exponent = 0;
    std::frexp(largest, &exponent);
    bool usable = std::isfinite(largest) && largest > 0;
    tensor_scales_[tensor] = usable ? std::ldexp(1.0, std::clamp(-exponent, -1021, 1021)) : 1.0;
  };
  for (const Run& run : Mine().runs) {
    PointAt(run, 0, vectors);
    double largest = 0;
    for (const void* vector : vectors) {
      largest = std::max(largest, kernels_.max_abs(static_cast<const double*>(vector), run.count));
    }
    if (run.whole) {
      set_scale(run.tensor, largest);
    } else {
      // A sum over ranks is all that is exchanged, so each rank's maximum travels in a place of its own.
      partial[run.tensor].resize(size_);
      partial[run.tensor][rank_].high = largest;
    }
  }
  std::set<int> shared;
  for (const Slice& slice : slices_) {
    for (const Run* run : PartialRuns(slice)) {
      shared.insert(run->tensor);
    }
  }
  for (const auto& [tensor, maxima] : SumOverRanks(partial, shared, size_)) {
    double largest = 0;
    for (const DoubleDouble& one : maxima) {
      largest = std::max(largest, one.high);
    }
    set_scale(tensor, largest);
  }
}

// ---- tensors that cross slice borders ----

// Exchanges `entries` sums for each partial run of `tensors` and adds them in rank order; every rank gets
// every tensor's total, from the same bytes in the same order.
std::map<int, Reduction::Payload> Reduction::SumOverRanks(const std::map<int, Payload>& mine,
                                                          const std::set<int>& tensors, size_t entries) {
  std::vector<std::vector<int>> parts(size_); // per rank: the tensors it holds a part of
  for (int rank = 0; rank < size_; ++rank) {
    for (const Run* run : PartialRuns(slices_[rank])) {
      if (tensors.count(run->tensor) != 0) {
        parts[rank].push_back(run->tensor);
      }
    }
  }
  std::vector<Payload> payloads(size_);
  std::vector<Message> messages(size_);
  for (int tensor : parts[rank_]) {
    const Payload& part = mine.at(tensor);
    payloads[rank_].insert(payloads[rank_].end(), part.begin(), part.end());
  }
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) {
      payloads[rank].resize(parts[rank].size() * entries);
      messages[rank] = {
          payloads[rank_].data(), static_cast<int64_t>(payloads[rank_].size() * sizeof(DoubleDouble)),
          payloads[rank].data(), static_cast<int64_t>(payloads[rank].size() * sizeof(DoubleDouble))};
    }
  }
  if (!tensors.empty()) {
    transport_.Exchange(messages);
  }
  std::map<int, Payload> totals;
  for (int rank = 0; rank < size_; ++rank) {
    for (size_t part = 0; part < parts[rank].size(); ++part) {
      Payload& total = totals[parts[rank][part]];
      total.resize(entries);
      Add(&payloads[rank][part * entries], total);
    }
  }
  return totals;
}

void Reduction::SolveSharedTensors() {
  std::set<int> shared, ill_conditioned;
  for (const Slice& slice : slices_) {
    for (const Run* run : PartialRuns(slice)) {
      shared.insert(run->tensor);
    }
  }
  std::vector<double> c(size_);
  for (const auto& [tensor, gram] : SumOverRanks(partial_grams_, shared, GramSize(size_))) {
    if (!SolveCoefficients(tree_, Rounded(gram).data(), c.data())) {
      ill_conditioned.insert(tensor);
    }
    for (size_t run = 0; run < Mine().runs.size(); ++run) {
      if (Mine().runs[run].tensor == tensor) {
        std::copy(c.begin(), c.end(), CoefficientsOf(run));
      }
    }
  }
  if (!ill_conditioned.empty()) {
    SolveExplicitly(ill_conditioned, /*shared=*/true);
  }
}

// ---- ill-conditioned tensors ----

// Walks the tree on vectors, a level at a time. A node's vector is never stored: each pass forms it again,
// block by block, from the inputs and the coefficients known so far. Shared tensors cost one small exchange
// per level, on all ranks, which all saw the same Gram matrix and so agree that it is needed.
void Reduction::SolveExplicitly(const std::set<int>& tensors, bool shared) {
  for (int tensor : tensors) {
    explicit_[tensor].resize(tree_.merges.size());
  }
  for (size_t level = 0; level < tree_.levels.size(); ++level) {
    std::map<int, Payload> sums;
    for (const Run& run : Mine().runs) {
      if (tensors.count(run.tensor) != 0) {
        sums[run.tensor] = LevelSums(run, level, explicit_[run.tensor]);
      }
    }
    const std::vector<int>& merges = tree_.levels[level];
    if (shared) {
      sums = SumOverRanks(sums, tensors, 3 * merges.size());
    }
    for (const auto& [tensor, sum] : sums) {
      for (size_t k = 0; k < merges.size(); ++k) {
        if (tree_.merges[merges[k]].adasum) {
          const double dot = sum[3 * k + 1].Rounded();
          explicit_[tensor][merges[k]] = {AdasumCoefficient(dot, sum[3 * k].Rounded()),
                                          AdasumCoefficient(dot, sum[3 * k + 2].Rounded())};
        }
      }
    }
  }
}

// Leaves in nodes_[i], for i the smallest rank of a node, that node's vector after `levels` levels, scaled
// by `scale`.
void Reduction::EvaluateNodes(const Run& run, int64_t position, int64_t n, size_t levels, double scale,
                              const std::vector<double>& leaves, const ExplicitTree& sides) {
  nodes_.resize(size_, std::vector<double>(kBlockElements));
  std::vector<const void*> vectors(size_);
  PointAt(run, position, vectors);
  for (int rank = 0; rank < size_; ++rank) {
    kernels_.widen[type_](vectors[rank], n, scale * leaves[rank], nodes_[rank].data());
  }
  for (size_t level = 0; level < levels; ++level) {
    for (int merge : tree_.levels[level]) {
      double* left = nodes_[tree_.members[tree_.merges[merge].left].front()].data();
      double* right = nodes_[tree_.members[tree_.merges[merge].right].front()].data();
      const void* both[] = {left, right};
      const double c[] = {sides[merge].left, sides[merge].right};
      kernels_.combine[kFloat64](both, c, 2, n, left);
    }
  }
}

// For each merge of a level, |left|^2, left.right and |right|^2 over one run.
Reduction::Payload Reduction::LevelSums(const Run& run, size_t level, const ExplicitTree& sides) {
  const std::vector<int>& merges = tree_.levels[level];
  Payload sums(3 * merges.size());
  for (int64_t position = 0; position < run.count; position += kBlockElements) {
    const int64_t n = std::min(kBlockElements, run.count - position);
    EvaluateNodes(run, position, n, level, tensor_scales_[run.tensor], tree_.leaf_weights, sides);
    for (size_t k = 0; k < merges.size(); ++k) {
      const Merge& merge = tree_.merges[merges[k]];
      const void* both[] = {nodes_[tree_.members[merge.left].front()].data(),
                            nodes_[tree_.members[merge.right].front()].data()};
      kernels_.gram[kFloat64](both, 2, n, 1.0, block_sums_.data());
      for (size_t entry = 0; entry < 3; ++entry) {
        sums[3 * k + entry] += block_sums_[entry];
      }
    }
  }
  return sums;
}

// ---- combine ----

// Writes elements [begin, end) of this rank's slice of the result.
void Reduction::Combine(int64_t begin, int64_t end) {
  std::vector<const void*> vectors(size_);
  std::vector<double> c(size_);
  const std::vector<Run>& runs = Mine().runs;
  auto after = std::upper_bound(runs.begin(), runs.end(), begin,
                                [](int64_t offset, const Run& run) { return offset < run.offset; });
  for (size_t index = after == runs.begin() ? 0 : after - runs.begin() - 1;
       index < runs.size() && runs[index].offset < end; ++index) {
    const Run& run = runs[index];
    const int64_t stop = std::min(end - run.offset, run.count);
    const auto walked = explicit_.find(run.tensor);
    for (int rank = 0; rank < size_; ++rank) {
      c[rank] = CoefficientsOf(index)[rank] * (size_ == 1 ? 1.0 : scale_);
    }
    for (int64_t position = std::max<int64_t>(begin - run.offset, 0); position < stop;
         position += kBlockElements) {
      const int64_t n = std::min(kBlockElements, stop - position);
      char* to = replicate_ ? Output(run) + position * element_bytes_
                            : result_[rank_] + (run.offset + position) * element_bytes_;
      if (walked != explicit_.end()) {
        EvaluateNodes(run, position, n, tree_.levels.size(), tensor_scales_[run.tensor], tree_.leaf_weights,
                      walked->second);
        kernels_.narrow[type_](nodes_[0].data(), n, scale_ / tensor_scales_[run.tensor], to);
      } else if (type_ == kFloat64 && size_ > 3) {
        // In the order of ranks 3/4 x may round where x does not; in the order of the tree only powers of
        // two of identical inputs occur.
        EvaluateNodes(run, position, n, tree_.levels.size(), 1.0, c, plain_sum_);
        kernels_.narrow[type_](nodes_[0].data(), n, 1.0, to);
      } else {
        PointAt(run, position, vectors);
        kernels_.combine[type_](vectors.data(), c.data(), size_, n, to);
      }
    }
  }
}

void Reduction::CombineAndGather() {
  if (replicate_) {
    Combine(0, Mine().elements);
    return;
  }
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    const int64_t begin = chunk * chunk_elements_;
    const int64_t count = std::max<int64_t>(ChunkEnd(chunk, Mine()) - begin, 0);
    Combine(begin, begin + count);
    std::vector<Message> messages(size_);
    for (int rank = 0; rank < size_; ++rank) {
      messages[rank] = {result_[rank_] + begin * element_bytes_, count * element_bytes_,
                        result_[rank] + begin * element_bytes_,
                        std::max<int64_t>(ChunkEnd(chunk, slices_[rank]) - begin, 0) * element_bytes_};
    }
    transport_.Start(messages);
  }
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    transport_.Wait();
  }
}

void Reduction::Unpack() {
  if (replicate_) {
    return;
  }
  for (int rank = 0; rank < size_; ++rank) {
    if (!Contiguous(slices_[rank])) {
      for (const Run& run : slices_[rank].runs) {
        std::memcpy(Output(run), result_[rank] + run.offset * element_bytes_, run.count * element_bytes_);
      }
    }
  }
}

} // namespace

char* ScratchBuffer::Reserve(int64_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    const int64_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    memory_.reset(static_cast<char*>(std::aligned_alloc(kHugePageBytes, rounded)));
    if (memory_ == nullptr) {
      bytes_ = 0;
      throw std::bad_alloc();
    }
    madvise(memory_.get(), rounded, MADV_HUGEPAGE); // a hint: where it is refused, small pages do
    bytes_ = rounded;
  }
  return memory_.get();
}

ReduceResult Reduce(const std::vector<TensorView>& tensors, ElementType type, const Tree& tree, double scale,
                    const ReduceSettings& settings, const Kernels& kernels, Transport& transport,
                    Scratch& scratch, const PhaseObserver& observer) {
  return Reduction(tensors, type, tree, scale, settings, kernels, transport, scratch).Execute(observer);
}

} // namespace adasum_hvd
