// Lower bounds of a chain of layers under a budget of bytes, redistribution costs included.
//
// At a price per byte, the cheapest choice of a chain is a shortest path over (layer, layout). Its
// priced cost less the price of the budget bounds the cost of every choice within the budget
// (Lagrangian relaxation). The path itself is a choice, and a plan if it fits. Many prices together
// give tangents of the convex hull of all choices, for every layer and layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/stage/option_lists.hpp"
#include "planner/stage/stage_kernel.hpp"

namespace autopar {

class ChainBound {
 public:
  // A choice that is cheapest at some price, and its priced cost, rounded down.
  struct Tangent {
    double priced = 0.0;
    Ticks cost = 0;
    Bytes bytes = 0;
    Bytes transient = 0, shared = 0;  // the largest
  };
  struct Answer {
    double bound;  // of the cost of every choice that fits; infinite if none can
    double price;  // that gave the bound
    Ticks cost;    // of the best choice found that fits: kInfTicks for none
  };

  explicit ChainBound(const StageProblem<1>& problem);

  // Sets the allowed options to those of the lists under these caps. False if a type has none.
  bool allow(OptionLists<1>& lists, Bytes transient_cap, Bytes shared_cap);
  // Bounds the cost of choices whose kept bytes are at most `most`. Tries prices, from `price` on,
  // until the bound is above `limit` or cannot rise.
  Answer bound(Bytes most, double price, double limit);

  // Tangents for all layers and layouts, at prices around the one that `budget` implies. Returns a
  // bound of the cost of all layers, and the cost of a choice that fits (kInfTicks: none known).
  double prepare(Bytes budget, double price, Ticks& found);
  bool prepared() const { return !prices_.empty(); }
  void forget() { prices_.clear(); }
  // Lower bound of the cost of the layers before `first`, which has this layout, within `left`
  // bytes, entry and redistribution included. `found`: cost of a choice that fits (kInfTicks: none
  // known).
  double rest(int first, int layout, Bytes left, Ticks& found) const;

 private:
  const StageProblem<1>& p_;
  const std::size_t n_, layouts_;
  double margin_;  // 1 minus the relative error of a priced cost
  std::vector<std::size_t> used_;
  std::vector<std::vector<StageOption<1>>> allowed_;  // by type
  std::vector<Tangent> best_;                         // (type, layout); priced < 0: no option
  std::vector<Tangent> now_, then_;
  std::vector<double> prices_;     // descending
  std::vector<Tangent> tangents_;  // (layer, layout, price)

  static bool less(const Tangent& a, const Tangent& b) {
    return a.priced != b.priced ? a.priced < b.priced : a.bytes < b.bytes;
  }
  Tangent path(double price, Tangent* table);
};

}  // namespace autopar
