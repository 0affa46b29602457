// Stages whose layers all differ: so many memory caps that they are searched by bounds.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "planner/stage/stage_kernel.hpp"

using namespace autopar;

namespace {

template <int D>
StageProblem<D> unlike_layers(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto cost = [&](int n) {
    Cost<D> c;
    for (auto& part : c) part = below(n);
    return c;
  };
  StageProblem<D> p;
  p.num_layouts = 1 + below(2);
  for (int i = 0; i < 5; ++i) {
    p.layer_type.push_back(i);
    p.options.emplace_back();
    for (int s = 0; s < 3; ++s)
      p.options.back().push_back(
          {s, below(p.num_layouts), below(40), below(90), below(90), cost(60)});
    p.redistribute.emplace_back();
    for (int c = 0; c < p.num_layouts * p.num_layouts; ++c)
      p.redistribute.back().push_back(cost(9));
  }
  const auto layouts = static_cast<std::size_t>(p.num_layouts);
  p.entry.assign(layouts, Cost<D>{});
  p.exit.assign(layouts, Cost<D>{});
  p.exit_allowed.assign(layouts, 1);
  p.budget = 60 + below(200);
  p.bound.microbatches_less_1 = 2.0;
  p.bound.incumbent = 1e15;
  return p;
}

// Every choice that fits, by odometer.
template <int D>
std::vector<StagePoint<D>> all_points(const StageProblem<D>& p) {
  std::vector<StagePoint<D>> points;
  for (int code = 0; code < 243; ++code) {
    StagePoint<D> point;
    Bytes transient = 0, shared = 0;
    int rest = code;
    for (std::size_t i = 0; i < 5; ++i, rest /= 3) {
      const auto& o = p.options[i][static_cast<std::size_t>(rest % 3)];
      point.cost = point.cost + o.cost;
      if (i == 0)
        point.first_layout = o.layout;
      else
        point.cost = point.cost + p.redistribute[i - 1][static_cast<std::size_t>(
                                      point.exit_layout * p.num_layouts + o.layout)];
      point.exit_layout = o.layout;
      point.bytes += o.bytes;
      transient = std::max(transient, o.transient);
      shared = std::max(shared, o.shared);
      point.strategies.push_back(o.strategy);
    }
    point.bytes += transient + shared;
    if (point.bytes <= p.budget) points.push_back(std::move(point));
  }
  return points;
}

template <int D>
void check_unlike_layers() {
  std::mt19937 random(D);
  int feasible = 0;
  for (int round = 0; round < 300; ++round) {
    CAPTURE(round);
    const StageProblem<D> p = unlike_layers<D>(random);
    const auto all = all_points<D>(p);
    std::int64_t states = 0;
    const auto found = solve_stage_frontier<D>(p, states);
    REQUIRE(found.empty() == all.empty());
    feasible += all.empty() ? 0 : 1;
    for (const auto& point : found)
      CHECK(std::any_of(all.begin(), all.end(), [&](const auto& other) {
        return other.strategies == point.strategies && other.cost == point.cost;
      }));
    for (const auto& point : all)
      CHECK(std::any_of(found.begin(), found.end(), [&](const auto& kept) {
        bool no_slower = D == 1 || kept.exit_layout == point.exit_layout;
        for (std::size_t d = 0; d < D; ++d) no_slower &= kept.cost[d] <= point.cost[d];
        return no_slower;
      }));
  }
  CHECK(feasible >= 100);
}

}  // namespace

TEST_CASE("unlike layers: one cost") { check_unlike_layers<1>(); }
TEST_CASE("unlike layers: two costs") { check_unlike_layers<2>(); }
TEST_CASE("unlike layers: three costs") { check_unlike_layers<3>(); }
