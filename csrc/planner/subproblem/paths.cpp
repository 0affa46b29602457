// Division over stages under limits of the slowest stage and the longest tail: a shortest path.
#include "planner/subproblem/subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();

Ticks divided_up(Ticks a, Ticks b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// Lower bound of the sum by a tangent; limits of the tail may be too large for a product.
template <class Tangent>
Ticks above(const Tangent& t, Ticks tail) {
  if (tail >= t.least / t.tail) return 0;
  return divided_up(t.least - t.tail * tail, t.sum);
}
}  // namespace

// Lower bound of a cell's part of the sum, with a tail of at most `tail`.
template <int D>
Ticks Subproblem<D>::least_sum(int j, const Cell& cell, Ticks tail) const {
  Ticks own = 0;
  for (std::size_t d = 0; d + 1 < D; ++d) own += cell.least[d];
  Ticks sum =
      std::max({own, divided_up(cell.least[D] - tail, microbatches_), cell.least[D + 1] - tail});
  // the relaxed minimum with part of the tail
  const double dual = cell.bound[D + 2] * (1.0 - kBoundSlack) -
                      stage_[at(j)].tail_weight * static_cast<double>(tail);
  if (dual > static_cast<double>(sum)) sum = static_cast<Ticks>(dual);
  if (cell.details) {
    for (const Tangent& t : cell.details->tangents) sum = std::max(sum, above(t, tail));
    for (const Minimum& m : cell.details->minima)
      if (tail <= m.tail) sum = std::max(sum, m.least);
  }
  return sum;
}

// Least part of the sum of a cell within the limits; for an exact cell also the points that matter
// there.
template <int D>
typename Subproblem<D>::Use Subproblem<D>::least_use(Row& row, const Cell& cell, int j, int l,
                                                     int n, const Region& region) const {
  Use use;
  const Limits& limits = region.high;
  const Opening* opened = opening(cell, region);
  if (opened == nullptr) {
    Ticks most = 0;
    for (std::size_t d = counted(); d < D; ++d)
      if (cell.least[d] > limits[d]) return use;
    for (std::size_t d = 0; d + 1 < D; ++d) most += limits[d];
    const Ticks sum = least_sum(j, cell, limits[D - 1]);
    if (microbatches_ == 1 || sum <= most) use.sum = sum;
    return use;
  }
  use.picks = 0;
  use.first_pick = static_cast<int>(row.picks.size());
  const int type = in_.t.layer_type[l + n - 1];
  // points are in order of their part of the sum: with two dimensions the first one that fits is
  // the best, whatever the cost of moves before it
  const bool first_only = D == 2 || microbatches_ == 1;
  thread_local std::vector<std::uint8_t> seen;
  seen.assign(at(layouts_) * at(layouts_), 0);
  for (const StagePoint<D>& point : opened->points) {
    if (!within(point.cost, limits)) continue;
    std::uint8_t& met = seen[at(point.first_layout * layouts_ + point.exit_layout)];
    if (met != 0 && first_only) continue;
    met = 1;
    Ticks sum = part_of_step(point.cost);
    if (in_.t.gpipe && j + 1 < stages_) {
      const Ticks send = send_of(type, point.exit_layout);
      bool slow = false;
      for (std::size_t d = counted(); d + 1 < D; ++d) slow = slow || send > limits[d];
      if (slow) continue;
      sum += 2 * send;
    }
    row.picks.push_back({&point, sum});
    ++use.picks;
    use.sum = std::min(use.sum, sum - least_sends(j));
  }
  return use;
}

template <int D>
const typename Subproblem<D>::Use& Subproblem<D>::use(Row& row, int j, int l, int n,
                                                      const Region& region) {
  const Cell& known = cell(row, j, l, n);
  if (row.path != path_) {
    row.path = path_;
    row.picks.clear();
    row.used.assign(row.cells.size(), 0);
    row.uses.resize(row.cells.size());
  } else if (row.uses.size() < row.cells.size()) {
    row.uses.resize(row.cells.size());
    row.used.resize(row.cells.size(), 0);
  }
  const std::size_t i = at(n - row.base);
  if (row.used[i] == 0) {
    row.used[i] = 1;
    row.uses[i] = known.fit == Fit::kFits ? least_use(row, known, j, l, n, region) : Use{};
  }
  return row.uses[i];
}

// Calls visit(n, point or null, sum) for every way to run stage j from layer l on, after a stage
// that ends in layout `entry` (-1: not charged), with all later stages.
template <int D>
template <class Visit>
void Subproblem<D>::ways_on(int j, int l, int entry, const Region& region, Visit visit) {
  const bool last = j == stages_ - 1;
  const int end = last ? layers_ : window_high_[at(j) + 1];
  for (int n = last ? layers_ - l : 1; l + n <= end; ++n) {
    if (!size_allowed(j, n)) continue;
    Row& here = row(j, l, n);
    const Use& found = use(here, j, l, n, region);
    const Cell& known = here.cells[at(n - here.base)];
    if (found.sum >= kInfTicks) {
      // more layers need and take more, according to relaxed bounds
      if (known.fit == Fit::kTooLarge || known.known == Known::kRelaxed) return;
      continue;
    }
    if (!last && l + n < window_low_[at(j) + 1]) continue;
    const std::size_t next = state(j + 1, l + n);
    const Ticks rest = last ? 0 : rest_[next];
    if (rest >= kInfTicks) continue;
    if (found.picks < 0) {
      visit(n, static_cast<const StagePoint<D>*>(nullptr), found.sum + least_sends(j) + rest);
      continue;
    }
    for (int q = 0; q < found.picks; ++q) {
      const Pick& pick = here.picks[at(found.first_pick + q)];
      Ticks sum = pick.sum;
      if (entry >= 0 && j > 0) {
        const Cost<D>& move =
            move_[at(in_.t.layer_type[l - 1])][at(entry * layouts_ + pick.point->first_layout)];
        if (move[0] >= kForbidden || !within(pick.point->cost + move, region.high)) continue;
        sum += part_of_step(move);
      }
      Ticks after = rest;
      if (!last && entry_counts_[next] != 0)
        after = rest_by_entry_[next * at(layouts_) + at(pick.point->exit_layout)];
      if (after < kInfTicks) visit(n, pick.point, sum + after);
    }
  }
}

// The division with the least sum among those whose stages stay within the limits, as far as cells
// are known, if it is at most `most`: a lower bound, exact if all its cells are.
template <int D>
typename Subproblem<D>::Path Subproblem<D>::least_path(const Region& region, Ticks most) {
  ++path_;
  const Limits& limits = region.high;
  Path path;
  const std::size_t size = (at(stages_) + 1) * (at(layers_) + 1);
  if (rest_.size() != size) {
    rest_.assign(size, kInfTicks);
    rest_by_entry_.assign(size * at(layouts_), kInfTicks);
    entry_counts_.assign(size, 0);
  }
  // range of first layers of each stage, from the first stage on
  window_low_.assign(at(stages_) + 1, 0);
  window_high_.assign(at(stages_) + 1, -1);
  window_high_[0] = 0;
  std::vector<int> largest(at(stages_), 0);  // number of layers
  for (int j = 0; j + 1 < stages_; ++j) {
    watch_->poll();
    int furthest = -1;
    for (int l = window_low_[at(j)]; l <= window_high_[at(j)]; ++l) {
      if (before_sum_[state(j, l)] == kInf) continue;
      for (int n = 1; l + n <= layers_ - (stages_ - 1 - j); ++n) {
        if (!size_allowed(j, n)) continue;
        Row& here = row(j, l, n);
        const Use& found = use(here, j, l, n, region);
        if (found.sum >= kInfTicks) {
          const Cell& known = here.cells[at(n - here.base)];
          if (known.fit == Fit::kTooLarge || known.known == Known::kRelaxed) break;
          continue;
        }
        furthest = std::max(furthest, l + n);
        largest[at(j)] = std::max(largest[at(j)], n);
      }
    }
    if (furthest < 0) return path;
    window_low_[at(j) + 1] = j + 1;
    window_high_[at(j) + 1] = furthest;
  }
  // least sums, from the last stage on
  int first_reached = layers_;
  for (int j = stages_ - 1; j >= 0; --j) {
    watch_->poll();
    const bool last = j == stages_ - 1;
    int reached = -1, low = window_low_[at(j)];
    if (!last) low = std::max(low, first_reached - largest[at(j)]);
    int lowest = window_high_[at(j)] + 1;  // the first layer that was visited
    for (int l = window_high_[at(j)]; l >= low; --l) {
      lowest = l;
      const std::size_t here = state(j, l);
      rest_[here] = kInfTicks;
      entry_counts_[here] = 0;
      if (before_sum_[here] == kInf) continue;
      const Ticks before = floor_ticks(before_sum_[here]);
      Ticks least = kInfTicks;
      bool by_entry = false;
      ways_on(j, l, -1, region, [&](int, const StagePoint<D>* point, Ticks sum) {
        by_entry = by_entry || (point != nullptr && j > 0);
        least = std::min(least, sum);
      });
      if (least >= kInfTicks || before + least > most) {
        // a last stage of more layers needs and takes more, too
        if (last && least >= kInfTicks && cell(j, l, layers_ - l).known == Known::kRelaxed) break;
        continue;
      }
      if (by_entry) {
        entry_counts_[here] = 1;
        least = kInfTicks;
        const std::uint8_t* allowed = &exit_allowed_[at(in_.t.layer_type[l - 1]) * at(layouts_)];
        for (int y = 0; y < layouts_; ++y) {
          Ticks& rest = rest_by_entry_[here * at(layouts_) + at(y)];
          rest = kInfTicks;
          if (allowed[y] == 0) continue;
          ways_on(j, l, y, region,
                  [&](int, const StagePoint<D>*, Ticks sum) { rest = std::min(rest, sum); });
          if (before + rest > most) rest = kInfTicks;
          least = std::min(least, rest);
        }
        if (least >= kInfTicks) continue;
      }
      rest_[here] = least;
      reached = l;
    }
    window_low_[at(j)] = lowest;
    if (reached < 0) return path;
    first_reached = reached;
  }
  // follow the least sums from the first stage on; of equal paths the first
  path.sum = rest_[state(0, 0)];
  int entry = -1;
  for (int j = 0, l = 0; j < stages_; ++j) {
    const std::size_t here = state(j, l);
    if (entry_counts_[here] != 0 && entry < 0)
      while (rest_by_entry_[here * at(layouts_) + at(++entry)] != rest_[here]) {
      }
    const Ticks wanted =
        entry_counts_[here] != 0 ? rest_by_entry_[here * at(layouts_) + at(entry)] : rest_[here];
    Step step;
    ways_on(j, l, entry_counts_[here] != 0 ? entry : -1, region,
            [&](int n, const StagePoint<D>* point, Ticks sum) {
              if (sum == wanted && step.layers == 0) step = {l, n, point};
            });
    // lower bound of this stage in every dimension
    if (step.point != nullptr) {
      Cost<D> cost = step.point->cost;
      if (entry_counts_[here] != 0)
        cost = cost +
               move_[at(in_.t.layer_type[l - 1])][at(entry * layouts_ + step.point->first_layout)];
      for (std::size_t d = 0; d < D; ++d) path.largest[d] = std::max(path.largest[d], cost[d]);
      if (in_.t.gpipe && j + 1 < stages_) {
        const Ticks send = send_of(in_.t.layer_type[l + step.layers - 1], step.point->exit_layout);
        for (std::size_t d = 0; d + 1 < D; ++d) path.largest[d] = std::max(path.largest[d], send);
      }
    } else {
      path.exact = false;
      const Cell& known = cell(j, l, step.layers);
      for (std::size_t d = 0; d < D; ++d)
        path.largest[d] = std::max(path.largest[d], known.least[d]);
      Ticks high = 0;
      for (std::size_t d = 0; d + 1 < D; ++d) high += limits[d];
      if constexpr (D == 2) {
        Row& cells = row(j, l, step.layers);
        path.largest[0] = std::max(path.largest[0], use(cells, j, l, step.layers, region).sum);
        path.largest[1] = std::max(
            {path.largest[1], known.least[D + 1] - high, known.least[D] - microbatches_ * high});
      }
    }
    path.steps.push_back(step);
    entry = step.point == nullptr ? -1 : step.point->exit_layout;
    l += step.layers;
  }
  return path;
}

// Least sums of the stages before every (stage, layer), under the limits of the current path and
// regardless of redistribution between stages.
template <int D>
std::vector<Ticks> Subproblem<D>::sums_before(const Region& region) {
  std::vector<Ticks> before((at(stages_) + 1) * (at(layers_) + 1), kInfTicks);
  before[state(0, 0)] = 0;
  for (int j = 0; j + 1 < stages_; ++j)
    for (int l = window_low_[at(j)]; l <= window_high_[at(j)]; ++l) {
      const Ticks sum = before[state(j, l)];
      if (sum >= kInfTicks || rest_[state(j, l)] >= kInfTicks) continue;
      ways_on(j, l, -1, region, [&](int n, const StagePoint<D>* point, Ticks) {
        const Row& here = row(j, l, n);
        const Use& found = here.uses[at(n - here.base)];
        (void)point;
        Ticks& there = before[state(j + 1, l + n)];
        there = std::min(there, sum + found.sum + least_sends(j));
      });
    }
  return before;
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
