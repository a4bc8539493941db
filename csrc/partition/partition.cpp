// A good start, then exchanges. The start is the better of zig-zag and longest-first (each sample, largest first, goes
// to the rank that is then least loaded). Then the slowest rank exchanges a pair of samples with the fastest rank that
// helps, again and again. No exchange makes the slowest rank slower, so the result is never worse than the start.
#include "partition.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace freescale {
namespace {

// Good enough: the slowest rank is within this share of the lower bound, far below what a step time can resolve.
constexpr double kTolerance = 1e-5;
// Bounds the time of hard cases; ordinary ones reach the tolerance or a local optimum with far fewer exchanges.
constexpr std::int64_t kExchangesPerRank = 16;
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

struct Sample {
  double cost;
  std::int64_t tokens;
  std::int64_t position;  // in the order of descending cost
};

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

using Plan = std::vector<Rank>;

// How many samples and tokens a rank may hold, and how slow each rank is: its time is load * pace.
struct Rules {
  std::int64_t min_count;
  std::int64_t max_count;
  std::int64_t max_tokens;
  std::vector<double> pace;  // [ranks], 1 for a rank of mean speed

  std::int64_t ranks() const { return static_cast<std::int64_t>(pace.size()); }
  double time(const Plan& plan, std::int64_t rank) const { return plan[rank].load * pace[rank]; }
  double slowest(const Plan& plan) const {
    double slowest = 0;
    for (std::int64_t rank = 0; rank < ranks(); ++rank) slowest = std::max(slowest, time(plan, rank));
    return slowest;
  }
  bool has_room(const Plan& plan) const {
    return std::all_of(plan.begin(), plan.end(), [this](const Rank& rank) { return rank.tokens <= max_tokens; });
  }
};

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

template <typename T>
std::string at(const char* name, std::int64_t i, T value) {
  return std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value);
}

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

// Indices by descending cost, ties by index. Radix sort: doubles that are not negative order like their bits.
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

// ---- starts ----

std::int64_t zigzag_rank(std::int64_t position, std::int64_t ranks) {
  const std::int64_t round = position / ranks, turn = position % ranks;
  return round % 2 == 0 ? turn : ranks - 1 - turn;
}

Plan deal(const std::vector<Sample>& samples, std::int64_t ranks) {
  Plan plan(ranks);
  for (const Sample& sample : samples) plan[zigzag_rank(sample.position, ranks)].add(sample);
  return plan;
}

// Finds the lightest rank, ties by index, in a knock-out tree. Load and rank share one word, the rank in the low bits
// of the mantissa, so that each round is one integer minimum without a branch: four times faster than a heap. Loads
// that differ only in those bits (1 part in 10^13 with 512 ranks) count as tied.
class Lightest {
 public:
  explicit Lightest(std::int64_t ranks) {
    while (leaves_ < static_cast<std::uint64_t>(ranks)) leaves_ *= 2;
    words_.assign(2 * leaves_, kClosed);
    for (std::int64_t rank = 0; rank < ranks; ++rank) words_[leaves_ + rank] = rank;
    for (std::uint64_t node = leaves_ - 1; node > 0; --node)
      words_[node] = std::min(words_[2 * node], words_[2 * node + 1]);
  }

  std::int64_t rank() const { return words_[1] & (leaves_ - 1); }

  // Both change the rank that is lightest now.
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
  std::vector<std::uint64_t> words_;  // 1 is the final, `leaves_` onwards are the ranks
};

// Longest-first with bounded counts: a rank is closed when it is full. The rank of a dominating sample is passed over
// until only the smallest samples are left for it, as the lower bound asks.
Plan longest_first_by_count(const std::vector<Sample>& samples, const Rules& rules) {
  Plan plan(rules.ranks());
  for (Rank& rank : plan) rank.samples.reserve(rules.max_count);
  Lightest lightest(rules.ranks());
  const auto count = [&] { return static_cast<std::int64_t>(plan[lightest.rank()].samples.size()); };
  std::int64_t larger = static_cast<std::int64_t>(samples.size()) - rules.min_count * rules.ranks();
  for (const Sample& sample : samples) {
    while (larger == 0 && count() == rules.min_count) lightest.close();  // no more ranks may exceed the minimum
    if (count() == rules.min_count) --larger;
    Rank& rank = plan[lightest.rank()];
    rank.add(sample);
    if (count() == rules.max_count)
      lightest.close();
    else
      lightest.set_load(rank.load);
  }
  return plan;
}

// Longest-first by the time each rank would then have, among the ranks with room for the tokens; ties go to the rank
// with fewer samples. An empty plan if a sample finds no room.
Plan longest_first_by_time(const std::vector<Sample>& samples, const Rules& rules) {
  Plan plan(rules.ranks());
  std::vector<double> loads(rules.ranks(), 0);  // side by side: this loop is all there is to it
  for (const Sample& sample : samples) {
    std::int64_t best = -1;
    double best_time = std::numeric_limits<double>::infinity();
    for (std::int64_t rank = 0; rank < rules.ranks(); ++rank) {
      const double time = (loads[rank] + sample.cost) * rules.pace[rank];
      if (time > best_time || plan[rank].tokens > rules.max_tokens - sample.tokens) continue;
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

// ---- exchanges ----

struct Exchange {
  double time;             // of the slower of the two ranks afterwards
  std::int64_t give = -1;  // index into the samples of the slow rank; -1: no exchange helps
  std::int64_t take = -1;  // index into the samples of the fast rank; one past the end: nothing in return
};

// The exchange after which the slower of two ranks is fastest. Both lists are sorted, so the best sample to take for
// each one to give is found by a pointer that only moves forward; tokens that do not fit make it look further on.
Exchange best_exchange(const Plan& plan, const Rules& rules, std::int64_t slow, std::int64_t fast) {
  const Rank &from = plan[slow], &to = plan[fast];
  const double slow_pace = rules.pace[slow], fast_pace = rules.pace[fast];
  const double ideal = (from.load * slow_pace - to.load * fast_pace) / (slow_pace + fast_pace);
  const std::int64_t gives = from.samples.size(), size = to.samples.size();
  const bool one_way = gives > rules.min_count && size < rules.max_count;
  const std::int64_t takes = size + one_way;
  const auto cost = [&](std::int64_t take) { return take < size ? to.samples[take].cost : 0.0; };

  Exchange best{from.load * slow_pace};
  std::int64_t split = 0;
  for (std::int64_t give = 0; give < gives; ++give) {
    const Sample& given = from.samples[give];
    const auto fits = [&](std::int64_t take) {
      const std::int64_t moved = given.tokens - (take < size ? to.samples[take].tokens : 0);
      return from.tokens - moved <= rules.max_tokens && to.tokens + moved <= rules.max_tokens;
    };
    const auto look_further = [&](std::int64_t take) {
      const double moved = given.cost - cost(take);
      const double time = std::max((from.load - moved) * slow_pace, (to.load + moved) * fast_pace);
      if (time >= best.time) return false;  // and those beyond are worse still
      if (!fits(take)) return true;
      best = {time, give, take};
      while (--take >= 0 && cost(take) == cost(best.take))
        if (fits(take)) best.take = take;  // of equal samples the first
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

void apply(const Exchange& exchange, Rank& slow, Rank& fast) {
  const bool both_ways = exchange.take < static_cast<std::int64_t>(fast.samples.size());
  const Sample given = take_out(slow, exchange.give);
  if (both_ways) put_in(slow, take_out(fast, exchange.take));
  put_in(fast, given);
}

// Exchanges until the slowest rank is at the bound, or nothing helps it any more.
void refine(Plan& plan, const Rules& rules, double bound) {
  std::set<std::pair<double, std::int64_t>> by_time;
  for (std::int64_t rank = 0; rank < rules.ranks(); ++rank) by_time.emplace(rules.time(plan, rank), rank);
  for (std::int64_t left = kExchangesPerRank * rules.ranks(); left > 0; --left) {
    const auto slow = std::prev(by_time.end());
    if (slow->first <= bound * (1 + kTolerance)) return;
    auto fast = by_time.begin();
    Exchange exchange{};
    for (; fast != slow; ++fast) {
      exchange = best_exchange(plan, rules, slow->second, fast->second);
      if (exchange.give >= 0) break;
    }
    if (fast == slow) return;
    const std::int64_t a = slow->second, b = fast->second;
    apply(exchange, plan[a], plan[b]);
    by_time.erase(slow);
    by_time.erase(fast);
    by_time.emplace(rules.time(plan, a), a);
    by_time.emplace(rules.time(plan, b), b);
  }
}

// ---- modes ----

Plan fixed_plan(const std::vector<Sample>& samples, std::int64_t ranks) {
  const std::int64_t n = samples.size();
  const Rules rules{n / ranks, (n + ranks - 1) / ranks, kUnbounded, std::vector<double>(ranks, 1.0)};
  Plan plan = longest_first_by_count(samples, rules);
  std::vector<double> zigzag_loads(ranks, 0);
  for (const Sample& sample : samples) zigzag_loads[zigzag_rank(sample.position, ranks)] += sample.cost;
  if (*std::max_element(zigzag_loads.begin(), zigzag_loads.end()) < rules.slowest(plan)) plan = deal(samples, ranks);

  double dominated = n ? samples[0].cost : 0;  // the largest sample and the smallest company it can have
  for (std::int64_t i = 1; i < rules.min_count; ++i) dominated += samples[n - i].cost;
  refine(plan, rules, std::max(mean_load(samples, ranks), dominated));
  return plan;
}

Rules variable_rules(std::int64_t samples, std::int64_t ranks, const Bounds& bounds) {
  Rules rules{0, samples, bounds.tokens ? bounds.max_tokens : kUnbounded, std::vector<double>(ranks, 1.0)};
  if (!bounds.shares) return rules;
  double total = 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank) total += bounds.shares[rank];
  for (std::int64_t rank = 0; rank < ranks; ++rank) rules.pace[rank] = total / ranks / bounds.shares[rank];
  return rules;
}

// A plan for tight memory: balances tokens alone, as well as it can. Throws if that does not fit either.
Plan packed(const std::vector<Sample>& samples, const Rules& rules) {
  std::vector<double> tokens(samples.size());
  for (const Sample& sample : samples) tokens[sample.position] = static_cast<double>(sample.tokens);
  const Costs costs{tokens.data(), static_cast<std::int64_t>(tokens.size())};
  const std::vector<std::int64_t> ranks = variable(costs, rules.ranks(), {});
  Plan plan(rules.ranks());
  for (const Sample& sample : samples) plan[ranks[sample.position]].add(sample);
  std::int64_t most = 0;
  for (const Rank& rank : plan) most = std::max(most, rank.tokens);
  if (!rules.has_room(plan))
    fail("max_tokens = " + std::to_string(rules.max_tokens) + " is too tight for this batch on " +
         std::to_string(rules.ranks()) + " ranks: the best balance found needs " + std::to_string(most));
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
  const Rules rules = variable_rules(costs.size, ranks, bounds);

  const double largest = samples.empty() ? 0 : samples[0].cost;
  const double fastest = *std::min_element(rules.pace.begin(), rules.pace.end());
  const double bound = std::max(mean_load(samples, ranks), largest * fastest);

  Plan plan = fixed_plan(samples, ranks);  // where equal counts do as well, they are kept
  if (!rules.has_room(plan)) plan.clear();
  if (plan.empty() || rules.slowest(plan) > bound * (1 + kTolerance)) {
    Plan other = longest_first_by_time(samples, rules);
    if (plan.empty() || (!other.empty() && rules.slowest(other) < rules.slowest(plan))) plan = std::move(other);
    if (plan.empty()) plan = packed(samples, rules);
    refine(plan, rules, bound);
  }
  return ranks_of(plan, order);
}

}  // namespace freescale
