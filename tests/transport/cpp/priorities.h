// Scenarios of the order of chunks: priorities, devices with one hardware queue, and chunks that are announced too
// early.
#pragma once

#include "devices.h"
#include "random_exchanges.h"

namespace {

// Issues a second exchange of three chunks while a low-priority exchange of many chunks runs. The third low-priority
// chunk is held up until the first chunk of the second exchange is copied. Returns how many low-priority chunks are
// copied between the first and the last chunk of the second exchange.
long overtaken(bool second_is_high) {
  constexpr int world = 2;
  constexpr std::size_t low_bytes = 40 * 4096, second_bytes = 3 * 4096;
  Group low(world, 1, small(false)), second(world, 1, small(second_is_high));
  std::vector<Trace> traces(world);
  on_ranks(world, [&](int rank) {
    Trace& trace = traces[rank];
    trace.before = [&](const std::string& what, long count) {
      if (what == "low out" && count == 3) trace.await("second out", 1);
      if (what == "second out" && count == 2) {
        if (second_is_high)
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time for a wrong low-priority chunk
        else
          trace.await("low out", 4);
      }
    };
    auto device = std::make_shared<TracedDevice>(trace);
    low.devices[rank] = second.devices[rank] = device;
    auto slow = low.open(rank);
    device->label = "second";
    auto fast = second.open(rank);
    Bytes out(low_bytes, 1), in(low_bytes), urgent_out(second_bytes, 2), urgent_in(second_bytes);
    const int peer = 1 - rank;
    const auto buffers = [&](Bytes& bytes) { return to_peer(peer, world, bytes); };
    auto first = slow->exchange("low", buffers(out), buffers(in), 0);
    trace.await("low out", 3);
    auto next = fast->exchange("second", buffers(urgent_out), buffers(urgent_in), 0);
    next->wait(60);
    first->wait(60);
    require(in == out && urgent_in == urgent_out, "both exchanges must be right");
    low.meeting.wait();
    slow->close(10);
    fast->close(10);
  });
  long between = 0;
  for (const Trace& trace : traces) {
    std::vector<std::string> out = trace.copies();
    out.erase(std::remove_if(out.begin(), out.end(), [](auto& copy) { return copy.find(" out") == std::string::npos; }),
              out.end());
    const auto first = std::find(out.begin(), out.end(), "second out");
    const auto last = std::find(out.rbegin(), out.rend(), "second out").base();
    require(std::count(first, last, "second out") == 3, "all chunks of the second exchange must be copied");
    between += std::count(first, last, "low out");
    const bool afterwards = std::count(last, out.end(), "low out") == 37;
    require(!second_is_high || afterwards, "the other low-priority chunks must be copied afterwards");
  }
  return between;
}

void priority() {
  require(overtaken(true) == 0, "no low-priority chunk may be copied between high-priority ones");
  require(overtaken(false) >= 2, "between exchanges of equal priority they are, so the check above can fail");
}

// There is no deadlock although no operation can overtake another: two groups of different priority run exchanges that
// are larger than their rings.
void one_queue() {
  constexpr int world = 3, exchanges = 16;
  Group low(world, 1, small(false)), high(world, 1, small(true));
  on_ranks(world, [&](int rank) {
    low.devices[rank] = high.devices[rank] = std::make_shared<OneQueueDevice>();
    auto slow = low.open(rank), fast = high.open(rank);
    std::deque<Buffers> all;
    for (int number = 0; number < exchanges; ++number) {
      all.push_back(fill(rank, world, number, 300'000));
      Buffers& buffers = all.back();
      buffers.exchange = (number % 2 ? fast : slow)->exchange("all_to_all", buffers.sends, buffers.receives, 0);
    }
    for (Buffers& buffers : all) {
      buffers.exchange->wait(60);
      require(wrong_bytes(buffers, rank) == 0, "every byte must be right");
    }
    low.meeting.wait();
    slow->close(10);
    fast->close(10);
  });
}

// If chunks are announced before they are copied, run_random() must find wrong bytes.
void early_flag() {
  Settings settings = small();
  settings.early_flag = true;
  Group group(2, 1, settings);
  std::vector<Trace> traces(2);
  for (int rank = 0; rank < 2; ++rank) {
    traces[rank].before = [](const std::string& what, long) {
      if (what == "low out") std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    group.devices[rank] = std::make_shared<TracedDevice>(traces[rank]);
  }
  require(run_random(group, 10, 20'000) > 0, "the checks must see the fault");
}

}  // namespace
