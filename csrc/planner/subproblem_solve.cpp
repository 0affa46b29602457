// Exact solution of a sub-problem: division over stages on bounds, opened lazily.
#include "planner/subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();

// A double lower bound as ticks that are certainly not above it.
Ticks floor_ticks(double value) { return static_cast<Ticks>(value * (1.0 - kBoundSlack)); }
}  // namespace

template <int D>
double Subproblem<D>::bound_of(double sum, double dual, const Bound& largest, std::size_t s_before,
                               std::size_t s_after) const {
  Bound all = largest;
  for (std::size_t d = 0; d < D + 1; ++d)
    all[d] = std::max({all[d], before_max_[s_before][d], after_max_[s_after][d]});
  return step(sum + before_sum_[s_before] + after_sum_[s_after],
              dual + before_dual_[s_before] + after_dual_[s_after], all);
}

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

template <int D>
void Subproblem<D>::offer(std::vector<Partial>& list, const Partial& label) const {
  const auto no_worse = [](const Partial& a, const Partial& b) {
    if (a.sum > b.sum || a.dual > b.dual) return false;
    for (std::size_t d = 0; d < D; ++d)
      if (a.largest[d] > b.largest[d]) return false;
    return a.combined <= b.combined;
  };
  for (const Partial& kept : list)
    if (no_worse(kept, label)) return;
  std::erase_if(list, [&](const Partial& kept) { return no_worse(label, kept); });
  list.push_back(label);
}

template <int D>
std::vector<std::vector<typename Subproblem<D>::Partial>> Subproblem<D>::divide(double limit) {
  const int any = layouts_;  // list of labels that do not depend on the entry layout
  const std::size_t lists = at(layouts_) + 1;
  std::vector<std::vector<Partial>> labels((at(stages_) + 1) * (at(layers_) + 1) * lists);
  labels[state(stages_, layers_) * lists + at(any)].push_back(Partial{});
  const Cell unknown;
  for (int j = stages_ - 1; j >= 0; --j)
    for (int l = j; l <= layers_ - (stages_ - j); ++l) {
      const std::size_t here = state(j, l);
      if (before_sum_[here] == kInf || after_sum_[here] == kInf) continue;
      for_each_size(j, l, limit, [&](int n, const Bound& bound) {
        const std::size_t there = state(j + 1, l + n);
        if (after_sum_[there] == kInf) return;
        const double sends = least_sends(j);
        Bound own_largest{};
        raise_to(own_largest, bound);
        if (bound_of(sends + part_of_sum(bound), sends + bound[D + 2], own_largest, here, there) *
                (1.0 - kBoundSlack) >
            limit)
          return;
        const auto found = cells_.find(bound_key(j, l, n));
        const Cell& cell = found == cells_.end() ? unknown : found->second;
        const int type = in_.t.layer_type[l + n - 1];
        // combine one way to run this stage with every way to run the following ones
        const StepBound<D> weights = weights_of(j);
        const auto combine = [&](const Cost<D>& own, double combined, double dual, int first,
                                 int exit, int point) {
          for (int list = 0; list <= any; ++list) {
            if (j < stages_ - 1 && list != any && exit >= 0 && list != exit) continue;
            if (j < stages_ - 1 && list != any &&
                !exit_allowed_[at(type) * at(layouts_) + at(list)])
              continue;
            const auto& following = labels[there * lists + at(list)];
            for (std::size_t f = 0; f < following.size(); ++f) {
              watch_->poll_rarely();
              const Partial& rest = following[f];
              for (int entry = 0; entry < (first < 0 || j == 0 ? 1 : layouts_); ++entry) {
                Cost<D> a = own;
                if (first >= 0 && j > 0)
                  a = a + move_[at(in_.t.layer_type[l - 1])][at(entry * layouts_ + first)];
                Partial label;
                label.sum = rest.sum;
                Ticks send = 0;
                if (in_.t.gpipe && j + 1 < stages_)
                  send = exit < 0 ? least_send_ : send_of(type, exit);
                label.sum += 2 * send;
                label.combined = std::max(rest.combined, combined);
                label.dual = rest.dual + 2.0 * static_cast<double>(send) +
                             (point < 0 ? dual : weights.entry(a, D + 2));
                Bound largest{};
                largest[D] = std::max(label.combined, before_max_[here][D]);
                for (std::size_t d = 0; d < D; ++d) {
                  if (d + 1 < D) label.sum += a[d];
                  if (d < counted()) continue;
                  label.largest[d] = std::max(rest.largest[d], a[d]);
                  if (d + 1 < D) label.largest[d] = std::max(label.largest[d], send);
                  largest[d] =
                      std::max(static_cast<double>(label.largest[d]), before_max_[here][d]);
                }
                if (step(static_cast<double>(label.sum) + before_sum_[here],
                         label.dual + before_dual_[here], largest) *
                        (1.0 - kBoundSlack) >
                    limit)
                  continue;
                label.layers = n;
                label.cell = cell.known == Known::kExact ? &cell : nullptr;
                label.point = point;
                label.next = static_cast<int>(f);
                label.next_layout = list;
                offer(labels[here * lists + at(first < 0 || j == 0 ? any : entry)], label);
              }
            }
          }
        };
        if (cell.known == Known::kExact) {
          for (std::size_t q = 0; q < cell.points.size(); ++q)
            combine(cell.points[q].cost, 0.0, 0.0, cell.points[q].first_layout,
                    cell.points[q].exit_layout, static_cast<int>(q));
        } else {
          Cost<D> own;
          for (std::size_t d = 0; d < D; ++d) own[d] = floor_ticks(own_largest[d]);
          combine(own, own_largest[D] * (1.0 - kBoundSlack), bound[D + 2] * (1.0 - kBoundSlack), -1,
                  -1, -1);
        }
      });
    }
  return labels;
}

// T of a quickly found plan for given stage sizes; infinite when none was found.
template <int D>
double Subproblem<D>::quick_step(const std::vector<int>& sizes, double limit) {
  std::vector<StagePoint<D>> found;
  int l = 0;
  for (int j = 0; j < stages_; ++j) {
    StageProblem<D> p = problem(j, l, sizes[at(j)]);
    p.bound.incumbent = limit;
    auto point = quick_point<D>(p);
    if (!point) return kInf;
    found.push_back(std::move(*point));
    l += sizes[at(j)];
  }
  std::vector<const StagePoint<D>*> points;
  for (const auto& point : found) points.push_back(&point);
  return step_of(points, sizes);
}

template <int D>
double Subproblem<D>::step_of(const std::vector<const StagePoint<D>*>& points,
                              const std::vector<int>& sizes) {
  Partial total;
  int l = 0;
  for (int j = 0; j < stages_; ++j) {
    Cost<D> cost = points[at(j)]->cost;
    if (j > 0) {
      const int type = in_.t.layer_type[l - 1];
      const int exit = points[at(j - 1)]->exit_layout;
      cost = cost + move_[at(type)][at(exit * layouts_ + points[at(j)]->first_layout)];
      if (in_.t.gpipe) {  // a link slower than every stage is the bottleneck
        total.sum += 2 * send_of(type, exit);
        for (std::size_t d = 0; d + 1 < D; ++d)
          total.largest[d] = std::max(total.largest[d], send_of(type, exit));
      }
    }
    for (std::size_t d = 0; d < D; ++d) {
      if (d + 1 < D) total.sum += cost[d];
      total.largest[d] = std::max(total.largest[d], cost[d]);
    }
    l += sizes[at(j)];
  }
  remember(points, sizes, exact_step(total));
  return static_cast<double>(exact_step(total)) * (1.0 + kBoundSlack);
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

// T of the best plan made of one known point per stage; infinite when a stage has none.
template <int D>
double Subproblem<D>::assembled_step(const std::vector<const Partial*>& path,
                                     const std::vector<int>& sizes) {
  std::vector<const StagePoint<D>*> slowest, others;
  int l = 0;
  for (int j = 0; j < stages_; ++j) {
    const Cell& cell = cells_[bound_key(j, l, sizes[at(j)])];
    const Partial& p = *path[at(j)];
    if (p.cell != nullptr) {
      slowest.push_back(&cell.points[at(p.point)]);
      others.push_back(slowest.back());
    } else {
      if (cell.feasible[0].strategies.empty()) return kInf;
      slowest.push_back(&cell.feasible[0]);
      others.push_back(&cell.feasible[cell.feasible[1].strategies.empty() ? 0 : 1]);
    }
    l += sizes[at(j)];
  }
  const double best = step_of(slowest, sizes);
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
ItemPlan Subproblem<D>::solve(double limit, Watch& watch, std::int64_t& states) {
  watch_ = &watch;
  known_ = ItemPlan{};
  try {
    return solve_exactly(limit, watch, states);
  } catch (const DeadlinePassed&) {
    known_.exact = false;
    return known_;
  }
}

// Takes back what holds for plans up to the limit tried so far only; bounds and points hold always.
template <int D>
void Subproblem<D>::forget_limit() {
  for (auto& [key, cell] : cells_) {
    if (cell_fit_[key] == Fit::kExcluded) {
      cell.known = Known::kRelaxed;
    } else if (D > 1 && cell.known == Known::kExact) {
      cell.known = Known::kIntegral;
      cell.points.clear();
    }
  }
  for (std::size_t key = 0; key < cell_fit_.size(); ++key)
    if (cell_fit_[key] == Fit::kExcluded) {
      cell_fit_[key] = Fit::kUnknown;  // its bound may be of other weights
      cell_refined_[key] = 0;
    }
}

template <int D>
ItemPlan Subproblem<D>::solve_exactly(double limit, Watch& watch, std::int64_t& states) {
  ItemPlan plan;
  if (!feasible_) return plan;
  int weighings = 0;
  bool opening = false;
  limit = std::min(limit, watch.limit());
  watch.set_working(0.0);
  if (!compute_bounds(limit)) return plan;
  // Nothing is faster than `lower`. Plans are looked for up to `tried`: how much there is to look
  // at depends on how far it is above the optimum, so it starts low and is raised while nothing is
  // found, whatever the limit is.
  double lower = whole_bound();
  double share = kFirstShare;
  const auto next_try = [&] { return lower * (1.0 + share) + 1.0; };
  double tried = next_try();
  while (true) {
    limit = std::min(limit, watch.limit());
    if (lower > limit) return plan;
    const double most = std::min(limit, tried);
    watch.set_working(most);
    try {
      watch.poll();
      std::vector<std::vector<Partial>> labels;
      const Partial* best = nullptr;
      if (compute_bounds(most) && whole_bound() <= most) {
        labels = divide(most);
        for (const Partial& p : labels[state(0, 0) * (at(layouts_) + 1) + at(layouts_)])
          if (best == nullptr || step_bound(p) < step_bound(*best)) best = &p;
      }
      if (best == nullptr || step_bound(*best) * (1.0 - kBoundSlack) > most) {
        if (most >= limit) return plan;
        lower = std::max(lower, most);
        share = std::min(share * kGrowth, 1e6);
        tried = next_try();
        forget_limit();
        continue;
      }
      lower = std::max(lower, step_bound(*best) * (1.0 - kBoundSlack));
      // walk the stages of the best division; open what is not exact yet
      const std::size_t lists = at(layouts_) + 1;
      std::vector<int> sizes;
      std::vector<const Partial*> path;
      bool exact = true;
      int l = 0;
      for (const Partial* p = best; l < layers_;) {
        path.push_back(p);
        sizes.push_back(p->layers);
        exact = exact && p->cell != nullptr;
        l += p->layers;
        p = &labels[state(static_cast<int>(path.size()), l) * lists + at(p->next_layout)]
                   [at(p->next)];
      }
      if (exact) {
        plan.step = exact_step(*best);
        plan.stage_sizes = sizes;
        for (const Partial* p : path) {
          const auto& strategies = p->cell->points[at(p->point)].strategies;
          plan.strategies.insert(plan.strategies.end(), strategies.begin(), strategies.end());
        }
        return plan;
      }
      // integral minima first: they are cheap, and their points make a plan
      compute_ways(most);
      bool refined = false;
      l = 0;
      for (int j = 0; j < stages_; ++j) {
        const Cell& cell = cells_[bound_key(j, l, sizes[at(j)])];
        if (cell.known == Known::kRelaxed) {
          if (!refined) limit = std::min(limit, quick_step(sizes, limit));
          refine(j, l, sizes[at(j)], std::min(most, limit), states);
          refined = true;
        }
        l += sizes[at(j)];
      }
      limit = std::min(limit, assembled_step(path, sizes));
      if (refined) continue;
      if (weighings < kWeighings) {
        ++weighings;
        if (weigh_tails(path, sizes, weighings, std::min(most, limit), states)) continue;
      }
      if (!opening) {
        opening = true;
        share = kOpeningShare;
        tried = std::min(tried, next_try());
        watch.set_working(std::min(limit, tried));
      }
      // one cell at a time, the one whose bound seems least tight: what it teaches narrows the
      // others
      int widest = -1, first_layer = 0;
      double widest_gap = -1.0;
      l = 0;
      for (int j = 0; j < stages_; ++j) {
        if (path[at(j)]->cell == nullptr) {
          const double gap = slack(j, l, sizes[at(j)], best->largest[D - 1]);
          if (gap > widest_gap) {
            widest_gap = gap;
            widest = j;
            first_layer = l;
          }
        }
        l += sizes[at(j)];
      }
      open(widest, first_layer, sizes[at(widest)], std::min(limit, tried), states);
    } catch (const Narrowed&) {
      continue;  // the limit is lower now; what was half done is done again
    }
  }
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
