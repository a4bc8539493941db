// Checks of jagged arrays, and the loops that reorder them.
#include "jagged.h"

#include <cstring>
#include <string>

#include "../invalid_argument.h"

namespace freescale {
namespace {

void check_same_size(const char* name, Indices indices, const char* other_name, Indices other) {
  if (indices.size != other.size)
    fail(std::string(name) + ": " + std::to_string(indices.size) + " entries, but " + other_name + " has " +
         std::to_string(other.size));
}

std::int64_t add_length(std::int64_t total, Indices lengths, std::int64_t i) {
  if (lengths[i] < 0) fail(at("lengths", i, lengths[i]) + " is negative");
  if (__builtin_add_overflow(total, lengths[i], &total)) fail("lengths: their sum does not fit 64 bits");
  return total;
}

}  // namespace

std::vector<std::int64_t> lengths_to_offsets(Indices lengths) {
  std::vector<std::int64_t> offsets(lengths.size + 1, 0);
  for (std::int64_t i = 0; i < lengths.size; ++i) offsets[i + 1] = add_length(offsets[i], lengths, i);
  return offsets;
}

std::int64_t check_slices(std::int64_t rows, Indices starts, Indices lengths) {
  check_same_size("starts", starts, "lengths", lengths);
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < starts.size; ++i) {
    total = add_length(total, lengths, i);
    if (starts[i] < 0) fail(at("starts", i, starts[i]) + " is negative");
    if (starts[i] > rows || lengths[i] > rows - starts[i])
      fail(at("starts", i, starts[i]) + " with " + at("lengths", i, lengths[i]) + " ends past the " +
           std::to_string(rows) + " rows of values");
  }
  return total;
}

void gather(Rows values, Indices starts, Indices lengths, std::byte* out) {
  for (std::int64_t i = 0; i < starts.size; ++i) {
    const std::size_t bytes = static_cast<std::size_t>(lengths[i]) * values.bytes;
    if (bytes == 0) continue;  // an empty array may have a null address
    std::memcpy(out, values.data + starts[i] * values.bytes, bytes);
    out += bytes;
  }
}

Slices permuted(std::int64_t rows, Indices lengths, Indices order) {
  check_same_size("order", order, "lengths", lengths);
  const std::vector<std::int64_t> offsets = lengths_to_offsets(lengths);
  if (offsets.back() != rows)
    fail("lengths: they sum to " + std::to_string(offsets.back()) + ", but values has " + std::to_string(rows) +
         " rows");
  invert(order);  // throws unless it is a permutation
  Slices slices{std::vector<std::int64_t>(order.size), std::vector<std::int64_t>(order.size), rows};
  for (std::int64_t i = 0; i < order.size; ++i) {
    slices.starts[i] = offsets[order[i]];
    slices.lengths[i] = lengths[order[i]];
  }
  return slices;
}

std::vector<std::int64_t> invert(Indices order) {
  std::vector<std::int64_t> inverse(order.size, -1);
  for (std::int64_t i = 0; i < order.size; ++i) {
    if (order[i] < 0 || order[i] >= order.size)
      fail(at("order", i, order[i]) + " is outside 0 .. " + std::to_string(order.size - 1));
    std::int64_t& position = inverse[order[i]];
    if (position >= 0)
      fail(at("order", i, order[i]) + " repeats " + at("order", position, order[i]) + "; order must be a permutation");
    position = i;
  }
  return inverse;
}

Groups group_by_rank(Indices lengths, Indices ranks, std::int64_t world) {
  check_same_size("ranks", ranks, "lengths", lengths);
  using Counts = std::vector<std::int64_t>;
  Groups groups{Counts(ranks.size), Counts(world, 0), Counts(world, 0)};
  for (std::int64_t i = 0; i < ranks.size; ++i) {
    const std::int64_t rank = ranks[i];
    if (rank < 0 || rank >= world) fail(at("ranks", i, rank) + " is outside 0 .. " + std::to_string(world - 1));
    groups.samples[rank] += 1;
    groups.values[rank] = add_length(groups.values[rank], lengths, i);
  }
  Counts next = lengths_to_offsets(groups.samples);
  for (std::int64_t i = 0; i < ranks.size; ++i) groups.order[next[ranks[i]]++] = i;
  return groups;
}

}  // namespace freescale
