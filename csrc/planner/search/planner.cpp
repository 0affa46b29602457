// Best-first search over sub-problems (candidate, embedding strategy).
//
// Every item carries a lower bound of its time per sample that only ever rises: first without
// memory, then with memory relaxed, then exact. The item with the lowest bound is refined next;
// when it is exact it is the optimum. Alternatives repeat this with the classes found so far
// excluded. An item that may still produce such a class is split into items that each exclude one
// of the layouts of the class.
#include <chrono>
#include <deque>
#include <set>
#include <tuple>

#include "planner/check.hpp"
#include "planner/search/knowledge.hpp"
#include "planner/subproblem/memory.hpp"
#include "planner/subproblem/subproblem.hpp"

namespace autopar {

// The three operations on an item, dispatched on the kind of its cost vector and, for 1F1B,
// repeated for every transfer time that can be the slowest one.
namespace {

constexpr Ticks kNoCap = kInfTicks;

std::vector<Ticks> send_caps(const Instance& in, const Item& item) {
  if (in.t.gpipe || in.stages(item) == 1) return {kNoCap};
  const int table = in.t.candidate_table[item.candidate];
  std::vector<Ticks> caps;
  for (int k = 0; k < in.t.num_types; ++k)
    for (int s = 0; s < in.t.num_strategies; ++s)
      if (in.count[at(k)] > 0 && in.t.valid[in.row(table, k, s)] != 0 &&
          in.allowed(item, in.t.num_stage_rules, s))
        caps.push_back(in.send[(at(table) * at(in.t.num_types) + at(k)) * at(in.t.num_layouts) +
                               at(in.t.strategy_layout[s])]);
  std::sort(caps.begin(), caps.end());
  caps.erase(std::unique(caps.begin(), caps.end()), caps.end());
  return caps;
}

template <class Visit>
void for_each_subproblem(const Instance& in, const Item& item, const Watch& watch, Visit visit) {
  for (const Ticks cap : send_caps(in, item)) {
    watch.poll();
    if (in.stages(item) == 1) {
      Subproblem<1> s(in, item, cap);
      visit(s);
    } else if (!in.t.gpipe) {
      Subproblem<2> s(in, item, cap);
      visit(s);
    } else {
      Subproblem<3> s(in, item, cap);
      visit(s);
    }
  }
}

}  // namespace

// Stages without embedding and head are the same for every embedding strategy of a candidate.
class StageMemo {
 public:
  // The stages of the item's sub-problem; of the candidates used last.
  template <int D>
  typename Subproblem<D>::InnerStages& of(const Item& item, Ticks send_cap) {
    auto& all = std::get<Kept<D>>(kept_);
    const Key key{item.candidate, item.layouts, item.only_strategy, send_cap};
    for (auto& [known, stages] : all)
      if (known == key) return stages;
    if (all.size() == kMost) all.pop_front();
    return all.emplace_back(key, typename Subproblem<D>::InnerStages{}).second;
  }

 private:
  static constexpr std::size_t kMost = 16;
  using Key = std::tuple<int, std::uint64_t, int, Ticks>;
  template <int D>
  using Kept = std::deque<std::pair<Key, typename Subproblem<D>::InnerStages>>;
  std::tuple<Kept<1>, Kept<2>, Kept<3>> kept_;
};

double relaxed_bound(const Instance& in, const Item& item, double limit, const Watch& watch) {
  double best = std::numeric_limits<double>::infinity();
  for_each_subproblem(in, item, watch, [&](auto& s) {
    best = std::min(best, s.bound(std::min(limit, best), watch));
  });
  return best;
}

ItemPlan solve_item(const Instance& in, const Item& item, double limit, const Watch& watch,
                    std::int64_t& states, StageMemo* memo) {
  ItemPlan best;
  bool exact = true, too_large = false;
  double bound = std::numeric_limits<double>::infinity();  // of unsolved sub-problems
  try {
    // possibly no plan fits although bounds do not show it; other ways to find out take long
    if (!LeastMemory(in, item, watch).fits(in.budget)) return {};
    for_each_subproblem(in, item, watch, [&](auto& s) {
      const double known = static_cast<double>(best.step);
      auto* stages = memo == nullptr ? nullptr
                                     : &memo->of<std::remove_cvref_t<decltype(s)>::kDimensions>(
                                           item, s.send_cap());
      if (stages != nullptr) s.take(*stages);
      ItemPlan plan = s.solve(std::min(limit, known), watch, states);
      if (stages != nullptr) s.give(*stages);
      if (!plan.exact) {
        exact = false;
        too_large = too_large || plan.too_large;
        bound = std::min(bound, plan.bound);
      }
      const bool better =
          plan.step < best.step || (plan.step == best.step && plan.step < kInfTicks &&
                                    std::tie(plan.stage_sizes, plan.strategies) <
                                        std::tie(best.stage_sizes, best.strategies));
      if (better) best = std::move(plan);
    });
  } catch (const DeadlinePassed&) {  // before the sub-problem of another cap was begun
    exact = false;
    bound = 0.0;
  }
  best.exact = exact;
  best.too_large = too_large;
  best.bound = std::min({bound, static_cast<double>(best.step), limit});
  return best;
}

Bytes smallest_budget(const Instance& in, const Item& item, Bytes limit, int& stage,
                      const Watch& watch) {
  return LeastMemory(in, item, watch).smallest_budget(limit, stage);
}

ItemPlan quick_plan(const Instance& in, const Item& item, const Watch& watch) {
  LeastMemory memory(in, item, watch);
  const std::vector<int> sizes = memory.division(in.budget);
  if (sizes.empty()) return {};
  const std::vector<int> strategies = memory.strategies(sizes);
  // transfers cost no memory: the cap that admits every layout
  const Ticks cap = send_caps(in, item).back();
  if (in.stages(item) == 1) return Subproblem<1>(in, item, cap).plan_near(sizes, strategies, watch);
  if (!in.t.gpipe) return Subproblem<2>(in, item, cap).plan_near(sizes, strategies, watch);
  return Subproblem<3>(in, item, cap).plan_near(sizes, strategies, watch);
}

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Time after the deadline to find a plan if none is known, or why there is none.
constexpr double kGraceS = 0.1;
// Share of the time limit for a plan before the search: one must exist whatever the search meets.
constexpr double kFirstPlanShare = 0.1;
__extension__ typedef __int128 Wide;  // products of ticks and batch sizes

struct Entry {
  Item item;
  double bound = 0.0;     // ticks per sample, a valid lower bound
  int level = 0;          // 0 simple, 1 relaxed, 2 exact (plan holds the optimum)
  bool tied = false;      // the candidate of fewer micro-batches is a separate entry
  bool settled = false;   // of its equally fast plans, `plan` is the one to report
  bool replaced = false;  // by other entries: its bound is obsolete
  ItemPlan plan;
  std::int64_t batch = 1;
};

class Search {
 public:
  Search(const Tables& tables, const SearchSettings& settings)
      : monitor_(settings.time_limit_s, settings.interrupted),
        in_(tables, settings),
        settings_(settings),
        known_(settings.known != nullptr ? *settings.known : own_) {
    known_.open(in_);
  }

  Outcome run() {
    try {
      search();
    } catch (const Stopped&) {
      outcome_ = Outcome{};
      outcome_.status = Status::kInterrupted;
    }
    learn();
    return std::move(outcome_);
  }

 private:
  // Features in which an alternative must differ: stages, default dp type, embedding, or fewer
  // layouts.
  struct Class {
    int stages, group, vocab;
    std::uint64_t layouts;
  };

  using Key = std::tuple<double, int, std::size_t>;  // bound, exact last, index

  Monitor monitor_;  // first: its time runs while the other members are made
  Instance in_;
  SearchSettings settings_;
  Knowledge own_;  // of this search only, if the caller keeps none
  Knowledge& known_;
  std::vector<Entry> incumbents_;  // plans of earlier searches that fit
  Entry fallback_;                 // best plan that is not proven optimal for its sub-problem
  std::deque<Entry> entries_;      // grows while one of them is worked on
  Outcome outcome_;
  double lowest_ = kInf;
  bool timed_out_ = false;
  bool entered_ = false;  // true if entries_ contains all sub-problems
  std::vector<Class> excluded_;

  // of a round
  double limit_ = kInf;  // ticks per sample of its best plan
  std::set<Key> queue_;
  std::int64_t best_ = -1;
  StageMemo memo_;

  void search() {
    try {
      remember();
      make_entries();
      monitor_.poll();  // also when there is nothing to search
      if (monitor_.limited() && !has_fallback()) {
        const Monitor::Period period(monitor_, kFirstPlanShare * monitor_.seconds_left());
        find_any();
        if (!has_fallback()) return explain_infeasible();
      }
    } catch (const DeadlinePassed&) {
      timed_out_ = !entered_;
    }
    if (!entered_) return stop_without_plan();  // nothing is known about missing entries
    for (int round = 0; round <= settings_.alternatives; ++round) {
      const std::int64_t found = best_outside();
      const Entry* best = found < 0 ? nullptr : &entries_[static_cast<std::size_t>(found)];
      if (timed_out_ && settings_.alternatives > 0) outcome_.alternatives_complete = false;
      if (round > 0) {
        if (best == nullptr || timed_out_) return;
        outcome_.alternatives.push_back(choice(*best));
        excluded_.push_back(class_of(*best));
        continue;
      }
      if (timed_out_ && best == nullptr && !has_fallback() && !find_in_grace())
        return stop_without_plan();
      if (timed_out_ && has_fallback() && (best == nullptr || faster(fallback_, *best)))
        best = &fallback_;
      if (best == nullptr) {  // also out of time: find_any() has looked at everything
        explain_infeasible();
        return;
      }
      outcome_.found = true;
      outcome_.status = timed_out_ ? Status::kTimeLimit : Status::kOptimal;
      outcome_.best = choice(*best);
      const double s_per_sample = outcome_.best.step_time_s / static_cast<double>(best->batch);
      outcome_.bound_s_per_sample = s_per_sample;
      if (timed_out_) {
        outcome_.bound_s_per_sample = std::min(s_per_sample, in_.scale.seconds(1) * lowest_);
        return;
      }
      excluded_.push_back(class_of(*best));
    }
  }

  bool has_fallback() const { return fallback_.plan.step < kInfTicks; }

  void stop_without_plan() {
    outcome_.status = Status::kTimeLimit;
    outcome_.bound_s_per_sample = entered_ && lowest_ < kInf ? in_.scale.seconds(1) * lowest_ : 0.0;
    outcome_.alternatives_complete = settings_.alternatives == 0;
  }

  int table(const Item& item) const { return in_.t.candidate_table[item.candidate]; }

  void make_entries() {
    outcome_.items = static_cast<std::int64_t>(in_.t.num_candidates) * in_.t.num_vocab *
                     (settings_.uniform ? in_.t.num_strategies : 1);
    for (int q = 0; q < in_.t.num_candidates; ++q) {
      if (q % 64 == 63) monitor_.poll();
      if (in_.most_microbatches(q) != q) continue;  // see add_fewer()
      for (int s = settings_.uniform ? 0 : -1; s < (settings_.uniform ? in_.t.num_strategies : 0);
           ++s) {
        const Item item{q, kAnyVocab, kAllLayouts, s};
        // an earlier search that divided the item by embedding strategy has tighter bounds there
        if (!known_.divided(item)) {
          add(item, 0.0);
          continue;
        }
        const double bound = known_.about(item, settings_.budget).bound;
        for (const int e : in_.vocabs(item)) add({q, e, kAllLayouts, s}, bound);
      }
    }
    entered_ = true;
  }

  void add(const Item& item, double at_least) {
    Entry entry;
    entry.item = item;
    entry.batch = in_.batch(item);
    const double bound = in_.simple_bound(item) / static_cast<double>(entry.batch);
    entry.bound = std::max(bound, at_least);
    if (item.layouts == kAllLayouts) {
      Knowledge::Answer known = known_.about(item, settings_.budget);
      entry.bound = std::max(entry.bound, known.bound);
      if (known.exact) {
        entry.level = 2;
        entry.plan = std::move(*known.plan);
        entry.bound = exact_bound(entry);
      } else if (known.relaxed) {
        entry.level = 1;
      }
    }
    if (entry.bound == kInf) return;
    entries_.push_back(std::move(entry));
    if (entries_.back().level == 2) add_fewer(entries_.back());
  }

  // Starts from plans of earlier searches that fit: nothing slower needs to be searched.
  void remember() {
    for (auto& [item, plan] : known_.plans(settings_.budget)) {
      if (settings_.uniform != (item.only_strategy >= 0)) continue;
      Entry entry;
      entry.item = item;
      entry.item.layouts = layouts_of(plan);
      entry.batch = in_.batch(item);
      entry.plan = std::move(plan);
      if (!has_fallback() || faster(entry, fallback_)) fallback_ = entry;
      incumbents_.push_back(std::move(entry));
    }
  }

  // Stores the results for later searches.
  void learn() {
    for (const Entry& e : entries_)
      if (!e.replaced) learn(e);
    if (has_fallback()) known_.learn_plan(fallback_.item, needs(fallback_), fallback_.plan);
  }
  void learn(const Entry& e) {
    if (e.item.layouts != kAllLayouts || e.level == 0) return;  // nothing new
    if (e.level == 1)
      known_.learn_bound(e.item, settings_.budget, e.bound, true);
    else
      known_.learn_exact(e.item, settings_.budget, e.bound, needs(e), e.plan);
  }
  Bytes needs(const Entry& e) const {
    return in_.needs(e.item, e.plan.stage_sizes, e.plan.strategies);
  }

  Choice choice(const Entry& entry) const {
    Choice c;
    c.candidate = entry.item.candidate;
    c.vocab = entry.item.vocab;
    c.step_time_s = in_.scale.seconds(entry.plan.step);
    c.stage_sizes = entry.plan.stage_sizes;
    c.strategies = entry.plan.strategies;
    return c;
  }

  std::uint64_t layouts_of(const ItemPlan& plan) const {
    std::uint64_t layouts = 0;
    for (const int s : plan.strategies) layouts |= std::uint64_t{1} << in_.t.strategy_layout[s];
    return layouts;
  }
  Class class_of(const Entry& entry) const {
    const int n = table(entry.item);
    return {in_.t.table_stages[n], in_.t.table_group[n], entry.item.vocab, layouts_of(entry.plan)};
  }

  // The layouts of an excluded class that the item could still reproduce; 0 when there is none.
  std::uint64_t conflict(const Item& item) const {
    const int n = table(item);
    for (const Class& c : excluded_)
      if (c.stages == in_.t.table_stages[n] && c.group == in_.t.table_group[n] &&
          c.vocab == item.vocab && (c.layouts & ~item.layouts) == 0)
        return c.layouts;
    return 0;
  }

  // Canonical order: stages, micro-batches, sizes, strategies, embedding.
  bool precedes(const Entry& a, const Entry& b) const {
    const auto key = [this](const Entry& e) {
      return std::tuple(in_.stages(e.item), in_.microbatches(e.item), e.plan.stage_sizes,
                        e.plan.strategies, e.item.vocab, e.item.candidate);
    };
    return key(a) < key(b);
  }
  bool faster(const Entry& a, const Entry& b) const {
    const Wide left = static_cast<Wide>(a.plan.step) * b.batch;
    const Wide right = static_cast<Wide>(b.plan.step) * a.batch;
    return left != right ? left < right : precedes(a, b);
  }

  // Index of the best entry outside the excluded classes, or -1. Sets lowest_ to a lower bound.
  std::int64_t best_outside() {
    queue_.clear();
    best_ = -1;
    limit_ = kInf;
    for (const Entry& e : incumbents_)
      if (conflict(e.item) == 0) limit_ = std::min(limit_, limit_of(e));
    for (std::size_t i = 0; i < entries_.size(); ++i) enqueue(i);
    try {
      while (!timed_out_ && !queue_.empty() && std::get<0>(*queue_.begin()) <= limit_) step();
    } catch (const DeadlinePassed&) {
      timed_out_ = true;
    }
    lowest_ = queue_.empty() ? kInf : std::get<0>(*queue_.begin());
    if (best_ >= 0 && !timed_out_) settle_ties();
    return best_;
  }

  void enqueue(std::size_t i) {
    const Entry& e = entries_[i];
    if (e.bound == kInf) return;
    if (e.level == 2 && conflict(e.item) == 0 &&
        (best_ < 0 || faster(e, entries_[static_cast<std::size_t>(best_)]))) {
      best_ = static_cast<std::int64_t>(i);
      limit_ = std::min(limit_, limit_of(e));
    }
    queue_.insert({e.bound, e.level, i});
  }

  // Limit in ticks per sample: nothing slower than the plan matters.
  double limit_of(const Entry& e) const {
    return static_cast<double>(e.plan.step) / static_cast<double>(e.batch) * (1.0 + kBoundSlack);
  }

  // Refines the entry with the lowest bound.
  void step() {
    monitor_.poll();
    const std::size_t i = std::get<2>(*queue_.begin());
    queue_.erase(queue_.begin());
    const Entry& entry = entries_[i];
    const std::uint64_t layouts = conflict(entry.item);
    if (layouts != 0)
      split(i, layouts);
    else if (entry.level == 0 || (entry.level == 1 && entry.item.vocab != kAnyVocab))
      refine(i);
    else if (entry.level == 1)
      each_vocab(i);
    // an exact entry needs no more work: it was compared with the best when it was enqueued
  }

  // Refines entry i and enqueues it again.
  void refine(std::size_t i) {
    Entry& entry = entries_[i];
    const double batch = static_cast<double>(entry.batch);
    const double limit = limit_ * batch;
    const Watch watch(monitor_);
    if (entry.level == 0) {
      double bound = kInf;
      try {
        bound = relaxed_bound(in_, entry.item, limit, watch) / batch;
      } catch (const DeadlinePassed&) {
        enqueue(i);  // its bound is part of the remaining lower bound
        throw;
      }
      entry.level = 1;
      if (bound <= limit_)  // above it only proves that nothing is within the limit
        entry.bound = std::max(entry.bound, bound);
      else
        raise(entry);
    } else {
      std::int64_t states = 0;
      ItemPlan plan = solve_item(in_, entry.item, limit, watch, states, &memo_);
      take(entry, std::move(plan), states);
    }
    enqueue(i);
  }

  // Takes the first of all plans that tie for the best. Which of its equally fast plans a
  // sub-problem finds depends on its limit, and that on other sub-problems and earlier searches. So
  // each is solved again with the optimum as limit, which is quick.
  void settle_ties() {
    const Entry best = entries_[static_cast<std::size_t>(best_)];
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      Entry& e = entries_[i];
      if (e.level != 2 || e.bound == kInf || conflict(e.item) != 0 ||
          static_cast<Wide>(e.plan.step) * best.batch !=
              static_cast<Wide>(best.plan.step) * e.batch)
        continue;
      if (!e.settled) {
        const Watch watch(monitor_);
        const double limit = static_cast<double>(e.plan.step) * (1.0 + kBoundSlack);
        ItemPlan plan = solve_item(in_, e.item, limit, watch, outcome_.states);
        if (plan.exact && plan.step == e.plan.step) e.plan = std::move(plan);
        e.settled = true;
      }
      if (faster(e, entries_[static_cast<std::size_t>(best_)]))
        best_ = static_cast<std::int64_t>(i);
    }
  }

  // Finds a plan of the first entry, in order of bounds, that has one. This is quick for all
  // sub-problems. If there is none and no deadline passed, nothing fits.
  void find_any() {
    const Watch watch(monitor_);
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i].bound < kInf) order.emplace_back(entries_[i].bound, i);
    std::sort(order.begin(), order.end());
    for (const auto& [bound, i] : order) {
      Entry entry = entries_[i];
      // the least memory over all embedding strategies: usually one check instead of many
      const std::vector<int> vocabs = in_.vocabs(entry.item);
      if (vocabs.size() > 1 && !LeastMemory(in_, entry.item, watch).fits(in_.budget)) continue;
      for (const int e : vocabs) {
        entry.item.vocab = e;
        entry.plan = quick_plan(in_, entry.item, watch);
        if (entry.plan.step >= kInfTicks) continue;
        if (!has_fallback() || faster(entry, fallback_)) fallback_ = entry;
      }
      if (has_fallback()) return;
    }
  }

  // Returns false if even that takes too long. If true and there is still no plan, nothing fits.
  bool find_in_grace() {
    const Monitor::Period period(monitor_, kGraceS);
    try {
      find_any();
    } catch (const DeadlinePassed&) {
      return has_fallback();
    }
    return true;
  }

  // Removes entry i, which others replace, and returns its bound.
  double replace(std::size_t i) {
    Entry& entry = entries_[i];
    learn(entry);
    if (entry.item.vocab == kAnyVocab && entry.item.layouts == kAllLayouts)
      known_.learn_divided(entry.item);
    entry.replaced = true;
    return std::exchange(entry.bound, kInf);
  }

  // Replaces entry i, a bound for all embedding strategies, by one entry for each of them.
  void each_vocab(std::size_t i) {
    const Item item = entries_[i].item;
    const double bound = replace(i);
    for (const int e : in_.vocabs(item)) {
      Item child = item;
      child.vocab = e;
      const std::size_t before = entries_.size();
      add(child, bound);
      if (entries_.size() > before) enqueue(before);
    }
  }

  // Replaces entry i by entries that exclude one of these layouts each.
  void split(std::size_t i, std::uint64_t layouts) {
    const Item item = entries_[i].item;
    const bool tied = entries_[i].tied;
    const double bound = replace(i);
    for (int y = 0; y < in_.t.num_layouts; ++y) {
      const std::uint64_t bit = std::uint64_t{1} << y;
      if ((layouts & bit) == 0) continue;
      Item child = item;
      child.layouts &= ~bit;
      const std::size_t before = entries_.size();
      add(child, bound);
      if (entries_.size() == before) continue;
      entries_.back().tied = tied;
      enqueue(before);
    }
  }

  // Raises the bound of an entry without a plan as good as the limit.
  void raise(Entry& entry) const {
    if (limit_ == kInf)
      entry.bound = kInf;
    else
      entry.bound = std::max(entry.bound, std::nextafter(limit_, kInf));
  }

  void take(Entry& entry, ItemPlan plan, std::int64_t states) {
    outcome_.states += states;
    ++outcome_.opened;
    entry.plan = std::move(plan);
    if (!entry.plan.exact) {
      // a proof is not possible: the best known plan is the answer
      if (entry.plan.too_large) outcome_.too_large = timed_out_ = true;
      if (entry.plan.step < kInfTicks && (!has_fallback() || faster(entry, fallback_)))
        fallback_ = entry;
      entry.bound = std::max(
          entry.bound, entry.plan.bound * (1.0 - kBoundSlack) / static_cast<double>(entry.batch));
      entry.plan = ItemPlan{};
    } else if (entry.plan.step >= kInfTicks) {
      raise(entry);
    } else {
      entry.level = 2;
      entry.bound = exact_bound(entry);
      add_fewer(entry);
    }
  }
  static double exact_bound(const Entry& e) {
    return static_cast<double>(e.plan.step) / static_cast<double>(e.batch);
  }

  // An entry also represents its candidates of fewer micro-batches, which are never faster. The
  // next of them becomes a separate entry only if it can be as fast.
  void add_fewer(Entry& entry) {
    const int fewer = in_.fewer_microbatches(entry.item.candidate);
    if (fewer < 0 || entry.tied) return;
    const double slower = in_.at_least_slower(entry.item, fewer);
    if (slower > entry.bound * 4.0 * kBoundSlack) return;
    entry.tied = true;
    Item item = entry.item;
    item.candidate = fewer;
    const std::size_t before = entries_.size();
    add(item, entry.bound);
    if (entries_.size() > before) enqueue(before);
  }

  void explain_infeasible() {
    const Monitor::Period period(monitor_, std::max(kGraceS, monitor_.seconds_left()));
    try {
      find_smallest_budget();
    } catch (const DeadlinePassed&) {
      outcome_.smallest_budget = 0;
      outcome_.binding_candidate = outcome_.binding_stage = -1;
      stop_without_plan();
    }
  }

  void find_smallest_budget() {
    const Watch watch(monitor_);
    SearchSettings unlimited = settings_;
    unlimited.budget = kInfBytes / 2;
    const Instance free(in_.t, unlimited);
    Bytes best = kInfBytes / 4;
    std::vector<std::uint8_t> known(at(in_.t.num_candidates),
                                    0);  // by candidate of most micro-batches
    for (int q = 0; q < in_.t.num_candidates; ++q) {
      if (std::exchange(known[at(in_.most_microbatches(q))], 1) != 0) continue;  // same memory
      std::vector<int> left;  // strategies of uniform plans, or -1
      for (int s = settings_.uniform ? 0 : -1; s < (settings_.uniform ? in_.t.num_strategies : 0);
           ++s) {
        // the least memory over all embedding strategies: usually one check instead of many
        const Item any{q, kAnyVocab, kAllLayouts, s};
        if (free.simple_bound(any) < kInf && LeastMemory(free, any, watch).fits(best - 1))
          left.push_back(s);
      }
      if (left.empty()) continue;
      for (const int e : free.vocabs({q, kAnyVocab, kAllLayouts, -1}))
        for (const int s : left) {
          int stage = -1;
          const Bytes need = smallest_budget(free, {q, e, kAllLayouts, s}, best, stage, watch);
          if (need >= best) continue;
          best = need;
          outcome_.smallest_budget = need;
          outcome_.binding_candidate = q;
          outcome_.binding_stage = stage;
        }
    }
  }
};

}  // namespace

Outcome search_plan(const Tables& tables, const SearchSettings& settings) {
  const Monitor::Clock::time_point start = Monitor::Clock::now();
  check_tables(tables);
  check_settings(settings);
  SearchSettings left = settings;
  if (settings.time_limit_s > 0) {  // large tables take a while to check
    const std::chrono::duration<double> taken = Monitor::Clock::now() - start;
    left.time_limit_s = std::max(settings.time_limit_s - taken.count(), 1e-6);
  }
  return Search(tables, left).run();
}

}  // namespace autopar
