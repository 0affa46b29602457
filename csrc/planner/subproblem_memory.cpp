// What a sub-problem needs at least, without regard to time.
#include "planner/subproblem.hpp"

namespace autopar {

// By stage: for every pair of maxima the least kept bytes of each type.
template <int D>
std::vector<std::vector<typename Subproblem<D>::Caps>> Subproblem<D>::least_bytes() const {
  std::vector<std::vector<Caps>> caps(at(stages_));
  for (int j = 0; j < stages_; ++j) {
    const Stage& stage = stage_[at(j)];
    std::vector<Bytes> transients{stage.base_transient}, shareds{stage.base_shared};
    for (const auto& options : stage.options)
      for (const auto& o : options) {
        transients.push_back(std::max(o.transient, stage.base_transient));
        shareds.push_back(std::max(o.shared, stage.base_shared));
      }
    for (auto* values : {&transients, &shareds}) {
      std::sort(values->begin(), values->end());
      values->erase(std::unique(values->begin(), values->end()), values->end());
    }
    for (const Bytes transient : transients)
      for (const Bytes shared : shareds) {
        Caps c{stage.base_bytes + transient + shared, std::vector<Bytes>(at(types_), kInfBytes),
               std::vector<const StageOption<D>*>(at(types_), nullptr)};
        for (int k = 0; k < types_; ++k)
          for (const auto& o : stage.options[at(k)])
            if (o.transient <= transient && o.shared <= shared && o.bytes < c.least[at(k)]) {
              c.least[at(k)] = o.bytes;
              c.option[at(k)] = &o;
            }
        caps[at(j)].push_back(std::move(c));
      }
  }
  return caps;
}

// The bytes of layers l..l+n-1 on a stage; infinite when one of them has no option.
template <int D>
Bytes Subproblem<D>::need(const Caps& caps, int l, int n) const {
  Bytes total = caps.maxima;
  for (int k = 0; k < types_ && total < kInfBytes; ++k) {
    const int count =
        in_.prefix[at(l + n) * at(types_) + at(k)] - in_.prefix[at(l) * at(types_) + at(k)];
    if (count == 0) continue;
    total = caps.least[at(k)] >= kInfBytes ? kInfBytes : total + caps.least[at(k)] * count;
  }
  return total;
}

// Which layers can every stage start at? Not only the last one that memory allows: starting there
// may force a large layer on a stage that holds many micro-batches. A stage's row is shorter than
// its number of layers when no division gets that far.
template <int D>
std::vector<std::vector<std::uint8_t>> Subproblem<D>::starts(
    const std::vector<std::vector<Caps>>& caps, Bytes budget, const Watch& watch) const {
  const auto fits = [&](int j, int l, int n) {
    return std::any_of(caps[at(j)].begin(), caps[at(j)].end(),
                       [&](const Caps& c) { return need(c, l, n) <= budget; });
  };
  // how many layers from l on stage j can hold; more layers never need less
  const auto furthest = [&](int j, int l) {
    const int most = layers_ - l - (stages_ - 1 - j);
    if (!in_.t.division.empty()) {
      const int n = in_.t.division[at(j)];
      return n <= most && fits(j, l, n) ? n : 0;
    }
    int low = 0, high = most;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (fits(j, l, middle))
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  };
  std::vector<std::vector<std::uint8_t>> all(at(stages_) + 1,
                                             std::vector<std::uint8_t>(at(layers_) + 1, 0));
  all[0][0] = 1;
  for (int j = 0; j < stages_; ++j)
    for (int l = j; l <= layers_ - (stages_ - j); ++l) {
      if (!all[at(j)][at(l)]) continue;
      watch.poll();
      const int n = furthest(j, l);
      const int least = in_.t.division.empty() ? 1 : n;
      for (int k = std::max(least, 1); k <= n; ++k) all[at(j) + 1][at(l + k)] = 1;
    }
  return all;
}

template <int D>
Bytes Subproblem<D>::smallest_budget(Bytes limit, int& binding_stage, const Watch& watch) {
  if (!feasible_) return limit;
  const auto caps = least_bytes();
  const auto reaches = [&](Bytes budget) {
    return starts(caps, budget, watch)[at(stages_)][at(layers_)] != 0;
  };
  if (limit <= 0 || !reaches(limit - 1)) return limit;
  Bytes low = 0, high = limit - 1;
  while (low < high) {
    const Bytes middle = low + (high - low) / 2;
    if (reaches(middle))
      high = middle;
    else
      low = middle + 1;
  }
  // the first stage that some division needs all of it for, and that no division avoids
  const auto short_of = starts(caps, high - 1, watch);
  binding_stage = stages_ - 1;
  for (int j = 0; j < stages_; ++j) {
    const auto& next = short_of[at(j) + 1];
    if (std::find(next.begin(), next.end(), 1) != next.end()) continue;
    binding_stage = j;
    break;
  }
  return high;
}

template <int D>
ItemPlan Subproblem<D>::smallest_plan(const Watch& watch) {
  known_ = ItemPlan{};
  if (!feasible_) return known_;
  const auto caps = least_bytes();
  const auto reached = starts(caps, in_.budget, watch);
  if (reached[at(stages_)][at(layers_)] == 0) return known_;
  // backwards from the last layer: of the stages that fit, the one that is nearest to the mean
  std::vector<int> sizes(at(stages_), 0);
  std::vector<StagePoint<D>> points(at(stages_));
  for (int j = stages_ - 1, end = layers_; j >= 0; --j) {
    const Caps* used = nullptr;
    for (int l = j; l < end; ++l) {
      if (!reached[at(j)][at(l)] || !size_allowed(j, end - l)) continue;
      for (const Caps& c : caps[at(j)]) {
        const int n = end - l;
        if (need(c, l, n) > in_.budget) continue;
        const auto from_mean = [&](int size) { return std::abs(size * (j + 1) - end); };
        if (used != nullptr && from_mean(n) >= from_mean(sizes[at(j)])) continue;
        used = &c;
        sizes[at(j)] = n;
      }
    }
    const int first = end - sizes[at(j)];
    StagePoint<D>& point = points[at(j)];
    point.cost = stage_[at(j)].base;
    int before = -1;
    for (int l = first; l < end; ++l) {
      const StageOption<D>& o = *used->option[at(in_.t.layer_type[l])];
      if (before < 0) point.first_layout = o.layout;
      if (l == 0) point.cost = point.cost + entry_[at(o.layout)];
      if (l + 1 == layers_) point.cost = point.cost + exit_[at(o.layout)];
      if (before >= 0)
        point.cost =
            point.cost + move_[at(in_.t.layer_type[l - 1])][at(before * layouts_ + o.layout)];
      point.cost = point.cost + o.cost;
      point.strategies.push_back(o.strategy);
      before = point.exit_layout = o.layout;
    }
    end = first;
  }
  std::vector<const StagePoint<D>*> all;
  for (const auto& point : points) all.push_back(&point);
  step_of(all, sizes);
  known_.exact = false;
  return known_;
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
