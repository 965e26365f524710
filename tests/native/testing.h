// What the native test programs share: checks, ranks as threads, and a main loop.
#pragma once

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace adasum_hvd {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void Check(bool condition, const std::string& what) {
  if (!condition) {
    throw Failure(what);
  }
}

// Runs body(rank) on `size` threads and rethrows the first exception, in the order of ranks.
inline void InThreads(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(size);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

// A test that throws it cannot run here, and says why.
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Prints "ok NAME (seconds)", "skipped NAME: why" or "FAILED NAME: why" per test, and returns the number of
// failures. Names on the command line choose tests; without any, all run. With --list it prints the names
// instead.
inline int RunTests(int argc, char** argv, const std::vector<std::pair<const char*, void (*)()>>& tests) {
  const std::set<std::string> chosen(argv + 1, argv + argc);
  int failures = 0;
  for (const auto& [name, test] : tests) {
    if (chosen.count("--list") != 0) {
      std::printf("%s\n", name);
      continue;
    }
    if (!chosen.empty() && chosen.count(name) == 0) {
      continue;
    }
    const auto started = std::chrono::steady_clock::now();
    try {
      test();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
      std::printf("ok %s (%.1f s)\n", name, seconds.count());
    } catch (const Skipped& why) {
      std::printf("skipped %s: %s\n", name, why.what());
    } catch (const std::exception& error) {
      ++failures;
      std::printf("FAILED %s: %s\n", name, error.what());
    }
    std::fflush(stdout);
  }
  return failures;
}

} // namespace adasum_hvd
