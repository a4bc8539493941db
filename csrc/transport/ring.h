// The ring buffer of one direction between two ranks, and where its chunks lie.
//
// Chunk k is written into slot k, modulo the number of slots; then the sender's counter `sent` becomes k + 1. The
// receiver waits for that, copies the chunk out, and its counter `received` becomes k + 1. The sender waits for
// `received` before it writes the slot again. Counters only grow; they wrap at 2^32. Each counter has one writer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "device.h"

namespace freescale::transport {

// Sender and receiver each keep a Ring and allocate the same sizes in the same order, so they agree on every slot
// without communication. A ring starts in a small area and moves to a larger one when a larger transfer comes. The
// larger area lies behind the smaller one, which is not used again.
class Ring {
 public:
  struct Slot {
    Word number;                  // of the chunk, counted from the first chunk of the ring
    std::size_t offset;           // from the start of the ring's region
    std::size_t bytes;
    std::optional<Word> free_at;  // the slot may be written when the receiver's counter reaches this; none: at once
  };
  struct Area {
    std::size_t offset, bytes;
  };

  Ring() = default;
  // `largest` is the size of the largest area in bytes, `chunk` that of the largest chunk, `first` the number of the first
  // chunk. The area is large enough for two transfers in a row, if each of them has at most `transfer` bytes.
  Ring(std::size_t largest, std::size_t chunk, std::size_t transfer, Word first = 0);
  // The slots of the next `bytes` bytes.
  std::vector<Slot> allocate(std::size_t bytes);
  Area area() const { return areas_[level_]; }
  std::size_t level() const { return level_; }
  std::size_t slots() const { return area().bytes / slot_bytes(); }
  std::size_t region() const { return areas_.back().offset + areas_.back().bytes; }  // bytes of all areas together
  Word next() const { return static_cast<Word>(count_); }                            // number of the next chunk

 private:
  std::size_t slot_bytes() const { return std::min(chunk_, area().bytes / 2); }

  std::vector<Area> areas_;  // from small to large
  std::size_t chunk_ = 0, transfer_ = 0, level_ = 0;
  std::uint64_t count_ = 0, first_ = 0;  // number of the next chunk; number of the first chunk of the present area
};

}  // namespace freescale::transport
