// A segment of POSIX shared memory, which the ranks of one host use to exchange data. Its name is random, only this
// user can open it, and the owner unlinks it as soon as every peer has mapped it. So a crash leaves nothing behind; if
// a process crashes earlier than that, the next segment that is created on the host removes the leftover. The system
// gives memory to a segment in pieces, when commit() asks for them.
#pragma once

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
  std::byte* data() const { return memory_->data; }
  std::size_t size() const { return memory_->bytes; }

  // Gives the segment its size and maps it. Every rank must give the same size.
  void map(std::size_t bytes);
  // Takes memory for a range of the segment from the system, or throws if /dev/shm is full. Without this call, the
  // first access would end the process with SIGBUS.
  void commit(std::size_t offset, std::size_t bytes);
  // Removes the name; the mappings stay valid. A second call does nothing.
  void unlink();

  static std::size_t free_bytes();  // in /dev/shm

 private:
  struct Memory {  // the mapping and the file; ranks in one process share it (this happens in tests)
    int file = -1;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::string linked_name;  // the name to remove; empty after unlink()
    ~Memory();
  };
  Segment(std::string name, std::shared_ptr<Memory> memory) : name_(std::move(name)), memory_(std::move(memory)) {}

  std::string name_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace freescale::transport
