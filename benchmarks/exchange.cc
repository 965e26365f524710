// How long ranks of a host take to send one another so many bytes, through the rings; exchange.py builds and
// runs it. Arguments: ranks, bytes, repetitions, 1 for a session each.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "local_ranks.h"

using namespace adasum_hvd;

namespace {

constexpr int kFirst = 200; // not counted

std::vector<double> Microseconds(LocalTransport& transport, int bytes, int repetitions) {
  std::vector<char> send(bytes), receive(bytes * transport.size());
  std::vector<Message> messages;
  for (int peer = 0; peer < transport.size(); ++peer) {
    messages.push_back({send.data(), bytes, receive.data() + peer * bytes, bytes});
  }
  std::vector<double> found;
  for (int repetition = -kFirst; repetition < repetitions; ++repetition) {
    const auto started = std::chrono::steady_clock::now();
    transport.Exchange(messages);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - started;
    if (repetition >= 0) {
      found.push_back(took.count());
    }
  }
  return found;
}

void Rank(Board& board, int rank, int ranks, int bytes, int repetitions) {
  const auto transport = Connect(board, rank, ranks, LocalSettings());
  std::vector<double> found = Microseconds(*transport, bytes, repetitions);
  if (rank == 0) {
    std::sort(found.begin(), found.end());
    std::printf("%d %d %.2f %.2f\n", ranks, bytes, found[repetitions / 2], found[repetitions * 9 / 10]);
  }
  std::fflush(stdout);
  transport->Exchange(std::vector<Message>(ranks));
}

} // namespace

int main(int count, char** words) {
  if (count != 5) {
    return 2;
  }
  const int ranks = std::atoi(words[1]);
  Board board(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() == 0) {
      if (std::atoi(words[4]) != 0) {
        setsid();
      }
      Rank(board, rank, ranks, std::atoi(words[2]), std::atoi(words[3]));
      _exit(0);
    }
  }
  int worst = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    wait(&status);
    worst = std::max(worst, status);
  }
  return worst == 0 ? 0 : 1;
}
