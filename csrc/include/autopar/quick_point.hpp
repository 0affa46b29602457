// Good feasible points of a stage at almost no cost: the incumbents that make pruning bite.
#pragma once

#include <optional>

#include "autopar/stage_kernel.hpp"

namespace autopar {

// The best point (by the problem's own bound) among: hull steps in order of slope inside one
// layout, and two strategies a...ab...b over all layers. Empty when none of them fits.
template <int D>
std::optional<StagePoint<D>> quick_point(const StageProblem<D>& problem);

extern template std::optional<StagePoint<1>> quick_point<1>(const StageProblem<1>&);
extern template std::optional<StagePoint<2>> quick_point<2>(const StageProblem<2>&);
extern template std::optional<StagePoint<3>> quick_point<3>(const StageProblem<3>&);

}  // namespace autopar
