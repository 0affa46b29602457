// Tables in ticks, and the sub-problems (items) that the best-first search orders.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/like_types.hpp"
#include "planner/problem.hpp"

namespace autopar {

// One sub-problem: a candidate (table and number of micro-batches) and an embedding strategy (or
// kAnyVocab, for bounds that hold for all of them), with the layouts that it may use and, for
// uniform plans, its one strategy.
inline constexpr int kAnyVocab = -1;
inline constexpr std::uint64_t kAllLayouts = ~std::uint64_t{0};

// Cost of embedding and head on one stage in ticks and bytes.
struct VocabCost {
  Ticks forward = 0, backward = 0, tail = 0;
  Bytes fixed = 0, activation = 0, transient = 0, shared = 0;
};

struct Item {
  int candidate = 0;
  int vocab = 0;
  std::uint64_t layouts = kAllLayouts;
  int only_strategy = -1;
};

struct ItemPlan {
  Ticks step = kInfTicks;
  bool exact = true;       // false: the best plan known when the deadline passed
  bool too_large = false;  // not exact because a stage had too many labels
  double bound = 0.0;      // if not exact: nothing in the item is faster than this
  std::vector<int> stage_sizes;
  std::vector<int> strategies;
};

class Instance {
  const LikeTypes like_types_;  // first: other members are made from its tables

 public:
  Instance(const Tables& tables, const SearchSettings& settings);

  const Tables& t;
  const Bytes budget;
  const TickScale scale;
  std::vector<int> count;   // layers by type
  std::vector<int> prefix;  // (L+1, K) layers of each type before layer l

  // First layer from which n layers, and the layer before them, equal those at l.
  int same_layers(int l, int n) const {
    if (t.num_types == 1) return std::min(l, 1);
    for (const auto& [first, most] : same_[static_cast<std::size_t>(l)])
      if (n <= most) return first;
    return l;
  }

  // row (n, k, s) etc. in ticks
  std::vector<Ticks> forward, backward, tail;                    // (N, K, S)
  std::vector<Ticks> move_forward, move_backward;                // (N, K, Y, Y)
  std::vector<Ticks> send;                                       // (N, K, Y)
  std::vector<Ticks> vocab_forward, vocab_backward, vocab_tail;  // (N, 3, E)

  int stages(const Item& item) const { return t.table_stages[t.candidate_table[item.candidate]]; }
  int microbatches(const Item& item) const { return t.candidate_microbatches[item.candidate]; }
  std::int64_t batch(const Item& item) const {
    return t.table_microbatch[t.candidate_table[item.candidate]] * microbatches(item);
  }
  bool allowed(const Item& item, int stage, int strategy) const {
    if (item.only_strategy >= 0 && strategy != item.only_strategy) return false;
    if (((item.layouts >> t.strategy_layout[strategy]) & 1U) == 0) return false;
    return stage >= t.num_stage_rules || t.stage_allowed[stage * t.num_strategies + strategy] != 0;
  }
  std::size_t row(int table, int type, int strategy) const {
    return (static_cast<std::size_t>(table) * static_cast<std::size_t>(t.num_types) +
            static_cast<std::size_t>(type)) *
               static_cast<std::size_t>(t.num_strategies) +
           static_cast<std::size_t>(strategy);
  }
  std::size_t vocab_row(int table, int position, int vocab) const {
    return (static_cast<std::size_t>(table) * 3 + static_cast<std::size_t>(position)) *
               static_cast<std::size_t>(t.num_vocab) +
           static_cast<std::size_t>(vocab);
  }
  std::size_t num_rows() const {
    return static_cast<std::size_t>(t.num_tables) * static_cast<std::size_t>(t.num_types) *
           static_cast<std::size_t>(t.num_strategies);
  }
  std::size_t num_vocab_rows() const {
    return static_cast<std::size_t>(t.num_tables) * 3 * static_cast<std::size_t>(t.num_vocab);
  }

  // Embedding strategies of the item that are valid in its table.
  std::vector<int> vocabs(const Item& item) const;
  // Least cost of these strategies at a position, per component; `once`: 0 for one micro-batch.
  VocabCost vocab_cost(const Item& item, int position, std::size_t once) const;

  // Bytes of the peak stage of a plan: kept bytes of its layers, plus the largest transient and the
  // largest shared bytes.
  Bytes needs(const Item& item, const std::vector<int>& sizes,
              const std::vector<int>& strategies) const;

  // Candidate of the same table, with the same memory, that has the next fewer micro-batches; -1
  // for none. A plan of both is never faster per sample with fewer of them.
  int fewer_microbatches(int candidate) const {
    return fewer_[static_cast<std::size_t>(candidate)];
  }
  // Of the candidates with the same memory, the one with the most micro-batches.
  int most_microbatches(int candidate) const { return most_[static_cast<std::size_t>(candidate)]; }
  // Lower bound of the additional ticks per sample of any plan of the item with `fewer`
  // micro-batches.
  double at_least_slower(const Item& item, int fewer) const;

  // Cheapest bound of T in ticks: no memory, no transitions; infinite if a type has no option.
  double simple_bound(const Item& item) const;

 private:
  void find_same_layers();
  void find_fewer_microbatches();
  std::vector<std::vector<std::pair<int, int>>> same_;  // by layer: first layer, and up to how many
  std::vector<int> fewer_;                              // by candidate
  std::vector<int> most_;
};

// Bound of T with memory relaxed to the convex hull. A value above `limit` only proves that no plan
// is within the limit.
double relaxed_bound(const Instance& instance, const Item& item, double limit, const Watch& watch);

// Results about inner stages, for the next embedding strategy; see planner.cpp.
class StageMemo;

// The optimum of the item if it is at most `limit`, else a plan with step == kInfTicks. After the
// deadline: the best plan found so far, not exact. `memo`: read and extended, if given.
ItemPlan solve_item(const Instance& instance, const Item& item, double limit, const Watch& watch,
                    std::int64_t& states, StageMemo* memo = nullptr);

// The smallest budget for which the item has a plan, if below `limit`, else `limit`; `stage`
// receives the binding stage.
Bytes smallest_budget(const Instance& instance, const Item& item, Bytes limit, int& stage,
                      const Watch& watch);

// A plan that fits, found quickly, whatever its time; none only if the item has none.
ItemPlan quick_plan(const Instance& instance, const Item& item, const Watch& watch);

}  // namespace autopar
