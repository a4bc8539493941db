// The ranks of the queue's tests, which are threads of one process, and buffers whose bytes depend only on their
// position.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>

#include "../../../csrc/transport/queue.h"

using namespace freescale::transport;

namespace {

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("FAILED: " + what);
}

// The message of the exception that `body` throws; empty if it throws none.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Makes all ranks of a test wait for each other.
class Meeting {
 public:
  explicit Meeting(int world) : world_(world) {}
  void wait() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++here_ == world_) {
      here_ = 0;
      ++round_;
      all_here_.notify_all();
      return;
    }
    all_here_.wait(lock, [&] { return round_ != round; });
  }

 private:
  int world_, here_ = 0, round_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

// Whether the rings between ranks of one host lie in device memory. A scenario with "@device" sets it.
bool rings_on_device = false;
std::string nixl_library;  // what moves data between hosts; empty: TCP does. A scenario with "@nixl" sets it.

struct Group {
  int world;
  Meeting meeting;
  std::vector<std::string> hosts, addresses;
  Settings settings;
  std::vector<std::shared_ptr<Device>> devices;

  Group(int world, int hosts_used, Settings given) : world(world), meeting(world), addresses(world), settings(given) {
    settings.device_rings = rings_on_device;
    settings.nixl_library = nixl_library;
    for (int rank = 0; rank < world; ++rank) {
      hosts.push_back("host" + std::to_string(rank % hosts_used));
      devices.push_back(host_device());
    }
  }

  std::unique_ptr<Queue> open(int rank) { return open(rank, settings); }

  std::unique_ptr<Queue> open(int rank, const Settings& of_this_rank) {
    auto queue = std::make_unique<Queue>(devices[rank], rank, hosts, of_this_rank);
    addresses[rank] = queue->address();
    meeting.wait();
    if (rings_on_device) {
      require(queue->map_device_rings(addresses).empty(), "every rank must map the rings of its host");
      meeting.wait();
    }
    queue->connect(addresses);
    require((queue->report().device_bytes > 0) == rings_on_device, "the report must say where the rings lie");
    meeting.wait();
    queue->unlink_segment();
    return queue;
  }
};

// Runs `body(rank)` on every rank. An exception on any rank ends the process.
void on_ranks(int world, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(world);
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
        try {
          throw;
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        }
        std::_Exit(1);  // otherwise the other ranks would wait for this one
      }
    });
  for (auto& thread : threads) thread.join();
}

using Bytes = std::vector<unsigned char>;

// Buffers of which only the one of `peer` is not empty.
std::vector<Buffer> to_peer(int peer, int world, Bytes& bytes) {
  std::vector<Buffer> list(world);
  list[peer] = {reinterpret_cast<Address>(bytes.data()), bytes.size()};
  return list;
}

unsigned char expected_byte(int exchange, int source, int target, std::size_t i) {
  return static_cast<unsigned char>((i * 131 + exchange * 29 + source * 7 + target * 3 + (i >> 8)) & 0xff);
}

struct Buffers {
  std::vector<Bytes> out, in;
  std::vector<Buffer> sends, receives;
  std::shared_ptr<Exchange> exchange;
  int number = 0;
};

// The bytes that each rank sends to each rank in exchange `number`: many 0, most small, some of many chunks.
std::vector<std::vector<std::size_t>> sizes(int world, int number, std::size_t largest) {
  std::mt19937 random(number * 7919 + world);
  std::vector<std::vector<std::size_t>> bytes(world, std::vector<std::size_t>(world));
  for (auto& row : bytes)
    for (auto& cell : row) {
      const unsigned kind = random() % 10;
      cell = kind < 3 ? 0 : kind < 8 ? random() % 3000 : random() % (largest + 1);
    }
  return bytes;
}

Buffers fill(int rank, int world, int number, std::size_t largest) {
  Buffers buffers;
  buffers.number = number;
  const auto bytes = sizes(world, number, largest);
  for (int peer = 0; peer < world; ++peer) {
    Bytes out(bytes[rank][peer]);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = expected_byte(number, rank, peer, i);
    buffers.out.push_back(std::move(out));
    buffers.in.emplace_back(bytes[peer][rank], static_cast<unsigned char>(0xEE));
  }
  for (int peer = 0; peer < world; ++peer) {
    buffers.sends.push_back({reinterpret_cast<Address>(buffers.out[peer].data()), buffers.out[peer].size()});
    buffers.receives.push_back({reinterpret_cast<Address>(buffers.in[peer].data()), buffers.in[peer].size()});
  }
  return buffers;
}

long wrong_bytes(const Buffers& buffers, int rank) {
  long wrong = 0;
  for (std::size_t source = 0; source < buffers.in.size(); ++source)
    for (std::size_t i = 0; i < buffers.in[source].size(); ++i)
      wrong += buffers.in[source][i] != expected_byte(buffers.number, static_cast<int>(source), rank, i);
  return wrong;
}

Settings small(bool high = false) {
  Settings settings;
  settings.high_priority = high;
  settings.chunk_bytes = 4096;
  settings.buffer_bytes = 256 << 10;
  settings.timeout = 60;
  return settings;
}

}  // namespace
