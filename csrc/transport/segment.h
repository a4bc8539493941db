// A segment of POSIX shared memory: random name, readable by this user alone, unlinked as soon as every peer has mapped
// it, so that a crash leaves nothing behind (a crash before that is swept up by the next segment created here). Memory
// is taken from the system piece by piece, when it is first needed.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace freescale::transport {

class Segment {
 public:
  // Creates an empty segment with a name nobody can guess.
  static Segment create();
  // Maps a peer's segment. It may still be empty: size() makes it as large as the owner will.
  static Segment open(const std::string& name);
  Segment(Segment&&) = default;
  Segment& operator=(Segment&&) = default;

  const std::string& name() const { return name_; }
  std::byte* data() const { return memory_->data; }
  std::size_t size() const { return memory_->bytes; }

  // Gives the segment its size and maps it. Every rank that does so must give the same size.
  void map(std::size_t bytes);
  // Takes memory for a range of it, or throws when /dev/shm has no more: without this, the first touch would be SIGBUS.
  void commit(std::size_t offset, std::size_t bytes);
  // Removes the name; the mappings stay. Safe to call again.
  void unlink();

  static std::size_t free_bytes();  // in /dev/shm

 private:
  struct Memory {  // mapping and file, shared between the ranks of one process (as in tests)
    int file = -1;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::string linked;  // the name to remove, until it is
    ~Memory();
  };
  Segment(std::string name, std::shared_ptr<Memory> memory) : name_(std::move(name)), memory_(std::move(memory)) {}

  std::string name_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace freescale::transport
