// Results about items from searches of the same tables, kept from one budget to the next.
//
// More memory only adds plans. So a bound that was proven at a budget holds at every smaller one,
// and a plan that fits at a budget fits at every larger one; where both meet, the optimum is known.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/instance.hpp"

namespace autopar {

// Several searches may use it at a time; items are those with all layouts.
class Knowledge {
 public:
  struct Answer {        // about an item at a budget
    double bound = 0.0;  // ticks per sample: no plan within the budget is faster, or there is none
    bool relaxed = false;          // true if `bound` includes the relaxed bound at this very budget
    std::optional<ItemPlan> plan;  // fastest known plan that fits
    bool exact = false;            // true if `plan` is the optimum
  };

  // Rejects other tables than those of the first call: bounds hold for one problem only.
  void open(const Instance& instance);

  void learn_bound(const Item& item, Bytes budget, double bound, bool relaxed);
  // Records the optimum and the bytes that it needs.
  void learn_exact(const Item& item, Bytes budget, double bound, Bytes needs, const ItemPlan& plan);
  // Records a plan that may not be the optimum.
  void learn_plan(const Item& item, Bytes needs, const ItemPlan& plan);
  // Records that the item was divided by embedding strategy.
  void learn_divided(const Item& item);

  Answer about(const Item& item, Bytes budget) const;
  bool divided(const Item& item) const;
  // Every item with a known plan that fits, and the fastest of these plans.
  std::vector<std::pair<Item, ItemPlan>> plans(Bytes budget) const;

 private:
  // Most budgets kept per item; more are rarely asked for. The largest is dropped first, because
  // its bounds are the weakest.
  static constexpr std::size_t kMostKept = 16;
  struct Proof {
    Bytes budget;
    double bound;
    bool relaxed;
    Ticks step;  // of the optimum if it is known, else 0
  };
  struct KnownPlan {
    Bytes needs;
    ItemPlan plan;
  };
  struct About {
    std::vector<Proof> proofs;     // budgets fall, bounds rise
    std::vector<KnownPlan> plans;  // needs fall, steps rise
    bool divided = false;
  };
  using Key = std::tuple<int, int, int>;  // candidate, embedding strategy, only strategy
  static Key key(const Item& item) { return {item.candidate, item.vocab, item.only_strategy}; }
  void prove(const Item& item, Proof proof);
  void keep(const Item& item, Bytes needs, const ItemPlan& plan);
  static const KnownPlan* fastest(const About& about, Bytes budget);

  mutable std::mutex mutex_;
  std::map<Key, About> items_;
  std::vector<std::int64_t> tables_;  // identifies the tables
};

}  // namespace autopar
