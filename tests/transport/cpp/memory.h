// Scenarios of the memory that ranks share: the ring and the segment.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <limits>
#include <map>

#include "ranks.h"

namespace {

// Sender and receiver agree on every slot of a ring, and no slot is used again before it is free.
void ring() {
  std::mt19937 random(3);
  for (const std::size_t largest : {std::size_t{8192}, std::size_t{100 * 4096}, std::size_t{3 << 20}}) {
    Ring sender(largest, 64 << 10, 64 << 10, 0xFFFFFF00u), receiver = sender;
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

// A transfer takes as few slots as its chunks allow, and the next transfer others, which are free.
void ring_of_two_transfers() {
  for (const std::size_t chunk : {std::size_t{8} << 20, std::size_t{512} << 10})
    for (const std::size_t bytes : {std::size_t{40} << 10, std::size_t{650} << 10, std::size_t{5} << 20}) {
      Ring ring(std::size_t{64} << 20, chunk, 8 << 20);
      const auto first = ring.allocate(bytes), second = ring.allocate(bytes);
      const std::size_t needed = (bytes + chunk - 1) / chunk;
      require(first.size() == needed && second.size() == needed, "a transfer must have as few chunks as possible");
      std::map<std::size_t, int> used;
      for (const auto& slot : first) ++used[slot.offset];
      for (const auto& slot : second) {
        require(++used[slot.offset] == 1, "the next transfer must use other slots");
        require(!slot.free_at, "the next transfer must not wait for the peer");
      }
    }
}

// Segments have random names, segments with other names are refused, and unlink() removes the name.
void segments() {
  Segment own = Segment::create();
  own.map(1 << 20);
  own.reserve(0, 1 << 20);
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

// The kernel of `interrupted_reserve`: calls for more than `most_at_once` bytes never end in time, and each other call is
// interrupted this many times.
std::size_t most_at_once = SIZE_MAX;
int interruptions = 0;

// Memory is reserved although signals interrupt it again and again. A process that is interrupted every time gets an error.
void interrupted_reserve() {
  constexpr std::size_t bytes = 5'000'000;
  const auto blocks = [](const Segment& segment) {
    struct stat status {};
    require(stat(("/dev/shm/" + segment.name()).c_str(), &status) == 0, "the file must exist");
    return static_cast<std::size_t>(status.st_blocks) * 512;
  };
  Segment own = Segment::create();
  own.map(to_pages(bytes));
  most_at_once = 1 << 20;
  interruptions = 3;
  own.reserve(0, bytes);
  require(blocks(own) >= bytes, "all bytes must be reserved");
  interruptions = std::numeric_limits<int>::max();
  const std::string error = error_of([&] { own.reserve(0, bytes); });
  most_at_once = SIZE_MAX;
  interruptions = 0;
  require(has(error, "Interrupted system call"), "the error is: " + error);
}

// The NUMA policy of the mapping of a segment, for example "prefer:0"; empty if the kernel does not tell.
std::string policy_of(const Segment& segment) {
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);)
    if (has(line, segment.name())) return line.substr(line.find(' ') + 1, line.find(" file=") - line.find(' ') - 1);
  return "";
}

void numa() {
  Segment own = Segment::create();
  own.map(1 << 20);
  const std::string before = policy_of(own);
  own.prefer_node(-1);     // unknown
  own.prefer_node(1'000);  // there is no such node
  require(policy_of(own) == before, "an unknown node must change nothing");
  own.prefer_node(0);
  require(before.empty() || policy_of(own) == "prefer:0", "the policy is " + policy_of(own));
  own.reserve(0, 1 << 20);
}

}  // namespace

// Stands for the function of the C library in this program.
extern "C" int posix_fallocate(int file, off_t offset, off_t bytes) {
  static std::atomic<int> interrupted{0};
  if (static_cast<std::size_t>(bytes) > most_at_once || interrupted++ < interruptions) return EINTR;
  interrupted = 0;
  return fallocate(file, 0, offset, bytes) == 0 ? 0 : errno;
}
