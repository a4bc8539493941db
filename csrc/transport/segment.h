// A segment of POSIX shared memory, which the ranks of one host use to exchange data. Its name is random, only this
// user can open it, and the owner unlinks it as soon as every peer has mapped it. So a crash leaves nothing behind; if
// a process crashes earlier than that, the next segment that is created on the host removes the leftover. The owner
// reserves the memory of a segment at set-up, so a full /dev/shm is found out before the first exchange.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

namespace freescale::transport {

inline constexpr std::size_t page = 4096;
inline std::size_t to_pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

class Segment {
 public:
  // Creates an empty segment with a random name.
  static Segment create();
  // Opens the segment of a peer. It may still be empty: map() gives it the size that the owner gives it too.
  static Segment open(const std::string& name);
  Segment(Segment&&) = default;
  Segment& operator=(Segment&&) = default;

  const std::string& name() const { return name_; }
  // A random text that is written into each new segment. Only processes of this user can read it.
  static std::string key_of(const std::string& name);
  static constexpr std::size_t key_bytes = 32;  // at the start of the segment
  std::byte* data() const { return memory_->data; }
  std::size_t size() const { return memory_->bytes; }

  // Gives the segment its size and maps it. Every rank must give the same size.
  void map(std::size_t bytes);
  // From now on, takes memory beside a NUMA node if it can. A failure changes the speed only, so it is not reported.
  void prefer_node(int node);
  // Takes memory for a range of the segment from the system, or throws if /dev/shm is full. Without this call, the
  // first access would end the process with SIGBUS.
  void reserve(std::size_t offset, std::size_t bytes);
  // For a peer's segment: closes the file, which is needed until the segment is mapped.
  void close_file();
  // Removes the name and closes the file; the mappings stay valid. A second call does nothing.
  void unlink();

  static std::size_t free_bytes();      // in /dev/shm
  static std::size_t reserved_bytes();  // by all segments of this process that are open

 private:
  struct Memory {  // the mapping and the file; ranks in one process share it (this happens in tests)
    int file = -1;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::atomic<std::size_t> reserved{0};
    std::string linked_name;  // the name to remove; empty after unlink()
    ~Memory();
  };
  Segment(std::string name, std::shared_ptr<Memory> memory) : name_(std::move(name)), memory_(std::move(memory)) {}

  std::string name_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace freescale::transport
