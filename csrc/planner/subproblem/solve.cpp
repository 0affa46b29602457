// Exact solution of a sub-problem: boxes of limits, cut and refined until none can hold a better
// plan.
#include "planner/subproblem/subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();
}  // namespace

template <int D>
StageProblem<D> Subproblem<D>::problem(int j, int l, int n) const {
  const Tables& t = in_.t;
  const Stage& stage = stage_[at(j)];
  StageProblem<D> p;
  p.layer_type.assign(t.layer_type + l, t.layer_type + l + n);
  p.options = stage.options;
  p.num_layouts = layouts_;
  p.redistribute = move_;
  p.entry = j == 0 ? entry_ : zero_;
  p.exit = j == stages_ - 1 ? exit_ : zero_;
  p.predecessor = j == 0 ? nullptr : &move_[at(t.layer_type[l - 1])];
  const std::size_t last = at(t.layer_type[l + n - 1]) * at(layouts_);
  if (j == stages_ - 1)
    p.exit_allowed.assign(at(layouts_), 1);
  else
    p.exit_allowed.assign(exit_allowed_.begin() + static_cast<std::ptrdiff_t>(last),
                          exit_allowed_.begin() + static_cast<std::ptrdiff_t>(last + at(layouts_)));
  p.base = stage.base;
  p.budget = in_.budget - stage.base_bytes;
  p.base_transient = stage.base_transient;
  p.base_shared = stage.base_shared;
  p.bound.microbatches_less_1 = microbatches_ - 1.0;
  p.watch = watch_;
  return p;
}

// T of a quickly found plan with the division of a path; infinite if none was found.
template <int D>
Ticks Subproblem<D>::quick_step(const Path& path) {
  std::vector<StagePoint<D>> found;
  std::vector<int> sizes;
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    StageProblem<D> p = problem(j, step.layer, step.layers);
    p.bound.incumbent = static_cast<double>(ceiling_);
    auto point = quick_point<D>(p);
    if (!point) return kInfTicks;
    found.push_back(std::move(*point));
    sizes.push_back(step.layers);
  }
  std::vector<const StagePoint<D>*> points;
  for (const auto& point : found) points.push_back(&point);
  return step_of(points, sizes);
}

template <int D>
Ticks Subproblem<D>::step_of(const std::vector<const StagePoint<D>*>& points,
                             const std::vector<int>& sizes) {
  Total total;
  int l = 0;
  for (int j = 0; j < stages_; ++j) {
    Cost<D> cost = points[at(j)]->cost;
    if (j > 0) {
      const int type = in_.t.layer_type[l - 1];
      const int exit = points[at(j - 1)]->exit_layout;
      const Cost<D>& move = move_[at(type)][at(exit * layouts_ + points[at(j)]->first_layout)];
      if (move[0] >= kForbidden) return kInfTicks;
      cost = cost + move;
      if (in_.t.gpipe) {  // a link slower than every stage is the bottleneck
        total.sum += 2 * send_of(type, exit);
        for (std::size_t d = 0; d + 1 < D; ++d)
          total.largest[d] = std::max(total.largest[d], send_of(type, exit));
      }
    }
    total.sum += part_of_step(cost);
    for (std::size_t d = 0; d < D; ++d) total.largest[d] = std::max(total.largest[d], cost[d]);
    l += sizes[at(j)];
  }
  const Ticks step = exact_step(total);
  remember(points, sizes, step);
  return step;
}

template <int D>
void Subproblem<D>::remember(const std::vector<const StagePoint<D>*>& points,
                             const std::vector<int>& sizes, Ticks step) {
  if (!in_.t.gpipe && stages_ > 1) {  // the slowest transfer of the plan may be below the cap
    Ticks slowest = 0;
    int l = 0;
    for (int j = 0; j + 1 < stages_; ++j) {
      l += sizes[at(j)];
      slowest = std::max(slowest, send_of(in_.t.layer_type[l - 1], points[at(j)]->exit_layout));
    }
    step -= (stages_ + microbatches_ - 1) * (transfers(send_cap_) - transfers(slowest));
  }
  if (step >= known_.step) return;
  known_.step = step;
  known_.stage_sizes = sizes;
  known_.strategies.clear();
  for (const auto* point : points)
    known_.strategies.insert(known_.strategies.end(), point->strategies.begin(),
                             point->strategies.end());
}

// T of plans made of one known point per stage of a path; infinite when a stage has none.
template <int D>
Ticks Subproblem<D>::assembled_step(const Path& path, const Region& region) {
  std::vector<const StagePoint<D>*> slowest, others, inside;
  std::vector<int> sizes;
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    sizes.push_back(step.layers);
    if (step.point != nullptr) {
      slowest.push_back(step.point);
      others.push_back(step.point);
      inside.push_back(step.point);
      continue;
    }
    const Cell& known = cell(j, step.layer, step.layers);
    if (known.known < Known::kIntegral || known.fit != Fit::kFits) return kInfTicks;
    slowest.push_back(&known.details->feasible[0]);
    others.push_back(&known.details->feasible[1]);
    inside.push_back(others.back());
    Ticks least = kInfTicks;
    for (const StagePoint<D>& point : known.details->met)
      if (within(point.cost, region.high) && part_of_step(point.cost) < least) {
        least = part_of_step(point.cost);
        inside.back() = &point;
      }
  }
  const Ticks best = std::min(step_of(slowest, sizes), step_of(inside, sizes));
  // stages that are not the slowest may trade time for a shorter tail
  Cost<D> largest{};
  for (const auto* point : slowest)
    for (std::size_t d = 0; d < D; ++d) largest[d] = std::max(largest[d], point->cost[d]);
  for (std::size_t j = 0; j < others.size(); ++j) {
    bool hidden = true;
    for (std::size_t d = 0; d + 1 < D; ++d) hidden = hidden && others[j]->cost[d] <= largest[d];
    if (hidden) slowest[j] = others[j];
  }
  return std::min(best, step_of(slowest, sizes));
}

template <int D>
ItemPlan Subproblem<D>::solve(double limit, const Watch& watch, std::int64_t& states) {
  watch_ = &watch;
  known_ = ItemPlan{};
  lower_ = 0;
  limit_ = limit;
  looked_just_above_ = false;
  try {
    if (!feasible_ || !search(watch, states)) return ItemPlan{};
  } catch (const TooManyLabels&) {
    known_.exact = false;
    known_.too_large = true;
    known_.bound = static_cast<double>(std::min(lower_, known_.step));
    return known_;
  } catch (const DeadlinePassed&) {
    known_.exact = false;
    known_.bound = static_cast<double>(std::min(lower_, known_.step));
    return known_;
  }
  if (static_cast<double>(known_.step) * (1.0 - kBoundSlack) > limit) return ItemPlan{};
  return known_;
}

// Forgets results that hold only for plans below the current ceiling; bounds and points stay valid.
template <int D>
void Subproblem<D>::forget_ceiling() {
  std::vector<Cell> none;
  for (auto& row : rows_)
    for (Cell& cell : row ? row->cells : none) {
      if (cell.fit == Fit::kExcluded) {
        cell.fit = Fit::kUnknown;
      } else if (cell.details) {
        cell.details->openings.clear();
      }
    }
}

template <int D>
void Subproblem<D>::take(InnerStages& stages) {
  std::move(stages.rows.begin(), stages.rows.end(),
            rows_.begin() + static_cast<std::ptrdiff_t>(row_starts_));
  stages.rows.clear();
}

// Keeps bounds and points, which hold whatever the plan. Paths are numbered anew, and how much work
// to spend on a cell is decided anew.
template <int D>
void Subproblem<D>::give(InnerStages& stages) {
  forget_ceiling();
  for (std::size_t r = row_starts_; r + row_starts_ < rows_.size(); ++r) {
    stages.rows.push_back(std::move(rows_[r]));
    if (!stages.rows.back()) continue;
    stages.rows.back()->path = 0;
    for (Cell& known : stages.rows.back()->cells)
      if (known.details) {
        known.details->box_states = 0;
        known.details->failed_states = kForAllStates / 2;
      }
  }
}

// The plan is searched for below this limit, given by the caller and the known plans.
template <int D>
Ticks Subproblem<D>::most() const {
  const double limit = limit_ * (1.0 + kBoundSlack);
  const Ticks wanted =
      limit < static_cast<double>(kForbidden) ? static_cast<Ticks>(limit) : kForbidden;
  return std::min(wanted + 1, known_.step);
}

// True if the search was completed: known_ is the optimum, if it is within the limit.
template <int D>
bool Subproblem<D>::search(const Watch& watch, std::int64_t& states) {
  watch.poll();
  if (stages_ == 1) return solve_one_stage(states);
  const double least = least_bound(limit_);
  if (least == kInf) return false;
  // Nothing is faster than `lower_`. Plans are searched up to a share above it. The work depends on
  // that distance, so the share starts low and is raised while nothing is found, whatever the
  // limit.
  lower_ = floor_ticks(least);
  double share = kFirstShare;
  bool opening = false;
  while (lower_ < most()) {
    ceiling_ = std::min(most(), ceiling(share));
    if (compute_bounds(static_cast<double>(ceiling_))) {
      push_all();
      search_boxes(watch, share, opening, states);
    }
    lower_ = std::max(lower_, std::min(ceiling_, most()));
    share = std::min(share * kGrowth, 1e6);
    if (ceiling_ < most()) forget_ceiling();
  }
  return true;
}

template <int D>
Ticks Subproblem<D>::ceiling(double share) const {
  const double lower = static_cast<double>(lower_);
  return std::min(lower_ + floor_ticks(lower * share), kForbidden) + 2;
}

template <int D>
bool Subproblem<D>::solve_one_stage(std::int64_t& states) {
  ceiling_ = most();
  if (cell(0, 0, layers_).fit != Fit::kFits) return false;
  refine(0, 0, layers_, states);
  const Cell& whole = cell(0, 0, layers_);
  if (whole.fit != Fit::kFits) return false;
  step_of({&whole.details->feasible[0]}, {layers_});
  return true;
}

// One box for all plans below the ceiling, starting at the least value of every maximum by itself.
template <int D>
void Subproblem<D>::push_all() {
  boxes_.clear();
  Limits none;
  none.fill(kInfTicks);
  std::vector<Limits> least((at(stages_) + 1) * (at(layers_) + 1), none);
  least[state(stages_, layers_)] = Limits{};
  for (int j = stages_ - 1; j >= 0; --j)
    for (int l = j; l <= layers_ - (stages_ - j); ++l) {
      const std::size_t here = state(j, l);
      if (before_sum_[here] == kInf) continue;
      watch_->poll_rarely();
      for_each_size(j, l, static_cast<double>(ceiling_), [&](int n, const Bound&) {
        const Limits& rest = least[state(j + 1, l + n)];
        const Cell& stage = cell(j, l, n);
        for (std::size_t d = counted(); d < D; ++d)
          least[here][d] = std::min(least[here][d], std::max(rest[d], stage.least[d]));
      });
    }
  Box all;
  all.low = least[state(0, 0)];
  all.bound = floor_ticks(before_sum_[state(stages_, layers_)]);
  for (std::size_t d = counted(); d < D; ++d) {
    all.high[d] = kForbidden;
    all.bound += times(d) * all.low[d];
  }
  push(all);
}

template <int D>
void Subproblem<D>::push(Box box) {
  if (box.bound >= ceiling_) return;
  box.number = ++box_number_;
  boxes_.push_back(box);
  std::push_heap(boxes_.begin(), boxes_.end());
}

// Searches until no box has a bound below the ceiling, which falls with every better plan.
template <int D>
void Subproblem<D>::search_boxes(const Watch& watch, double& share, bool& opening,
                                 std::int64_t& states) {
  while (!boxes_.empty()) {
    ceiling_ = std::min(ceiling_, most());
    std::pop_heap(boxes_.begin(), boxes_.end());
    Box box = boxes_.back();
    boxes_.pop_back();
    if (box.bound >= ceiling_) break;
    lower_ = std::max(lower_, box.bound);
    watch.poll();
    // upper limit of a maximum if everything else is least
    Ticks low = 0;
    for (std::size_t d = counted(); d < D; ++d) {
      low += times(d) * box.low[d];
      box.high[d] = std::min(box.high[d], box.low[d] + (ceiling_ - 1 - box.bound) / times(d));
    }
    const Path path = least_path(box, ceiling_ - 1 - low);
    if (path.steps.empty()) continue;
    if (path.exact) {
      std::vector<const StagePoint<D>*> points;
      std::vector<int> sizes;
      for (const Step& step : path.steps) {
        points.push_back(step.point);
        sizes.push_back(step.layers);
      }
      step_of(points, sizes);
      ceiling_ = std::min(ceiling_, most());
    }
    box.bound = std::max(box.bound, path.sum + low);
    if (box.bound >= ceiling_) continue;
    Ticks own = path.sum;
    for (std::size_t d = counted(); d < D; ++d)
      own += times(d) * std::max(box.low[d], path.largest[d]);
    if (own >= ceiling_) {
      cut_below(box, path);
      continue;
    }
    refine_path(path, box, share, opening, states);
  }
  boxes_.clear();
}

template <int D>
void Subproblem<D>::cut(const Box& box, std::size_t d, Ticks top) {
  const Ticks middle = box.low[d] + (top - 1 - box.low[d]) / 2;
  Box below = box, above = box;
  below.high[d] = middle;
  above.low[d] = middle + 1;
  above.bound += times(d) * (above.low[d] - box.low[d]);
  push(below);
  push(above);
}

// The path of a box is not the result: plans of the box have a smaller maximum, or cost more.
template <int D>
void Subproblem<D>::cut_below(const Box& box, const Path& path) {
  std::size_t widest = D;
  Ticks most = 0;
  for (std::size_t d = counted(); d < D; ++d) {
    const Ticks width = times(d) * (std::min(path.largest[d], box.high[d]) - box.low[d]);
    if (width > most) {
      most = width;
      widest = d;
    }
  }
  // otherwise all plans in the box cost as much as its path, which is too much
  if (widest < D) cut(box, widest, std::min(path.largest[widest], box.high[widest]));
}

// Before labels are made without a limit, searches once for plans just above the bound: the number
// of labels grows fast with the distance between bound and ceiling.
template <int D>
bool Subproblem<D>::look_just_above(double& share) {
  const Ticks part = (ceiling_ - lower_) / kJustAbove;
  if (looked_just_above_ || part == 0) return false;
  looked_just_above_ = true;
  share = static_cast<double>(part) / static_cast<double>(lower_ + 1);
  ceiling_ = lower_ + part;
  return true;
}

template <int D>
bool Subproblem<D>::cut_wide(const Box& box, double share) {
  std::size_t widest = D;
  Ticks most = static_cast<Ticks>(static_cast<double>(ceiling_) * share) + 1;
  for (std::size_t d = counted(); d < D; ++d)
    if (times(d) * (box.high[d] - box.low[d]) > most) {
      most = times(d) * (box.high[d] - box.low[d]);
      widest = d;
    }
  if (widest == D) return false;
  cut(box, widest, box.high[widest] + 1);
  return true;
}

// Refines the cells of a path that could be better than the best plan.
template <int D>
void Subproblem<D>::refine_path(const Path& path, const Box& box, double& share, bool& opening,
                                std::int64_t& states) {
  // Expensive work is delayed: relaxed minima under each pair of caps, and a narrower box come
  // first.
  bool refined = false, costly = false;
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    Cell& known = cell(j, step.layer, step.layers);
    if (step.layers < kLongStage || known.known >= Known::kIntegral || known.fit != Fit::kFits)
      continue;
    costly = true;
    if (known.known == Known::kRelaxed)
      refined |= relax_under_caps(known, j, step.layer, step.layers);
  }
  if (refined) return push(box);
  if (costly && known_.step < kInfTicks && cut_wide(box, kWide)) return;
  // integral minima first: they are cheap, and their points make a plan
  for (int j = 0; j < stages_; ++j) {
    const Step& step = path.steps[at(j)];
    const Cell& known = cell(j, step.layer, step.layers);
    if (known.known >= Known::kIntegral || known.fit != Fit::kFits) continue;
    if (!refined && known_.step >= kInfTicks) quick_step(path);
    refine(j, step.layer, step.layers, states);
    refined = true;
  }
  // then tangents where the frontier crosses the limit of the tail
  if (!refined) refined = sharpen_path(path, box, states);
  if (refined) {
    assembled_step(path, box);
    return push(box);
  }
  arrange(path, box);
  ceiling_ = std::min(ceiling_, most());
  if (least_of_path(path, box, states)) {
    assembled_step(path, box);
    return push(box);
  }
  if (!opening) {
    opening = true;
    share = kOpeningShare;
    const Ticks narrow = ceiling(share);
    if (narrow < ceiling_) {
      ceiling_ = narrow;
      return push(box);
    }
  }
  if (!open_path(path, box, false, states)) {
    if (cut_wide(box, kNarrow)) return;
    if (look_just_above(share)) return push(box);
    open_path(path, box, true, states);
  }
  assembled_step(path, box);
  push(box);
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
