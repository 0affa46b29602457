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
  std::function<bool()> interrupted;  // polled; true makes the solver throw Stopped
};

struct StageAnswer {
  bool feasible = false;
  std::vector<int> choice;
  // Totals of the choice from the given numbers: the search itself counts in ticks and units.
  double total_s = 0.0;
  double memory_bytes = 0.0;  // kept bytes of all layers plus the largest transient
  std::int64_t states = 0;
};

// Exact for times up to the rounding of one tick (2^-58 of the largest total). Throws
// std::invalid_argument for inputs that check.hpp refuses, std::length_error if layers differ so
// much that their tables take more than 2 GiB.
StageAnswer solve_stage(const StageArrays& arrays);

}  // namespace autopar
