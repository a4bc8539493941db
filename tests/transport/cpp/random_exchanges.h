// Scenarios of random exchanges between ranks on one or several hosts.
#pragma once

#include "ranks.h"

namespace {

// Issues many random uneven exchanges, of which several are outstanding, and reuses the slots many times. Returns the
// number of wrong bytes.
long run_random(Group& group, int exchanges, std::size_t largest) {
  std::atomic<long> wrong{0};
  on_ranks(group.world, [&](int rank) {
    auto queue = group.open(rank);
    std::deque<std::unique_ptr<Buffers>> outstanding;
    for (int number = 0; number < exchanges; ++number) {
      outstanding.push_back(std::make_unique<Buffers>(fill(rank, group.world, number, largest)));
      Buffers& buffers = *outstanding.back();
      buffers.exchange = queue->exchange("all_to_all", buffers.sends, buffers.receives, 0);
      if (outstanding.size() < 8) continue;
      outstanding.front()->exchange->wait(60);
      wrong += wrong_bytes(*outstanding.front(), rank);
      outstanding.pop_front();
    }
    for (auto& buffers : outstanding) {
      buffers->exchange->wait(60);
      wrong += wrong_bytes(*buffers, rank);
    }
    const Report report = queue->report();
    require(report.exchanges == static_cast<std::uint64_t>(exchanges), "the report must count all exchanges");
    require(report.ring_bytes <= report.ring_bound_bytes, "the rings must stay within their bound");
    require(report.ring_bound_bytes <= group.settings.buffer_bytes, "the bound must stay within buffer_bytes");
    queue->close(30);
  });
  return wrong;
}

void random_exchanges(int world, int hosts, bool high, Word first = 0, std::size_t network_threads = 2) {
  Settings settings = small(high);
  settings.first_chunk = first;
  settings.network_threads = network_threads;
  Group group(world, hosts, settings);
  require(run_random(group, 24, 60'000) == 0, "every byte must be right");
}

}  // namespace
