// One stage given as plain arrays: the smallest total time of a chain of layers within a budget.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

struct StageArrays {
  int num_layers = 0;
  int num_strategies = 0;
  const double* time_s = nullptr;           // (L, S); infinite where a strategy is not allowed
  const double* memory_bytes = nullptr;     // (L, S)
  const double* transition_s = nullptr;     // (L, S, S): from, to; row 0 is not charged
  const double* transient_bytes = nullptr;  // (L, S) or null
  double budget_bytes = 0.0;
  std::function<bool()> interrupted;  // asked now and then; true makes the solver throw Stopped
};

struct StageAnswer {
  bool feasible = false;
  std::vector<int> choice;
  // Of the choice, from the numbers that were given: the search itself counts in ticks and units.
  double total_s = 0.0;
  double memory_bytes = 0.0;  // the sum of what is kept, and the largest transient
  std::int64_t states = 0;
};

// Exact for times up to the rounding of one tick (2^-58 of the largest total). Throws
// std::invalid_argument for what check.hpp refuses, std::length_error when layers differ so much
// that their tables take more than 2 GiB.
StageAnswer solve_stage(const StageArrays& arrays);

}  // namespace autopar
