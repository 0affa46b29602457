// Exact solution of a sub-problem: division over stages on bounds, opened lazily.
#include "subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();

// A double lower bound as ticks that are certainly not above it.
Ticks floor_ticks(double value) { return static_cast<Ticks>(value * (1.0 - kBoundSlack)); }
}  // namespace

template <int D>
double Subproblem<D>::bound_of(double sum, const Bound& largest, std::size_t s_before,
                               std::size_t s_after) const {
  Bound all = largest;
  for (std::size_t d = 0; d < D; ++d)
    all[d] = std::max({all[d], before_max_[s_before][d], after_max_[s_after][d]});
  return step(sum + before_sum_[s_before] + after_sum_[s_after], all);
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
  return p;
}

// What the rest of the pipeline costs at least when stage j has layers l..l+n-1 (with one layer
// type: n layers, wherever they are).
template <int D>
StepBound<D> Subproblem<D>::kernel_bound(int j, int l, int n, double limit) {
  StepBound<D> bound;
  bound.microbatches_less_1 = microbatches_ - 1.0;
  bound.incumbent = limit;
  bound.others_sum = kInf;
  bound.others_max.fill(kInf);
  const double sends =
      in_.t.gpipe && j + 1 < stages_ ? 2.0 * static_cast<double>(least_send_) : 0.0;
  for (int first = one_type_ ? j : l; first <= (one_type_ ? layers_ - n : l); ++first) {
    const std::size_t from = state(j, first), to = state(j + 1, first + n);
    if (before_sum_[from] == kInf || after_sum_[to] == kInf) continue;
    bound.others_sum = std::min(bound.others_sum, before_sum_[from] + after_sum_[to] + sends);
    for (std::size_t d = 0; d < D; ++d)
      bound.others_max[d] =
          std::min(bound.others_max[d], std::max(before_max_[from][d], after_max_[to][d]));
  }
  return bound;
}

template <int D>
void Subproblem<D>::open(int j, int l, int n, double limit, std::int64_t& states) {
  Cell& cell = cells_[cell_key(j, l, n)];
  StageProblem<D> p = problem(j, l, n);
  p.bound = kernel_bound(j, l, n, limit);
  cell.points = solve_stage_frontier<D>(p, states);
  cell.exact = true;
}

template <int D>
void Subproblem<D>::offer(std::vector<Partial>& list, const Partial& label) const {
  const auto no_worse = [](const Partial& a, const Partial& b) {
    if (a.sum > b.sum) return false;
    for (std::size_t d = 0; d < D; ++d)
      if (a.largest[d] > b.largest[d]) return false;
    return true;
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
  Bound bound;
  for (int j = stages_ - 1; j >= 0; --j)
    for (int l = j; l <= layers_ - (stages_ - j); ++l) {
      const std::size_t here = state(j, l);
      if (before_sum_[here] == kInf || after_sum_[here] == kInf) continue;
      const int most = layers_ - l - (stages_ - 1 - j);
      for (int n = j == stages_ - 1 ? most : 1; n <= most; ++n) {
        if (!size_allowed(j, n)) continue;
        if (!cell_bound(j, l, n, bound)) break;
        const std::size_t there = state(j + 1, l + n);
        if (after_sum_[there] == kInf) continue;
        double sum = in_.t.gpipe && j + 1 < stages_ ? 2.0 * static_cast<double>(least_send_) : 0.0;
        for (std::size_t d = 0; d + 1 < D; ++d) sum += bound[d];
        if (bound_of(sum, bound, here, there) * (1.0 - kBoundSlack) > limit) continue;
        const auto found = cells_.find(cell_key(j, l, n));
        const Cell& cell = found == cells_.end() ? unknown : found->second;
        const int type = in_.t.layer_type[l + n - 1];
        // combine one way to run this stage with every way to run the following ones
        const auto combine = [&](const Cost<D>& own, int first, int exit, int point) {
          for (int list = 0; list <= any; ++list) {
            if (j < stages_ - 1 && list != any && exit >= 0 && list != exit) continue;
            if (j < stages_ - 1 && list != any &&
                !exit_allowed_[at(type) * at(layouts_) + at(list)])
              continue;
            const auto& following = labels[there * lists + at(list)];
            for (std::size_t f = 0; f < following.size(); ++f) {
              const Partial& rest = following[f];
              for (int entry = 0; entry < (first < 0 || j == 0 ? 1 : layouts_); ++entry) {
                Cost<D> a = own;
                if (first >= 0 && j > 0)
                  a = a + move_[at(in_.t.layer_type[l - 1])][at(entry * layouts_ + first)];
                Partial label;
                label.sum = rest.sum;
                if (in_.t.gpipe && j + 1 < stages_)
                  label.sum +=
                      2 * (exit < 0 ? least_send_
                                    : in_.send[(at(table_) * at(types_) + at(type)) * at(layouts_) +
                                               at(exit)]);
                Bound largest;
                for (std::size_t d = 0; d < D; ++d) {
                  if (d + 1 < D) label.sum += a[d];
                  label.largest[d] = std::max(rest.largest[d], a[d]);
                  largest[d] =
                      std::max(static_cast<double>(label.largest[d]), before_max_[here][d]);
                }
                if (step(static_cast<double>(label.sum) + before_sum_[here], largest) *
                        (1.0 - kBoundSlack) >
                    limit)
                  continue;
                label.layers = n;
                label.cell = cell.exact ? &cell : nullptr;
                label.point = point;
                label.next = static_cast<int>(f);
                label.next_layout = list;
                offer(labels[here * lists + at(first < 0 || j == 0 ? any : entry)], label);
              }
            }
          }
        };
        if (cell.exact) {
          for (std::size_t q = 0; q < cell.points.size(); ++q)
            combine(cell.points[q].cost, cell.points[q].first_layout, cell.points[q].exit_layout,
                    static_cast<int>(q));
        } else {
          Cost<D> own;
          for (std::size_t d = 0; d < D; ++d) own[d] = floor_ticks(bound[d]);
          combine(own, -1, -1, -1);
        }
      }
    }
  return labels;
}

// T of a quickly found plan for given stage sizes; infinite when none was found.
template <int D>
double Subproblem<D>::quick_step(const std::vector<int>& sizes, double limit) {
  int l = 0, previous_exit = -1;
  double sum = 0.0;
  Bound largest;
  largest.fill(0.0);
  for (int j = 0; j < stages_; ++j) {
    StageProblem<D> p = problem(j, l, sizes[at(j)]);
    p.bound.incumbent = limit;
    if (previous_exit >= 0)
      for (int y = 0; y < layouts_; ++y)
        p.entry[at(y)] = (*p.predecessor)[at(previous_exit * layouts_ + y)];
    const auto point = quick_point<D>(p);
    if (!point) return kInf;
    for (std::size_t d = 0; d < D; ++d) {
      const double c = static_cast<double>(point->cost[d]);
      if (d + 1 < D) sum += c;
      largest[d] = std::max(largest[d], c);
    }
    l += sizes[at(j)];
    previous_exit = point->exit_layout;
    if (in_.t.gpipe && j + 1 < stages_)
      sum += 2.0 *
             static_cast<double>(
                 in_.send[(at(table_) * at(types_) + at(in_.t.layer_type[l - 1])) * at(layouts_) +
                          at(previous_exit)]);
  }
  return step(sum, largest);
}

template <int D>
ItemPlan Subproblem<D>::solve(double limit, std::int64_t& states) {
  ItemPlan plan;
  if (!feasible_) return plan;
  while (true) {
    if (!compute_bounds(limit)) return plan;
    if (step(after_sum_[state(0, 0)], after_max_[state(0, 0)]) * (1.0 - kBoundSlack) > limit)
      return plan;
    const auto labels = divide(limit);
    const std::size_t lists = at(layouts_) + 1;
    const auto& complete = labels[state(0, 0) * lists + at(layouts_)];
    const Partial* best = nullptr;
    for (const Partial& p : complete)
      if (best == nullptr || exact_step(p) < exact_step(*best)) best = &p;
    if (best == nullptr || static_cast<double>(exact_step(*best)) * (1.0 - kBoundSlack) > limit)
      return plan;
    // walk the stages of the best division; open what is not exact yet
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
    limit = std::min(limit, quick_step(sizes, limit));
    l = 0;
    for (std::size_t j = 0; j < path.size(); ++j) {
      if (path[j]->cell == nullptr) open(static_cast<int>(j), l, sizes[j], limit, states);
      l += sizes[j];
    }
  }
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
