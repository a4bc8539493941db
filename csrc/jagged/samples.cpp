// Copies the rows of samples between the tensors of a batch and one array of bytes.
#include "samples.h"

#include <cstring>
#include <string>

#include "../invalid_argument.h"

namespace freescale {
namespace {

// The rows of one key of one tensor.
struct Part {
  std::byte* data;
  std::int64_t bytes;
  const std::int64_t* lengths;  // of sample i at lengths[i * columns]
};

std::vector<std::int64_t> sum_columns(LengthTable lengths) {
  std::vector<std::int64_t> totals(lengths.columns, 0);
  for (std::int64_t i = 0; i < lengths.samples * lengths.columns; ++i) {
    std::int64_t& total = totals[i % lengths.columns];
    if (lengths.data[i] < 0) fail(at("lengths", i / lengths.columns, lengths.data[i]) + " is negative");
    if (__builtin_add_overflow(total, lengths.data[i], &total)) fail("lengths: their sum does not fit 64 bits");
  }
  return totals;
}

std::vector<Part> parts_of(const std::vector<BatchRows>& tensors, LengthTable lengths) {
  const std::vector<std::int64_t> totals = sum_columns(lengths);
  std::vector<Part> parts;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::int64_t row = 0;
    for (std::int64_t column : tensors[t].columns) {
      if (column < -1 || column >= lengths.columns || lengths.columns == 0)
        fail(at("columns", t, column) + " is outside the " + std::to_string(lengths.columns) + " columns of lengths");
      if (column == -1) column = lengths.columns - 1;
      if (totals[column] > tensors[t].count - row) {
        row = -1;
        break;
      }
      parts.push_back({tensors[t].data + row * tensors[t].bytes, tensors[t].bytes, lengths.data + column});
      row += totals[column];
    }
    if (row != tensors[t].count)
      fail("lengths: they do not sum to the " + std::to_string(tensors[t].count) + " rows of tensor " +
           std::to_string(t));
  }
  return parts;
}

std::int64_t bytes_of(const Part& part, LengthTable lengths, std::int64_t sample) {
  return part.lengths[sample * lengths.columns] * part.bytes;
}

// memcpy must not get the null address of an empty array.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

void pack(const std::vector<BatchRows>& tensors, LengthTable lengths, Indices order, std::byte* packed,
          std::int64_t size) {
  const std::vector<Part> parts = parts_of(tensors, lengths);
  const auto width = static_cast<std::int64_t>(parts.size());
  std::vector<std::byte*> begin(lengths.samples * width);  // of each part of each sample
  for (std::int64_t p = 0; p < width; ++p) {
    std::byte* next = parts[p].data;
    for (std::int64_t i = 0; i < lengths.samples; ++i) {
      begin[i * width + p] = next;
      next += bytes_of(parts[p], lengths, i);
    }
  }
  std::int64_t left = size;
  for (std::int64_t i = 0; i < order.size; ++i) {
    if (order[i] < 0 || order[i] >= lengths.samples)
      fail(at("order", i, order[i]) + " is outside 0 .. " + std::to_string(lengths.samples - 1));
    for (const Part& part : parts) left -= bytes_of(part, lengths, order[i]);
    if (left < 0) break;
  }
  if (left != 0) fail("packed: " + std::to_string(size) + " bytes do not fit the samples");
  for (std::int64_t i = 0; i < order.size; ++i) {
    for (std::int64_t p = 0; p < width; ++p) {
      const std::int64_t bytes = bytes_of(parts[p], lengths, order[i]);
      copy_bytes(packed, begin[order[i] * width + p], bytes);
      packed += bytes;
    }
  }
}

void unpack(const std::byte* packed, std::int64_t size, Indices starts, LengthTable lengths,
            const std::vector<BatchRows>& tensors) {
  if (starts.size != lengths.samples)
    fail("starts: " + std::to_string(starts.size) + " entries, but lengths has " + std::to_string(lengths.samples));
  std::vector<Part> parts = parts_of(tensors, lengths);
  for (std::int64_t i = 0; i < starts.size; ++i) {
    std::int64_t left = size - starts[i];
    for (const Part& part : parts) left -= bytes_of(part, lengths, i);
    if (starts[i] < 0 || left < 0)
      fail(at("starts", i, starts[i]) + ": the sample is not within the " + std::to_string(size) + " bytes of packed");
  }
  for (std::int64_t i = 0; i < starts.size; ++i) {
    const std::byte* from = packed + starts[i];
    for (Part& part : parts) {
      const std::int64_t bytes = bytes_of(part, lengths, i);
      copy_bytes(part.data, from, bytes);
      part.data += bytes;
      from += bytes;
    }
  }
}

}  // namespace freescale
