// What searches of the same tables have found out about items, kept from one budget to the next.
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

// May be used by several searches at a time; items are those with all layouts.
class Knowledge {
 public:
  struct Answer {        // about an item at a budget
    double bound = 0.0;  // ticks per sample: no plan within the budget is faster, or there is none
    bool relaxed = false;          // the relaxed bound at this very budget is part of it
    std::optional<ItemPlan> plan;  // the fastest known one that fits
    bool exact = false;            // which is the optimum
  };

  // Refuses other tables than those of the first call: bounds hold for one problem only.
  void open(const Instance& instance);

  void learn_bound(const Item& item, Bytes budget, double bound, bool relaxed);
  // The optimum, and what it needs.
  void learn_exact(const Item& item, Bytes budget, double bound, Bytes needs, const ItemPlan& plan);
  // A plan that may not be the optimum.
  void learn_plan(const Item& item, Bytes needs, const ItemPlan& plan);
  // That the item, of any embedding strategy, was looked at strategy by strategy.
  void learn_divided(const Item& item);

  Answer about(const Item& item, Bytes budget) const;
  bool divided(const Item& item) const;
  // Every item with a known plan that fits, and the fastest of these plans.
  std::vector<std::pair<Item, ItemPlan>> plans(Bytes budget) const;

 private:
  // More budgets than this are seldom asked about; the largest is forgotten first, whose bounds
  // say least.
  static constexpr std::size_t kMostKept = 16;
  struct Proof {
    Bytes budget;
    double bound;
    bool relaxed;
    Ticks step;  // of the optimum, where it is known, or 0
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
  std::vector<std::int64_t> tables_;  // what the tables are told by
};

}  // namespace autopar
