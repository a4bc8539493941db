// First plans of the partition solver.
#include "initial.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace freescale::partition {
namespace {

// Finds the rank with the least load in a tournament tree; of equal loads, the rank with the smaller index. Load and
// rank share one 64-bit integer, with the rank in the low bits of the mantissa, so each level of the tree is one
// integer minimum without a branch. This is four times faster than a heap. Loads that differ only in those bits (1 part
// in 10^13 with 512 ranks) count as equal.
class LeastLoaded {
 public:
  explicit LeastLoaded(std::int64_t ranks) {
    while (leaves_ < static_cast<std::uint64_t>(ranks)) leaves_ *= 2;
    words_.assign(2 * leaves_, kClosed);
    for (std::int64_t rank = 0; rank < ranks; ++rank) words_[leaves_ + rank] = rank;
    for (std::uint64_t node = leaves_ - 1; node > 0; --node)
      words_[node] = std::min(words_[2 * node], words_[2 * node + 1]);
  }

  std::int64_t rank() const { return words_[1] & (leaves_ - 1); }

  // Both change the rank that has the least load now.
  void set_load(double load) {
    std::uint64_t bits;
    std::memcpy(&bits, &load, sizeof bits);
    replace((bits & ~(leaves_ - 1)) | rank());
  }
  void close() { replace(kClosed); }

 private:
  static constexpr std::uint64_t kClosed = ~std::uint64_t{0};

  void replace(std::uint64_t word) {
    std::uint64_t node = leaves_ + rank();
    for (words_[node] = word; node > 1; words_[node] = word) {
      word = std::min(word, words_[node ^ 1]);
      node /= 2;
    }
  }

  std::uint64_t leaves_ = 1;
  std::vector<std::uint64_t> words_;  // the root is at 1, the ranks start at `leaves_`
};

}  // namespace

Plan zigzag_plan(const std::vector<Sample>& samples, std::int64_t ranks) {
  Plan plan(ranks);
  for (const Sample& sample : samples) plan[zigzag_rank(sample.position, ranks)].add(sample);
  return plan;
}

Plan longest_first_by_count(const std::vector<Sample>& samples, const Limits& limits) {
  Plan plan(limits.ranks());
  for (Rank& rank : plan) rank.samples.reserve(limits.max_count);
  LeastLoaded lightest(limits.ranks());
  const auto count = [&] { return static_cast<std::int64_t>(plan[lightest.rank()].samples.size()); };
  std::int64_t larger = static_cast<std::int64_t>(samples.size()) - limits.min_count * limits.ranks();
  for (const Sample& sample : samples) {
    while (larger == 0 && count() == limits.min_count) lightest.close();  // no further rank may exceed the minimum
    if (count() == limits.min_count) --larger;
    Rank& rank = plan[lightest.rank()];
    rank.add(sample);
    if (count() == limits.max_count)
      lightest.close();
    else
      lightest.set_load(rank.load);
  }
  return plan;
}

Plan longest_first_by_time(const std::vector<Sample>& samples, const Limits& limits) {
  Plan plan(limits.ranks());
  std::vector<double> loads(limits.ranks(), 0);  // contiguous, because the loop below takes nearly all the time
  for (const Sample& sample : samples) {
    std::int64_t best = -1;
    double best_time = std::numeric_limits<double>::infinity();
    for (std::int64_t rank = 0; rank < limits.ranks(); ++rank) {
      const double time = (loads[rank] + sample.cost) * limits.slowness[rank];
      if (time > best_time || plan[rank].tokens > limits.max_tokens - sample.tokens) continue;
      if (time == best_time && best >= 0 && plan[rank].samples.size() >= plan[best].samples.size()) continue;
      best = rank;
      best_time = time;
    }
    if (best < 0) return {};
    plan[best].add(sample);
    loads[best] = plan[best].load;
  }
  return plan;
}

}  // namespace freescale::partition
