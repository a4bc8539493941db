// Scenarios of what a failed exchange leaves in the outputs, and of ranks that a failure must reach.
#pragma once

#include "devices.h"
#include "ranks.h"

namespace {

// The bytes of `bytes` that are not `value`.
long others(const Bytes& bytes, unsigned char value) {
  return static_cast<long>(bytes.size()) - std::count(bytes.begin(), bytes.end(), value);
}

// The ring holds bytes of an earlier exchange. Rank 0 times out in the next one. Its output must be NaN (bytes of ones),
// not the old bytes.
void poisoned_output(int hosts) {
  Group group(2, hosts, small());
  on_ranks(2, [&](int rank) {
    Settings settings = group.settings;
    if (rank == 1) settings.timeout = 1.5;  // the higher rank waits for no connection
    auto queue = group.open(rank, settings);
    Bytes old(200'000, 7), first(200'000, 0), second(60'000, 0);
    queue->exchange("all_to_all", to_peer(1 - rank, 2, old), to_peer(1 - rank, 2, first), 0)->wait(30);
    require(others(first, 7) == 0, "the first exchange must be right");
    group.meeting.wait();
    if (rank == 1) {
      auto exchange = queue->exchange("all_to_all", std::vector<Buffer>(2), to_peer(0, 2, second), 0);
      const std::string error = error_of([&] { exchange->wait(30); });
      require(has(error, "60000 bytes from rank 0"), error);
      require(others(second, 0xFF) == 0, std::to_string(others(second, 0xFF)) + " bytes of the output are not NaN");
    }
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
}

// Rank 0 sends more than the ring holds and times out, because rank 1 is late. When rank 1 comes, it must fail, or get
// the right bytes: the streams of rank 0 must not overwrite chunks that rank 1 has not read.
void late_receiver() {
  constexpr std::size_t bytes = 600'000;
  Group group(2, 1, small());
  on_ranks(2, [&](int rank) {
    Settings settings = group.settings;
    if (rank == 0) settings.timeout = 0.3;
    auto queue = group.open(rank, settings);
    Bytes data(bytes);
    for (std::size_t i = 0; i < bytes; ++i) data[i] = rank == 0 ? expected_byte(0, 0, 1, i) : 0;
    const std::vector<Buffer> nothing(2);
    if (rank == 0) {
      auto exchange = queue->exchange("all_to_all", to_peer(1, 2, data), nothing, 0);
      require(!error_of([&] { exchange->wait(30); }).empty(), "rank 0 must time out");
      group.meeting.wait();
    } else {
      group.meeting.wait();
      const std::string error = error_of([&] {
        queue->exchange("all_to_all", nothing, to_peer(0, 2, data), 0)->wait(30);
      });
      long wrong = 0;
      for (std::size_t i = 0; i < bytes; ++i)
        wrong += data[i] != expected_byte(0, 0, 1, i) && data[i] != 0xFF && data[i] != 0;
      require(!error.empty(), "rank 1 must hear of the failure");
      require(wrong == 0, std::to_string(wrong) + " bytes are neither right nor NaN");
    }
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
}

// A device that holds up its callers until `go` is set, as a driver does that another thread keeps busy.
class BusyDevice : public TestDevice {
 public:
  std::atomic<bool> entered{false}, go{false};
  std::string name() const override { return "host memory, busy"; }
  std::unique_ptr<Stream> new_stream() override { return inner_->new_stream(); }
  std::shared_ptr<Event> record(StreamHandle caller) override {
    for (entered = true; !go;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return inner_->record(caller);
  }
};

// The group fails while rank 0 issues an exchange whose bytes have come already. They must stay in the ring until its stream
// has copied them, also if nothing is on the stream yet.
void failure_during_issue() {
  Group group(2, 1, small());
  const auto busy = std::make_shared<BusyDevice>();
  group.devices[0] = busy;
  on_ranks(2, [&](int rank) {
    Settings settings = group.settings;
    if (rank == 1) settings.timeout = 0.3;
    auto queue = group.open(rank, settings);
    Bytes out(3000, 5), in(3000, 0);
    if (rank == 0) {
      std::thread issues([&] {
        error_of([&] { queue->exchange("all_to_all", to_peer(1, 2, out), to_peer(1, 2, in), 0)->wait(30); });
      });
      for (int i = 0; i < 20'000 && !queue->failure(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      require(queue->failure() && busy->entered, "rank 0 must hear of the failure while it issues");
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // for the watchdog
      busy->go = true;
      issues.join();
      require(others(in, 5) == 0, std::to_string(others(in, 5)) + " bytes that rank 1 has sent are lost");
    } else {
      error_of([&] { queue->exchange("all_to_all", to_peer(0, 2, out), to_peer(0, 2, in), 0)->wait(30); });
    }
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
}

// A rank that has nothing outstanding hears of the failure of another rank, too.
void idle_rank_fails(int hosts) {
  Group group(3, hosts, small());
  on_ranks(3, [&](int rank) {
    Settings settings = group.settings;
    if (rank == 2) settings.timeout = 0.3;
    auto queue = group.open(rank, settings);
    Bytes bytes(100);
    if (rank == 2) queue->exchange("all_to_all", std::vector<Buffer>(3), to_peer(1, 3, bytes), 0);
    for (int i = 0; i < 20'000 && !queue->failure(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    require(queue->failure() && has(*queue->failure(), "100 bytes from rank 1"), "every rank must know the failure");
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
}

// Ranks on several hosts disagree: rank 0 expects bytes, rank 1 sends none. Rank 1 may also be many exchanges ahead.
void expects_bytes_of_nobody(int ahead) {
  Group group(2, 2, small());
  std::atomic<int> named{0};
  on_ranks(2, [&](int rank) {
    auto queue = group.open(rank);
    Bytes bytes(5000);
    const std::vector<Buffer> nothing(2);
    std::string error;
    if (rank == 1) {
      for (int i = 0; i <= ahead && error.empty(); ++i)
        error = error_of([&] { queue->exchange("all_to_all", nothing, nothing, 0); });
      group.meeting.wait();
    } else {
      if (ahead > 0) group.meeting.wait();
      error = error_of([&] { queue->exchange("all_to_all", nothing, to_peer(1, 2, bytes), 0)->wait(20); });
      if (ahead == 0) group.meeting.wait();
      const bool by_us = has(error, "5000 bytes from rank 1");
      const bool none = has(error, "which sends 0") || has(error, "without sending");
      require((by_us && none) || has(error, "sends 0 bytes to rank 0, which expects 5000"), error);
      require(!has(error, "not finished"), "it must be noticed before the timeout: " + error);
      ++named;
    }
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
  require(named == 1, "rank 0 must name it");
}

}  // namespace
