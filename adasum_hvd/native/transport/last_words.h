// What a rank says to the others when it takes part no more, and how they find from it which one is to blame.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace adasum_hvd {

// As they travel.
struct LastWords {
  int32_t blamed[32] = {-1}; // global ranks that it waited for, or itself, or nobody; -1 behind the last
  char why[384] = "";

  LastWords() = default;
  LastWords(const std::vector<int>& ranks, const std::string& reason);
  std::vector<int> Blamed() const;
};

// By global rank, of those that have said something.
using Heard = std::map<int, LastWords>;

struct Verdict {
  int rank; // global
  std::string why;
  bool certain;        // it said so itself; else it has said nothing as yet
  bool circle = false; // all have spoken, and wait for one another
};

// Who is to blame, for a rank `here` that waited for `awaited`, for the reason `why`: from rank to rank
// follows what each has said, to one that blames itself or nobody, or says nothing; one that blames itself
// comes before a silent one.
Verdict FindBlame(const Heard& heard, int here, const std::vector<int>& awaited, const std::string& why);

} // namespace adasum_hvd
