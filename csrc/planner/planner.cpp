// Best-first search over sub-problems (candidate, embedding strategy).
//
// Every item carries a lower bound of its time per sample that only ever rises: first without
// memory, then with memory relaxed, then exact. The item with the lowest bound is refined next;
// when it is exact it is the optimum. Alternatives repeat this with the classes found so far
// excluded: an item that may still produce such a class is split into items that leave out one of
// the layouts which the class uses.
#include <chrono>
#include <set>
#include <thread>
#include <tuple>

#include "planner/subproblem.hpp"

namespace autopar {

// The three questions about an item, dispatched on the kind of its cost vector and, for 1F1B,
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
void for_each_subproblem(const Instance& in, const Item& item, Visit visit) {
  for (const Ticks cap : send_caps(in, item)) {
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

double relaxed_bound(const Instance& in, const Item& item, double limit) {
  double best = std::numeric_limits<double>::infinity();
  for_each_subproblem(in, item,
                      [&](auto& s) { best = std::min(best, s.bound(std::min(limit, best))); });
  return best;
}

ItemPlan solve_item(const Instance& in, const Item& item, double limit, const Deadline& deadline,
                    std::int64_t& states) {
  ItemPlan best;
  bool exact = true;
  for_each_subproblem(in, item, [&](auto& s) {
    const double known = static_cast<double>(best.step);
    ItemPlan plan = s.solve(std::min(limit, known), deadline, states);
    exact = exact && plan.exact;
    const bool better = plan.step < best.step || (plan.step == best.step && plan.step < kInfTicks &&
                                                  std::tie(plan.stage_sizes, plan.strategies) <
                                                      std::tie(best.stage_sizes, best.strategies));
    if (better) best = std::move(plan);
  });
  best.exact = exact;
  return best;
}

Bytes smallest_budget(const Instance& in, const Item& item, Bytes limit, int& stage) {
  // transfers cost no memory: any cap that admits every layout will do
  Item all = item;
  const Ticks cap = send_caps(in, item).empty() ? kNoCap : send_caps(in, item).back();
  if (in.stages(item) == 1) return Subproblem<1>(in, all, cap).smallest_budget(limit, stage);
  return Subproblem<2>(in, all, cap).smallest_budget(limit, stage);
}

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
__extension__ typedef __int128 Wide;  // products of ticks and batch sizes

struct Entry {
  Item item;
  double bound = 0.0;  // ticks per sample, a valid lower bound
  int level = 0;       // 0 simple, 1 relaxed, 2 exact (plan holds the optimum)
  ItemPlan plan;
  std::int64_t batch = 1;
};

class Search {
 public:
  Search(const Tables& tables, const SearchSettings& settings)
      : in_(tables, settings), settings_(settings) {
    if (settings.time_limit_s > 0) {
      const std::chrono::duration<double> limit(std::min(settings.time_limit_s, 1e9));
      deadline_ = Deadline(std::chrono::steady_clock::now() +
                           std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit));
    }
  }

  Outcome run() {
    make_entries();
    std::vector<Class> excluded;
    for (int round = 0; round <= settings_.alternatives; ++round) {
      const std::int64_t found = best_outside(excluded);
      const Entry* best = found < 0 ? nullptr : &entries_[static_cast<std::size_t>(found)];
      if (round > 0) {
        if (best == nullptr || timed_out_) break;
        outcome_.alternatives.push_back(choice(*best));
        excluded.push_back(class_of(*best));
        continue;
      }
      if (timed_out_ && fallback_.plan.step < kInfTicks &&
          (best == nullptr || faster(fallback_, *best)))
        best = &fallback_;
      outcome_.bound_s_per_sample = in_.scale.seconds(1) * lowest_;
      if (best == nullptr) {
        if (timed_out_) break;
        outcome_.bound_s_per_sample = 0.0;  // what was looked at last depends on the threads
        explain_infeasible();
        break;
      }
      outcome_.found = true;
      outcome_.status = timed_out_ ? Status::kTimeLimit : Status::kOptimal;
      outcome_.best = choice(*best);
      if (timed_out_) break;
      outcome_.bound_s_per_sample = outcome_.best.step_time_s / static_cast<double>(best->batch);
      excluded.push_back(class_of(*best));
    }
    if (timed_out_ && !outcome_.found) outcome_.status = Status::kTimeLimit;
    return std::move(outcome_);
  }

 private:
  // What an alternative must differ in: stages, default dp type, embedding, or fewer layouts.
  struct Class {
    int stages, group, vocab;
    std::uint64_t layouts;
  };

  Instance in_;
  SearchSettings settings_;
  Deadline deadline_;
  Entry fallback_;  // the best plan that is not known to be the optimum of its sub-problem
  std::vector<Entry> entries_;
  Outcome outcome_;
  double lowest_ = kInf;
  bool timed_out_ = false;

  int table(const Item& item) const { return in_.t.candidate_table[item.candidate]; }

  void make_entries() {
    outcome_.items = static_cast<std::int64_t>(in_.t.num_candidates) * in_.t.num_vocab *
                     (settings_.uniform ? in_.t.num_strategies : 1);
    for (int q = 0; q < in_.t.num_candidates; ++q) {
      if (!settings_.uniform) {
        add({q, kAnyVocab, ~std::uint64_t{0}, -1}, 0.0);
        continue;
      }
      for (int s = 0; s < in_.t.num_strategies; ++s) add({q, kAnyVocab, ~std::uint64_t{0}, s}, 0.0);
    }
  }

  void add(const Item& item, double at_least) {
    Entry entry;
    entry.item = item;
    entry.batch = in_.batch(item);
    const double bound = in_.simple_bound(item) / static_cast<double>(entry.batch);
    if (bound == kInf) return;
    entry.bound = std::max(bound, at_least);
    entries_.push_back(std::move(entry));
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

  Class class_of(const Entry& entry) const {
    const int n = table(entry.item);
    Class c{in_.t.table_stages[n], in_.t.table_group[n], entry.item.vocab, 0};
    for (const int s : entry.plan.strategies)
      c.layouts |= std::uint64_t{1} << in_.t.strategy_layout[s];
    return c;
  }

  // The layouts of an excluded class that the item could still reproduce; 0 when there is none.
  std::uint64_t conflict(const Item& item, const std::vector<Class>& excluded) const {
    const int n = table(item);
    for (const Class& c : excluded)
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
  std::int64_t best_outside(const std::vector<Class>& excluded) {
    using Key = std::tuple<double, int, std::size_t>;  // bound, exact last, index
    std::set<Key> queue;
    std::int64_t best = -1;
    const auto enqueue = [&](std::size_t i) {
      const Entry& e = entries_[i];
      if (e.bound == kInf) return;
      if (e.level == 2 && conflict(e.item, excluded) == 0 &&
          (best < 0 || faster(e, entries_[static_cast<std::size_t>(best)])))
        best = static_cast<std::int64_t>(i);
      queue.insert({e.bound, e.level, i});
    };
    for (std::size_t i = 0; i < entries_.size(); ++i) enqueue(i);
    const auto limit = [&] {
      if (best < 0) return kInf;
      const Entry& e = entries_[static_cast<std::size_t>(best)];
      return static_cast<double>(e.plan.step) / static_cast<double>(e.batch) * (1.0 + kBoundSlack);
    };
    while (!queue.empty()) {
      lowest_ = std::get<0>(*queue.begin());
      if (lowest_ > limit()) break;
      // the first plan is always finished: stopping without any would help nobody
      const bool any = best >= 0 || fallback_.plan.step < kInfTicks || !excluded.empty();
      if (any && deadline_.passed()) {
        timed_out_ = true;
        break;
      }
      const std::size_t i = std::get<2>(*queue.begin());
      queue.erase(queue.begin());
      const std::uint64_t layouts = conflict(entries_[i].item, excluded);
      if (layouts != 0) {
        split(i, layouts, enqueue);
        continue;
      }
      if (entries_[i].level == 2) continue;  // already compared with the best
      if (entries_[i].level == 0) {
        refine(entries_[i], limit());
        enqueue(i);
        continue;
      }
      if (entries_[i].item.vocab == kAnyVocab) {
        for (const std::size_t child : each_vocab(i)) enqueue(child);
        continue;
      }
      std::vector<std::size_t> batch{i};
      while (static_cast<int>(batch.size()) < settings_.threads && !queue.empty()) {
        const auto [bound, level, next] = *queue.begin();
        if (bound > limit() || level != 1 || entries_[next].item.vocab == kAnyVocab ||
            conflict(entries_[next].item, excluded) != 0)
          break;
        batch.push_back(next);
        queue.erase(queue.begin());
      }
      solve(batch, limit());
      for (const std::size_t b : batch) enqueue(b);
    }
    if (best >= 0 && !timed_out_) lowest_ = limit();
    return best;
  }

  // Replaces entry i, a bound for all embedding strategies, by one entry for each of them.
  std::vector<std::size_t> each_vocab(std::size_t i) {
    const Item item = entries_[i].item;
    const double bound = entries_[i].bound;
    entries_[i].bound = kInf;
    std::vector<std::size_t> children;
    for (const int e : in_.vocabs(item)) {
      Item child = item;
      child.vocab = e;
      const std::size_t before = entries_.size();
      add(child, bound);
      if (entries_.size() > before) children.push_back(before);
    }
    return children;
  }

  // Replaces entry i by entries that leave out one of these layouts each.
  template <class Enqueue>
  void split(std::size_t i, std::uint64_t layouts, Enqueue enqueue) {
    const Item item = entries_[i].item;
    const double bound = entries_[i].bound;
    entries_[i].bound = kInf;
    for (int y = 0; y < in_.t.num_layouts; ++y) {
      const std::uint64_t bit = std::uint64_t{1} << y;
      if ((layouts & bit) == 0) continue;
      Item child = item;
      child.layouts &= ~bit;
      const std::size_t before = entries_.size();
      add(child, bound);
      if (entries_.size() > before) enqueue(before);
    }
  }

  void refine(Entry& entry, double limit) {
    const double batch = static_cast<double>(entry.batch);
    const double bound = relaxed_bound(in_, entry.item, limit * batch) / batch;
    entry.level = 1;
    if (bound <= limit)  // above it only says that nothing is better than the limit
      entry.bound = std::max(entry.bound, bound);
    else
      raise(entry, limit);
  }

  // Nothing in the entry is as good as `limit`.
  static void raise(Entry& entry, double limit) {
    if (limit == kInf) {
      entry.bound = kInf;
      return;
    }
    entry.bound = std::max(entry.bound, std::nextafter(limit, kInf));
  }

  void solve(const std::vector<std::size_t>& batch, double limit) {
    std::vector<std::int64_t> states(batch.size(), 0);
    const auto work = [&](std::size_t b) {
      Entry& entry = entries_[batch[b]];
      const double step = limit * static_cast<double>(entry.batch);
      entry.plan = solve_item(in_, entry.item, step, deadline_, states[b]);
    };
    std::vector<std::thread> threads;
    for (std::size_t b = 1; b < batch.size(); ++b) threads.emplace_back(work, b);
    work(0);
    for (auto& thread : threads) thread.join();
    for (std::size_t b = 0; b < batch.size(); ++b) {
      Entry& entry = entries_[batch[b]];
      outcome_.states += states[b];
      ++outcome_.opened;
      if (!entry.plan.exact) {
        if (entry.plan.step < kInfTicks &&
            (fallback_.plan.step >= kInfTicks || faster(entry, fallback_)))
          fallback_ = entry;
        entry.plan = ItemPlan{};
        continue;
      }
      if (entry.plan.step >= kInfTicks) {
        raise(entry, limit);
        continue;
      }
      entry.level = 2;
      entry.bound = static_cast<double>(entry.plan.step) / static_cast<double>(entry.batch);
    }
  }

  void explain_infeasible() {
    SearchSettings unlimited = settings_;
    unlimited.budget = kInfBytes / 2;
    const Instance free(in_.t, unlimited);
    Bytes best = kInfBytes / 4;
    for (int q = 0; q < in_.t.num_candidates; ++q)
      for (int e = 0; e < in_.t.num_vocab; ++e)
        for (int s = settings_.uniform ? 0 : -1; s < (settings_.uniform ? in_.t.num_strategies : 0);
             ++s) {
          const Item item{q, e, ~std::uint64_t{0}, s};
          if (free.simple_bound(item) == kInf) continue;
          int stage = -1;
          const Bytes need = smallest_budget(free, item, best, stage);
          if (need >= best) continue;
          best = need;
          outcome_.smallest_budget = need;
          outcome_.binding_candidate = q;
          outcome_.binding_stage = stage;
        }
  }
};

}  // namespace

Outcome search_plan(const Tables& tables, const SearchSettings& settings) {
  return Search(tables, settings).run();
}

}  // namespace autopar
