// Stage cells: what the other stages cost at least, integral minima, exact frontiers.
#include "planner/subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();
}  // namespace

// Keeps ways that no other one beats in everything; merges into the last one when there are many,
// which keeps them valid bounds.
template <int D>
void Subproblem<D>::offer_way(std::vector<OtherStages<D>>& ways, const OtherStages<D>& way) const {
  constexpr std::size_t kMostWays = 12;
  const auto no_worse = [](const OtherStages<D>& a, const OtherStages<D>& b) {
    if (a.sum > b.sum || a.dual > b.dual) return false;
    for (std::size_t d = 0; d < D + 1; ++d)
      if (a.largest[d] > b.largest[d]) return false;
    return true;
  };
  for (const auto& kept : ways)
    if (no_worse(kept, way)) return;
  std::erase_if(ways, [&](const auto& kept) { return no_worse(way, kept); });
  if (ways.size() < kMostWays) {
    ways.push_back(way);
    return;
  }
  OtherStages<D>& last = ways.back();
  last.sum = std::min(last.sum, way.sum);
  last.dual = std::min(last.dual, way.dual);
  for (std::size_t d = 0; d < D + 1; ++d)
    last.largest[d] = std::min(last.largest[d], way.largest[d]);
}

// Pareto-minimal ways of the stages before and after every (stage, layer).
template <int D>
void Subproblem<D>::compute_ways(double limit) {
  const std::size_t size = (at(stages_) + 1) * (at(layers_) + 1);
  before_ways_.assign(size, {});
  after_ways_.assign(size, {});
  before_ways_[state(0, 0)].push_back({});
  after_ways_[state(stages_, layers_)].push_back({});
  const auto extend = [&](int j, int l, bool forward) {
    const std::size_t here = state(j, l);
    if (before_sum_[here] == kInf) return;
    watch_->poll();
    for_each_size(j, l, limit, [&](int n, const Bound& cell) {
      const std::size_t there = state(j + 1, l + n);
      if (after_sum_[there] == kInf) return;
      const auto& sources = forward ? before_ways_[here] : after_ways_[there];
      auto& target = forward ? before_ways_[there] : after_ways_[here];
      for (const OtherStages<D>& source : sources) {
        OtherStages<D> way = source;
        way.sum += part_of_sum(cell) + least_sends(j);
        way.dual += cell[D + 2] + least_sends(j);
        Bound largest{};
        for (std::size_t d = 0; d < D + 1; ++d) largest[d] = source.largest[d];
        raise_to(largest, cell);
        for (std::size_t d = counted(); d < D + 1; ++d) way.largest[d] = largest[d];
        const double sum = way.sum + (forward ? after_sum_[there] : before_sum_[here]);
        const double dual = way.dual + (forward ? after_dual_[there] : before_dual_[here]);
        if (step(sum, dual, largest) * (1.0 - kBoundSlack) <= limit) offer_way(target, way);
      }
    });
  };
  for (int j = 0; j < stages_; ++j)
    for (int l = j; l <= layers_ - (stages_ - j); ++l) extend(j, l, true);
  for (int j = stages_ - 1; j >= 0; --j)
    for (int l = j; l <= layers_ - (stages_ - j); ++l) extend(j, l, false);
}

// What the rest of the pipeline costs at least when stage j has layers l..l+n-1 (with one layer
// type: n layers, wherever they are).
template <int D>
StepBound<D> Subproblem<D>::kernel_bound(int j, int l, int n, double limit) {
  StepBound<D> bound = weights_of(j);
  bound.incumbent = limit;
  bound.others.clear();
  Bound cell;
  if (cell_bound(j, l, n, cell) == Fit::kTooLarge) return bound;
  for (int first = one_type_ ? j : l; first <= (one_type_ ? layers_ - n : l); ++first) {
    for (const auto& before : before_ways_[state(j, first)])
      for (const auto& after : after_ways_[state(j + 1, first + n)]) {
        OtherStages<D> way;
        way.sum = before.sum + after.sum + least_sends(j);
        way.dual = before.dual + after.dual + least_sends(j);
        for (std::size_t d = 0; d < D + 1; ++d)
          way.largest[d] = std::max(before.largest[d], after.largest[d]);
        if (bound.with(way, cell) * (1.0 - kBoundSlack) <= limit) offer_way(bound.others, way);
      }
  }
  return bound;
}

// The same stage with one cost, a weighted sum of its dimensions; the first layer may follow
// anything at no cost.
template <int D>
StageProblem<1> scalar_problem(const StageProblem<D>& p, const std::array<Ticks, D>& weight) {
  const auto scalar = [&](const Cost<D>& c) {
    Ticks total = 0;
    for (std::size_t d = 0; d < D; ++d) total += weight[d] * c[d];
    return Cost<1>{total};
  };
  StageProblem<1> s;
  s.layer_type = p.layer_type;
  s.options.resize(p.options.size());
  for (std::size_t k = 0; k < p.options.size(); ++k)
    for (const auto& o : p.options[k])
      s.options[k].push_back(
          {o.strategy, o.layout, o.bytes, o.transient, o.shared, scalar(o.cost)});
  s.num_layouts = p.num_layouts;
  for (const auto& table : p.redistribute) {
    s.redistribute.emplace_back();
    for (const auto& c : table) s.redistribute.back().push_back(scalar(c));
  }
  for (const auto& c : p.entry) s.entry.push_back(scalar(c));
  for (const auto& c : p.exit) s.exit.push_back(scalar(c));
  s.exit_allowed = p.exit_allowed;
  s.base = scalar(p.base);
  s.budget = p.budget;
  s.base_transient = p.base_transient;
  s.base_shared = p.base_shared;
  s.watch = p.watch;
  return s;
}

// The vector cost of given strategies.
template <int D>
StagePoint<D> priced(const StageProblem<D>& p, const StagePoint<1>& scalar) {
  StagePoint<D> point;
  point.first_layout = scalar.first_layout;
  point.exit_layout = scalar.exit_layout;
  point.strategies = scalar.strategies;
  point.bytes = scalar.bytes;
  point.cost = p.base + p.entry[at(point.first_layout)] + p.exit[at(point.exit_layout)];
  int before = -1;
  for (std::size_t i = 0; i < point.strategies.size(); ++i) {
    const auto& options = p.options[at(p.layer_type[i])];
    const auto o = std::find_if(options.begin(), options.end(), [&](const auto& option) {
      return option.strategy == point.strategies[i];
    });
    point.cost = point.cost + o->cost;
    if (before >= 0)
      point.cost = point.cost +
                   p.redistribute[at(p.layer_type[i - 1])][at(before * p.num_layouts + o->layout)];
    before = o->layout;
  }
  return point;
}

// Replaces one entry of a cell's relaxed bound by its integral minimum, and keeps the point that
// has it. Excludes the cell when nothing is as good as the limit.
template <int D>
void Subproblem<D>::refine_entry(int j, int l, int n, std::size_t entry, const StepBound<D>& rest,
                                 double limit, std::int64_t& states) {
  // What is minimised is scale * (the entry of the bound), in whole ticks.
  std::array<Ticks, D> weight{};
  const Ticks scale = entry == D + 2 ? kWeights : entry < D ? microbatches_ : 1;
  for (std::size_t c = 0; c + 1 < D; ++c) {
    if (entry >= D)
      weight[c] = entry == D ? microbatches_ : scale;
    else
      weight[c] = c == entry ? scale : 0;
  }
  if (entry >= D) weight[D - 1] = entry == D + 2 ? stage_[at(j)].tail_weight : 1;
  // T is at least others + factor * scaled entry
  const double factor = entry == D + 2 ? 1.0 / kWeights : 1.0;
  double others = kInf;
  for (const auto& other : rest.others) {
    double steady = 0.0;
    for (std::size_t c = 0; c + 1 < D; ++c) steady += rest.microbatches_less_1 * other.largest[c];
    double sum = other.sum;
    if (entry < D) sum += other.largest[D - 1];
    if (entry == D + 1) sum += steady;
    if (entry == D + 2) sum = other.dual + steady;
    others = std::min(others, sum);
  }
  const StageProblem<D> p = problem(j, l, n);
  StageProblem<1> scalar = scalar_problem<D>(p, weight);
  scalar.bound.others = {{others / factor, 0.0, {}}};
  scalar.bound.incumbent = limit / factor;
  if (const auto quick = quick_point<1>(scalar)) {
    const double found = static_cast<double>(quick->cost[0]) * (1.0 + kBoundSlack) + 1.0;
    scalar.bound.incumbent = std::min(scalar.bound.incumbent, others / factor + found);
  }
  const auto points = solve_stage_frontier<1>(scalar, states);
  const auto best = std::min_element(points.begin(), points.end(),
                                     [](const auto& a, const auto& b) { return a.cost < b.cost; });
  const std::size_t key = bound_key(j, l, n);
  if (best == points.end()) {
    cell_fit_[key] = Fit::kExcluded;
    return;
  }
  const double least =
      static_cast<double>(best->cost[0]) * (1.0 - kBoundSlack) / static_cast<double>(scale);
  cell_bound_[key][entry] = std::max(cell_bound_[key][entry], least);
  if (entry >= D) cells_[bound_key(j, l, n)].feasible[entry - D] = priced<D>(p, *best);
}

template <int D>
void Subproblem<D>::refine(int j, int l, int n, double limit, std::int64_t& states) {
  Cell& cell = cells_[bound_key(j, l, n)];
  const std::size_t key = bound_key(j, l, n);
  const StepBound<D> rest = kernel_bound(j, l, n, limit);
  cell_refined_[key] = 1;
  if (rest.others.empty()) cell_fit_[key] = Fit::kExcluded;  // no plan within the limit uses it
  // first the combinations, then every bottleneck dimension
  std::vector<std::size_t> entries{D};
  if (D > 1) entries.insert(entries.end(), {D + 1, D + 2});
  for (std::size_t d = 0; d + 1 < D; ++d)
    if (d == 0 || microbatches_ > 1) entries.push_back(d);  // see cost()
  for (const std::size_t entry : entries)
    if (cell_fit_[key] == Fit::kFits) refine_entry(j, l, n, entry, rest, limit, states);
  cell.known = Known::kIntegral;
  if (D == 1 && cell_fit_[key] == Fit::kFits) {  // one stage: its combined cost is the objective
    cell.points = {cell.feasible[0]};
    cell.known = Known::kExact;
  }
}

// Moves weight to the tails of those stages that hold the largest ones, by the points that are best
// for the present weights; averaged over rounds, so that the weights settle. True when changed.
template <int D>
bool Subproblem<D>::weigh_tails(const std::vector<const Partial*>& path,
                                const std::vector<int>& sizes, int round, double limit,
                                std::int64_t& states) {
  if (stages_ < 2 || stages_ > kWeights) return false;
  std::vector<Ticks> tails;
  int l = 0;
  for (int j = 0; j < stages_; ++j) {
    const Cell& cell = cells_[bound_key(j, l, sizes[at(j)])];
    if (path[at(j)]->cell != nullptr)
      tails.push_back(cell.points[at(path[at(j)]->point)].cost[D - 1]);
    else if (!cell.feasible[2].strategies.empty())
      tails.push_back(cell.feasible[2].cost[D - 1]);
    else
      return false;
    l += sizes[at(j)];
  }
  const Ticks largest = *std::max_element(tails.begin(), tails.end());
  const Ticks heavy = largest - largest / 16;
  const auto count = std::count_if(tails.begin(), tails.end(), [&](Ticks t) { return t >= heavy; });
  std::vector<Ticks> weight(at(stages_), 0);
  for (int j = 0; j < stages_; ++j) {
    const double target = tails[at(j)] >= heavy ? 1.0 / static_cast<double>(count) : 0.0;
    double& average = stage_[at(j)].average_weight;
    average += (target - average) / (round + 1);
    weight[at(j)] = static_cast<Ticks>(average * kWeights);
  }
  bool changed = false;
  for (int j = 0; j < stages_; ++j) {
    Stage& stage = stage_[at(j)];
    if (stage.tail_weight == weight[at(j)]) continue;
    changed = true;
    stage.tail_weight = weight[at(j)];
    relax(j);
    const StepBound<D> weights = weights_of(j);
    std::vector<int> counts(at(types_));
    for (int first = one_type_ ? 0 : j; first <= (one_type_ ? 0 : layers_ - 1); ++first)
      for (int n = 1; n <= layers_ - first; ++n) {
        const std::size_t key = bound_key(j, first, n);
        if (cell_fit_[key] != Fit::kFits) continue;
        for (int k = 0; k < types_; ++k)
          counts[at(k)] = in_.prefix[at(first + n) * at(types_) + at(k)] -
                          in_.prefix[at(first) * at(types_) + at(k)];
        cell_bound_[key][D + 2] = stage.relaxed[D + 2].minimum(counts, stage.relaxed_budget) +
                                  weights.entry(stage.base, D + 2);
      }
  }
  if (!changed) return false;
  compute_bounds(limit);
  compute_ways(limit);
  l = 0;
  for (int j = 0; j < stages_; ++j) {
    const int n = sizes[at(j)];
    if (cell_fit_[bound_key(j, l, n)] == Fit::kFits) {
      const StepBound<D> rest = kernel_bound(j, l, n, limit);
      if (rest.others.empty())
        cell_fit_[bound_key(j, l, n)] = Fit::kExcluded;
      else
        refine_entry(j, l, n, D + 2, rest, limit, states);
    }
    l += n;
  }
  return true;
}

template <int D>
void Subproblem<D>::open(int j, int l, int n, double limit, std::int64_t& states) {
  Cell& cell = cells_[bound_key(j, l, n)];
  StageProblem<D> p = problem(j, l, n);
  p.bound = kernel_bound(j, l, n, limit);
  cell.points = solve_stage_frontier<D>(p, states);
  cell.known = Known::kExact;
}

// How far the known point of a refined cell is from its bound, given the tail of the division.
template <int D>
double Subproblem<D>::slack(int j, int l, int n, Ticks tail) {
  const StagePoint<D>& point = cells_[bound_key(j, l, n)].feasible[1];
  Bound bound;
  if (point.strategies.empty() || cell_bound(j, l, n, bound) != Fit::kFits) return 0.0;
  double gap = std::max(0.0, static_cast<double>(point.cost[D - 1] - tail));
  for (std::size_t d = 0; d + 1 < D; ++d) gap += static_cast<double>(point.cost[d]) - bound[d];
  return std::max(gap, 0.0);
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
