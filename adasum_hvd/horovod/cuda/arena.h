// Tables and work space in one piece of device memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace adasum_hvd {

// Lays out arrays in one piece of device memory whose address is not known yet.
class Arena {
public:
  // `*where` will point to a copy of `values`.
  template <class T> void Put(const T** where, const std::vector<T>& values) {
    const int64_t offset = Aligned(static_cast<int64_t>(uploaded_.size()));
    uploaded_.resize(offset);
    const char* bytes = reinterpret_cast<const char*>(values.data());
    uploaded_.insert(uploaded_.end(), bytes, bytes + values.size() * sizeof(T));
    Remember(where, offset, uploads_);
  }
  // `*where` will point to uninitialized memory for `count` elements.
  template <class T> void Room(T** where, int64_t count) {
    Remember(where, room_, rooms_);
    room_ = Aligned(room_ + count * static_cast<int64_t>(sizeof(T)));
  }

  int64_t bytes() const { return Aligned(static_cast<int64_t>(uploaded_.size())) + room_; }
  const std::vector<char>& uploaded() const { return uploaded_; }

  void Resolve(char* base) const {
    for (const auto& [where, offset] : uploads_) {
      Point(where, base + offset);
    }
    char* rooms = base + Aligned(static_cast<int64_t>(uploaded_.size()));
    for (const auto& [where, offset] : rooms_) {
      Point(where, rooms + offset);
    }
  }

private:
  static constexpr int64_t kAlignment = 256; // bytes, of every table
  static int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  using Pointers = std::vector<std::pair<void*, int64_t>>;
  template <class T> static void Remember(T** where, int64_t offset, Pointers& pointers) {
    pointers.emplace_back(const_cast<void*>(static_cast<const void*>(where)), offset);
  }
  static void Point(void* where, const char* at) { std::memcpy(where, &at, sizeof at); }

  std::vector<char> uploaded_;
  int64_t room_ = 0;
  Pointers uploads_;
  Pointers rooms_;
};

} // namespace adasum_hvd
