#include "planner/stage/narrowed.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

#include "planner/hull.hpp"

namespace autopar {
namespace {

// Most rounds: every exclusion tightens the bounds of the remaining options.
constexpr int kRounds = 4;
// Every option is bounded with all types: with more pairs of both that takes longer than it saves.
constexpr std::size_t kMostPairs = std::size_t{1} << 16;

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

template <int D>
void lower_to(Cost<D>& least, const Cost<D>& cost) {
  for (std::size_t d = 0; d < D; ++d) least[d] = std::min(least[d], cost[d]);
}

// Relaxed minima of layers of some types, per entry of the bound.
template <int D>
class Relaxed {
 public:
  static constexpr std::size_t kBounds =
      D == 1 ? 1 : D + 3;  // combinations add nothing to one dimension

  explicit Relaxed(std::size_t num_types) {
    for (auto& hulls : hulls_) hulls.resize(num_types);
  }
  void add(std::size_t type, const StageOption<D>& option, const StepBound<D>& bound) {
    for (std::size_t d = 0; d < kBounds; ++d)
      hulls_[d][type].push_back({static_cast<double>(option.bytes), bound.entry(option.cost, d)});
  }
  void finish() {
    for (std::size_t d = 0; d < kBounds; ++d) {
      for (auto& hull : hulls_[d]) lower_hull(hull);
      layers_[d].assign(hulls_[d]);
    }
  }
  // Adds the minimum to `cost`; false if the layers do not fit.
  bool add_minimum(const std::vector<int>& counts, double budget,
                   typename StepBound<D>::Vector& cost) const {
    for (std::size_t d = 0; d < kBounds; ++d) {
      const double rest = layers_[d].minimum(counts, budget);
      if (rest < 0) return false;
      cost[d] += rest;
    }
    return true;
  }

 private:
  std::array<std::vector<std::vector<HullPoint>>, kBounds> hulls_;
  std::array<RelaxedLayers, kBounds> layers_;
};

}  // namespace

template <int D>
Narrowed<D>::Narrowed(const StageProblem<D>& problem) : p_(problem), kept_(problem.options) {
  counts_.assign(p_.options.size(), 0);
  for (const int type : p_.layer_type) ++counts_[idx(type)];
  std::size_t options = 0;
  for (std::size_t k = 0; k < counts_.size(); ++k) {
    if (counts_[k] == 0) {
      kept_[k].clear();
      continue;
    }
    used_.push_back(k);
    options += kept_[k].size();
  }
  if (options * used_.size() <= kMostPairs)
    for (int round = 0; round < kRounds && possible_ && leave_out(); ++round) {
    }
  for (const std::size_t k : used_) possible_ = possible_ && !kept_[k].empty();
  if (possible_) renumber();
}

// Excludes options; true if there were any to exclude.
template <int D>
bool Narrowed<D>::leave_out() {
  const std::size_t layouts = idx(p_.num_layouts);
  Relaxed<D> all(counts_.size());
  std::vector<Relaxed<D>> alone;  // by layout
  std::vector<int> number(layouts, -1);
  Bytes least_transient = p_.base_transient, least_shared = p_.base_shared;
  for (const std::size_t k : used_) {
    Bytes transient = kInfBytes, shared = kInfBytes;
    for (const StageOption<D>& o : kept_[k]) {
      transient = std::min(transient, o.transient);
      shared = std::min(shared, o.shared);
      all.add(k, o, p_.bound);
      int& own = number[idx(o.layout)];
      if (own < 0) {
        own = static_cast<int>(alone.size());
        alone.emplace_back(counts_.size());
      }
      alone[idx(own)].add(k, o, p_.bound);
    }
    // some layer of every type has one of its options
    least_transient = std::max(least_transient, transient);
    least_shared = std::max(least_shared, shared);
  }
  all.finish();
  for (Relaxed<D>& one : alone) one.finish();
  // least cost of a change from or to a layout, and of both ends in any layout
  Cost<D> free_ends;
  free_ends.fill(kForbidden);
  std::vector<Cost<D>> change(layouts, free_ends);
  Cost<D> entry = free_ends, exit = free_ends;
  for (std::size_t x = 0; x < layouts; ++x) {
    if (number[x] < 0) continue;
    lower_to<D>(entry, p_.entry[x]);
    if (p_.exit_allowed[x] != 0) lower_to<D>(exit, p_.exit[x]);
    for (std::size_t y = 0; y < layouts; ++y) {
      if (x == y || number[y] < 0) continue;
      for (const std::size_t k : used_) {
        lower_to<D>(change[x], p_.redistribute[k][x * layouts + y]);
        lower_to<D>(change[y], p_.redistribute[k][x * layouts + y]);
      }
    }
  }
  const bool one_layer = p_.layer_type.size() == 1;
  const auto too_much = [&](std::size_t k, const StageOption<D>& o) {
    const std::size_t y = idx(o.layout);
    const double budget =
        static_cast<double>(p_.budget - o.bytes - std::max(o.transient, least_transient) -
                            std::max(o.shared, least_shared));
    if (budget < 0) return true;
    const auto prunes = [&](const Relaxed<D>& others, const Cost<D>& ends) {
      typename StepBound<D>::Vector cost{};
      for (std::size_t d = 0; d < Relaxed<D>::kBounds; ++d)
        cost[d] = p_.bound.entry(p_.base + o.cost + ends, d);
      return !others.add_minimum(counts_, budget, cost) || p_.bound.prunes(cost);
    };
    --counts_[k];
    const bool pruned =
        (one_layer || prunes(all, entry + exit + change[y])) &&
        (p_.exit_allowed[y] == 0 || prunes(alone[idx(number[y])], p_.entry[y] + p_.exit[y]));
    ++counts_[k];
    return pruned;
  };
  bool fewer = false;
  for (const std::size_t k : used_)
    fewer |= std::erase_if(kept_[k], [&](const auto& o) { return too_much(k, o); }) > 0;
  return fewer;
}

// Renumbers the remaining layouts and cuts the tables to them.
template <int D>
void Narrowed<D>::renumber() {
  const std::size_t before = idx(p_.num_layouts);
  std::vector<int> number(before, -1);
  for (const std::size_t k : used_)
    for (const StageOption<D>& o : kept_[k]) number[idx(o.layout)] = 0;
  for (std::size_t y = 0; y < before; ++y)
    if (number[y] == 0) {
      number[y] = static_cast<int>(layouts_.size());
      layouts_.push_back(static_cast<int>(y));
    }
  for (const std::size_t k : used_)
    for (StageOption<D>& o : kept_[k]) o.layout = number[idx(o.layout)];
  const std::size_t left = layouts_.size();
  const auto cut = [&](const std::vector<Cost<D>>& moves, std::size_t rows, auto row) {
    std::vector<Cost<D>> table(rows * left);
    for (std::size_t x = 0; x < rows; ++x)
      for (std::size_t y = 0; y < left; ++y)
        table[x * left + y] = moves[row(x) * before + idx(layouts_[y])];
    return table;
  };
  narrow_.layer_type = p_.layer_type;
  narrow_.options = std::move(kept_);
  narrow_.num_layouts = static_cast<int>(left);
  narrow_.redistribute.resize(p_.redistribute.size());
  for (const std::size_t k : used_)
    narrow_.redistribute[k] =
        cut(p_.redistribute[k], left, [&](std::size_t x) { return idx(layouts_[x]); });
  for (const int y : layouts_) {
    narrow_.entry.push_back(p_.entry[idx(y)]);
    narrow_.exit.push_back(p_.exit[idx(y)]);
    narrow_.exit_allowed.push_back(p_.exit_allowed[idx(y)]);
  }
  if (p_.predecessor != nullptr) {
    // the previous stage may have any layout
    const std::size_t rows = p_.predecessor->size() / before;
    predecessor_ = cut(*p_.predecessor, rows, [](std::size_t x) { return x; });
    narrow_.predecessor = &predecessor_;
  }
  narrow_.base = p_.base;
  narrow_.budget = p_.budget;
  narrow_.base_transient = p_.base_transient;
  narrow_.base_shared = p_.base_shared;
  narrow_.tail_floor = p_.tail_floor;
  narrow_.most_tail = p_.most_tail;
  narrow_.bound = p_.bound;
  narrow_.watch = p_.watch;
  narrow_.most_states = p_.most_states;
}

template class Narrowed<1>;
template class Narrowed<2>;
template class Narrowed<3>;

}  // namespace autopar
