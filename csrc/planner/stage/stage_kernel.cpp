#include "planner/stage/stage_kernel.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <queue>
#include <string>

#include "planner/hull.hpp"
#include "planner/stage/chain_bound.hpp"
#include "planner/stage/counts.hpp"
#include "planner/stage/narrowed.hpp"
#include "planner/stage/option_lists.hpp"

namespace autopar {
namespace {

constexpr std::int32_t kNone = -1;
constexpr std::size_t kCaps = 2;  // of transient and of shared bytes
// Up to this many types, layers that need all of a cap are bounded; with more, it is only known
// that some do.
constexpr std::size_t kFewTypes = 4;
// Up to this many pairs of caps are solved one after the other; more are searched by their bounds.
constexpr std::size_t kFewCaps = 64;
// Number of labels from which bounds with redistribution are worth making.
constexpr std::int64_t kManyLabels = 4096;
// Most counts of equal layers that are searched before labels are.
constexpr std::int64_t kMostNodes = 400'000;

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

template <int D>
std::array<double, D> to_double(const Cost<D>& c) {
  std::array<double, D> r;
  for (std::size_t d = 0; d < D; ++d) r[d] = static_cast<double>(c[d]);
  return r;
}

template <int D>
bool dominates(const Cost<D>& a, const Cost<D>& shift, const Cost<D>& b) {
  for (std::size_t d = 0; d < D; ++d)
    if (a[d] + shift[d] > b[d]) return false;
  return true;
}

// Kept labels of one layout in order of bytes, to find out if one dominates a candidate. One
// dimension: a running minimum. Two: a staircase. More: a list.
template <int D>
class Staircase {
 public:
  void clear() { steps_.clear(); }
  bool dominates_candidate(const Cost<D>& shift, const Cost<D>& c) const {
    if constexpr (D == 1) {
      return !steps_.empty() && steps_.front()[0] + shift[0] <= c[0];
    } else if constexpr (D == 2) {
      const Ticks x = c[0] - shift[0];
      auto it = std::upper_bound(steps_.begin(), steps_.end(), x,
                                 [](Ticks v, const Cost<2>& s) { return v < s[0]; });
      return it != steps_.begin() && (*(it - 1))[1] + shift[1] <= c[1];
    } else {
      for (const auto& s : steps_)
        if (dominates<D>(s, shift, c)) return true;
      return false;
    }
  }
  void insert(const Cost<D>& c) {
    if constexpr (D == 1) {
      if (steps_.empty())
        steps_.push_back(c);
      else if (c[0] < steps_.front()[0])
        steps_.front() = c;
    } else if constexpr (D == 2) {
      auto it = std::lower_bound(steps_.begin(), steps_.end(), c[0],
                                 [](const Cost<2>& s, Ticks v) { return s[0] < v; });
      if (it != steps_.begin() && (*(it - 1))[1] <= c[1]) return;
      auto end = it;
      while (end != steps_.end() && (*end)[1] >= c[1]) ++end;
      it = steps_.erase(it, end);
      steps_.insert(it, c);
    } else {
      steps_.push_back(c);
    }
  }

 private:
  std::vector<Cost<D>> steps_;
};

template <int D>
struct Label {
  Bytes bytes = 0;
  Cost<D> cost{};
  std::int32_t next = kNone;  // label of the following layer
  std::int32_t option = 0;    // index into the options of its layer's type
  std::int32_t layout = 0;
  std::int32_t exit = 0;     // layout of the last layer; 0 where only the best point counts
  std::uint8_t missing = 0;  // caps that none of its layers needs; see Kernel
};

// Largest difference over predecessors z, the rows, of redistribute(z, x) - redistribute(z, y).
template <int D>
std::vector<Cost<D>> worst_differences(const std::vector<Cost<D>>& table, int num_layouts) {
  std::vector<Cost<D>> delta(idx(num_layouts) * idx(num_layouts));
  const int rows = static_cast<int>(table.size()) / num_layouts;
  for (int x = 0; x < num_layouts; ++x)
    for (int y = 0; y < num_layouts; ++y) {
      Cost<D> worst;
      worst.fill(std::numeric_limits<Ticks>::min());
      for (int z = 0; z < rows; ++z)
        for (std::size_t d = 0; d < D; ++d)
          worst[d] = std::max(
              worst[d], table[idx(z * num_layouts + x)][d] - table[idx(z * num_layouts + y)][d]);
      delta[idx(x * num_layouts + y)] = worst;
    }
  return delta;
}

template <int D>
class Kernel {
 public:
  Kernel(const StageProblem<D>& problem, std::int64_t& states)
      : p_(problem),
        n_(static_cast<int>(problem.layer_type.size())),
        states_(states),
        bound_(problem.bound) {}

  std::vector<StagePoint<D>> run() {
    prepare_counts();
    prepare_deltas();
    prepare_floors();
    lists_.emplace(p_, prefix_count_[idx(n_)]);
    prepare_counting();
    transients_ = lists_->transients();
    shareds_ = lists_->shareds();
    if (transients_.size() * shareds_.size() > kFewCaps) {
      search_caps();
    } else {
      for (const Bytes transient : transients_)
        for (const Bytes shared : shareds_) solve_with_caps(transient, shared);
    }
    return pareto();
  }

 private:
  using Options = std::vector<StageOption<D>>;

  const StageProblem<D>& p_;
  const int n_;
  std::int64_t& states_;
  std::int64_t own_states_ = 0;
  std::size_t kept_labels_ = 0;  // under the current caps
  StepBound<D> bound_;
  std::vector<std::vector<int>> prefix_count_;  // layers 0..i-1 by type
  std::vector<std::vector<Cost<D>>> delta_;     // by layer
  std::vector<int> delta_of_layer_;
  std::optional<OptionLists<D>> lists_;
  std::vector<Bytes> transients_, shareds_;  // all caps
  std::vector<Options> options_;             // allowed under the caps, Pareto-pruned
  std::optional<ChainBound> chain_;          // with one dimension, once it pays
  double price_ = 0.0;                       // per byte: start of its search
  RelaxedLayers relaxed_;
  std::array<RelaxedLayers, D + 3> relaxed_of_;  // under the current caps, by entry of the bound
  std::vector<std::vector<HullPoint>> prefix_bound_[D + 3];  // as StepBound::Vector
  // The same if one of the layers needs all of a cap; empty if none can.
  std::vector<std::vector<HullPoint>> reaching_bound_[kCaps][D + 3];
  Bytes cap_[kCaps] = {};              // current caps
  std::uint8_t missing_at_first_ = 0;  // caps that the stage does not need without its layers
  std::vector<std::vector<Label<D>>> labels_;  // by layer
  struct Key {
    Bytes bytes;
    Ticks cost;
    std::uint32_t label;
  };
  std::vector<Key> order_;
  std::vector<StagePoint<D>> points_;
  std::vector<Ticks> tail_floor_;  // by layer; see prepare_floors
  std::optional<Walks> walks_;     // if layers are searched by counts

  void poll() const {
    if (p_.watch != nullptr) p_.watch->poll_rarely();
  }

  void prepare_counts() {
    prefix_count_.assign(idx(n_) + 1, std::vector<int>(p_.options.size(), 0));
    for (int i = 0; i < n_; ++i) {
      prefix_count_[idx(i) + 1] = prefix_count_[idx(i)];
      ++prefix_count_[idx(i) + 1][idx(p_.layer_type[idx(i)])];
    }
  }

  void prepare_deltas() {
    // Layer i > 0 may follow any layout of the layer before it; the first layer any exit layout of
    // the previous stage. On the first stage the label already contains its entry.
    std::vector<int> by_type(p_.redistribute.size(), -1);
    delta_of_layer_.assign(idx(n_), 0);
    if (p_.predecessor != nullptr)
      delta_.push_back(worst_differences<D>(*p_.predecessor, p_.num_layouts));
    else
      delta_.emplace_back(idx(p_.num_layouts) * idx(p_.num_layouts), Cost<D>{});
    for (int i = 1; i < n_; ++i) {
      const int type = p_.layer_type[idx(i - 1)];
      if (by_type[idx(type)] < 0) {
        by_type[idx(type)] = static_cast<int>(delta_.size());
        delta_.push_back(worst_differences<D>(p_.redistribute[idx(type)], p_.num_layouts));
      }
      delta_of_layer_[idx(i)] = by_type[idx(type)];
    }
  }

  // Labels of layer i count as having at least tail_floor_[i]: whatever comes before layer i, and
  // the move to the stage, add no more than is left to the floor of the stage.
  void prepare_floors() {
    if constexpr (D > 1) {
      const auto longest = [](const auto& costs) {
        Ticks most = 0;
        for (const auto& cost : costs) most = std::max(most, cost[D - 1]);
        return most;
      };
      std::vector<Ticks> most(p_.options.size(), 0);
      for (std::size_t k = 0; k < most.size(); ++k) {
        for (const auto& option : p_.options[k]) most[k] = std::max(most[k], option.cost[D - 1]);
        most[k] += longest(p_.redistribute[k]);
      }
      Ticks floor = p_.tail_floor - longest(p_.entry);
      if (p_.predecessor != nullptr) floor -= longest(*p_.predecessor);
      tail_floor_.assign(idx(n_), floor);
      for (int i = 1; i < n_; ++i)
        tail_floor_[idx(i)] = tail_floor_[idx(i - 1)] - most[idx(p_.layer_type[idx(i - 1)])];
    }
  }
  // A cost of layers from `i` on, with its tail raised to their floor.
  Cost<D> floored(Cost<D> cost, int i) const {
    if constexpr (D > 1) cost[D - 1] = std::max(cost[D - 1], tail_floor_[idx(i)]);
    return cost;
  }

  // All pairs of caps between two of transient and two of shared bytes, by index.
  struct Caps {
    std::size_t transient_low, transient_high, shared_low, shared_high;
    double bound = 0.0;
    double price = 0.0;
    std::size_t size() const { return transient_high - transient_low + shared_high - shared_low; }
    bool operator<(const Caps& other) const {  // for a heap: the largest is popped first
      if (bound != other.bound) return bound > other.bound;
      if (size() != other.size()) return size() > other.size();
      if (transient_low != other.transient_low) return transient_low > other.transient_low;
      return shared_low > other.shared_low;
    }
  };

  // Many types have so many pairs of caps that these are halved, the best bound first. Options
  // under the largest caps of a part, within the bytes that its smallest caps leave, bound all of
  // the part.
  void search_caps() {
    if constexpr (D == 1) chain_.emplace(p_);
    std::priority_queue<Caps> open;
    const auto push = [&](Caps caps) {
      poll();
      if (bound_caps(caps)) open.push(caps);
    };
    push({0, transients_.size() - 1, 0, shareds_.size() - 1});
    while (!open.empty()) {
      Caps caps = open.top();
      open.pop();
      if (D == 1 && prunes(caps.bound)) return;  // all others are pruned, too
      const std::size_t transients = caps.transient_high - caps.transient_low;
      const std::size_t shareds = caps.shared_high - caps.shared_low;
      if (transients + shareds == 0) {
        price_ = caps.price;
        solve_with_caps(transients_[caps.transient_low], shareds_[caps.shared_low]);
        continue;
      }
      Caps rest = caps;
      if (transients >= shareds) {
        caps.transient_high = caps.transient_low + transients / 2;
        rest.transient_low = caps.transient_high + 1;
      } else {
        caps.shared_high = caps.shared_low + shareds / 2;
        rest.shared_low = caps.shared_high + 1;
      }
      push(caps);
      push(rest);
    }
  }

  // True if a plan of this cost may be dropped; one dimension only.
  bool prunes(double cost) const {
    typename StepBound<D>::Vector total{};
    total[0] = cost;
    return bound_.prunes(total);
  }
  // Only the best point counts, and this cost is achievable.
  void tighten(const Cost<D>& cost) {
    typename StepBound<D>::Vector total{};
    for (std::size_t d = 0; d < kBounds; ++d) total[d] = bound_.entry(cost, d);
    if (!bound_.prunes(total)) bound_.incumbent = std::min(bound_.incumbent, bound_.least(total));
  }

  // Bounds a part of the caps; false if nothing in it is of interest.
  bool bound_caps(Caps& caps) {
    const Bytes transient = transients_[caps.transient_high], shared = shareds_[caps.shared_high];
    const Bytes most = p_.budget - transients_[caps.transient_low] - shareds_[caps.shared_low];
    if (most < 0) return false;
    if constexpr (D == 1) {
      if (!chain_->allow(*lists_, transient, shared)) return false;
      const ChainBound::Answer answer = chain_->bound(most, caps.price, bound_.incumbent);
      if (answer.cost < kInfTicks) tighten({answer.cost});
      caps.bound = std::max(caps.bound, answer.bound);
      caps.price = answer.price;
      return !prunes(caps.bound);
    } else {
      typename StepBound<D>::Vector total{};
      for (std::size_t d = 0; d < kBounds; ++d) {
        std::vector<const std::vector<HullPoint>*> hulls(p_.options.size(), nullptr);
        for (const std::size_t k : lists_->used()) {
          auto& list = lists_->under(k, transient, shared);
          if (list.kept.empty()) return false;
          hulls[k] = &hull_of(list, k, d);
        }
        relaxed_.assign(hulls);
        const double rest = relaxed_.minimum(prefix_count_[idx(n_)], static_cast<double>(most));
        if (rest < 0) return false;
        total[d] = bound_.entry(p_.base, d) + rest;
      }
      return !bound_.prunes(total);
    }
  }

  const std::vector<HullPoint>& hull_of(typename OptionLists<D>::List& list, std::size_t k,
                                        std::size_t d) const {
    list.hulls.resize(kBounds);
    auto& hull = list.hulls[d];
    if (hull.empty()) {
      for (const std::int32_t o : list.kept) {
        const StageOption<D>& option = p_.options[k][idx(o)];
        hull.push_back({static_cast<double>(option.bytes), bound_.entry(option.cost, d)});
      }
      lower_hull(hull);
    }
    return hull;
  }

  void solve_with_caps(Bytes transient_cap, Bytes shared_cap) {
    const Bytes budget = p_.budget - transient_cap - shared_cap;
    if (budget < 0 || !restrict_options(transient_cap, shared_cap)) return;
    cap_[0] = transient_cap;
    cap_[1] = shared_cap;
    missing_at_first_ = static_cast<std::uint8_t>((transient_cap > p_.base_transient ? 1U : 0U) |
                                                  (shared_cap > p_.base_shared ? 2U : 0U));
    if (walks_ && solved_by_counts({budget, transient_cap, shared_cap,
                                    (missing_at_first_ & 1U) != 0, (missing_at_first_ & 2U) != 0}))
      return;
    if (!prepare_bounds(budget, transient_cap, shared_cap)) return;
    const std::size_t last = idx(n_ - 1);
    labels_.resize(idx(n_));
    for (auto& layer : labels_) layer.clear();
    kept_labels_ = 0;
    const std::int64_t first_state = own_states_;
    std::vector<Label<D>> created;
    const Options& final_options = options_[idx(p_.layer_type[last])];
    for (std::size_t o = 0; o < final_options.size(); ++o) {
      const auto& option = final_options[o];
      if (!p_.exit_allowed[idx(option.layout)]) continue;
      Label<D> label{option.bytes,
                     option.cost + p_.exit[idx(option.layout)] + p_.base,
                     kNone,
                     static_cast<std::int32_t>(o),
                     option.layout,
                     p_.only_best() ? 0 : option.layout,
                     still_missing(missing_at_first_, option)};
      if (n_ == 1) label.cost = label.cost + p_.entry[idx(option.layout)];
      if (admits(label, n_ - 1, budget)) created.push_back(label);
    }
    keep_undominated(n_ - 1, created);
    for (int i = n_ - 2; i >= 0; --i) {
      if (labels_[idx(i) + 1].empty()) return;
      if (D == 1 && own_states_ - first_state > kManyLabels && !bound_by_chain())
        prepare_chain(budget, transient_cap, shared_cap);
      extend(i, budget, created);
      keep_undominated(i, created);
    }
    collect(transient_cap + shared_cap);
  }

  void prepare_counting() {
    if constexpr (D == 2) {  // with one dimension labels are few
      if (!Counts::apply(p_)) return;
      std::vector<Ticks> moves;
      for (const Cost<D>& move : p_.redistribute[idx(p_.layer_type.front())])
        moves.push_back(move[0]);
      walks_.emplace(std::move(moves), p_.num_layouts);
    }
  }

  // False if there are too many counts: then labels are searched.
  bool solved_by_counts(const CountCaps& caps) {
    if constexpr (D == 2) {
      Counts counts(p_, options_[idx(p_.layer_type.front())], caps, bound_, *walks_);
      const bool limited = p_.most_states < std::numeric_limits<std::int64_t>::max();
      const bool done = counts.run(limited ? p_.most_states - own_states_ : kMostNodes);
      states_ += counts.nodes();
      own_states_ += counts.nodes();
      for (auto& point : counts.points()) points_.push_back(std::move(point));
      if (done) return true;
      // labels are more than counts
      if (limited) throw TooManyStates{};
      walks_.reset();
    }
    return false;
  }

  bool bound_by_chain() const { return chain_ && chain_->prepared(); }

  bool prepare_chain(Bytes budget, Bytes transient_cap, Bytes shared_cap) {
    if constexpr (D == 1) {
      if (!chain_) chain_.emplace(p_);
      if (!chain_->allow(*lists_, transient_cap, shared_cap)) return false;
      Ticks found = kInfTicks;
      const double least = chain_->prepare(budget, price_, found);
      if (found < kInfTicks) tighten({found});
      return !prunes(least);
    }
    return true;
  }

  // Keeps the options allowed under the caps, without dominated ones inside a layout. False if
  // these caps admit nothing that smaller caps do not. If no type keeps an option that needs
  // exactly a cap, all kept options are allowed under smaller caps, which leave more bytes; and a
  // kept option can replace a dropped one.
  bool restrict_options(Bytes transient_cap, Bytes shared_cap) {
    bool transient_used = transient_cap == p_.base_transient;
    bool shared_used = shared_cap == p_.base_shared;
    for (const std::size_t k : lists_->used()) {
      const auto& list = lists_->under(k, transient_cap, shared_cap);
      if (list.kept.empty()) return false;
      transient_used |= list.transient == transient_cap;
      shared_used |= list.shared == shared_cap;
    }
    if (!transient_used || !shared_used) return false;
    options_.resize(p_.options.size());
    for (const std::size_t k : lists_->used()) {
      options_[k].clear();
      for (const std::int32_t o : lists_->under(k, transient_cap, shared_cap).kept)
        options_[k].push_back(p_.options[k][idx(o)]);
    }
    return true;
  }

  // A chain that needs less than the caps is found under smaller ones, which leave more bytes. So
  // under these caps only chains count that need all of both. A label that misses a cap is bounded
  // together with a layer that needs it, and dropped if no layer before it can. It may still
  // dominate others: it is no worse than they are, and is found under smaller caps.
  std::uint8_t still_missing(std::uint8_t missing, const StageOption<D>& option) const {
    if (option.transient == cap_[0]) missing &= static_cast<std::uint8_t>(~1U);
    if (option.shared == cap_[1]) missing &= static_cast<std::uint8_t>(~2U);
    return missing;
  }

  static constexpr std::size_t kBounds = D == 1 ? 1 : D + 3;

  typename StepBound<D>::Vector bounded(const Cost<D>& cost, int first, double left,
                                        bool& fits) const {
    typename StepBound<D>::Vector total{};
    for (std::size_t d = 0; d < kBounds && fits; ++d) {
      const double rest = value_at(prefix_bound_[d][idx(first)], left);
      fits = rest >= 0;
      total[d] = bound_.entry(cost, d) + rest;
    }
    return total;
  }

  bool prepare_bounds(Bytes budget, Bytes transient_cap, Bytes shared_cap) {
    if (chain_) {
      chain_->forget();
      if (transients_.size() * shareds_.size() > kFewCaps)
        return prepare_chain(budget, transient_cap, shared_cap);
    }
    for (std::size_t d = 0; d < kBounds; ++d) {
      std::vector<const std::vector<HullPoint>*> hulls(p_.options.size(), nullptr);
      for (const std::size_t k : lists_->used())
        hulls[k] = &hull_of(lists_->under(k, transient_cap, shared_cap), k, d);
      relaxed_of_[d].assign(hulls);
      prefix_bound_[d].resize(idx(n_) + 1);
      for (int i = 0; i <= n_; ++i) {
        poll();
        if (!relaxed_of_[d].breakpoints(prefix_count_[idx(i)], prefix_bound_[d][idx(i)]))
          return false;
      }
    }
    bool fits = true;
    auto total = bounded(p_.base, n_, static_cast<double>(budget), fits);
    if (!fits || bound_.prunes(total)) return false;
    // all layers first: usually that is enough
    bound_reaching(n_);
    if (!reaches(missing_at_first_, p_.base, n_, static_cast<double>(budget), total)) return false;
    for (int i = 0; i < n_; ++i) bound_reaching(i);
    return true;
  }

  // Relaxed bounds of the layers before `i`, one of which needs all of a cap that the stage does
  // not need without them: the option of that layer, and the others relaxed.
  void bound_reaching(int i) {
    for (std::size_t cap = 0; cap < kCaps; ++cap) {
      if ((missing_at_first_ >> cap & 1U) == 0) continue;
      for (std::size_t d = 0; d < kBounds; ++d) {
        auto& bounds = reaching_bound_[cap][d];
        bounds.resize(idx(n_) + 1);
        bounds[idx(i)].clear();
        bound_reaching(i, cap, d, bounds[idx(i)]);
      }
    }
  }

  void bound_reaching(int i, std::size_t cap, std::size_t d, std::vector<HullPoint>& bound) {
    std::vector<int> counts = prefix_count_[idx(i)];
    if (lists_->used().size() > kFewTypes) {
      const auto can = [&](std::size_t k) {
        const auto& list = lists_->under(k, cap_[0], cap_[1]);
        return counts[k] > 0 && (cap == 0 ? list.transient : list.shared) == cap_[cap];
      };
      if (std::any_of(lists_->used().begin(), lists_->used().end(), can))
        bound = prefix_bound_[d][idx(i)];
      return;
    }
    std::vector<HullPoint> rest;
    for (const std::size_t k : lists_->used()) {
      if (counts[k] == 0) continue;
      bool made = false;
      for (const auto& o : options_[k]) {
        if ((cap == 0 ? o.transient : o.shared) != cap_[cap]) continue;
        poll();
        if (!made) {
          --counts[k];
          made = relaxed_of_[d].breakpoints(counts, rest);
          ++counts[k];
        }
        for (const HullPoint& p : rest)
          bound.push_back(
              {p.bytes + static_cast<double>(o.bytes), p.cost + bound_.entry(o.cost, d)});
      }
    }
    if (!bound.empty()) lower_hull(bound);
  }

  // True if a label may still lead to a point, given that some layers must need the missing caps.
  // `total`: its bound without them, which is raised.
  bool reaches(std::uint8_t missing, const Cost<D>& cost, int first, double left,
               typename StepBound<D>::Vector& total) const {
    for (std::size_t cap = 0; cap < kCaps; ++cap) {
      if ((missing >> cap & 1U) == 0) continue;
      for (std::size_t d = 0; d < kBounds; ++d) {
        const auto& bound = reaching_bound_[cap][d][idx(first)];
        if (bound.empty()) return false;
        const double rest = value_at(bound, left);
        if (rest < 0) return false;
        total[d] = std::max(total[d], bound_.entry(cost, d) + rest);
      }
    }
    return missing == 0 || !bound_.prunes(total);
  }

  // True if the label of layers first..n-1 may still lead to a point within budget and bound.
  bool admits(const Label<D>& label, int first, Bytes budget) {
    if constexpr (D == 1)
      if (bound_by_chain()) return admits_by_chain(label, first, budget);
    if (label.cost[D - 1] > p_.most_tail) return false;
    bool fits = true;
    const double left = static_cast<double>(budget - label.bytes);
    auto total = bounded(label.cost, first, left, fits);
    return fits && !bound_.prunes(total) && reaches(label.missing, label.cost, first, left, total);
  }

  // The same with the layers before bounded together with their redistribution. The cheapest of
  // them that fit complete the label to a plan; no worse plan is needed any more.
  bool admits_by_chain(const Label<D>& label, int first, Bytes budget) {
    if (label.bytes > budget) return false;
    if (first == 0) return label.missing == 0 && !prunes(static_cast<double>(label.cost[0]));
    Ticks found = kInfTicks;
    const double rest = chain_->rest(first, label.layout, budget - label.bytes, found);
    if (found < kInfTicks) tighten({label.cost[0] + found});
    return !prunes(static_cast<double>(label.cost[0]) + rest);
  }

  // Throws if the labels of one call take more than kMostLabelBytes.
  void check_memory(const std::vector<Label<D>>& created) const {
    const std::size_t bytes = (kept_labels_ + created.size()) * sizeof(Label<D>) +
                              std::max(created.size(), order_.capacity()) * sizeof(Key);
    if (bytes > kMostLabelBytes)
      throw TooManyLabels("the exact search of a stage of " + std::to_string(n_) +
                          " layers needs more than 1 GiB of partial plans");
  }

  void extend(int i, Bytes budget, std::vector<Label<D>>& created) {
    created.clear();
    const int type = p_.layer_type[idx(i)];
    const bool same_type = type == p_.layer_type[idx(i) + 1];
    const Options& options = options_[idx(type)];
    const auto& redistribute = p_.redistribute[idx(type)];
    const auto& following = labels_[idx(i) + 1];
    for (std::size_t l = 0; l < following.size(); ++l) {
      const Label<D>& next = following[l];
      check_memory(created);
      if (bound_by_chain() && !admits(next, i + 1, budget)) continue;  // the incumbent has improved
      for (std::size_t o = 0; o < options.size(); ++o) {
        poll();
        const auto& option = options[o];
        // equal neighbours in one layout: ascending strategies only, because swapping changes
        // nothing
        if (same_type && option.layout == next.layout && static_cast<std::int32_t>(o) > next.option)
          continue;
        Label<D> label{next.bytes + option.bytes,
                       next.cost + option.cost +
                           redistribute[idx(option.layout * p_.num_layouts + next.layout)],
                       static_cast<std::int32_t>(l),
                       static_cast<std::int32_t>(o),
                       option.layout,
                       next.exit,
                       still_missing(next.missing, option)};
        if (i == 0) label.cost = label.cost + p_.entry[idx(option.layout)];
        if (admits(label, i, budget)) created.push_back(label);
      }
    }
  }

  // True if label a of layer i has a smaller strategy sequence than label b.
  bool sequence_less(int i, const Label<D>* a, const Label<D>* b) const {
    while (true) {
      if (a->option != b->option) return a->option < b->option;
      if (a->next == b->next) return false;
      ++i;
      a = &labels_[idx(i)][idx(a->next)];
      b = &labels_[idx(i)][idx(b->next)];
    }
  }

  void keep_undominated(int i, std::vector<Label<D>>& created) {
    states_ += static_cast<std::int64_t>(created.size());
    own_states_ += static_cast<std::int64_t>(created.size());
    if (own_states_ > p_.most_states) throw TooManyStates{};
    // sorting small keys is cheaper than moving labels; ties are rare
    order_.clear();
    for (std::size_t c = 0; c < created.size(); ++c)
      order_.push_back({created[c].bytes, created[c].cost[0], static_cast<std::uint32_t>(c)});
    std::sort(order_.begin(), order_.end(), [&](const Key& x, const Key& y) {
      poll();
      if (x.bytes != y.bytes) return x.bytes < y.bytes;
      if (x.cost != y.cost) return x.cost < y.cost;
      const Label<D>& a = created[x.label];
      const Label<D>& b = created[y.label];
      if (a.cost != b.cost) return a.cost < b.cost;
      if (a.exit != b.exit) return a.exit < b.exit;
      return sequence_less(i, &a, &b);
    });
    const auto& delta = delta_[idx(delta_of_layer_[idx(i)])];
    const int layouts = p_.num_layouts;
    std::vector<Staircase<D>> stairs(idx(layouts) * idx(layouts));  // exit * Y + layout
    std::vector<std::uint8_t> used(idx(layouts) * idx(layouts), 0);
    auto& kept = labels_[idx(i)];
    kept.clear();
    for (const Key& key : order_) {
      if constexpr (D == 3) {  // searching a list costs far more than reading the clock
        if (p_.watch != nullptr && (key.label & 63U) == 0) p_.watch->poll();
      } else {
        poll();
      }
      const Label<D>& label = created[key.label];
      const Cost<D> cost = floored(label.cost, i);
      bool dominated = false;
      for (int x = 0; x < layouts && !dominated; ++x) {
        const std::size_t at = idx(label.exit * layouts + x);
        if (!used[at]) continue;
        dominated = stairs[at].dominates_candidate(delta[idx(x * layouts + label.layout)], cost);
      }
      if (dominated) continue;
      const std::size_t at = idx(label.exit * layouts + label.layout);
      stairs[at].insert(cost);
      used[at] = 1;
      kept.push_back(label);
    }
    kept_labels_ += kept.size();
  }

  void collect(Bytes caps) {
    for (const Label<D>& first : labels_[0]) {
      StagePoint<D> point;
      point.cost = first.cost;
      point.bytes = first.bytes + caps;
      point.first_layout = first.layout;
      point.strategies.reserve(idx(n_));
      const Label<D>* label = &first;
      for (int i = 0; i < n_; ++i) {
        point.strategies.push_back(
            options_[idx(p_.layer_type[idx(i)])][idx(label->option)].strategy);
        if (i + 1 < n_) label = &labels_[idx(i) + 1][idx(label->next)];
      }
      point.exit_layout = label->layout;
      if (p_.only_best()) tighten(point.cost);
      points_.push_back(std::move(point));
    }
  }

  // Non-dominated points of all caps, per (first layout, exit layout).
  std::vector<StagePoint<D>> pareto() {
    std::sort(points_.begin(), points_.end(), [](const StagePoint<D>& a, const StagePoint<D>& b) {
      if (a.cost != b.cost) return a.cost < b.cost;
      return a.strategies < b.strategies;
    });
    std::vector<StagePoint<D>> kept;
    for (auto& point : points_) {
      poll();
      const Cost<D> cost = floored(point.cost, 0);
      const bool dominated = std::any_of(kept.begin(), kept.end(), [&](const StagePoint<D>& k) {
        return k.first_layout == point.first_layout && k.exit_layout == point.exit_layout &&
               dominates<D>(k.cost, Cost<D>{}, cost);
      });
      if (!dominated) kept.push_back(std::move(point));
    }
    return kept;
  }
};

}  // namespace

template <int D>
std::vector<StagePoint<D>> solve_stage_frontier(const StageProblem<D>& problem,
                                                std::int64_t& states) {
  if (problem.layer_type.empty()) return {};
  const Narrowed<D> narrow(problem);
  if (!narrow.possible()) return {};
  auto points = Kernel<D>(narrow.problem(), states).run();
  for (StagePoint<D>& point : points) {
    point.first_layout = narrow.layout(point.first_layout);
    point.exit_layout = narrow.layout(point.exit_layout);
  }
  return points;
}

template std::vector<StagePoint<1>> solve_stage_frontier<1>(const StageProblem<1>&, std::int64_t&);
template std::vector<StagePoint<2>> solve_stage_frontier<2>(const StageProblem<2>&, std::int64_t&);
template std::vector<StagePoint<3>> solve_stage_frontier<3>(const StageProblem<3>&, std::int64_t&);

}  // namespace autopar
