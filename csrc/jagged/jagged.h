// Jagged arrays: samples of different lengths, stored one after another as rows of a flat array. These functions
// reorder the samples.
//
// A row is a number of bytes, so the functions work for every dtype and every shape of a row. Nothing here depends on
// Python. Invalid input throws std::invalid_argument with the argument and the value, before any byte is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace freescale {

// An array of 64-bit integers: lengths, starts, ranks or positions. It does not own the memory.
struct Indices {
  const std::int64_t* data;
  std::int64_t size;

  Indices(const std::int64_t* data, std::int64_t size) : data(data), size(size) {}
  Indices(const std::vector<std::int64_t>& values)
      : data(values.data()), size(static_cast<std::int64_t>(values.size())) {}
  std::int64_t operator[](std::int64_t i) const { return data[i]; }
};

// `count` contiguous rows of `bytes` bytes each. It does not own the memory.
struct Rows {
  const std::byte* data;
  std::int64_t count;
  std::int64_t bytes;
};

// Slices of an array to copy one after another, and the number of rows in all of them.
struct Slices {
  std::vector<std::int64_t> starts;
  std::vector<std::int64_t> lengths;
  std::int64_t total = 0;
};

// Samples grouped by rank: the old position of each sample [n], and the samples and rows of each rank [world].
struct Groups {
  std::vector<std::int64_t> order;
  std::vector<std::int64_t> samples;
  std::vector<std::int64_t> values;
};

// [n] lengths to [n + 1] offsets: offsets[0] = 0, offsets[i + 1] = offsets[i] + lengths[i].
std::vector<std::int64_t> lengths_to_offsets(Indices lengths);

// Number of rows that `gather` writes. Throws unless every slice lies inside `rows` rows.
std::int64_t check_slices(std::int64_t rows, Indices starts, Indices lengths);

// Copies rows starts[i] .. starts[i] + lengths[i] for every i, one slice after another. The slices must have
// passed check_slices.
void gather(Rows values, Indices starts, Indices lengths, std::byte* out);

// The slices that put sample order[i] at position i. Throws unless the lengths sum to `rows` and `order` is a
// permutation.
Slices permuted(std::int64_t rows, Indices lengths, Indices order);

// inverse[order[i]] = i. Throws unless `order` is a permutation.
std::vector<std::int64_t> invert(Indices order);

// The permutation that groups samples by rank, keeping their order within a rank. Throws on a rank outside
// 0 .. world - 1.
Groups group_by_rank(Indices lengths, Indices ranks, std::int64_t world);

}  // namespace freescale
