// Scenarios of late ranks: what goes on beside them.
#pragma once

#include "devices.h"
#include "ranks.h"

namespace {

// Rank 1 does not read, and its ring is full. Rank 2 gets its bytes of the next exchange all the same.
void late_reader() {
  constexpr std::size_t ring_bytes = 8 * 4096;
  Settings settings = small();
  settings.buffer_bytes = 3 * ring_bytes;
  Group group(3, 1, settings);
  on_ranks(3, [&](int rank) {
    auto queue = group.open(rank);
    const std::vector<Buffer> nothing(3);
    Bytes small_part(50, 3), received(50, 0);
    Bytes ring_full(ring_bytes, 5), read(ring_bytes, 0);
    std::shared_ptr<Exchange> last;
    if (rank == 0) {
      queue->exchange("all_to_all", to_peer(1, 3, ring_full), nothing, 0);
      auto both = to_peer(1, 3, small_part);
      both[2] = both[1];
      last = queue->exchange("all_to_all", both, nothing, 0);
      group.meeting.wait();
    } else if (rank == 2) {
      queue->exchange("all_to_all", nothing, nothing, 0);
      queue->exchange("all_to_all", nothing, to_peer(0, 3, received), 0)->wait(20);
      require(received == small_part, "rank 2 must get its bytes");
      group.meeting.wait();
    } else {
      group.meeting.wait();  // rank 1 reads only after rank 2 has got its bytes
      queue->exchange("all_to_all", nothing, to_peer(0, 3, read), 0);
      queue->exchange("all_to_all", nothing, to_peer(0, 3, received), 0)->wait(20);
      require(read == ring_full && received == small_part, "rank 1 must get its bytes, too");
    }
    if (last) last->wait(20);
    group.meeting.wait();
    queue->close(10);
  });
}

// The streams of a device take a limited number of operations, like those of CUDA. Rank 0 issues a high-priority exchange
// that is larger, for which rank 1 is late. A low-priority exchange of both ranks completes meanwhile.
void full_stream() {
  constexpr std::size_t bytes = 1000 * 4096;
  Group low(2, 1, small(false)), high(2, 1, small(true));
  on_ranks(2, [&](int rank) {
    low.devices[rank] = high.devices[rank] = std::make_shared<LimitedDevice>(1000);
    auto slow = low.open(rank), fast = high.open(rank);
    Bytes out(bytes, 1), in(bytes), some(100, 2), got(100);
    const auto run_large = [&] {
      fast->exchange("large", to_peer(1 - rank, 2, out), to_peer(1 - rank, 2, in), 0)->wait(50);
    };
    const auto run_small = [&] {
      slow->exchange("small", to_peer(1 - rank, 2, some), to_peer(1 - rank, 2, got), 0)->wait(20);
      require(got == some, "the low-priority exchange must be right");
    };
    if (rank == 0) {
      std::thread large(run_large);
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // now the streams are full
      run_small();
      low.meeting.wait();
      large.join();
    } else {
      run_small();
      low.meeting.wait();
      run_large();
    }
    require(in == out, "the high-priority exchange must be right");
    low.meeting.wait();
    slow->close(10);
    fast->close(10);
  });
}

}  // namespace
