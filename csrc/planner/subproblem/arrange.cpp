// Plans of known points with their layers in other orders.
//
// A point is the least of its stage alone. A move in front of the slowest stage counts once per
// micro-batch, so a plan of such points is slower than one whose stages begin in the layout in
// which the stage before ends.
#include "planner/subproblem/subproblem.hpp"

namespace autopar {
namespace {
// Most layouts of a point whose orders are tried: there are as many orders as permutations.
constexpr std::size_t kMostRuns = 5;
}  // namespace

template <int D>
void Subproblem<D>::offer_way(StagePoint<D> point, std::vector<StagePoint<D>>& ways) const {
  StagePoint<D>& known = ways[at(point.first_layout * layouts_ + point.exit_layout)];
  if (known.strategies.empty() || part_of_step(point.cost) < part_of_step(known.cost))
    known = std::move(point);
}

// Offers the point, and if its layers are of one type the points of the same strategies that keep
// layers of one layout together, or end with one layer of the first layout.
template <int D>
void Subproblem<D>::offer_orders(const StageProblem<D>& p, const StagePoint<D>& point,
                                 std::vector<StagePoint<D>>& ways) const {
  offer_way(point, ways);
  const int type = p.layer_type.front();
  for (const int other : p.layer_type)
    if (other != type) return;
  const auto& options = p.options[at(type)];
  const auto move = [&](int from, int to) {
    return p.redistribute[at(type)][at(from * layouts_ + to)];
  };
  struct Run {
    int layout;
    std::vector<int> strategies;
  };
  std::vector<Run> runs;
  Cost<D> inside = p.base;
  for (const int strategy : point.strategies) {
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const auto& o) { return o.strategy == strategy; });
    auto run = std::find_if(runs.begin(), runs.end(),
                            [&](const Run& r) { return r.layout == option->layout; });
    if (run == runs.end()) run = runs.insert(run, Run{option->layout, {}});
    if (move(run->layout, run->layout) != Cost<D>{}) return;
    inside = inside + option->cost;
    run->strategies.push_back(strategy);
  }
  if (runs.size() < 2 || runs.size() > kMostRuns) return;
  std::vector<std::size_t> order;
  for (Run& run : runs) {
    std::sort(run.strategies.begin(), run.strategies.end());
    order.push_back(order.size());
  }
  do {
    const Run& first = runs[order.front()];
    const int last = runs[order.back()].layout;
    Cost<D> cost = inside + p.entry[at(first.layout)];
    for (std::size_t i = 1; i < order.size(); ++i)
      cost = cost + move(runs[order[i - 1]].layout, runs[order[i]].layout);
    for (const bool closed : {false, true}) {
      StagePoint<D> made{cost, point.bytes, first.layout, closed ? first.layout : last, {}};
      if (!p.exit_allowed[at(made.exit_layout)]) continue;
      if (closed && first.strategies.size() < 2) continue;
      made.cost = made.cost + p.exit[at(made.exit_layout)];
      if (closed) made.cost = made.cost + move(last, first.layout);
      if (made.cost[0] >= kForbidden) continue;
      const StagePoint<D>& known = ways[at(made.first_layout * layouts_ + made.exit_layout)];
      if (!known.strategies.empty() && part_of_step(known.cost) <= part_of_step(made.cost))
        continue;
      for (const std::size_t r : order)
        made.strategies.insert(made.strategies.end(), runs[r].strategies.begin(),
                               runs[r].strategies.end());
      if (closed) {
        const auto moved = made.strategies.begin() + std::ssize(first.strategies) - 1;
        std::rotate(moved, moved + 1, made.strategies.end());
      }
      offer_way(std::move(made), ways);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

// The plan of the least sum of these ways whose stages take at most `cap`, each with the move in
// front of it. Returns the time of the slowest stage; infinite if there is no such plan.
template <int D>
Ticks Subproblem<D>::arranged_within(Ticks cap, const std::vector<std::vector<StagePoint<D>>>& ways,
                                     const std::vector<int>& sizes) {
  struct Reached {  // an exit layout, by the least sum
    Ticks sum = kInfTicks, slowest = 0;
    const StagePoint<D>* way = nullptr;
    int before = 0;  // exit layout of the stage before
  };
  std::vector<std::vector<Reached>> reached(at(stages_), std::vector<Reached>(at(layouts_)));
  for (int j = 0, l = 0; j < stages_; l += sizes[at(j++)])
    for (const StagePoint<D>& way : ways[at(j)]) {
      Reached& to = reached[at(j)][at(way.exit_layout)];
      const Ticks own = part_of_step(way.cost);
      if (j == 0) {
        if (own <= cap && own < to.sum) to = {own, own, &way, 0};
        continue;
      }
      for (int y = 0; y < layouts_; ++y) {
        const Reached& from = reached[at(j - 1)][at(y)];
        const Cost<D>& move =
            move_[at(in_.t.layer_type[l - 1])][at(y * layouts_ + way.first_layout)];
        if (from.way == nullptr || move[0] >= kForbidden) continue;
        const Ticks stage = own + part_of_step(move);
        if (stage <= cap && from.sum + stage < to.sum)
          to = {from.sum + stage, std::max(from.slowest, stage), &way, y};
      }
    }
  const auto& ends = reached.back();
  const auto end = std::min_element(ends.begin(), ends.end(),
                                    [](const auto& a, const auto& b) { return a.sum < b.sum; });
  if (end->way == nullptr) return kInfTicks;
  std::vector<const StagePoint<D>*> points(at(stages_));
  int y = static_cast<int>(end - ends.begin());
  for (int j = stages_ - 1; j >= 0; --j) {
    points[at(j)] = reached[at(j)][at(y)].way;
    y = reached[at(j)][at(y)].before;
  }
  step_of(points, sizes);
  return end->slowest;
}

// Looks for plans with the division of a path, of known points in any order of their layers: the
// least sum, and with a slowest stage that is ever faster.
template <int D>
void Subproblem<D>::arrange(const Path& path, const Region& region) {
  std::vector<std::vector<StagePoint<D>>> ways(at(stages_));
  std::vector<int> sizes;
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    sizes.push_back(step.layers);
    const Cell& known = cell(j, step.layer, step.layers);
    if (!known.details) return;
    std::vector<StagePoint<D>> best(at(layouts_) * at(layouts_));
    if (const Opening* opened = opening(known, region))
      for (const StagePoint<D>& point : opened->points)
        if (point.cost[D - 1] <= region.high[D - 1]) offer_way(point, best);
    const StageProblem<D> p = problem(j, step.layer, step.layers);
    for (const StagePoint<D>& point : known.details->met)
      if (point.cost[D - 1] <= region.high[D - 1]) offer_orders(p, point, best);
    std::erase_if(best, [](const auto& way) { return way.strategies.empty(); });
    if (best.empty()) return;
    ways[at(j)] = std::move(best);
  }
  Ticks fast = 0, slow = arranged_within(kForbidden, ways, sizes);
  while (fast + 1 < slow && slow < kInfTicks) {
    const Ticks cap = fast + (slow - fast) / 2;
    const Ticks slowest = arranged_within(cap, ways, sizes);
    if (slowest <= cap)
      slow = slowest;
    else
      fast = cap;
  }
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
