// One sub-problem (G, m, p, embedding): exact stage boundaries and strategies.
//
// T is the sum of all stages, plus m - 1 times the slowest, plus the longest tail. Once no stage
// may be slower, and no tail longer, than given caps, the least sum is a shortest path over the
// stages, which is cheap for any number of layers. So the search divides the space of caps into
// boxes. The path under the largest caps of a box, and its smallest caps, bound T for every plan in
// the box. Boxes whose bound reaches the best plan are dropped. Others are cut in two, or the cells
// of their path are refined.
//
// A stage cell (stage, first layer, number of layers) is refined from relaxed bounds to integral
// minima of single objectives, which also give plans, and to the exact Pareto frontier.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "planner/hull.hpp"
#include "planner/instance.hpp"
#include "planner/stage/option_lists.hpp"
#include "planner/stage/stage_kernel.hpp"

namespace autopar {

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

// A double lower bound as ticks that are certainly not above it.
inline Ticks floor_ticks(double value) {
  constexpr double kLargest = static_cast<double>(kInfTicks);
  if (!(value < kLargest)) return kInfTicks;
  return static_cast<Ticks>(value * (1.0 - kBoundSlack));
}

template <int D>
class Subproblem {
 public:
  static constexpr int kDimensions = D;
  // `send_cap`: with 1F1B, the slowest transfer between stages that is allowed, and charged.
  Subproblem(const Instance& instance, const Item& item, Ticks send_cap);

  // False if some stage cannot hold a single layer.
  bool feasible() const { return feasible_; }
  // Lower bound of T within memory; a value above `limit` only proves that no plan is within it.
  double bound(double limit, const Watch& watch);
  // The optimum if at most `limit` (step == kInfTicks otherwise). After the deadline: the best plan
  // found so far, not exact, and a bound of the rest.
  ItemPlan solve(double limit, const Watch& watch, std::int64_t& states);
  Ticks send_cap() const { return send_cap_; }
  // Results about the stages without embedding and head, for other embedding strategies.
  class InnerStages;
  void take(InnerStages& stages);
  void give(InnerStages& stages);
  // The plan with these layers per stage and strategies, which must fit, or a faster one found
  // quickly in this division.
  ItemPlan plan_near(const std::vector<int>& sizes, const std::vector<int>& strategies,
                     const Watch& watch);

 private:
  // Plans are searched up to this share above the lower bound first, then up to kGrowth times it.
  // The first share is for cheap bounds, the second for exact frontiers, whose size grows fast with
  // it.
  static constexpr double kFirstShare = 1.0 / 16;
  static constexpr double kOpeningShare = 1.0 / 8192;
  static constexpr double kGrowth = 4.0;
  static constexpr Ticks kJustAbove = 64;  // divisor of the distance from bound to ceiling
  // Labels that end a round of openings: other results may make the rest of the round needless.
  static constexpr std::int64_t kRoundStates = 20'000;
  // A frontier of more labels waits until the box is narrower than this share of T: the number of
  // points grows fast with the width.
  static constexpr std::int64_t kEasyStates = 5'000;
  static constexpr double kNarrow = 1e-9;
  // A cell that took this many labels for single boxes is opened for all boxes, if they are few.
  static constexpr std::int64_t kForAllStates = 50'000;
  static constexpr std::size_t kMostBoxes = 64;
  static constexpr int kSharpenings = 4;  // per cell and round
  // A minimum is searched up to this share of its bound first, and at most up to the last one
  // before anything is.
  static constexpr Ticks kFirstWidth = 4096, kLastWidth = 16;
  // A stage of this many layers is slow to refine. Up to kFewCaps pairs of caps are first relaxed
  // one by one, and a box is cut until it is no wider than kWide, a share of T.
  static constexpr int kLongStage = 32;
  static constexpr std::size_t kFewCaps = 64;
  static constexpr double kWide = 1.0 / 256;

  // Relaxed options of layers with these largest transient and shared needs.
  struct Capped {
    double budget;
    std::array<RelaxedLayers, D + 3> relaxed;  // as StepBound::Vector
  };
  struct Stage {
    std::vector<std::vector<StageOption<D>>> options;  // by type
    std::array<RelaxedLayers, D + 3> relaxed;          // as StepBound::Vector
    Cost<D> base{};
    Bytes base_bytes = 0;
    Bytes base_transient = 0;
    Bytes base_shared = 0;
    double relaxed_budget = 0.0;
    double tail_weight = 0.0;  // see OtherStages::dual
    bool capped = false;       // true if `under_caps` is filled
    std::vector<Capped> under_caps;
  };
  // Bound of a cell, as StepBound::Vector. As maxima over stages: the dimensions, with the tail
  // raised to the value implied by the second combination, then the first combination less the
  // stage's part of the sum; the last entry is not used.
  using Bound = typename StepBound<D>::Vector;
  // Use of a cell: not even its smallest options fit (nor would more layers), or no plan within the
  // current limit uses it.
  enum class Fit : std::uint8_t { kUnknown, kFits, kTooLarge, kExcluded };
  enum class Known : std::uint8_t { kRelaxed, kCapped, kIntegral };
  // Limits of the bottleneck dimensions and the tail: the largest over stages lie between them.
  using Limits = std::array<Ticks, D>;
  struct Region {
    Limits low{}, high{};
  };
  struct Tangent {  // of the frontier: sum * (part of the sum) + tail * tail >= least
    Ticks sum, tail, least;
  };
  struct Minimum {  // no point with a tail of at most this has a smaller part of the sum
    Ticks tail, least;
  };
  struct Opening {  // the exact frontier, as far as plans of the regions below the ceiling use it
    std::vector<Region> regions;
    std::vector<StagePoint<D>> points;  // by their part of the sum
  };
  struct Details {
    // points with the least combinations, for the slowest stage and for another one
    std::array<StagePoint<D>, 2> feasible;
    std::vector<StagePoint<D>> met;  // all points that were least in some objective
    std::vector<Tangent> tangents;
    std::vector<Minimum> minima;
    std::vector<Opening> openings;
    std::int64_t box_states = 0;  // labels of openings for single boxes
    std::int64_t failed_states =
        kForAllStates / 2;  // labels that were not enough for all boxes at once

    bool worth_all() const { return box_states >= 2 * failed_states; }
  };
  struct Cell {
    Bound bound{};
    // In whole ticks: the least of every dimension, then of m * (bottleneck dimensions) + tail and
    // of (bottleneck dimensions) + tail.
    std::array<Ticks, D + 2> least{};
    Fit fit = Fit::kUnknown;
    Known known = Known::kRelaxed;
    std::unique_ptr<Details> details;
  };
  struct Pick {  // a point of an exact cell within the limits
    const StagePoint<D>* point;
    Ticks sum;
  };
  struct Use {              // of a cell under the limits of the current path
    Ticks sum = kInfTicks;  // least part of the sum over all points
    int first_pick = 0;
    int picks = -1;  // -1: the cell is not exact
  };
  // Cells of a stage that begin with equal layers, by number of layers from `base` on.
  struct Row {
    int base = 1;
    std::vector<Cell> cells;
    std::uint32_t path = 0;  // for which `uses` is valid
    std::vector<Use> uses;
    std::vector<std::uint8_t> used;  // which of them are filled
    std::vector<Pick> picks;
  };
  // All plans whose slowest stage and longest tail lie between `low` and `high`.
  struct Box : Region {
    Ticks bound = 0;  // no plan in it is faster
    std::uint32_t number = 0;
    bool operator<(const Box& other) const {  // for a heap: the largest is popped first
      return bound != other.bound ? bound > other.bound : number > other.number;
    }
  };
  struct Step {  // a stage of a path
    int layer = 0, layers = 0;
    const StagePoint<D>* point = nullptr;  // null: the cell is not exact
  };
  struct Path {
    Ticks sum = kInfTicks;
    std::vector<Step> steps;
    Limits largest{};  // lower bounds over all stages
    bool exact = true;
  };
  struct Total {  // of one known point per stage
    Ticks sum = 0;
    Cost<D> largest{};
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
  Ticks least_send_ = 0;
  std::vector<Stage> stage_;
  std::vector<std::vector<Cost<D>>> move_;  // by producing type
  std::vector<Cost<D>> entry_, exit_;
  std::vector<std::uint8_t> exit_allowed_;  // (K, Y)
  std::vector<Cost<D>> zero_;
  // Bounds of stages before j on layers before l.
  struct Before {
    double sum = std::numeric_limits<double>::infinity();
    double dual = std::numeric_limits<double>::infinity();
    Bound largest{};
  };
  std::vector<double> before_sum_;  // by (j, l)
  Before whole_;                    // of all stages on all layers
  bool limited_ = false;            // true if the last bounds exclude what exceeds their limit
  std::size_t row_starts_;          // distinct first layers
  std::vector<std::unique_ptr<Row>> rows_;  // by (j, first layer), made when asked for

  const Watch* watch_ = nullptr;  // during a call
  ItemPlan known_;                // best plan found so far
  std::vector<Box> boxes_;        // a heap
  std::uint32_t box_number_ = 0;
  double limit_ = 0.0;  // of the call
  Ticks lower_ = 0;     // no plan is faster
  Ticks ceiling_ = 0;   // plans are searched below it
  bool looked_just_above_ = false;
  // of the path under some limits: least sums by (j, l) and by entry layout; the range of first
  // layers that were visited for every stage, and for the end
  std::uint32_t path_ = 0;
  std::vector<Ticks> rest_, rest_by_entry_;
  std::vector<std::uint8_t> entry_counts_;
  std::vector<int> window_low_, window_high_;

  bool search(const Watch& watch, std::int64_t& states);
  bool solve_one_stage(std::int64_t& states);
  void search_boxes(const Watch& watch, double& share, bool& opening, std::int64_t& states);
  void refine_path(const Path& path, const Box& box, double& share, bool& opening,
                   std::int64_t& states);
  void push_all();
  void push(Box box);
  void cut(const Box& box, std::size_t d, Ticks top);
  void cut_below(const Box& box, const Path& path);
  bool cut_wide(const Box& box, double share);
  bool look_just_above(double& share);
  Ticks most() const;
  Ticks ceiling(double share) const;
  void forget_ceiling();
  // The first maximum over stages that T depends on: with one micro-batch only the tail counts.
  std::size_t counted() const { return microbatches_ == 1 ? D - 1 : 0; }
  // Number of times that the step contains the maximum `d`.
  Ticks times(std::size_t d) const { return d + 1 == D ? 1 : microbatches_ - 1; }
  void remember(const std::vector<const StagePoint<D>*>& points, const std::vector<int>& sizes,
                Ticks step);
  void build_stage(int j);
  Cost<D> cost(Ticks forward, Ticks backward, Ticks tail) const;
  Ticks send_of(int type, int layout) const {
    return in_.send[(at(table_) * at(types_) + at(type)) * at(layouts_) + at(layout)];
  }
  Row& row(int j, int l, int n) {
    auto& found = rows_[at(j) * row_starts_ + at(in_.same_layers(l, n))];
    if (!found) found = std::make_unique<Row>();
    return *found;
  }
  Cell& cell(int j, int l, int n) { return cell(row(j, l, n), j, l, n); }
  Cell& cell(Row& row, int j, int l, int n) {
    const std::size_t i = static_cast<std::size_t>(n - row.base);
    if (i < row.cells.size() && row.cells[i].fit != Fit::kUnknown) return row.cells[i];
    return new_cell(row, j, l, n);
  }
  Cell& new_cell(Row& row, int j, int l, int n);
  void relax_cell(Cell& cell, int j, int l, int n) const;
  bool size_allowed(int j, int n) const {
    const auto& division = in_.t.division;
    return division.empty() || division[at(j)] == n;
  }
  // True if a stage of this cost exceeds the limit by itself.
  bool alone_exceeds(const Bound& cell, double limit) const {
    double total = cell[D - 1];
    for (std::size_t d = 0; d + 1 < D; ++d) total += microbatches_ * cell[d];
    return std::max({total, cell[D], cell[D + 1]}) * (1.0 - kBoundSlack) > limit;
  }
  // Calls visit(n, bound) for every number of layers that stage j may have from layer l on.
  template <class Visit>
  void for_each_size(int j, int l, double limit, Visit visit) {
    const int most = layers_ - l - (stages_ - 1 - j);
    for (int n = j == stages_ - 1 ? most : 1; n <= most; ++n) {
      if (!size_allowed(j, n)) continue;
      const Cell& found = cell(j, l, n);
      if (found.fit == Fit::kExcluded) continue;
      if (found.fit == Fit::kTooLarge) return;  // more layers need more
      if (alone_exceeds(found.bound, limit)) {
        limited_ = true;
        // relaxed bounds only rise with more layers; refined ones need not, because the layout at
        // the exit may be forced
        if (found.known != Known::kRelaxed) continue;
        return;
      }
      visit(n, found.bound);
    }
  }
  // Transfer time that 1F1B charges every stage if `send` is the slowest transfer.
  Ticks transfers(Ticks send) const {
    return std::llround(2.0 * static_cast<double>(send) * (stages_ - 1) / stages_);
  }
  // Least cost of sends between stages, per boundary after stage j (GPipe's sum only).
  Ticks least_sends(int j) const { return in_.t.gpipe && j + 1 < stages_ ? 2 * least_send_ : 0; }
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
    return step(whole_.sum, whole_.dual, whole_.largest) * (1.0 - kBoundSlack);
  }
  bool compute_bounds(double limit, bool keep = true);
  double least_bound(double limit);
  StageProblem<D> problem(int j, int l, int n) const;
  StepBound<D> weights_of(int j) const;
  void relax(int j);
  void make_caps(int j);
  bool relax_under_caps(Cell& cell, int j, int l, int n);

  // refinement of cells
  void refine(int j, int l, int n, std::int64_t& states);
  StagePoint<D> least_point(int j, int l, int n, const std::array<Ticks, D>& weight,
                            double incumbent, Ticks& least, std::int64_t& states);
  void refine_entry(Cell& cell, int j, int l, int n, std::size_t entry, std::int64_t& states);
  bool sharpen(Cell& cell, int j, int l, int n, Ticks tail, std::int64_t& states);
  bool sharpen_path(const Path& path, const Region& region, std::int64_t& states);
  bool least_within(Cell& cell, int j, int l, int n, Ticks tail, Ticks most, std::int64_t& states);
  bool least_of_path(const Path& path, const Box& box, std::int64_t& states);
  const Opening* opening(const Cell& cell, const Region& region) const;
  bool open_path(const Path& path, const Box& box, bool whatever, std::int64_t& states);
  double tail_weight(int j, const Cell& cell, Ticks tail) const;
  bool other_stages(int j, const Step& step, const Region& region, const std::vector<Ticks>& before,
                    double weight, OtherStages<D>& way) const;
  double slack(const Step& step, int j, Ticks tail);

  // paths: division over stages under limits
  Path least_path(const Region& region, Ticks most);
  Ticks least_sum(int j, const Cell& cell, Ticks tail) const;
  Use least_use(Row& row, const Cell& cell, int j, int l, int n, const Region& region) const;
  const Use& use(Row& row, int j, int l, int n, const Region& region);
  bool within(const Cost<D>& cost, const Limits& limits) const {
    for (std::size_t d = counted(); d < D; ++d)
      if (cost[d] > limits[d]) return false;
    return true;
  }
  Ticks part_of_step(const Cost<D>& cost) const {
    Ticks sum = 0;
    for (std::size_t d = 0; d + 1 < D; ++d) sum += cost[d];
    return sum;
  }
  template <class Visit>
  void ways_on(int j, int l, int entry, const Region& region, Visit visit);
  std::vector<Ticks> sums_before(const Region& region);

  // plans
  Ticks quick_step(const Path& path);
  Ticks assembled_step(const Path& path, const Region& region);
  void offer_way(StagePoint<D> point, std::vector<StagePoint<D>>& ways) const;
  void offer_orders(const StageProblem<D>& p, const StagePoint<D>& point,
                    std::vector<StagePoint<D>>& ways) const;
  Ticks arranged_within(Ticks cap, const std::vector<std::vector<StagePoint<D>>>& ways,
                        const std::vector<int>& sizes);
  void arrange(const Path& path, const Region& region);
  // T of one point per stage.
  Ticks step_of(const std::vector<const StagePoint<D>*>& points, const std::vector<int>& sizes);
  Ticks exact_step(const Total& total) const {
    Ticks step = total.sum;
    for (std::size_t d = 0; d < D; ++d) step += times(d) * total.largest[d];
    return step;
  }
};

template <int D>
class Subproblem<D>::InnerStages {
  friend class Subproblem;
  std::vector<std::unique_ptr<Row>> rows;  // of stages 1 to p - 2
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
