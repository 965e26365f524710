// To be called between two reads of memory that another thread or process writes.
#pragma once

namespace adasum_hvd {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace adasum_hvd
