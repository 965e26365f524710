#include "host/abort_notice.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace adasum_hvd {
namespace {

bool IsSelfReported(const AbortNotices::value_type& sent) {
  const std::vector<int> suspects = sent.second.Suspects();
  return std::find(suspects.begin(), suspects.end(), sent.first) != suspects.end();
}

RootCause ReportedBy(const AbortNotices::value_type& sent) {
  return {sent.first, sent.first, sent.second.reason, /*final=*/true};
}

} // namespace

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t k = 0; k < ranks.size(); ++k) {
    text += (k == 0 ? "" : ", ") + std::to_string(ranks[k]);
  }
  return text;
}

RootCause OwnFailure(int rank, const std::exception& error) {
  return {rank, rank, RankList({rank}) + " failed: " + error.what()};
}

std::string DidNotRespond(int64_t timeout_seconds, const std::string& limit) {
  return "did not respond for " + std::to_string(timeout_seconds) + " s, the limit " + limit;
}

AbortNotice::AbortNotice(const std::vector<int>& ranks, const std::string& text) {
  const size_t count = std::min(ranks.size(), std::size(suspects) - 1);
  std::copy_n(ranks.begin(), count, suspects);
  suspects[count] = -1;
  size_t length = std::min(text.size(), sizeof reason - 1);
  // Ends after a whole character: Python refuses text that ends inside one.
  while (length < text.size() && length > 0 && (text[length] & 0xC0) == 0x80) {
    --length;
  }
  std::copy_n(text.begin(), length, reason);
}

std::vector<int> AbortNotice::Suspects() const {
  return {suspects, std::find(std::begin(suspects), std::end(suspects), -1)};
}

RootCause FindRootCause(const AbortNotices& notices, int here, const std::vector<int>& awaited,
                        const std::string& problem) {
  const auto self_reported = std::find_if(notices.begin(), notices.end(), IsSelfReported);
  const auto unless_self_reported = [&](const RootCause& cause) {
    return self_reported == notices.end() ? cause : ReportedBy(*self_reported);
  };
  std::vector<RootCause> chain;
  for (int rank : awaited) {
    chain.push_back({rank, here, RankList({rank}) + " " + problem});
  }
  for (size_t k = 0; k < chain.size(); ++k) { // the chain grows in the loop
    const auto sent = notices.find(chain[k].rank);
    if (sent == notices.end()) {
      return unless_self_reported(chain[k]);
    }
    if (sent->second.Suspects().empty() || IsSelfReported(*sent)) {
      return ReportedBy(*sent);
    }
    for (int next : sent->second.Suspects()) {
      const bool known =
          std::any_of(chain.begin(), chain.end(), [&](const RootCause& cause) { return cause.rank == next; });
      if (next != here && !known) {
        chain.push_back({next, sent->first, sent->second.reason});
      }
    }
  }
  return unless_self_reported({chain.front().rank, here,
                               chain.front().reason + ": the ranks wait for one another",
                               /*final=*/true, /*circular=*/true});
}

UnresponsiveRank::UnresponsiveRank(RootCause found, const std::string& during)
    : std::runtime_error(found.reason + " (rank " + std::to_string(found.reporter) + " reported it" +
                         (during.empty() ? "" : ", during " + during) + ")"),
      cause(std::move(found)) {}

} // namespace adasum_hvd
