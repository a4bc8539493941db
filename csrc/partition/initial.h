// First plans of the partition solver, which refine.h then improves.
//
// Longest-first: each sample, largest first, goes to the rank that has the least load at that moment.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace freescale::partition {

// The rank of the sample at `position` in zig-zag order: 0 1 2 .. 2 1 0 0 1 2 ..
inline std::int64_t zigzag_rank(std::int64_t position, std::int64_t ranks) {
  const std::int64_t round = position / ranks, turn = position % ranks;
  return round % 2 == 0 ? turn : ranks - 1 - turn;
}

// `samples` are in the order of descending cost in all three.
Plan zigzag_plan(const std::vector<Sample>& samples, std::int64_t ranks);

// Longest-first with bounded sample counts: a rank that is full gets no more. The rank of a dominating sample gets no
// other sample until only the smallest ones are left for it, as the lower bound demands.
Plan longest_first_by_count(const std::vector<Sample>& samples, const Limits& limits);

// Longest-first by the time that each rank would then need, among the ranks with room for the tokens. Of ranks with
// equal times, the one with fewer samples gets the sample. Returns an empty plan if a sample finds no room.
Plan longest_first_by_time(const std::vector<Sample>& samples, const Limits& limits);

}  // namespace freescale::partition
