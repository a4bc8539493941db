// Samples of a batch of several tensors to bytes, and back: the bytes of a sample are its rows of each tensor.
//
// Nothing here depends on Python. Invalid input throws std::invalid_argument before any byte is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "jagged.h"

namespace freescale {

// [samples, columns] numbers of rows. It does not own the memory.
struct LengthTable {
  const std::int64_t* data;
  std::int64_t samples;
  std::int64_t columns;
};

// A tensor of `count` rows of `bytes` bytes. Its rows of the first key come first. For each key, `columns` tells which
// column of a LengthTable counts the rows of a sample; -1 is the last column. It does not own the memory.
struct BatchRows {
  std::byte* data;
  std::int64_t count;
  std::int64_t bytes;
  std::vector<std::int64_t> columns;
};

// Writes the bytes of the samples order[0], order[1], ... one after another: for each tensor, for each of its keys, the
// rows of the sample. Throws unless they take `size` bytes, and unless the lengths fit the tensors.
void pack(const std::vector<BatchRows>& tensors, LengthTable lengths, Indices order, std::byte* packed,
          std::int64_t size);

// Inverse of `pack`: fills the tensors with the rows of the samples. The bytes of sample i begin at starts[i]. Throws
// unless they end within `size` bytes, and unless the lengths fit the tensors.
void unpack(const std::byte* packed, std::int64_t size, Indices starts, LengthTable lengths,
            const std::vector<BatchRows>& tensors);

}  // namespace freescale
