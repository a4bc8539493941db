// Jagged index kernels: samples of different lengths, stored one after another as rows of a flat array.
//
// A row is opaque bytes, so one kernel serves every dtype and every trailing shape. Nothing here knows Python. Bad
// input throws std::invalid_argument that names the argument and the value, before any byte is moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace freescale {

// A borrowed array of 64-bit integers: lengths, starts, ranks or positions.
struct Indices {
  const std::int64_t* data;
  std::int64_t size;

  Indices(const std::int64_t* data, std::int64_t size) : data(data), size(size) {}
  Indices(const std::vector<std::int64_t>& values)
      : data(values.data()), size(static_cast<std::int64_t>(values.size())) {}
  std::int64_t operator[](std::int64_t i) const { return data[i]; }
};

// Borrowed rows: `count` rows of `bytes` bytes each, contiguous.
struct Rows {
  const std::byte* data;
  std::int64_t count;
  std::int64_t bytes;
};

// Which slices of an array to copy, one after another, and how many rows that makes.
struct Slices {
  std::vector<std::int64_t> starts;
  std::vector<std::int64_t> lengths;
  std::int64_t total = 0;
};

// Samples grouped by rank: old position of each [n], and how many samples and rows go to each rank [world].
struct Groups {
  std::vector<std::int64_t> order;
  std::vector<std::int64_t> samples;
  std::vector<std::int64_t> values;
};

// [n] lengths to [n + 1] offsets: offsets[0] = 0, offsets[i + 1] = offsets[i] + lengths[i].
std::vector<std::int64_t> lengths_to_offsets(Indices lengths);

// Number of rows that `gather` writes. Throws unless every slice lies inside `rows` rows.
std::int64_t check_slices(std::int64_t rows, Indices starts, Indices lengths);

// Copies rows starts[i] .. starts[i] + lengths[i] for every i, one slice after another. The slices are checked already.
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
