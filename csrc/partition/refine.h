// Improves a plan by swaps: the slowest rank gives a sample to the fastest rank that helps, and may take one back. This
// is repeated until the slowest rank is at `bound` or no swap helps. No swap makes the slowest rank slower, so the
// result is never worse than the first plan.
#pragma once

#include "plan.h"

namespace freescale::partition {

// `bound` is a lower bound of the time of the slowest rank.
void refine(Plan& plan, const Limits& limits, double bound);

}  // namespace freescale::partition
