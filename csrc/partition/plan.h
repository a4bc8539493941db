// The types that the parts of the partition solver share. Internal: partition.h is the interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace freescale::partition {

// The solver stops when the slowest rank is within this fraction of the lower bound, far below what a step time can
// resolve.
constexpr double kTolerance = 1e-5;
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

struct Sample {
  double cost;
  std::int64_t tokens;
  std::int64_t position;  // in the order of descending cost
};

// One rank and the samples that are assigned to it.
struct Rank {
  double load = 0;
  std::int64_t tokens = 0;
  std::vector<Sample> samples;  // in the order of descending cost

  void add(const Sample& sample) {
    load += sample.cost;
    tokens += sample.tokens;
    samples.push_back(sample);
  }
};

using Plan = std::vector<Rank>;  // [ranks]

// How many samples and tokens a rank may hold, and how slow each rank is.
struct Limits {
  std::int64_t min_count;
  std::int64_t max_count;
  std::int64_t max_tokens;
  std::vector<double> slowness;  // [ranks]; the time of a rank is load * slowness, and 1 is a rank of mean speed

  std::int64_t ranks() const { return static_cast<std::int64_t>(slowness.size()); }
  double time(const Plan& plan, std::int64_t rank) const { return plan[rank].load * slowness[rank]; }
  double slowest(const Plan& plan) const {
    double slowest = 0;
    for (std::int64_t rank = 0; rank < ranks(); ++rank) slowest = std::max(slowest, time(plan, rank));
    return slowest;
  }
  // Whether no rank has more tokens than it may hold.
  bool has_room(const Plan& plan) const {
    return std::all_of(plan.begin(), plan.end(), [this](const Rank& rank) { return rank.tokens <= max_tokens; });
  }
};

}  // namespace freescale::partition
