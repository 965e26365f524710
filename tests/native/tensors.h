// Tensors of several ranks as doubles and in an element type, and how values compare.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace adasum_hvd {

inline std::string Scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

inline std::vector<const Kernels*> AllKernels() {
  std::vector<const Kernels*> all;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (const Kernels* kernels = ChooseKernels(name)) {
      all.push_back(kernels);
    }
  }
  return all;
}

inline const Kernels& Portable() { return *ChooseKernels("portable"); }

// One rank's tensors, as doubles and in the element type.
struct Tensors {
  std::vector<std::vector<double>> values;
  std::vector<std::vector<char>> bytes;
};

template <class T> std::vector<char> BytesOf(const std::vector<T>& values) {
  std::vector<char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

inline std::vector<char> Encode(const std::vector<double>& values, ElementType type) {
  if (type == kFloat64) {
    return BytesOf(values);
  }
  if (type == kFloat32) {
    return BytesOf(std::vector<float>(values.begin(), values.end()));
  }
  std::vector<uint16_t> halves(values.size());
  Portable().narrow[type](values.data(), values.size(), 1.0, halves.data());
  return BytesOf(halves);
}

inline std::vector<double> Decode(const std::vector<char>& bytes, ElementType type) {
  std::vector<double> values(bytes.size() / ElementBytes(type));
  if (bytes.empty()) {
    return values;
  }
  if (type == kFloat64) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  } else if (type == kFloat32) {
    std::vector<float> floats(values.size());
    std::memcpy(floats.data(), bytes.data(), bytes.size());
    values.assign(floats.begin(), floats.end());
  } else {
    std::vector<uint16_t> halves(values.size());
    std::memcpy(halves.data(), bytes.data(), bytes.size());
    Portable().widen[type](halves.data(), halves.size(), 1.0, values.data());
  }
  return values;
}

using Maker = std::function<double(int rank, size_t tensor, int64_t element)>;

inline std::vector<Tensors> MakeTensors(int ranks, const std::vector<int64_t>& sizes, ElementType type,
                                        const Maker& maker) {
  std::vector<Tensors> all(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
      std::vector<double> values(sizes[tensor]);
      for (int64_t k = 0; k < sizes[tensor]; ++k) {
        values[k] = maker(rank, tensor, k);
      }
      all[rank].bytes.push_back(Encode(values, type));
      all[rank].values.push_back(Decode(all[rank].bytes.back(), type));
    }
  }
  return all;
}

// Bell-shaped values that depend on nothing but their place: splitmix64, four uniforms added.
inline Maker Random(uint64_t seed, double scale = 1.0) {
  return [seed, scale](int rank, size_t tensor, int64_t element) {
    uint64_t state = seed * 1000003 + uint64_t(rank) * 10007 + tensor * 101 + (uint64_t(element) << 24);
    double sum = -2;
    for (int k = 0; k < 4; ++k) {
      state += 0x9e3779b97f4a7c15;
      uint64_t bits = state;
      bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
      bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
      sum += static_cast<double>((bits ^ (bits >> 31)) >> 11) * 0x1p-53;
    }
    return scale * sum;
  };
}

// Largest difference relative to the largest element, or to `floor` where everything is smaller.
inline double RelativeError(const std::vector<double>& got, const std::vector<double>& expected,
                            double floor = 0) {
  double difference = 0, largest = floor;
  for (size_t k = 0; k < got.size(); ++k) {
    difference = std::max(difference, std::fabs(got[k] - expected[k]));
    largest = std::max(largest, std::fabs(expected[k]));
  }
  return largest == 0 ? difference : difference / largest;
}

// One rounding to the element type. For float64 the arithmetic itself shows: a node may cancel to 1e-6 of
// its terms before its vector is formed, which costs 2^-52 / 1e-6.
constexpr double kRounding[] = {1.0 / 1024, 1.0 / (1 << 23), 2.3e-10, 1.0 / 128};

} // namespace adasum_hvd
