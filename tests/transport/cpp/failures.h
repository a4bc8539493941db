// Scenarios of ranks that are late, leave, or disagree.
#pragma once

#include <tuple>

#include "../../../csrc/transport/process.h"
#include "ranks.h"

namespace {

// Rank 1 does not take part. Rank 2 times out, and rank 0, which needs only rank 2, fails with the same error. Only rank
// 2 has a short timeout. It is the highest rank, so it waits for no connection, which must come within the timeout, too.
void timeout(int hosts) {
  Group group(3, hosts, small());
  on_ranks(3, [&](int rank) {
    Settings settings = group.settings;
    if (rank == 2) settings.timeout = 0.3;
    auto queue = group.open(rank, settings);
    Bytes bytes(70'000, 1), more(100, 1);
    const std::vector<Buffer> nothing(3);
    std::string error;
    if (rank == 2) {
      auto exchange = queue->exchange("all_to_all", nothing, to_peer(1, 3, bytes), 0);
      error = error_of([&] { exchange->wait(30); });
      require(has(error, "rank 2") && has(error, "all_to_all #0") && has(error, "70000 bytes from rank 1"), error);
      require(has(error, "not finished after"), error);
      const std::string later = error_of([&] { queue->exchange("all_to_all", nothing, nothing, 0); });
      require(!later.empty(), "a later exchange must be refused");
    } else if (rank == 0) {
      error = error_of([&] {
        queue->exchange("all_to_all", nothing, nothing, 0);
        queue->exchange("all_to_all", nothing, to_peer(2, 3, more), 0)->wait(30);
      });
      require(has(error, "rank 2, all_to_all #0"), "rank 0 must report the error of rank 2, not: " + error);
    }
    group.meeting.wait();
    error_of([&] { queue->close(10); });
  });
}

// A rank leaves the group while another rank needs it.
void leaver(int hosts) {
  Group group(2, hosts, small());
  on_ranks(2, [&](int rank) {
    auto queue = group.open(rank);
    if (rank == 1) {
      queue->close(10);
      queue.reset();
      group.meeting.wait();
      return;
    }
    group.meeting.wait();
    Bytes bytes(5000);
    auto exchange = queue->exchange("all_gather", std::vector<Buffer>(2), to_peer(1, 2, bytes), 0);
    const std::string error = error_of([&] { exchange->wait(30); });
    require(has(error, "5000 bytes from rank 1") && has(error, hosts == 1 ? "has left" : "cannot be reached"), error);
  });
}

// Two ranks disagree about sizes, or about which collective comes next. At least one of them gets an error before bytes
// are mixed up.
void mismatch(int hosts) {
  for (const bool kind : {false, true}) {
    Group group(2, hosts, small());
    std::atomic<int> noticed{0};
    on_ranks(2, [&](int rank) {
      auto queue = group.open(rank);
      Bytes out(100, 1), in(kind || rank == 1 ? 100 : 200, 0);
      const std::string error = error_of([&] {
        auto exchange = queue->exchange(kind && rank == 1 ? "broadcast" : "all_to_all", to_peer(1 - rank, 2, out),
                                        to_peer(1 - rank, 2, in), 0);
        exchange->wait(30);
        group.meeting.wait();
      });
      if (has(error, kind ? "another collective" : "200")) ++noticed;
      else require(error.empty(), error);
      if (!error.empty()) group.meeting.wait();
      error_of([&] { queue->close(10); });
    });
    require(noticed >= 1, "no rank noticed it");
  }
}

// A peer of another namespace of processes is known by its heartbeat alone. It is gone after the timeout, and after 30 s at least.
void silent_peer() {
  for (const auto& [timeout, alive, gone] : {std::tuple{100.0, 60, 120}, std::tuple{5.0, 20, 40}}) {
    Settings settings = small();
    settings.timeout = timeout;
    Segment segment = Segment::create();  // the peer has no process
    Queue queue(host_device(), 0, {"host", "host"}, settings);
    const std::string own = queue.address(), rest = own.substr(own.find('\n'));
    queue.connect({own, "segment=" + segment.name() + rest});
    Header& header = *reinterpret_cast<Header*>(segment.data());
    header.namespace_ = this_namespace() + 1;
    const auto beat = [&](int seconds) {
      __atomic_store_n(&header.heartbeat, now_ns() - seconds * std::uint64_t{1'000'000'000}, __ATOMIC_RELEASE);
    };
    beat(alive);
    Bytes bytes(100);
    const auto exchange = queue.exchange("all_to_all", std::vector<Buffer>(2), to_peer(1, 2, bytes), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    require(!queue.failure(), "the peer may be silent for longer");
    beat(gone);
    const std::string error = error_of([&] { exchange->wait(5); });
    require(has(error, "has sent no heartbeat for " + std::to_string(gone) + " s"), error);
    queue.close(5);
  }
}

}  // namespace
