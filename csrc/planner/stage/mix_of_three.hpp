// A good chain of equal layers at almost no cost, where two strategies are not enough.
#pragma once

#include "planner/stage/stage_kernel.hpp"

namespace autopar {

// The cost of the cheapest chain a..ab..bc..c that is found among a few strategies, in any order
// and each of them possibly left out, or `known` where none is cheaper: budgets between those of
// two strategies are filled by a third. The chain exists, so that the optimum costs no more. Layers
// of several types are left alone.
Ticks mix_of_three(const StageProblem<1>& problem, Ticks known);

}  // namespace autopar
