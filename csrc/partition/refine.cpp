// Swaps of samples between the slowest rank and faster ones.
#include "refine.h"

#include <algorithm>
#include <set>
#include <utility>

namespace freescale::partition {
namespace {

// Bounds the time of hard cases. Ordinary cases reach the tolerance or a local optimum with far fewer swaps.
constexpr std::int64_t kSwapsPerRank = 16;

struct Swap {
  double time;             // the time of the slower of the two ranks afterwards
  std::int64_t give = -1;  // index into the samples of the slow rank; -1: no swap helps
  std::int64_t take = -1;  // index into the samples of the fast rank; one past the end: it gives nothing back
};

// The swap after which the slower of two ranks is fastest. Both lists are sorted. So for each sample to give, a pointer
// that only moves forward finds the best sample to take; if the tokens do not fit, the search continues from there.
Swap best_swap(const Plan& plan, const Limits& limits, std::int64_t slow, std::int64_t fast) {
  const Rank &from = plan[slow], &to = plan[fast];
  const double from_slowness = limits.slowness[slow], to_slowness = limits.slowness[fast];
  const double ideal = (from.load * from_slowness - to.load * to_slowness) / (from_slowness + to_slowness);
  const std::int64_t gives = from.samples.size(), size = to.samples.size();
  const bool one_way = gives > limits.min_count && size < limits.max_count;
  const std::int64_t takes = size + one_way;
  const auto cost = [&](std::int64_t take) { return take < size ? to.samples[take].cost : 0.0; };

  Swap best{from.load * from_slowness};
  std::int64_t split = 0;
  for (std::int64_t give = 0; give < gives; ++give) {
    const Sample& given = from.samples[give];
    const auto fits = [&](std::int64_t take) {
      const std::int64_t moved = given.tokens - (take < size ? to.samples[take].tokens : 0);
      return from.tokens - moved <= limits.max_tokens && to.tokens + moved <= limits.max_tokens;
    };
    const auto look_further = [&](std::int64_t take) {
      const double moved = given.cost - cost(take);
      const double time = std::max((from.load - moved) * from_slowness, (to.load + moved) * to_slowness);
      if (time >= best.time) return false;  // the candidates beyond are worse
      if (!fits(take)) return true;
      best = {time, give, take};
      while (--take >= 0 && cost(take) == cost(best.take))
        if (fits(take)) best.take = take;  // of equal samples, the first
      return false;
    };
    while (split < takes && given.cost - cost(split) <= ideal) ++split;
    for (std::int64_t take = split - 1; take >= 0 && look_further(take);) --take;
    for (std::int64_t take = split; take < takes && look_further(take);) ++take;
  }
  return best;
}

Sample take_out(Rank& rank, std::int64_t index) {
  const Sample sample = rank.samples[index];
  rank.samples.erase(rank.samples.begin() + index);
  rank.load -= sample.cost;
  rank.tokens -= sample.tokens;
  return sample;
}

void put_in(Rank& rank, const Sample& sample) {
  rank.add(sample);
  for (std::size_t i = rank.samples.size() - 1; i > 0 && rank.samples[i - 1].position > sample.position; --i)
    std::swap(rank.samples[i - 1], rank.samples[i]);
}

void apply(const Swap& swap, Rank& slow, Rank& fast) {
  const bool both_ways = swap.take < static_cast<std::int64_t>(fast.samples.size());
  const Sample given = take_out(slow, swap.give);
  if (both_ways) put_in(slow, take_out(fast, swap.take));
  put_in(fast, given);
}

}  // namespace

void refine(Plan& plan, const Limits& limits, double bound) {
  std::set<std::pair<double, std::int64_t>> by_time;
  for (std::int64_t rank = 0; rank < limits.ranks(); ++rank) by_time.emplace(limits.time(plan, rank), rank);
  for (std::int64_t left = kSwapsPerRank * limits.ranks(); left > 0; --left) {
    const auto slow = std::prev(by_time.end());
    if (slow->first <= bound * (1 + kTolerance)) return;
    auto fast = by_time.begin();
    Swap swap{};
    for (; fast != slow; ++fast) {
      swap = best_swap(plan, limits, slow->second, fast->second);
      if (swap.give >= 0) break;
    }
    if (fast == slow) return;
    const std::int64_t a = slow->second, b = fast->second;
    apply(swap, plan[a], plan[b]);
    by_time.erase(slow);
    by_time.erase(fast);
    by_time.emplace(limits.time(plan, a), a);
    by_time.emplace(limits.time(plan, b), b);
  }
}

}  // namespace freescale::partition
