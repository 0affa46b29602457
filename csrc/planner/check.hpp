// Limits of the planner: values, sizes, and the memory of its tables.
#pragma once

#include "planner/problem.hpp"
#include "planner/stage/solve_stage.hpp"

namespace autopar {

// No time is that large; sums of larger numbers would overflow.
inline constexpr double kLargestSeconds = 1e150;
inline constexpr int kMostLayers = 10000;
inline constexpr int kMostStageLayers = 2000;  // sums of 2^51 units of memory fit in 63 bits
inline constexpr int kMostStrategies = 1024;
inline constexpr int kMostLayouts = 64;  // bits of one word
inline constexpr int kMostAlternatives = 1000;
// For one sub-problem, and for the list of all of them.
inline constexpr double kMostTableBytes = 2.0 * (1U << 30);

// Throw std::invalid_argument with one sentence that names the invalid argument. Arrays must have
// the sizes given by the structure; rows that are not valid are not checked.
void check_tables(const Tables& tables);
void check_settings(const SearchSettings& settings);
void check_stage(const StageArrays& arrays);

}  // namespace autopar
