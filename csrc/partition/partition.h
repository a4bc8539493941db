// The partition solver assigns samples to ranks so that the slowest rank finishes as early as possible.
//
// Every function maps the costs of n samples to the rank of each sample. The functions are pure and deterministic. Of
// equal candidates, the one with the smaller index wins. Invalid input throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <vector>

namespace freescale {

// An array of n sample costs, finite and not negative. It does not own the memory.
struct Costs {
  const double* data;
  std::int64_t size;

  double operator[](std::int64_t i) const { return data[i]; }
};

// Further limits of `variable`. Null pointers mean that tokens are not bounded and that shares are equal.
struct Bounds {
  const std::int64_t* tokens = nullptr;  // [n]
  std::int64_t max_tokens = 0;           // most tokens that a rank may hold
  const double* shares = nullptr;        // [ranks] each rank's share of the work, in any unit
};

// Sorts by cost and assigns the samples to ranks 0 1 2 .. 2 1 0 0 1 2 .., as the FreeScale paper does for a fixed batch
// size.
std::vector<std::int64_t> zigzag(Costs costs, std::int64_t ranks);

// Equal sample counts (they differ by at most one), and the least load on the rank with the most load.
std::vector<std::int64_t> fixed(Costs costs, std::int64_t ranks);

// Any sample counts, and the least time on the slowest rank, within the bounds.
std::vector<std::int64_t> variable(Costs costs, std::int64_t ranks, Bounds bounds);

}  // namespace freescale
