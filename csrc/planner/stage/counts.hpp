// A stage of equal layers under 1F1B by how many of them have each strategy.
//
// Which layers these are matters for redistribution alone, and between layers of one layout there
// is none. So the search is over counts, not over chains of strategies: chains of the same counts
// differ only in the walk over their layouts and in its two ends. Prices of a byte and of a tick of
// tail (Lagrangian relaxation) give a bound, and every layer costs more than that by the reduced
// cost of its strategy. The sum of these has to stay within the gap between bound and limit.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/stage/stage_kernel.hpp"
#include "planner/walks.hpp"

namespace autopar {

// Limits of the layers of a stage: see Kernel::solve_with_caps.
struct CountCaps {
  Bytes budget = 0;  // for kept bytes
  Bytes transient = 0, shared = 0;
  bool needs_transient = false, needs_shared = false;  // by some layer, all of it
};

class Counts {
 public:
  // True if counts tell chains of this stage apart: its layers are of one type, moves have no tail,
  // and staying in a layout is free.
  static bool apply(const StageProblem<2>& problem);

  // `options`: allowed under the caps. Better points lower the incumbent of `bound` where only the
  // best one counts. `walks` are of the redistribution of the type.
  Counts(const StageProblem<2>& problem, const std::vector<StageOption<2>>& options,
         const CountCaps& caps, StepBound<2>& bound, Walks& walks);

  // False if there are more than this many nodes: then points are missing.
  bool run(std::int64_t most_nodes);
  std::int64_t nodes() const { return nodes_; }
  // Undominated points per (first layout, exit layout), or the best one.
  std::vector<StagePoint<2>> points() const;

 private:
  struct TooMany {};
  struct Found {
    Cost<2> cost{};
    Ticks tail = 0;  // at least the floor
    Bytes bytes = 0;
    int first = 0, exit = 0;
    std::vector<int> counts;  // by option
  };
  // Sums over the layers chosen so far.
  struct Part {
    Cost<2> cost{};
    Bytes bytes = 0;
    double reduced = 0.0;
    // least arrivals in the layouts used, and the dearest of them: the first layout has none
    Ticks arrivals = 0, dearest = 0;
    bool needs_transient = false, needs_shared = false;
  };

  const StageProblem<2>& p_;
  const std::vector<StageOption<2>>& given_;
  const CountCaps caps_;
  StepBound<2>& bound_;
  Walks& walks_;
  const int layers_;
  const std::size_t layouts_;
  Ticks least_ends_ = 0;
  Ticks most_tail_ = kInfTicks;
  // bound at the prices, and the largest excess of a point
  double byte_price_ = 0.0, tail_price_ = 0.0, relaxed_ = 0.0, gap_ = 0.0;
  double most_time_ = 0.0;
  std::vector<StageOption<2>> options_;  // of falling reduced cost
  std::vector<double> reduced_;
  std::vector<Bytes> least_bytes_;  // of the options from each one on
  std::vector<Ticks> least_tail_;
  std::vector<Ticks> arrival_;  // by layout: the least move to it
  std::vector<int> counts_;     // by option
  std::vector<int> layers_in_;  // by layout
  std::int64_t nodes_ = 0, most_nodes_ = 0;
  const Walks::Set* set_ = nullptr;  // over the layouts `least_walk_of_`
  std::vector<int> layers_of_set_;
  std::uint64_t used_ = 0, least_walk_of_ = 0;
  Ticks least_walk_ = 0;                   // with both ends, over the layouts `least_walk_of_`
  std::vector<std::vector<Found>> found_;  // by time; tails fall

  double priced(const StageOption<2>& option) const;
  double most_at(double tail_price) const;
  double relaxed_at(double tail_price, double& byte_price) const;
  bool find_prices();
  void limit();
  void order_options();
  void extend(std::size_t from, int left, const Part& part);
  void leaf(const Part& part);
  void find_walks();
  Ticks ends(int first, int exit) const;
  bool prunes(const Cost<2>& cost) const;
  void offer(const Cost<2>& cost, Bytes bytes, int first, int exit);
  std::vector<int> chain(const Found& found) const;
};

}  // namespace autopar
