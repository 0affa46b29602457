// Cheap heuristic for chains of equal layers for which two strategies are not enough.
#pragma once

#include "planner/stage/stage_kernel.hpp"

namespace autopar {

// Cost of the cheapest chain a..ab..bc..c found among a few strategies, in any order and possibly
// without one of them, or `known` if none is cheaper. A third strategy fills budgets between those
// of two. The chain exists, so the optimum costs no more. Returns `known` for layers of several
// types.
Ticks mix_of_three(const StageProblem<1>& problem, Ticks known);

}  // namespace autopar
