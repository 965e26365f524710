// The op's arithmetic, against a float64 tree walked on whole vectors. With ADASUM_ON_DEVICE it is the
// arithmetic on CUDA devices, or on simulated ones.
#include "reducing.h"

using namespace adasum_hvd;

namespace {

void AgreesWithTheFloat64Tree() {
  for (ElementType type : {kFloat16, kFloat32, kFloat64, kBfloat16}) {
    for (int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12}) {
      const Options options = For(ranks, type);
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, Random(ranks));
      const auto result = ReduceAll(tensors, options);
      for (size_t k = 0; k < kSizes.size(); ++k) {
        // Opposite scalars cancel; half the typical input is what the error is then measured against.
        const double error = RelativeError(Decode(result[k], type), Reference(tensors, k, options.tree), 0.3);
        Check(error <= kRounding[type], "type " + std::to_string(type) + ", " + std::to_string(ranks) +
                                            " ranks, " + std::to_string(kSizes[k]) + " elements: error " +
                                            Scientific(error));
      }
    }
  }
}

// Every way to cut, fuse, place and compute gives the same bits.
void SameBitsInEveryForm() {
  for (ElementType type : kTypes) {
    for (int ranks : {2, 3, 5, 8}) {
      const Options plain = For(ranks, type);
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, Random(77));
      const auto fused = ReduceAll(tensors, plain);
      Options in_place = plain;
      in_place.in_place = true;
      Check(ReduceAll(tensors, in_place) == fused, "in place");
      Options adjacent = plain;
      adjacent.adjacent = true;
      Check(ReduceAll(tensors, adjacent) == fused, "one behind the other");
      adjacent.in_place = true;
      Check(ReduceAll(tensors, adjacent) == fused, "one behind the other in place");
      Options replicated = plain;
      replicated.settings.replicate_bytes = int64_t{1} << 30;
      Check(ReduceAll(tensors, replicated) == fused, "replicated");
#if !defined(ADASUM_ON_DEVICE) // where there are no chunks, and the kernels are the device's
      for (int64_t chunk_bytes : {int64_t{1}, int64_t{1} << 30}) {
        Options chunked = plain;
        chunked.settings.chunk_bytes = chunk_bytes;
        Check(ReduceAll(tensors, chunked) == fused, "another chunk size");
      }
      Options shared = plain;
      shared.share = true;
      Check(ReduceAll(tensors, shared) == fused, "staged in shared memory");
      shared.in_place = true;
      Check(ReduceAll(tensors, shared) == fused, "in place, staged in shared memory");
      for (int64_t window_bytes : {1, 100000}) { // every tensor by itself, and some at a time
        Options in_windows = shared;
        in_windows.settings.window_bytes = window_bytes;
        Check(ReduceAll(tensors, in_windows) == fused, "in windows");
        in_windows.shared_tensors = true;
        Check(ReduceAll(tensors, in_windows) == fused, "where they lie, without windows");
      }
      shared.shared_tensors = true;
      Check(ReduceAll(tensors, shared) == fused, "where they lie in shared memory");
      shared.threads = 3;
      Check(ReduceAll(tensors, shared) == fused, "several threads, in shared memory");
      shared.adjacent = true;
      Check(ReduceAll(tensors, shared) == fused, "one behind the other in shared memory");
      Options threaded = plain;
      threaded.threads = 3;
      Check(ReduceAll(tensors, threaded) == fused, "several threads");
      for (const Kernels* kernels : AllKernels()) {
        Options other = plain;
        other.kernels = kernels;
        Check(ReduceAll(tensors, other) == fused, std::string("kernels ") + kernels->name);
      }
#endif
      for (size_t k = 0; k < kSizes.size(); ++k) {
        std::vector<Tensors> alone(ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          alone[rank].bytes = {tensors[rank].bytes[k]};
        }
        for (const Options& form : {plain, replicated}) {
          Check(ReduceAll(alone, form)[0] == fused[k],
                "unfused tensor of " + std::to_string(kSizes[k]) + " elements");
        }
      }
    }
  }
}

void IdenticalInputsComeBackBitForBit() {
  for (ElementType type : kTypes) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      const Maker same = [](int, size_t tensor, int64_t k) { return Random(5)(0, tensor, k); };
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, same);
      Check(ReduceAll(tensors, For(ranks, type)) == tensors[0].bytes, std::to_string(ranks) + " ranks");
    }
  }
}

void WideRangeInOneFloat64Tensor() {
  const Maker wide = [](int, size_t, int64_t k) { return k % 2 == 0 ? 1e200 : 1e-200; };
  const std::vector<Tensors> tensors = MakeTensors(4, {64}, kFloat64, wide);
  Check(ReduceAll(tensors, For(4, kFloat64)) == tensors[0].bytes, "small elements were flushed");
  Options threaded = For(4, kFloat64); // every rank looks at enough blocks for its threads to share
  threaded.threads = 3;
  threaded.settings.replicate_bytes = int64_t{1} << 30;
  const std::vector<Tensors> longer = MakeTensors(4, {64, 8 * kBlockElements}, kFloat64, wide);
  Check(ReduceAll(longer, threaded) == longer[0].bytes, "small elements of many blocks were flushed");
}

void OrthogonalInputsAddUp() {
  const int ranks = 5;
  const Maker disjoint = [](int rank, size_t tensor, int64_t k) {
    return k % 5 == rank ? Random(6)(rank, tensor, k) : 0.0;
  };
  const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, disjoint);
  const auto result = ReduceAll(tensors, For(ranks, kFloat32));
  for (size_t k = 0; k < kSizes.size(); ++k) {
    std::vector<double> sum(kSizes[k]);
    for (const Tensors& rank : tensors) {
      for (int64_t e = 0; e < kSizes[k]; ++e) {
        sum[e] += rank.values[k][e];
      }
    }
    Check(Decode(result[k], kFloat32) == sum, "tensor " + std::to_string(k));
  }
}

void TwiceTheOtherGivesOneAndAHalf() {
  const Maker doubled = [](int rank, size_t tensor, int64_t k) {
    return (rank + 1) * std::floor(1000 * Random(8)(0, tensor, k));
  };
  const std::vector<Tensors> tensors = MakeTensors(2, kSizes, kFloat32, doubled);
  const auto result = ReduceAll(tensors, For(2, kFloat32));
  for (size_t k = 0; k < kSizes.size(); ++k) {
    const std::vector<double> got = Decode(result[k], kFloat32);
    for (int64_t e = 0; e < kSizes[k]; ++e) {
      Check(got[e] == 1.5 * tensors[0].values[k][e], "tensor " + std::to_string(k));
    }
  }
}

void ZeroIsNeutral() {
  for (int ranks : {2, 3, 6}) {
    for (int giver = 0; giver < ranks; ++giver) {
      const Maker one = [giver](int rank, size_t tensor, int64_t k) {
        return rank == giver ? Random(9)(0, tensor, k) : 0.0;
      };
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, one);
      Check(ReduceAll(tensors, For(ranks, kFloat32)) == tensors[giver].bytes,
            "rank " + std::to_string(giver));
    }
  }
}

void HomogeneousAndSymmetricBitForBit() {
  const std::vector<Tensors> small = MakeTensors(4, kSizes, kFloat32, Random(10));
  const std::vector<Tensors> big = MakeTensors(4, kSizes, kFloat32, Random(10, std::ldexp(1.0, 40)));
  const auto a = ReduceAll(small, For(4, kFloat32)), b = ReduceAll(big, For(4, kFloat32));
  for (size_t k = 0; k < kSizes.size(); ++k) {
    std::vector<double> scaled = Decode(a[k], kFloat32);
    for (double& value : scaled) {
      value = std::ldexp(value, 40);
    }
    Check(scaled == Decode(b[k], kFloat32), "f(2^40 x) is not 2^40 f(x)");
  }
  std::vector<Tensors> swapped = {small[1], small[0]}, straight = {small[0], small[1]};
  Check(ReduceAll(swapped, For(2, kFloat32)) == ReduceAll(straight, For(2, kFloat32)), "not symmetric");
}

void ExtremeMagnitudes() {
  for (double scale : {1e19, 1e-30}) {
    for (int ranks : {2, 3, 8}) {
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, Random(11, scale));
      const auto result = ReduceAll(tensors, For(ranks, kFloat32));
      for (size_t k = 0; k < kSizes.size(); ++k) {
        Check(RelativeError(Decode(result[k], kFloat32), Reference(tensors, k, For(ranks, kFloat32).tree)) <=
                  kRounding[kFloat32],
              "float32 at " + std::to_string(scale));
      }
    }
  }
  const std::vector<Tensors> plain = MakeTensors(3, kSizes, kFloat64, Random(12));
  for (int exponent : {990, -990}) {
    const std::vector<Tensors> tensors =
        MakeTensors(3, kSizes, kFloat64, Random(12, std::ldexp(1.0, exponent)));
    const auto result = ReduceAll(tensors, For(3, kFloat64));
    for (size_t k = 0; k < kSizes.size(); ++k) {
      std::vector<double> expected = Reference(plain, k, For(3, kFloat64).tree);
      for (double& value : expected) {
        value = std::ldexp(value, exponent);
      }
      Check(RelativeError(Decode(result[k], kFloat64), expected) <= kRounding[kFloat64],
            "float64 at 2^" + std::to_string(exponent));
    }
  }
}

void ScaleAndNonFinite() {
  Options options = For(3, kFloat32);
  const std::vector<Tensors> tensors = MakeTensors(3, kSizes, kFloat32, Random(16));
  const auto plain = ReduceAll(tensors, options);
  options.scale = 0.25;
  const auto scaled = ReduceAll(tensors, options);
  for (size_t k = 0; k < kSizes.size(); ++k) {
    std::vector<double> expected = Decode(plain[k], kFloat32);
    for (double& value : expected) {
      value *= 0.25;
    }
    Check(Decode(scaled[k], kFloat32) == expected, "scale 0.25");
  }
  for (ElementType type : {kFloat16, kFloat32, kFloat64, kBfloat16}) {
    const Maker overflowed = [](int rank, size_t tensor, int64_t k) {
      return rank == 1 && k == 0 ? HUGE_VAL : Random(17)(rank, tensor, k);
    };
    const auto result = ReduceAll(MakeTensors(3, kSizes, type, overflowed), For(3, type));
    for (size_t k = 0; k < kSizes.size(); ++k) {
      for (double value : Decode(result[k], type)) {
        Check(!std::isfinite(value), "an infinity on one rank did not reach every element");
      }
    }
  }
}

// start + AdaSum(input - start), in place and not, alone and with other ranks.
void ChangesOfWeights() {
  for (ElementType type : kTypes) {
    for (int ranks : {1, 2, 3, 8}) {
      Options options = For(ranks, type);
      const std::vector<Tensors> before = MakeTensors(
          1, kSizes, type, [](int, size_t tensor, int64_t k) { return Random(23)(0, tensor, k); });
      const std::vector<Tensors> after =
          MakeTensors(ranks, kSizes, type, [](int rank, size_t tensor, int64_t k) {
            return Random(23)(0, tensor, k) + Random(24, 0.01)(rank, tensor, k);
          });
      std::vector<Tensors> changes(ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        for (size_t k = 0; k < kSizes.size(); ++k) {
          std::vector<double> change = after[rank].values[k];
          for (size_t e = 0; e < change.size(); ++e) {
            change[e] -= before[0].values[k][e];
          }
          changes[rank].bytes.push_back(Encode(change, type));
        }
      }
      const auto reduced = ReduceAll(changes, options);
      std::vector<std::vector<char>> expected;
      for (size_t k = 0; k < kSizes.size(); ++k) {
        std::vector<double> weights = Decode(reduced[k], type);
        for (size_t e = 0; e < weights.size(); ++e) {
          weights[e] += before[0].values[k][e];
        }
        expected.push_back(Encode(weights, type));
      }
      options.starts = &before[0].bytes;
      for (bool in_place : {false, true}) {
        for (int64_t replicate_bytes : {0, 1 << 30}) {
          options.in_place = in_place;
          options.settings.replicate_bytes = replicate_bytes;
          Check(ReduceAll(after, options) == expected,
                std::to_string(ranks) + " ranks, type " + std::to_string(type));
        }
      }
      if (ranks == 8) {
        options.hosts = {0, 0, 1, 1, 2, 2, 3, 3};
        options.radices = {2, 4};
        const auto in_levels = ReduceAll(after, options);
        options.settings.replicate_bytes = 0;
        Check(ReduceAll(after, options) == in_levels, "in levels: other bits when replicated");
#if !defined(ADASUM_ON_DEVICE)
        options.share = true;
        Check(ReduceAll(after, options) == in_levels, "in levels: other bits in shared memory");
        options.settings.window_bytes = 1;
        Check(ReduceAll(after, options) == in_levels, "in levels: other bits in windows");
#endif
        for (size_t k = 0; k < kSizes.size(); ++k) {
          Check(RelativeError(Decode(in_levels[k], type), Decode(expected[k], type), 0.3) <=
                    4 * kRounding[type],
                "in levels, type " + std::to_string(type));
        }
      }
    }
  }
}

#if defined(ADASUM_ON_DEVICE)
// Reductions of three tensors are enqueued behind one another while the device is held up, all three with
// ill-conditioned nodes: nothing waits for it.
void NothingWaitsForTheDevice() {
  const int size = 4;
  const std::vector<int64_t> sizes = {kSizes[6], kSizes[8], kSizes[3]};
  const Maker opposite = [](int rank, size_t tensor, int64_t k) {
    return (rank % 2 == 0 ? 1 : -1) * Random(26)(0, tensor, k) + 1e-6 * Random(27)(rank, tensor, k);
  };
  const std::vector<Tensors> tensors = MakeTensors(size, sizes, kFloat32, opposite);
  const Options options = For(size, kFloat32);
  const auto expected = ReduceAll(tensors, options); // and all memory is there
  for (size_t k = 0; k < sizes.size(); ++k) {
    const double error = RelativeError(Decode(expected[k], kFloat32), Reference(tensors, k, options.tree));
    Check(error <= kRounding[kFloat32] + 10 * std::ldexp(1.0, -52) / 1e-6, "a tree was not walked");
  }
  std::vector<std::vector<std::vector<char>>> results(size);
  std::vector<std::vector<TensorView>> views(size);
  Gate gate;
  bool held = false;
  auto& job = RanksOnDevice(size, TotalBytes(tensors) * (size + 1));
  OnEveryRank(
      tensors, options,
      [&](Rank& rank) {
        const int me = rank.transport().rank();
        results[me] = tensors[me].bytes;
        for (std::vector<char>& bytes : results[me]) {
          char* at = rank.Put(bytes);
          views[me].push_back({at, at, static_cast<int64_t>(bytes.size() / sizeof(float))});
        }
      },
      [&](Rank& rank) {
        const int me = rank.transport().rank();
        gate.Close(job[me]->stream);
        for (const TensorView& view : views[me]) {
          rank.Reduce({view}, {{&rank.transport(), &options.tree}}, options);
        }
      },
      [&](Rank& rank) {
        if (rank.transport().rank() == 0) {
          held = gate.Open();
        }
        rank.Finish();
      });
  Check(held, "a reduction was enqueued only when the device was let go");
  for (const auto& result : results) {
    Check(result == expected, "other bits than when waited for");
  }
}
#endif

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"agrees with the float64 tree", AgreesWithTheFloat64Tree},
                      {"same bits in every form", SameBitsInEveryForm},
                      {"identical inputs come back bit for bit", IdenticalInputsComeBackBitForBit},
                      {"wide range in one float64 tensor", WideRangeInOneFloat64Tensor},
                      {"orthogonal inputs add up", OrthogonalInputsAddUp},
                      {"twice the other gives one and a half", TwiceTheOtherGivesOneAndAHalf},
                      {"zero is neutral", ZeroIsNeutral},
                      {"homogeneous and symmetric bit for bit", HomogeneousAndSymmetricBitForBit},
                      {"extreme magnitudes", ExtremeMagnitudes},
                      {"scale and non-finite values", ScaleAndNonFinite},
                      {"changes of weights", ChangesOfWeights},
#if defined(ADASUM_ON_DEVICE)
                      {"nothing waits for the device", NothingWaitsForTheDevice},
#endif
                  });
}
