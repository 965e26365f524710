#include "transport/last_words.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace adasum_hvd {

LastWords::LastWords(const std::vector<int>& ranks, const std::string& reason) {
  const size_t count = std::min(ranks.size(), std::size(blamed) - 1);
  std::copy_n(ranks.begin(), count, blamed);
  blamed[count] = -1;
  std::strncpy(why, reason.c_str(), sizeof why - 1);
}

std::vector<int> LastWords::Blamed() const {
  return {blamed, std::find(std::begin(blamed), std::end(blamed), -1)};
}

Verdict FindBlame(const Heard& heard, int here, const std::vector<int>& awaited, const std::string& why) {
  struct Link {
    int rank;
    std::string why;
  };
  const auto own = [](const auto& said) {
    const std::vector<int> blamed = said.second.Blamed();
    return std::find(blamed.begin(), blamed.end(), said.first) != blamed.end();
  };
  const auto of = [](const auto& said) {
    return Verdict{said.first, std::string("a reduction failed there: ") + said.second.why, true};
  };
  // Where the chain leads to nobody, one that blames itself all the same.
  const auto confessed = std::find_if(heard.begin(), heard.end(), own);
  std::vector<Link> chain;
  for (int rank : awaited) {
    chain.push_back({rank, why});
  }
  for (size_t k = 0; k < chain.size(); ++k) { // which grows
    const auto words = heard.find(chain[k].rank);
    if (words == heard.end()) {
      return confessed != heard.end() ? of(*confessed) : Verdict{chain[k].rank, chain[k].why, false};
    }
    if (words->second.Blamed().empty()) {
      return {chain[k].rank, words->second.why, true};
    }
    if (own(*words)) {
      return of(*words);
    }
    for (int next : words->second.Blamed()) {
      const bool known =
          std::any_of(chain.begin(), chain.end(), [&](const Link& link) { return link.rank == next; });
      if (next != here && !known) {
        chain.push_back({next, "rank " + std::to_string(chain[k].rank) + " says: " + words->second.why});
      }
    }
  }
  return confessed != heard.end() ? of(*confessed)
                                  : Verdict{chain.front().rank, "the ranks wait for one another", true, true};
}

} // namespace adasum_hvd
