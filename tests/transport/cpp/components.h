// Scenarios of single components: the TCP receiver, the ring, the segment.
#pragma once

#include <sys/stat.h>

#include <cstring>
#include <map>

#include "ranks.h"

namespace {

// After an invalid chunk nothing more is read from that peer. Chunks of another peer still arrive.
void bad_chunk() {
  struct : WireCallbacks {
    std::byte memory[64];
    int asked = 0, came = 0;
    std::byte* destination(int peer, const Chunk&) override {
      ++asked;
      if (peer == 1) throw std::runtime_error("no such place");
      return memory;
    }
    void arrived(int, const Chunk&) override { ++came; }
    void credited(int, Word) override { require(false, "a credit"); }
    void aborted(int, const std::string& why) override { require(false, why); }
    void lost(int, const std::string& why) override { require(false, why); }
  } callbacks;
  std::vector<std::unique_ptr<Wire>> wires;
  std::map<int, std::string> addresses;
  for (int rank = 0; rank < 3; ++rank) addresses[rank] = wires.emplace_back(tcp_wire(rank, "127.0.0.1"))->address();
  on_ranks(3, [&](int rank) {
    std::map<int, std::string> others = addresses;
    others.erase(rank);
    wires[rank]->connect(others, after_seconds(20));
  });
  const auto receiver = wires[0]->receiver({1, 2});
  const auto receive = [&] { receiver->progress(callbacks, std::chrono::milliseconds(20)); };
  const Bytes data(64, 7);
  Chunk chunk{};
  chunk.bytes = data.size();
  const auto bad = wires[1]->sender({0}), good = wires[2]->sender({0});
  for (int i = 0; i < 3; ++i) bad->put(0, chunk, reinterpret_cast<const std::byte*>(data.data()));
  require(has(error_of(receive), "no such place"), "the invalid chunk must be refused");
  for (int i = 0; i < 3; ++i) receive();
  require(callbacks.asked == 1 && callbacks.came == 0, "nothing more may be read from that peer");
  good->put(0, chunk, reinterpret_cast<const std::byte*>(data.data()));
  for (int i = 0; i < 500 && callbacks.came == 0; ++i) receive();
  require(callbacks.came == 1, "the chunk of the other peer must arrive");
  require(std::memcmp(callbacks.memory, data.data(), data.size()) == 0, "its bytes must be right");
}

// Sender and receiver agree on every slot of a ring, and no slot is used again before it is free.
void ring() {
  std::mt19937 random(3);
  for (const std::size_t largest : {std::size_t{8192}, std::size_t{100 * 4096}, std::size_t{3 << 20}}) {
    Ring sender(largest, 64 << 10, 0xFFFFFF00u), receiver(largest, 64 << 10, 0xFFFFFF00u);
    std::map<std::size_t, Word> owner;  // byte offset of a slot to the chunk it holds
    Word received = 0xFFFFFF00u;           // the receiver's counter; it grows as late as possible
    std::size_t level = 0;
    for (int i = 0; i < 400; ++i) {
      const std::size_t bytes = random() % (2 * largest);
      const auto slots = sender.allocate(bytes), same = receiver.allocate(bytes);
      require(slots.size() == same.size(), "both must allocate as many slots");
      std::size_t total = 0;
      for (std::size_t s = 0; s < slots.size(); ++s) {
        require(slots[s].number == same[s].number, "both must number the chunks alike");
        require(slots[s].offset == same[s].offset, "both must allocate the same slots");
        require(slots[s].bytes == same[s].bytes, "both must allocate the same sizes");
        require(slots[s].offset + slots[s].bytes <= sender.region(), "a slot must lie inside the region");
        total += slots[s].bytes;
        if (slots[s].free_at && !reached(received, *slots[s].free_at)) received = *slots[s].free_at;
        if (const auto before = owner.find(slots[s].offset); before != owner.end() && sender.level() == level)
          require(reached(received, before->second + 1), "a slot must be free before it is written");
        level = sender.level();
        owner[slots[s].offset] = slots[s].number;
      }
      require(total == bytes, "every byte must have a slot");
    }
  }
}

// Segments have random names, segments with other names are refused, and unlink() removes the name.
void segments() {
  Segment own = Segment::create();
  own.map(1 << 20);
  own.commit(0, 1 << 20);
  require(Segment::create().name() != own.name(), "two segments must have different names");
  struct stat status {};
  require(stat(("/dev/shm/" + own.name()).c_str(), &status) == 0, "the file must exist");
  require((status.st_mode & 0777) == 0600, "only the owner may open the file");
  require(!error_of([] { Segment::open("freescale-nobody"); }).empty(), "an unknown name must be refused");
  require(!error_of([] { Segment::open("../etc/passwd"); }).empty(), "a path must be refused");
  own.unlink();
  require(!error_of([&] { Segment other = Segment::open(own.name()); }).empty(), "the name must be gone");
  own.data()[100] = std::byte{1};  // the memory is still mapped
}

}  // namespace
