// Exact solution of one pipeline stage: the strategy of each of its layers.
//
// Labels (bytes, cost vector) per first layout are extended from the last layer to the first. Three
// rules keep them few, none of which can lose an optimum:
//   * dominance, also across layouts (a label is dropped when another one is no larger and no
//     slower even after the worst difference in redistribution);
//   * the convex-hull (linear programming) bound of the layers still to come; with one dimension
//     and many labels a bound that includes their redistribution, see ChainBound;
//   * equal neighbouring layers in one layout are ordered by strategy, because swapping them
//     changes nothing.
// The two "maximum" memory terms (transient and shared bytes) are enumerated outside, by branch and
// bound where many layer types give many pairs of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

template <int D>
struct StageOption {
  int strategy = 0;
  int layout = 0;
  Bytes bytes = 0;
  Bytes transient = 0;
  Bytes shared = 0;
  Cost<D> cost{};
};

// One way to run all other stages: lower bounds of their part of the sum and of their maxima, by
// dimension. The last maximum is m * (bottleneck dimensions) + tail of a stage, less its part of
// the sum; added to `sum` it bounds T by itself. `dual` is the sum of bottleneck dimensions plus
// weighted tails. The weights of all stages add up to at most one, so it replaces the sum and the
// largest tail together.
template <int D>
struct OtherStages {
  double sum = 0.0;
  double dual = 0.0;
  std::array<double, D + 1> largest{};
  std::array<double, D> most = unlimited();  // upper limit of every dimension, for any stage
  double most_dual =
      std::numeric_limits<double>::infinity();  // upper limit of this stage's part of the dual

  static std::array<double, D> unlimited() {
    std::array<double, D> most;
    most.fill(std::numeric_limits<double>::infinity());
    return most;
  }
  bool allows(const std::array<double, D + 3>& cost) const {
    for (std::size_t d = 0; d < D; ++d)
      if (cost[d] * (1.0 - kBoundSlack) > most[d]) return false;
    return cost[D + 2] * (1.0 - kBoundSlack) <= most_dual;
  }
};

// Lower bound of the step time T of any plan in which this stage costs at least `cost`. The cost
// vector is followed by lower bounds of two combinations: m * (sum of bottleneck dimensions) +
// tail, and (sum of bottleneck dimensions) + tail. They show that the smallest time and the
// smallest tail need not come from the same strategies, for the slowest stage and for others. The
// last entry is the stage's part of `dual`.
template <int D>
struct StepBound {
  using Vector = std::array<double, D + 3>;

  std::vector<OtherStages<D>> others{OtherStages<D>{}};  // alternatives, one of which holds
  double microbatches_less_1 = 0.0;
  double tail_weight = 0.0;  // of this stage, in the dual
  double incumbent = 0.0;    // labels whose bound exceeds it are dropped

  // Entry `d` of the vector that belongs to an exact cost.
  double entry(const std::array<Ticks, D>& cost, std::size_t d) const {
    if (d < D) return static_cast<double>(cost[d]);
    const double weight = d == D ? microbatches_less_1 + 1.0 : 1.0;
    double total = static_cast<double>(cost[D - 1]) * (d == D + 2 ? tail_weight : 1.0);
    for (std::size_t c = 0; c + 1 < D; ++c) total += weight * static_cast<double>(cost[c]);
    return total;
  }
  double with(const OtherStages<D>& other, const Vector& cost) const {
    double sum = 0.0, steady = 0.0;
    for (std::size_t d = 0; d + 1 < D; ++d) {
      sum += cost[d];
      steady += microbatches_less_1 * std::max(cost[d], other.largest[d]);
    }
    const double tail = std::max({cost[D - 1], other.largest[D - 1], cost[D + 1] - sum});
    return std::max(other.sum + std::max({sum + steady + tail, cost[D], sum + other.largest[D]}),
                    other.dual + cost[D + 2] + steady);
  }
  bool prunes(const Vector& cost) const {
    for (const auto& other : others)
      if (other.allows(cost) && with(other, cost) * (1.0 - kBoundSlack) <= incumbent) return false;
    return true;
  }
  double least(const Vector& cost) const {
    double best = std::numeric_limits<double>::infinity();
    for (const auto& other : others) best = std::min(best, with(other, cost));
    return best;
  }
};

inline constexpr Ticks kNoFloor = std::numeric_limits<Ticks>::min() / 2;

template <int D>
struct StageProblem {
  std::vector<int> layer_type;                       // n, indices into `options`
  std::vector<std::vector<StageOption<D>>> options;  // by type, ascending strategy
  int num_layouts = 1;
  std::vector<std::vector<Cost<D>>> redistribute;     // by producing type: Y*Y, from * Y + to
  std::vector<Cost<D>> entry;                         // Y: before the first layer
  std::vector<Cost<D>> exit;                          // Y: after the last layer
  const std::vector<Cost<D>>* predecessor = nullptr;  // *Y of the boundary to the previous stage
  std::vector<std::uint8_t> exit_allowed;             // Y
  Cost<D> base{};                                     // cost of the stage without its layers
  Bytes budget = 0;                                   // for kept + transient + shared
  Bytes base_transient = 0;
  Bytes base_shared = 0;
  // Another stage has a tail of at least this: shorter tails of this stage are all alike.
  Ticks tail_floor = kNoFloor;
  // Points with a longer tail do not count, and of the others only the best one does.
  Ticks most_tail = kInfTicks;
  StepBound<D> bound;
  const Watch* watch = nullptr;  // polled by the kernel, which passes its exceptions on
  std::int64_t most_states = std::numeric_limits<std::int64_t>::max();  // else TooManyStates

  bool only_best() const { return D == 1 || most_tail < kInfTicks; }
};

// Thrown if there are more labels than the problem allows.
struct TooManyStates {};

// Most bytes of the labels of one call, whatever the problem allows; above, TooManyLabels is
// thrown.
inline constexpr std::size_t kMostLabelBytes = std::size_t{1} << 30;
struct TooManyLabels : std::length_error {
  using std::length_error::length_error;
};

template <int D>
struct StagePoint {
  Cost<D> cost{};   // base, entry and exit included
  Bytes bytes = 0;  // kept + transient + shared
  int first_layout = 0;
  int exit_layout = 0;
  std::vector<int> strategies;
};

// Pareto-minimal points per (first layout, exit layout); empty if nothing fits in budget and bound.
// Where only the best point counts, exits are not kept apart, and the incumbent tightens as points
// are found. `states` is increased by the number of labels created. Throws TooManyStates,
// TooManyLabels and the exceptions of the problem's watch.
template <int D>
std::vector<StagePoint<D>> solve_stage_frontier(const StageProblem<D>& problem,
                                                std::int64_t& states);

extern template std::vector<StagePoint<1>> solve_stage_frontier<1>(const StageProblem<1>&,
                                                                   std::int64_t&);
extern template std::vector<StagePoint<2>> solve_stage_frontier<2>(const StageProblem<2>&,
                                                                   std::int64_t&);
extern template std::vector<StagePoint<3>> solve_stage_frontier<3>(const StageProblem<3>&,
                                                                   std::int64_t&);

// Good feasible points of a stage at almost no cost: incumbents that make pruning effective.
//
// The best point (by the problem's bound) among: hull steps in order of slope inside one layout,
// and two strategies a...ab...b over all layers. Empty if none of them fits.
template <int D>
std::optional<StagePoint<D>> quick_point(const StageProblem<D>& problem);

extern template std::optional<StagePoint<1>> quick_point<1>(const StageProblem<1>&);
extern template std::optional<StagePoint<2>> quick_point<2>(const StageProblem<2>&);
extern template std::optional<StagePoint<3>> quick_point<3>(const StageProblem<3>&);

}  // namespace autopar
