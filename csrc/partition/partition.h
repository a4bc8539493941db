// The partition solver: which rank trains which sample, so that the slowest rank finishes as early as possible.
//
// Every function maps the costs of n samples to the rank of each. They are pure and deterministic: equal costs in,
// equal ranks out. Ties are broken by index. Bad input throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <vector>

namespace freescale {

// A borrowed array of n sample costs, finite and not negative.
struct Costs {
  const double* data;
  std::int64_t size;

  double operator[](std::int64_t i) const { return data[i]; }
};

// What `variable` has to respect beside the cost. Null pointers: tokens are not bounded, shares are equal.
struct Bounds {
  const std::int64_t* tokens = nullptr;  // [n]
  std::int64_t max_tokens = 0;           // most tokens a rank may hold
  const double* shares = nullptr;        // [ranks] target share of the work of each rank, in any unit
};

// Sort by cost, deal 0 1 2 .. 2 1 0 0 1 2 ..: the balancing with fixed batch size of the FreeScale paper.
std::vector<std::int64_t> zigzag(Costs costs, std::int64_t ranks);

// Equal sample counts (they differ by at most one), the least load on the heaviest rank.
std::vector<std::int64_t> fixed(Costs costs, std::int64_t ranks);

// Sample counts as they come, the least time on the slowest rank, within the bounds.
std::vector<std::int64_t> variable(Costs costs, std::int64_t ranks, Bounds bounds);

}  // namespace freescale
