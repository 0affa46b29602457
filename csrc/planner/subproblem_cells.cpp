// Stage cells: relaxed bounds, integral minima, exact frontiers within what other stages leave.
#include "planner/subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();
}  // namespace

template <int D>
typename Subproblem<D>::Cell& Subproblem<D>::cell(Row& row, int j, int l, int n) {
  if (row.cells.empty()) {
    // the last stage takes all layers that are left, and a given division leaves no choice either
    const bool one_size = !in_.t.division.empty() || (j == stages_ - 1 && types_ > 1);
    row.base = one_size ? n : 1;
  }
  if (n < row.base) {
    std::vector<Cell> cells(at(row.base - n));
    std::move(row.cells.begin(), row.cells.end(), std::back_inserter(cells));
    row.cells = std::move(cells);
    row.base = n;
    row.path = 0;
  }
  const std::size_t i = at(n - row.base);
  if (i >= row.cells.size()) row.cells.resize(i + 1);
  if (row.cells[i].fit == Fit::kUnknown) relax_cell(row.cells[i], j, l, n);
  return row.cells[i];
}

template <int D>
void Subproblem<D>::relax_cell(Cell& cell, int j, int l, int n) const {
  const Stage& stage = stage_[at(j)];
  thread_local std::vector<int> counts;
  counts.assign(at(types_), 0);
  for (int k = 0; k < types_; ++k)
    counts[at(k)] =
        in_.prefix[at(l + n) * at(types_) + at(k)] - in_.prefix[at(l) * at(types_) + at(k)];
  const StepBound<D> weights = weights_of(j);
  cell.known = Known::kRelaxed;
  cell.fit = Fit::kFits;
  for (std::size_t d = 0; d < D + 3; ++d) {
    const double value = stage.relaxed[d].minimum(counts, stage.relaxed_budget);
    if (value < 0) {
      cell.fit = Fit::kTooLarge;
      return;
    }
    cell.bound[d] = value + weights.entry(stage.base, d);
  }
  for (std::size_t d = 0; d < D + 2; ++d) cell.least[d] = floor_ticks(cell.bound[d]);
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
// has it. Excludes the cell when nothing is below the ceiling.
template <int D>
void Subproblem<D>::refine_entry(Cell& cell, int j, int l, int n, std::size_t entry,
                                 std::int64_t& states) {
  // What is minimised is scale * (the entry of the bound), in whole ticks; T is never less.
  std::array<Ticks, D> weight{};
  const Ticks scale = entry < D ? microbatches_ : 1;
  for (std::size_t c = 0; c + 1 < D; ++c) {
    if (entry >= D)
      weight[c] = entry == D ? microbatches_ : 1;
    else
      weight[c] = c == entry ? scale : 0;
  }
  if (entry >= D) weight[D - 1] = 1;
  const StageProblem<D> p = problem(j, l, n);
  StageProblem<1> scalar = scalar_problem<D>(p, weight);
  scalar.bound.incumbent = static_cast<double>(ceiling_);
  if (const auto quick = quick_point<1>(scalar)) {
    const double found = static_cast<double>(quick->cost[0]) * (1.0 + kBoundSlack) + 1.0;
    scalar.bound.incumbent = std::min(scalar.bound.incumbent, found);
  }
  const auto points = solve_stage_frontier<1>(scalar, states);
  const auto best = std::min_element(points.begin(), points.end(),
                                     [](const auto& a, const auto& b) { return a.cost < b.cost; });
  if (best == points.end()) {
    cell.fit = Fit::kExcluded;
    return;
  }
  const Ticks least = (best->cost[0] + scale - 1) / scale;
  cell.least[entry] = std::max(cell.least[entry], least);
  cell.bound[entry] =
      std::max(cell.bound[entry], static_cast<double>(cell.least[entry]) * (1.0 - kBoundSlack));
  if (entry >= D) cell.details->feasible[entry - D] = priced<D>(p, *best);
}

template <int D>
void Subproblem<D>::refine(int j, int l, int n, std::int64_t& states) {
  Cell& refined = cell(j, l, n);
  if (!refined.details) refined.details = std::make_unique<Details>();
  // first the combinations, then every bottleneck dimension
  std::vector<std::size_t> entries{D};
  if (D > 1 && microbatches_ > 1) entries.push_back(D + 1);
  for (std::size_t d = 0; d + 1 < D; ++d)
    if (d == 0 || microbatches_ > 1) entries.push_back(d);  // see cost()
  for (const std::size_t entry : entries)
    if (refined.fit == Fit::kFits) refine_entry(refined, j, l, n, entry, states);
  if (refined.fit == Fit::kFits && microbatches_ == 1) {  // both combinations are the same
    refined.least[D + 1] = refined.least[D];
    refined.details->feasible[1] = refined.details->feasible[0];
  }
  refined.known = Known::kIntegral;
}

// What the other stages cost at least while a stage of a path is opened: one way for each open box,
// since every plan that is looked for lies in one of them.
template <int D>
std::vector<StepBound<D>> Subproblem<D>::other_stages(const std::vector<int>& opened,
                                                      const Path& path, const Box& box) {
  std::vector<Box> boxes{box};
  std::vector<Box> others = boxes_;
  std::sort(others.begin(), others.end(), [](const Box& a, const Box& b) { return b < a; });
  for (const Box& other : others) {
    if (other.bound >= ceiling_) continue;
    if (boxes.size() < kMostWays) {
      boxes.push_back(other);
      continue;
    }
    Box& last = boxes.back();  // stands for all that follow
    last.bound = std::min(last.bound, other.bound);
    for (std::size_t d = 0; d < D; ++d) {
      last.low[d] = std::min(last.low[d], other.low[d]);
      last.high[d] = std::max(last.high[d], other.high[d]);
    }
  }
  std::vector<StepBound<D>> bounds;
  for (const int j : opened) {
    bounds.push_back(weights_of(j));
    bounds.back().others.clear();
    bounds.back().incumbent = static_cast<double>(ceiling_);
  }
  for (const Box& each : boxes) {
    Ticks low = 0;
    for (std::size_t d = counted(); d < D; ++d) low += times(d) * each.low[d];
    if (least_path(each.high, ceiling_ - 1 - low).steps.empty()) continue;
    const std::vector<Ticks> before = sums_before(each.high);
    for (std::size_t i = 0; i < opened.size(); ++i) {
      const int j = opened[i];
      const Step& step = path.steps[at(j)];
      const int n = step.layers;
      OtherStages<D> way;
      Ticks sum = kInfTicks;
      way.dual = kInf;
      // the cell stands for all layers like its own
      const int same = in_.same_layers(step.layer, n);
      for (int l = window_low_[at(j)]; l <= window_high_[at(j)] && l + n <= layers_; ++l) {
        if (in_.same_layers(l, n) != same || before[state(j, l)] >= kInfTicks) continue;
        Ticks after = 0;
        if (j + 1 < stages_) {
          if (l + n < window_low_[at(j) + 1] || l + n > window_high_[at(j) + 1]) continue;
          after = rest_[state(j + 1, l + n)];
        } else if (l + n != layers_) {
          continue;
        }
        if (after >= kInfTicks) continue;
        sum = std::min(sum, before[state(j, l)] + after);
        way.dual = std::min(way.dual,
                            before_dual_[state(j, l)] + after_dual_[state(j + 1, l + n)]);
      }
      if (sum >= kInfTicks) continue;
      way.sum = static_cast<double>(sum + least_sends(j));
      way.dual += static_cast<double>(least_sends(j));
      for (std::size_t d = 0; d < D; ++d) {
        way.largest[d] = d < counted() ? 0.0 : static_cast<double>(each.low[d]);
        if (d >= counted()) way.most[d] = static_cast<double>(each.high[d]);
      }
      bounds[i].others.push_back(way);
    }
  }
  return bounds;
}

// Opens cells of a path, those first whose bound seems least tight, until that was work enough:
// what they teach may lead elsewhere.
template <int D>
void Subproblem<D>::open_path(const Path& path, const Box& box, std::int64_t& states) {
  std::vector<int> opened;
  std::vector<double> gap(at(stages_), 0.0);
  for (int j = 0; j < stages_; ++j) {
    if (path.steps[at(j)].point != nullptr) continue;
    opened.push_back(j);
    gap[at(j)] = slack(path.steps[at(j)], j, path.largest[D - 1]);
  }
  std::stable_sort(opened.begin(), opened.end(),
                   [&](int a, int b) { return gap[at(a)] > gap[at(b)]; });
  const std::vector<StepBound<D>> bounds = other_stages(opened, path, box);
  const std::int64_t before = states;
  for (std::size_t i = 0; i < opened.size() && states - before < kRoundStates; ++i) {
    const Step& step = path.steps[at(opened[i])];
    open(opened[i], step.layer, step.layers, bounds[i], states);
  }
}

template <int D>
void Subproblem<D>::open(int j, int l, int n, const StepBound<D>& rest, std::int64_t& states) {
  Cell& opened = cell(j, l, n);
  if (opened.known == Known::kExact || opened.fit != Fit::kFits) return;
  if (rest.others.empty()) {
    opened.fit = Fit::kExcluded;  // no plan below the ceiling uses it
    return;
  }
  StageProblem<D> p = problem(j, l, n);
  p.bound = rest;
  std::vector<StagePoint<D>> points = solve_stage_frontier<D>(p, states);
  std::stable_sort(points.begin(), points.end(), [&](const auto& a, const auto& b) {
    return part_of_step(a.cost) < part_of_step(b.cost);
  });
  opened.details->points = std::move(points);
  opened.known = Known::kExact;
}

// How far the known point of a refined cell is from its bound, given the tail of the division.
template <int D>
double Subproblem<D>::slack(const Step& step, int j, Ticks tail) {
  const Cell& known = cell(j, step.layer, step.layers);
  const StagePoint<D>& point = known.details->feasible[1];
  if (known.fit != Fit::kFits) return 0.0;
  double gap = std::max(0.0, static_cast<double>(point.cost[D - 1] - tail));
  for (std::size_t d = 0; d + 1 < D; ++d)
    gap += static_cast<double>(point.cost[d] - known.least[d]);
  return std::max(gap, 0.0);
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
