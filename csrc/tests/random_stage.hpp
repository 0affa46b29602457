// Small random stages, and every way to run them.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "planner/stage/stage_kernel.hpp"
#include "planner_plans.hpp"

namespace random_stage {

using namespace autopar;

// A small stage whose whole seconds and bytes make ties and exact fits common.
template <int D>
struct RandomStage {
  StageProblem<D> problem;
  std::vector<Cost<D>> boundary;

  explicit RandomStage(std::mt19937& random) {
    const auto below = [&random](int n) {
      return static_cast<int>(random() % static_cast<unsigned>(n));
    };
    const auto cost = [&](int n) {
      Cost<D> c;
      for (auto& part : c) part = below(n);
      return c;
    };
    StageProblem<D>& p = problem;
    const int types = 1 + below(2), strategies = 1 + below(4), layers = 1 + below(4);
    p.num_layouts = 1 + below(3);
    const std::size_t pairs = planner_plans::at(p.num_layouts * p.num_layouts);
    std::vector<int> layout;
    for (int s = 0; s < strategies; ++s) layout.push_back(below(p.num_layouts));
    for (int i = 0; i < layers; ++i) p.layer_type.push_back(below(types));
    for (int k = 0; k < types; ++k) {
      p.options.emplace_back();
      for (int s = 0; s < strategies; ++s)
        if (below(8) > 0)
          p.options.back().push_back(
              {s, layout[planner_plans::at(s)], below(10), below(5), below(3), cost(10)});
      p.redistribute.emplace_back();
      for (std::size_t i = 0; i < pairs; ++i) p.redistribute.back().push_back(cost(4));
    }
    for (int y = 0; y < p.num_layouts; ++y) {
      p.entry.push_back(cost(3));
      p.exit.push_back(cost(3));
      p.exit_allowed.push_back(below(5) > 0);
    }
    for (std::size_t i = 0; i < pairs; ++i) boundary.push_back(cost(4));
    if (D > 1 && below(2) == 0) {  // a previous stage
      p.predecessor = &boundary;
      p.entry.assign(p.entry.size(), Cost<D>{});
    }
    p.base = cost(5);
    p.budget = below(40);
    p.base_transient = below(4);
    p.base_shared = below(3);
    p.bound.microbatches_less_1 = below(4);
    p.bound.incumbent = 1e15;
  }
  RandomStage(const RandomStage&) = delete;
  RandomStage& operator=(const RandomStage&) = delete;

  // The point of one option per layer, by indices into the options.
  StagePoint<D> point(const std::vector<std::size_t>& choice) const {
    const StageProblem<D>& p = problem;
    StagePoint<D> point;
    Bytes transient = p.base_transient, shared = p.base_shared;
    point.cost = p.base;
    for (std::size_t i = 0; i < choice.size(); ++i) {
      const auto& option = p.options[planner_plans::at(p.layer_type[i])][choice[i]];
      point.cost = point.cost + option.cost;
      if (i == 0) {
        point.first_layout = option.layout;
        point.cost = point.cost + p.entry[planner_plans::at(option.layout)];
      } else {
        point.cost =
            point.cost + p.redistribute[planner_plans::at(p.layer_type[i - 1])][planner_plans::at(
                             point.exit_layout * p.num_layouts + option.layout)];
      }
      point.exit_layout = option.layout;
      point.bytes += option.bytes;
      transient = std::max(transient, option.transient);
      shared = std::max(shared, option.shared);
      point.strategies.push_back(option.strategy);
    }
    point.cost = point.cost + p.exit[planner_plans::at(point.exit_layout)];
    point.bytes += transient + shared;
    return point;
  }

  // All points that fit and end in an allowed layout.
  std::vector<StagePoint<D>> all() const {
    std::vector<StagePoint<D>> points;
    std::vector<std::size_t> choice(problem.layer_type.size(), 0);
    for (const int type : problem.layer_type)
      if (problem.options[planner_plans::at(type)].empty()) return points;
    while (true) {
      const StagePoint<D> found = point(choice);
      if (found.bytes <= problem.budget &&
          problem.exit_allowed[planner_plans::at(found.exit_layout)])
        points.push_back(found);
      std::size_t i = 0;
      while (i < choice.size() &&
             ++choice[i] == problem.options[planner_plans::at(problem.layer_type[i])].size())
        choice[i++] = 0;
      if (i == choice.size()) return points;
    }
  }
};

template <int D>
bool no_slower(const Cost<D>& a, const Cost<D>& b) {
  for (std::size_t d = 0; d < D; ++d)
    if (a[d] > b[d]) return false;
  return true;
}

template <int D>
bool contains(const std::vector<StagePoint<D>>& points, const StagePoint<D>& wanted) {
  return std::any_of(points.begin(), points.end(), [&](const auto& point) {
    return point.strategies == wanted.strategies && point.cost == wanted.cost &&
           point.first_layout == wanted.first_layout && point.exit_layout == wanted.exit_layout;
  });
}

}  // namespace random_stage
