// The mode of floating-point arithmetic in a thread. A framework may have made it flush denormal numbers to
// zero, on one rank only; then the ranks would get different bits.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace adasum_hvd {

// While it lives, the calling thread rounds to nearest and flushes nothing; then it is as it was.
class DefaultFloatMode {
public:
  DefaultFloatMode() { Write(kDefault); }
  ~DefaultFloatMode() { Write(before_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80; // all exceptions masked
  static uint64_t Read() { return _mm_getcsr(); }
  static void Write(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t Read() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Write(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t Read() { return 0; }
  static void Write(uint64_t) {}
#endif

  const uint64_t before_ = Read();
};

} // namespace adasum_hvd
