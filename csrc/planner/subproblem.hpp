// One sub-problem (G, m, p, embedding): stage boundaries and strategies, exactly.
//
// Stage cells (stage, first layer, number of layers) start as relaxed lower bounds. A label-setting
// pass over the stages finds the best division on what is known. The cells that it uses are refined
// in two steps: first the integral minimum of single objectives, which is cheap and gives both a
// tighter bound and a plan; then the exact Pareto frontier. Done when the best division uses exact
// cells only.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <unordered_map>
#include <vector>

#include "planner/hull.hpp"
#include "planner/instance.hpp"
#include "planner/stage/stage_kernel.hpp"

namespace autopar {

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

template <int D>
class Subproblem {
 public:
  // `send_cap`: with 1F1B, the slowest transfer between stages that is allowed, and charged.
  Subproblem(const Instance& instance, const Item& item, Ticks send_cap);

  // False when some stage cannot hold any layer at all.
  bool feasible() const { return feasible_; }
  // Lower bound of T within memory; above `limit` it only says "nothing better than limit".
  double bound(double limit, const Watch& watch);
  // The optimum if at most `limit` and the watch's limit (step == kInfTicks otherwise). When the
  // deadline passes, the best plan met so far, not exact.
  ItemPlan solve(double limit, Watch& watch, std::int64_t& states);
  // Smallest budget with a plan, if below `limit`.
  Bytes smallest_budget(Bytes limit, int& binding_stage, const Watch& watch);
  // A plan that fits if there is any: the one that needs least memory, whatever its time.
  ItemPlan smallest_plan(const Watch& watch);

 private:
  static constexpr int kWeighings = 6;
  static constexpr Ticks kWeights = 64;  // the tail weights of all stages add up to it
  // Plans are looked for up to this share above the lower bound first, then up to kGrowth times it:
  // while bounds are cheap, and once exact frontiers are needed, whose size grows fast with it.
  static constexpr double kFirstShare = 1.0 / 16;
  static constexpr double kOpeningShare = 1.0 / 1024;
  static constexpr double kGrowth = 4.0;

  struct Stage {
    std::vector<std::vector<StageOption<D>>> options;  // by type
    std::array<RelaxedLayers, D + 3> relaxed;          // as StepBound::Vector
    Cost<D> base{};
    Bytes base_bytes = 0;
    Bytes base_transient = 0;
    Bytes base_shared = 0;
    double relaxed_budget = 0.0;
    Ticks tail_weight = 0;  // in units of 1/kWeights; see OtherStages::dual
    double average_weight = 0.0;
  };
  // Of a cell: as StepBound::Vector. As maxima over stages: the dimensions, with the tail raised
  // to what the second combination implies, then the first combination less the stage's part of
  // the sum; the last entry is not used.
  using Bound = typename StepBound<D>::Vector;
  // Whether a cell can be used: not even its smallest options fit (nor would more layers), or no
  // plan within the current limit uses it.
  enum class Fit : std::uint8_t { kUnknown, kFits, kTooLarge, kExcluded };
  enum class Known { kRelaxed, kIntegral, kExact };
  struct Cell {
    Known known = Known::kRelaxed;
    // kIntegral: points with the least combinations, for a slowest stage and for another one, and
    // the point that is best for the dual
    std::array<StagePoint<D>, 3> feasible;
    std::vector<StagePoint<D>> points;
  };
  struct Caps {  // of transient and shared bytes
    Bytes maxima;
    std::vector<Bytes> least;                   // kept bytes, by type
    std::vector<const StageOption<D>*> option;  // that needs no more
  };
  struct Partial {  // stages j..p-1
    Ticks sum = 0;
    double dual = 0.0;
    Cost<D> largest{};
    double combined = 0.0;  // largest combined bound of cells that are not exact
    int layers = 0;         // of stage j
    const Cell* cell = nullptr;
    int point = -1;
    int next = -1;         // label index
    int next_layout = -1;  // and its list
  };

  const Instance& in_;
  const Item item_;
  const int table_;
  const int stages_;
  const int layers_;
  const int microbatches_;
  const int types_;
  const int layouts_;
  const Ticks send_cap_;
  bool feasible_ = true;
  bool one_type_ = true;
  Ticks least_send_ = 0;
  std::vector<Stage> stage_;
  std::vector<std::vector<Cost<D>>> move_;  // by producing type
  std::vector<Cost<D>> entry_, exit_;
  std::vector<std::uint8_t> exit_allowed_;  // (K, Y)
  std::vector<Cost<D>> zero_;
  // bounds by (j, l): stages before j on layers before l; stages from j on layers from l
  std::vector<double> before_sum_, after_sum_, before_dual_, after_dual_;
  std::vector<Bound> before_max_, after_max_;
  // as before_*/after_*, but as ways that belong together (see OtherStages); filled when needed
  std::vector<std::vector<OtherStages<D>>> before_ways_, after_ways_;
  std::vector<Bound> cell_bound_;
  std::vector<Fit> cell_fit_;
  std::vector<std::uint8_t> cell_refined_;
  std::unordered_map<std::size_t, Cell> cells_;  // by bound_key

  const Watch* watch_ = nullptr;  // while a question is answered
  ItemPlan known_;                // the best plan met so far

  ItemPlan solve_exactly(double limit, Watch& watch, std::int64_t& states);
  void forget_limit();
  // The first maximum over stages that T depends on: with one micro-batch only the tail counts.
  std::size_t counted() const { return microbatches_ == 1 ? D - 1 : 0; }
  void remember(const std::vector<const StagePoint<D>*>& points, const std::vector<int>& sizes,
                Ticks step);
  std::vector<std::vector<Caps>> least_bytes() const;
  Bytes need(const Caps& caps, int l, int n) const;
  std::vector<std::vector<std::uint8_t>> starts(const std::vector<std::vector<Caps>>& caps,
                                                Bytes budget, const Watch& watch) const;
  void build_stage(int j);
  Cost<D> cost(Ticks forward, Ticks backward, Ticks tail) const;
  Ticks send_of(int type, int layout) const {
    return in_.send[(at(table_) * at(types_) + at(type)) * at(layouts_) + at(layout)];
  }
  Fit cell_bound(int j, int l, int n, Bound& out);
  bool size_allowed(int j, int n) const {
    const auto& division = in_.t.division;
    return division.empty() || division[at(j)] == n;
  }
  // Does a stage of this cost exceed the limit all by itself?
  bool alone_exceeds(const Bound& cell, double limit) const {
    double total = cell[D - 1];
    for (std::size_t d = 0; d + 1 < D; ++d) total += microbatches_ * cell[d];
    return std::max({total, cell[D], cell[D + 1]}) * (1.0 - kBoundSlack) > limit;
  }
  // Calls visit(n, bound) for every number of layers that stage j may have from layer l on.
  template <class Visit>
  void for_each_size(int j, int l, double limit, Visit visit) {
    const int most = layers_ - l - (stages_ - 1 - j);
    Bound cell;
    for (int n = j == stages_ - 1 ? most : 1; n <= most; ++n) {
      if (!size_allowed(j, n)) continue;
      const Fit fit = cell_bound(j, l, n, cell);
      if (fit == Fit::kExcluded) continue;
      if (fit == Fit::kTooLarge) return;  // more layers need more
      if (alone_exceeds(cell, limit)) {
        // relaxed bounds only rise with more layers; refined ones need not, because the layout at
        // the exit may be forced
        if (cell_refined_[bound_key(j, l, n)]) continue;
        return;
      }
      visit(n, cell);
    }
  }
  // What 1F1B charges every stage for transfers of which this is the slowest.
  Ticks transfers(Ticks send) const {
    return std::llround(2.0 * static_cast<double>(send) * (stages_ - 1) / stages_);
  }
  // What sends between stages cost at least, per boundary behind stage j (GPipe's sum only).
  double least_sends(int j) const {
    return in_.t.gpipe && j + 1 < stages_ ? 2.0 * static_cast<double>(least_send_) : 0.0;
  }
  std::size_t state(int j, int l) const { return at(j) * (at(layers_) + 1) + at(l); }
  static double part_of_sum(const Bound& cell) {
    double sum = 0.0;
    for (std::size_t d = 0; d + 1 < D; ++d) sum += cell[d];
    return sum;
  }
  static void raise_to(Bound& largest, const Bound& cell) {
    const double sum = part_of_sum(cell);
    for (std::size_t d = 0; d < D; ++d) largest[d] = std::max(largest[d], cell[d]);
    largest[D - 1] = std::max(largest[D - 1], cell[D + 1] - sum);
    largest[D] = std::max(largest[D], cell[D] - sum);
  }
  double step(double sum, double dual, const Bound& largest) const {
    double steady = 0.0;
    for (std::size_t d = 0; d + 1 < D; ++d) steady += (microbatches_ - 1.0) * largest[d];
    return std::max(sum + std::max(steady + largest[D - 1], largest[D]), dual + steady);
  }
  double whole_bound() const {
    const std::size_t all = state(0, 0);
    return step(after_sum_[all], after_dual_[all], after_max_[all]) * (1.0 - kBoundSlack);
  }
  double bound_of(double sum, double dual, const Bound& largest, std::size_t s_before,
                  std::size_t s_after) const;
  bool compute_bounds(double limit);
  StageProblem<D> problem(int j, int l, int n) const;
  StepBound<D> kernel_bound(int j, int l, int n, double limit);
  void compute_ways(double limit);
  void offer_way(std::vector<OtherStages<D>>& ways, const OtherStages<D>& way) const;
  std::size_t bound_key(int j, int l, int n) const;
  void refine(int j, int l, int n, double limit, std::int64_t& states);
  double slack(int j, int l, int n, Ticks tail);
  StepBound<D> weights_of(int j) const;
  void relax(int j);
  bool weigh_tails(const std::vector<const Partial*>& path, const std::vector<int>& sizes,
                   int round, double limit, std::int64_t& states);
  void refine_entry(int j, int l, int n, std::size_t entry, const StepBound<D>& rest, double limit,
                    std::int64_t& states);
  void open(int j, int l, int n, double limit, std::int64_t& states);
  double quick_step(const std::vector<int>& sizes, double limit);
  // T of one point per stage.
  double step_of(const std::vector<const StagePoint<D>*>& points, const std::vector<int>& sizes);
  double assembled_step(const std::vector<const Partial*>& path, const std::vector<int>& sizes);
  double step_bound(const Partial& p) const {
    Bound largest{};
    for (std::size_t d = 0; d < D; ++d) largest[d] = static_cast<double>(p.largest[d]);
    largest[D] = p.combined;
    return step(static_cast<double>(p.sum), p.dual, largest);
  }
  Ticks exact_step(const Partial& p) const {
    Ticks total = p.sum + p.largest[D - 1];
    for (std::size_t d = 0; d + 1 < D; ++d) total += (microbatches_ - 1) * p.largest[d];
    return total;
  }
  // One pass of label setting; returns the labels of every (j, l) by entry layout, the extra
  // list holding labels that any entry layout may use.
  std::vector<std::vector<Partial>> divide(double limit);
  void offer(std::vector<Partial>& list, const Partial& label) const;
};

template <int D>
Cost<D> Subproblem<D>::cost(Ticks forward, Ticks backward, Ticks tail) const {
  if constexpr (D == 1)
    return {microbatches_ * (forward + backward) + tail};
  else if constexpr (D == 2)
    return {forward + backward, tail};
  else if (microbatches_ ==
           1)  // T is the sum of both: one number, and far fewer incomparable points
    return {forward + backward, 0, tail};
  else
    return {forward, backward, tail};
}

}  // namespace autopar
