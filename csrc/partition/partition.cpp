// The partition solver: a first plan (initial.cpp), which is then refined (refine.cpp). The first plan of `fixed` is
// the better one of zig-zag and longest-first.
#include "partition.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "../invalid_argument.h"
#include "initial.h"
#include "plan.h"
#include "refine.h"

namespace freescale {
namespace {

using namespace partition;

void check(Costs costs, std::int64_t ranks) {
  if (ranks < 1) fail("ranks = " + std::to_string(ranks) + " must be at least 1");
  for (std::int64_t i = 0; i < costs.size; ++i)
    if (!(costs[i] >= 0) || std::isinf(costs[i])) fail(at("costs", i, costs[i]) + " must be finite and not negative");
}

void check(const Bounds& bounds, std::int64_t samples, std::int64_t ranks) {
  if (bounds.shares)
    for (std::int64_t i = 0; i < ranks; ++i)
      if (!(bounds.shares[i] > 0) || std::isinf(bounds.shares[i]))
        fail(at("shares", i, bounds.shares[i]) + " must be finite and positive");
  if (!bounds.tokens) return;
  for (std::int64_t i = 0; i < samples; ++i) {
    if (bounds.tokens[i] < 0) fail(at("tokens", i, bounds.tokens[i]) + " is negative");
    if (bounds.tokens[i] > bounds.max_tokens)
      fail(at("tokens", i, bounds.tokens[i]) + " is more than max_tokens = " + std::to_string(bounds.max_tokens) +
           ": this sample fits no rank");
  }
}

// Indices by descending cost; of equal costs, the smaller index first. This is a radix sort: doubles that are not
// negative have the order of their bits.
std::vector<std::int64_t> descending(Costs costs) {
  struct Key {
    std::uint64_t bits;
    std::int64_t index;
    std::size_t digit(int d) const { return (bits >> (8 * d)) & 255; }
  };
  constexpr int kDigits = sizeof(Key::bits);
  std::vector<Key> keys(costs.size), next(costs.size);
  std::array<std::array<std::int64_t, 256>, kDigits> counts{};
  for (std::int64_t i = 0; i < costs.size; ++i) {
    const double cost = costs[i] + 0.0;  // -0.0 becomes 0.0
    std::memcpy(&keys[i].bits, &cost, sizeof cost);
    keys[i].bits = ~keys[i].bits;  // largest first
    keys[i].index = i;
    for (int d = 0; d < kDigits; ++d) ++counts[d][keys[i].digit(d)];
  }
  for (int d = 0; d < kDigits; ++d) {
    if (costs.size && counts[d][keys[0].digit(d)] == costs.size) continue;  // all samples share this digit
    std::int64_t offset = 0;
    for (std::int64_t& count : counts[d]) offset += std::exchange(count, offset);
    for (const Key& key : keys) next[counts[d][key.digit(d)]++] = key;
    keys.swap(next);
  }
  std::vector<std::int64_t> order(costs.size);
  for (std::int64_t i = 0; i < costs.size; ++i) order[i] = keys[i].index;
  return order;
}

std::vector<Sample> sorted_samples(Costs costs, const std::int64_t* tokens, const std::vector<std::int64_t>& order) {
  std::vector<Sample> samples(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    samples[i] = {costs[order[i]], tokens ? tokens[order[i]] : 0, static_cast<std::int64_t>(i)};
  return samples;
}

std::vector<std::int64_t> ranks_of(const Plan& plan, const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> ranks(order.size());
  for (std::size_t rank = 0; rank < plan.size(); ++rank)
    for (const Sample& sample : plan[rank].samples) ranks[order[sample.position]] = rank;
  return ranks;
}

double mean_load(const std::vector<Sample>& samples, std::int64_t ranks) {
  double total = 0;
  for (const Sample& sample : samples) total += sample.cost;
  return total / ranks;
}

Plan fixed_plan(const std::vector<Sample>& samples, std::int64_t ranks) {
  const std::int64_t n = samples.size();
  const Limits limits{n / ranks, (n + ranks - 1) / ranks, kUnbounded, std::vector<double>(ranks, 1.0)};
  Plan plan = longest_first_by_count(samples, limits);
  std::vector<double> zigzag_loads(ranks, 0);
  for (const Sample& sample : samples) zigzag_loads[zigzag_rank(sample.position, ranks)] += sample.cost;
  if (*std::max_element(zigzag_loads.begin(), zigzag_loads.end()) < limits.slowest(plan))
    plan = zigzag_plan(samples, ranks);

  double dominated = n ? samples[0].cost : 0;  // the largest sample together with the smallest others
  for (std::int64_t i = 1; i < limits.min_count; ++i) dominated += samples[n - i].cost;
  refine(plan, limits, std::max(mean_load(samples, ranks), dominated));
  return plan;
}

Limits variable_limits(std::int64_t samples, std::int64_t ranks, const Bounds& bounds) {
  Limits limits{0, samples, bounds.tokens ? bounds.max_tokens : kUnbounded, std::vector<double>(ranks, 1.0)};
  if (!bounds.shares) return limits;
  double total = 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank) total += bounds.shares[rank];
  for (std::int64_t rank = 0; rank < ranks; ++rank) limits.slowness[rank] = total / ranks / bounds.shares[rank];
  return limits;
}

// A plan for tight memory: it balances only the tokens. Throws if even that plan does not fit.
Plan packed(const std::vector<Sample>& samples, const Limits& limits) {
  std::vector<double> tokens(samples.size());
  for (const Sample& sample : samples) tokens[sample.position] = static_cast<double>(sample.tokens);
  const Costs costs{tokens.data(), static_cast<std::int64_t>(tokens.size())};
  const std::vector<std::int64_t> ranks = variable(costs, limits.ranks(), {});
  Plan plan(limits.ranks());
  for (const Sample& sample : samples) plan[ranks[sample.position]].add(sample);
  std::int64_t most = 0;
  for (const Rank& rank : plan) most = std::max(most, rank.tokens);
  if (!limits.has_room(plan))
    fail("max_tokens = " + std::to_string(limits.max_tokens) + " is too tight for this batch on " +
         std::to_string(limits.ranks()) + " ranks: the best balance found needs " + std::to_string(most));
  return plan;
}

}  // namespace

std::vector<std::int64_t> zigzag(Costs costs, std::int64_t ranks) {
  check(costs, ranks);
  const std::vector<std::int64_t> order = descending(costs);
  std::vector<std::int64_t> result(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) result[order[i]] = zigzag_rank(i, ranks);
  return result;
}

std::vector<std::int64_t> fixed(Costs costs, std::int64_t ranks) {
  check(costs, ranks);
  const std::vector<std::int64_t> order = descending(costs);
  return ranks_of(fixed_plan(sorted_samples(costs, nullptr, order), ranks), order);
}

std::vector<std::int64_t> variable(Costs costs, std::int64_t ranks, Bounds bounds) {
  check(costs, ranks);
  check(bounds, costs.size, ranks);
  const std::vector<std::int64_t> order = descending(costs);
  const std::vector<Sample> samples = sorted_samples(costs, bounds.tokens, order);
  const Limits limits = variable_limits(costs.size, ranks, bounds);

  const double largest = samples.empty() ? 0 : samples[0].cost;
  const double fastest = *std::min_element(limits.slowness.begin(), limits.slowness.end());
  const double bound = std::max(mean_load(samples, ranks), largest * fastest);

  Plan plan = fixed_plan(samples, ranks);  // kept if equal sample counts are good enough
  if (!limits.has_room(plan)) plan.clear();
  if (plan.empty() || limits.slowest(plan) > bound * (1 + kTolerance)) {
    Plan other = longest_first_by_time(samples, limits);
    if (plan.empty() || (!other.empty() && limits.slowest(other) < limits.slowest(plan))) plan = std::move(other);
    if (plan.empty()) plan = packed(samples, limits);
    refine(plan, limits, bound);
  }
  return ranks_of(plan, order);
}

}  // namespace freescale
