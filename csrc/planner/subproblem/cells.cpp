// Stage cells: relaxed bounds, integral minima, exact frontiers within the limits that other stages
// leave.
#include "planner/stage/mix_of_three.hpp"
#include "planner/subproblem/subproblem.hpp"

namespace autopar {
template <int D>
typename Subproblem<D>::Cell& Subproblem<D>::new_cell(Row& row, int j, int l, int n) {
  if (row.cells.empty()) {
    // only one size: the last stage takes all remaining layers, or the division is given
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
  watch_->poll_rarely();
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

// The same stage with other costs, `of` each cost; the first layer may follow any layout at no
// cost.
template <int E, int D, class Of>
StageProblem<E> with_costs(const StageProblem<D>& p, Of of) {
  StageProblem<E> s;
  s.layer_type = p.layer_type;
  s.options.resize(p.options.size());
  for (std::size_t k = 0; k < p.options.size(); ++k)
    for (const auto& o : p.options[k])
      s.options[k].push_back({o.strategy, o.layout, o.bytes, o.transient, o.shared, of(o.cost)});
  s.num_layouts = p.num_layouts;
  for (const auto& table : p.redistribute) {
    s.redistribute.emplace_back();
    for (const auto& c : table) s.redistribute.back().push_back(of(c));
  }
  for (const auto& c : p.entry) s.entry.push_back(of(c));
  for (const auto& c : p.exit) s.exit.push_back(of(c));
  s.exit_allowed = p.exit_allowed;
  s.base = of(p.base);
  s.budget = p.budget;
  s.base_transient = p.base_transient;
  s.base_shared = p.base_shared;
  s.watch = p.watch;
  return s;
}

// Vector cost of given strategies.
template <int D, int E>
StagePoint<D> priced(const StageProblem<D>& p, const StagePoint<E>& given) {
  StagePoint<D> point;
  point.first_layout = given.first_layout;
  point.exit_layout = given.exit_layout;
  point.strategies = given.strategies;
  point.bytes = given.bytes;
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

// Least weighted sum of a stage's cost, with a point that has it; no strategies if none is below
// the incumbent.
template <int D>
StagePoint<D> Subproblem<D>::least_point(int j, int l, int n, const std::array<Ticks, D>& weight,
                                         double incumbent, Ticks& least, std::int64_t& states) {
  const StageProblem<D> p = problem(j, l, n);
  StageProblem<1> scalar = with_costs<1>(p, [&](const Cost<D>& c) {
    Ticks total = 0;
    for (std::size_t d = 0; d < D; ++d) total += weight[d] * c[d];
    return Cost<1>{total};
  });
  scalar.bound.incumbent = incumbent;
  if (const auto quick = quick_point<1>(scalar)) {
    const Ticks cheap = n < kLongStage ? quick->cost[0] : mix_of_three(scalar, quick->cost[0]);
    const double found = static_cast<double>(cheap) * (1.0 + kBoundSlack) + 1.0;
    scalar.bound.incumbent = std::min(scalar.bound.incumbent, found);
  }
  const auto points = solve_stage_frontier<1>(scalar, states);
  const auto best = std::min_element(points.begin(), points.end(),
                                     [](const auto& a, const auto& b) { return a.cost < b.cost; });
  if (best == points.end()) return {};
  least = best->cost[0];
  return priced(p, *best);
}

// Replaces one entry of a cell's relaxed bound by its integral minimum, and keeps the point of that
// minimum. Excludes the cell if nothing is below the ceiling.
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
  Ticks found = 0;
  StagePoint<D> point = least_point(j, l, n, weight, static_cast<double>(ceiling_), found, states);
  if (point.strategies.empty()) {
    cell.fit = Fit::kExcluded;
    return;
  }
  const Ticks least = (found + scale - 1) / scale;
  cell.least[entry] = std::max(cell.least[entry], least);
  cell.bound[entry] =
      std::max(cell.bound[entry], static_cast<double>(cell.least[entry]) * (1.0 - kBoundSlack));
  if (entry >= D) cell.details->feasible[entry - D] = point;
  cell.details->met.push_back(std::move(point));
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

// Adds a tangent of a cell's frontier where this tail crosses it, through the points on both sides.
// False if it adds nothing.
template <int D>
bool Subproblem<D>::sharpen(Cell& cell, int j, int l, int n, Ticks tail, std::int64_t& states) {
  Details& details = *cell.details;
  const StagePoint<D>*within = nullptr, *beyond = nullptr;
  for (const StagePoint<D>& point : details.met) {
    const StagePoint<D>*& side = point.cost[D - 1] <= tail ? within : beyond;
    const bool nearer =
        side == nullptr ||
        (point.cost[D - 1] <= tail ? part_of_step(point.cost) < part_of_step(side->cost)
                                   : point.cost[D - 1] < side->cost[D - 1]);
    if (nearer) side = &point;
  }
  const Ticks before = least_sum(j, cell, tail);
  if (within != nullptr && (beyond == nullptr || part_of_step(within->cost) <= before))
    return false;
  // no sum of ticks leaves 61 bits: a stage is at most 2^58 / (2 (m + 2)), see Instance
  const Ticks weights = std::min<Ticks>(8 * (microbatches_ + 2), 4096);
  double share = 1.0;  // of the tail
  if (within != nullptr) {
    const double slower =
        static_cast<double>(part_of_step(within->cost) - part_of_step(beyond->cost));
    const double longer = static_cast<double>(beyond->cost[D - 1] - within->cost[D - 1]);
    share = std::max(slower, 0.0) / (std::max(slower, 0.0) + longer);
  }
  Tangent tangent{};
  tangent.tail =
      std::clamp<Ticks>(std::llround(static_cast<double>(weights) * share), 1, weights - 1);
  tangent.sum = weights - tangent.tail;
  for (const Tangent& known : details.tangents)
    if (known.tail == tangent.tail) return false;
  std::array<Ticks, D> weight;
  weight.fill(tangent.sum);
  weight[D - 1] = tangent.tail;
  double incumbent = static_cast<double>(kInfTicks);
  for (const StagePoint<D>& point : details.met)
    incumbent = std::min(incumbent, static_cast<double>(tangent.sum * part_of_step(point.cost) +
                                                        tangent.tail * point.cost[D - 1]) *
                                            (1.0 + kBoundSlack) +
                                        1.0);
  StagePoint<D> point = least_point(j, l, n, weight, incumbent, tangent.least, states);
  if (point.strategies.empty()) return false;
  details.tangents.push_back(tangent);
  const bool fresh = std::none_of(details.met.begin(), details.met.end(),
                                  [&](const auto& met) { return met.cost == point.cost; });
  if (fresh) details.met.push_back(std::move(point));
  return fresh || least_sum(j, cell, tail) > before;
}

template <int D>
bool Subproblem<D>::sharpen_path(const Path& path, const Region& region, std::int64_t& states) {
  bool learnt = false;
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    Cell& known = cell(j, step.layer, step.layers);
    if (step.point != nullptr || known.fit != Fit::kFits) continue;
    for (int round = 0; round < kSharpenings; ++round) {
      if (!sharpen(known, j, step.layer, step.layers, region.high[D - 1], states)) break;
      learnt = true;
    }
  }
  return learnt;
}

// Finds the least part of the sum of a cell's points with a tail of at most `tail`, if that is at
// most `most`. Tangents only bound it, since the frontier is not convex. False if it was known.
template <int D>
bool Subproblem<D>::least_within(Cell& cell, int j, int l, int n, Ticks tail, Ticks most,
                                 std::int64_t& states) {
  Details& details = *cell.details;
  for (const StagePoint<D>& point : details.met)  // nothing as slow is of interest
    if (point.cost[D - 1] <= tail) most = std::min(most, part_of_step(point.cost) - 1);
  Ticks least = least_sum(j, cell, tail);
  if (least > most) return false;
  const StageProblem<D> p = problem(j, l, n);
  StageProblem<2> s =
      with_costs<2>(p, [&](const Cost<D>& c) { return Cost<2>{part_of_step(c), c[D - 1]}; });
  s.tail_floor = s.most_tail = tail;
  s.bound.tail_weight = tail_weight(j, cell, tail);
  OtherStages<2>& other = s.bound.others.front();
  other.largest[1] = other.most[1] = static_cast<double>(tail);
  other.dual = (1.0 - s.bound.tail_weight) * static_cast<double>(tail);
  // first just above the bound, where few points are; far from it there may be none at all
  std::vector<StagePoint<2>> points;
  const Ticks last_width = least / kLastWidth;
  for (Ticks width = least / kFirstWidth + 1; points.empty() && least <= most; width *= 2) {
    const Ticks limit = width > last_width ? most : std::min(most, least + width);
    s.bound.incumbent = static_cast<double>(limit) + static_cast<double>(tail);
    points = solve_stage_frontier<2>(s, states);
    least = limit + 1;
  }
  if (!points.empty()) {
    const auto best =
        std::min_element(points.begin(), points.end(),
                         [](const auto& a, const auto& b) { return a.cost[0] < b.cost[0]; });
    least = best->cost[0];
    details.met.push_back(priced(p, *best));
  }
  details.minima.push_back({tail, least});
  return true;
}

template <int D>
bool Subproblem<D>::least_of_path(const Path& path, const Box& box, std::int64_t& states) {
  Ticks low = 0, high = 0;
  for (std::size_t d = counted(); d < D; ++d) low += times(d) * box.low[d];
  for (std::size_t d = 0; d + 1 < D; ++d) high += box.high[d];
  const Ticks room = ceiling_ - 1 - low - path.sum;  // of a stage above its least
  bool learnt = false;
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    Cell& known = cell(j, step.layer, step.layers);
    if (step.point != nullptr || known.fit != Fit::kFits) continue;
    const Ticks tail = box.high[D - 1];
    Ticks most = least_sum(j, known, tail) + room;
    if (microbatches_ > 1) most = std::min(most, high);
    learnt |= least_within(known, j, step.layer, step.layers, tail, most, states);
  }
  return learnt;
}

// The exact frontier that is valid for the region, or null.
template <int D>
const typename Subproblem<D>::Opening* Subproblem<D>::opening(const Cell& cell,
                                                              const Region& region) const {
  if (!cell.details) return nullptr;
  for (const Opening& opened : cell.details->openings)
    for (const Region& whole : opened.regions) {
      bool holds = true;
      for (std::size_t d = counted(); d < D && holds; ++d)
        holds = whole.low[d] <= region.low[d] && region.high[d] <= whole.high[d];
      if (holds) return &opened;
    }
  return nullptr;
}

// Weight of a cell's tail in the dual: that of the tightest tangent at this limit. Neither time nor
// tail alone is known well for the points that are left there.
template <int D>
double Subproblem<D>::tail_weight(int j, const Cell& cell, Ticks tail) const {
  double weight = stage_[at(j)].tail_weight, most = -1.0;
  for (const Tangent& t : cell.details->tangents) {
    const double sum = static_cast<double>(t.sum);
    const double says =
        (static_cast<double>(t.least) - static_cast<double>(t.tail) * static_cast<double>(tail)) /
        sum;
    if (says <= most) continue;
    most = says;
    weight = static_cast<double>(t.tail) / sum;
  }
  return weight;
}

// Lower bounds of the other stages, in any plan of the region below the ceiling that has a stage
// like this one, by the path just found there; false if there is no such plan.
template <int D>
bool Subproblem<D>::other_stages(int j, const Step& step, const Region& region,
                                 const std::vector<Ticks>& before, double weight,
                                 OtherStages<D>& way) const {
  const int n = step.layers;
  // the cell represents all equal layers
  const int same = in_.same_layers(step.layer, n);
  Ticks sum = kInfTicks;
  for (int l = window_low_[at(j)]; l <= window_high_[at(j)] && l + n <= layers_; ++l) {
    if (before[state(j, l)] >= kInfTicks || in_.same_layers(l, n) != same) continue;
    Ticks after = 0;
    if (j + 1 < stages_) {
      if (l + n < window_low_[at(j) + 1] || l + n > window_high_[at(j) + 1]) continue;
      after = rest_[state(j + 1, l + n)];
    } else if (l + n != layers_) {
      continue;
    }
    if (after < kInfTicks) sum = std::min(sum, before[state(j, l)] + after);
  }
  if (sum >= kInfTicks) return false;
  way.sum = static_cast<double>(sum + least_sends(j));
  double high = 0.0;
  for (std::size_t d = counted(); d < D; ++d) {
    way.largest[d] = static_cast<double>(region.low[d]);
    way.most[d] = static_cast<double>(region.high[d]);
    if (d + 1 < D) high += way.most[d];
  }
  // the longest tail is at least weight * (tail of this stage) + (1 - weight) * (its lower limit);
  // for weights above 1 its upper limit replaces the lower one
  const double low_tail = static_cast<double>(region.low[D - 1]);
  const double high_tail = static_cast<double>(region.high[D - 1]);
  way.dual = way.sum + (1.0 - weight) * (weight <= 1.0 ? low_tail : high_tail);
  if (microbatches_ > 1) way.most_dual = high + weight * high_tail;
  return true;
}

// Opens cells of the path just found, those with the loosest bounds first, until there was enough
// work for one round: results may lead elsewhere. False if one takes too many labels, unless
// `whatever` allows any number.
template <int D>
bool Subproblem<D>::open_path(const Path& path, const Box& box, bool whatever,
                              std::int64_t& states) {
  std::vector<int> opened;
  std::vector<double> gap(at(stages_), 0.0);
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    if (step.point != nullptr || cell(j, step.layer, step.layers).fit != Fit::kFits) continue;
    opened.push_back(j);
    gap[at(j)] = slack(step, j, path.largest[D - 1]);
  }
  std::stable_sort(opened.begin(), opened.end(),
                   [&](int a, int b) { return gap[at(a)] > gap[at(b)]; });
  const std::int64_t first = states;
  for (const bool all : {true, false}) {
    // For all open boxes at once, if single boxes took as much work already.
    std::vector<Region> regions{box};
    if (all) {
      for (const Box& other : boxes_)
        if (other.bound < ceiling_) regions.push_back(other);
      const bool worth = std::any_of(opened.begin(), opened.end(), [&](int j) {
        const Step& step = path.steps[at(j)];
        return cell(j, step.layer, step.layers).details->worth_all();
      });
      if (!worth || regions.size() > kMostBoxes) continue;
    }
    std::vector<StepBound<D>> rest(opened.size());
    for (std::size_t i = 0; i < opened.size(); ++i) {
      const Step& step = path.steps[at(opened[i])];
      rest[i] = weights_of(opened[i]);
      rest[i].tail_weight =
          tail_weight(opened[i], cell(opened[i], step.layer, step.layers), box.high[D - 1]);
      rest[i].others.clear();
      rest[i].incumbent = static_cast<double>(ceiling_);
    }
    for (const Region& region : regions) {
      Ticks low = 0;
      for (std::size_t d = counted(); d < D; ++d) low += times(d) * region.low[d];
      if (least_path(region, ceiling_ - 1 - low).steps.empty()) continue;
      const std::vector<Ticks> before = sums_before(region);
      for (std::size_t i = 0; i < opened.size(); ++i) {
        OtherStages<D> way;
        if (other_stages(opened[i], path.steps[at(opened[i])], region, before, rest[i].tail_weight,
                         way))
          rest[i].others.push_back(way);
      }
    }
    for (std::size_t i = 0; i < opened.size(); ++i) {
      if (states - first >= kRoundStates) return true;
      const int j = opened[i];
      const Step& step = path.steps[at(j)];
      Details& details = *cell(j, step.layer, step.layers).details;
      if (opening(cell(j, step.layer, step.layers), box) != nullptr) continue;
      if (all && !details.worth_all()) continue;
      const std::int64_t before_it = states;
      StageProblem<D> p = problem(j, step.layer, step.layers);
      p.bound = std::move(rest[i]);
      p.tail_floor = regions.front().low[D - 1];
      for (const Region& region : regions) p.tail_floor = std::min(p.tail_floor, region.low[D - 1]);
      if (all)
        p.most_states = details.box_states;
      else if (!whatever)
        p.most_states = kEasyStates;
      bool done = true;
      Opening made{regions, {}};
      try {
        if (!p.bound.others.empty()) made.points = solve_stage_frontier<D>(p, states);
      } catch (const TooManyStates&) {
        done = false;
      }
      if (!all) details.box_states += states - before_it;
      if (done) {
        std::stable_sort(made.points.begin(), made.points.end(), [&](const auto& a, const auto& b) {
          return part_of_step(a.cost) < part_of_step(b.cost);
        });
        details.openings.push_back(std::move(made));
      } else if (all) {
        details.failed_states = details.box_states;
      } else {
        return false;
      }
    }
  }
  return true;
}

// Distance of the known point of a refined cell from its bound, given the tail of the division.
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
