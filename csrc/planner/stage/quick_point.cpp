#include "planner/stage/stage_kernel.hpp"

#include <algorithm>

#include "planner/hull.hpp"

namespace autopar {
namespace {

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

template <int D>
class QuickPoint {
 public:
  explicit QuickPoint(const StageProblem<D>& problem)
      : p_(problem), n_(static_cast<int>(problem.layer_type.size())) {
    counts_.assign(p_.options.size(), 0);
    for (const int type : p_.layer_type) ++counts_[idx(type)];
  }

  std::optional<StagePoint<D>> run() {
    for (int layout = 0; layout < p_.num_layouts; ++layout)
      if (p_.exit_allowed[idx(layout)]) fill_layout(layout);
    if (std::count_if(counts_.begin(), counts_.end(), [](int c) { return c > 0; }) == 1)
      mix_pairs();
    return std::move(best_);
  }

 private:
  using Option = StageOption<D>;

  const StageProblem<D>& p_;
  const int n_;
  std::vector<int> counts_;
  std::optional<StagePoint<D>> best_;
  double best_value_ = 0.0;

  double weight(const Cost<D>& cost) const {
    double total = 0.0;
    for (std::size_t d = 0; d + 1 < D; ++d) total += static_cast<double>(cost[d]);
    return total * (p_.bound.microbatches_less_1 + 1.0) + static_cast<double>(cost[D - 1]);
  }

  // Starts from the smallest option of every layer and takes hull steps while they fit; the
  // largest transient and shared bytes are charged as they appear.
  void fill_layout(int layout) {
    struct Step {
      double slope;
      int type;
      const Option* to;
    };
    std::vector<const Option*> start(counts_.size(), nullptr);
    std::vector<Step> steps;
    for (std::size_t k = 0; k < counts_.size(); ++k) {
      if (counts_[k] == 0) continue;
      std::vector<const Option*> corners;
      for (const Option& o : p_.options[k])
        if (o.layout == layout) corners.push_back(&o);
      if (corners.empty()) return;
      // own need first: kept bytes of all its layers plus its maxima
      const auto need = [&](const Option* o) {
        return static_cast<double>(o->bytes) * counts_[k] +
               static_cast<double>(std::max(o->transient, p_.base_transient)) +
               static_cast<double>(std::max(o->shared, p_.base_shared));
      };
      std::sort(corners.begin(), corners.end(), [&](const Option* a, const Option* b) {
        return need(a) != need(b) ? need(a) < need(b) : weight(a->cost) < weight(b->cost);
      });
      start[k] = corners.front();
      const Option* at = corners.front();
      while (true) {
        const Option* best = nullptr;
        double best_slope = 0.0;
        for (const Option* o : corners) {
          const double gain = weight(o->cost) - weight(at->cost);
          const double bytes = std::max(1.0, static_cast<double>(o->bytes - at->bytes));
          if (gain < 0 && (best == nullptr || gain / bytes < best_slope)) {
            best = o;
            best_slope = gain / bytes;
          }
        }
        if (best == nullptr) break;
        steps.push_back({best_slope, static_cast<int>(k), best});
        at = best;
      }
    }
    std::stable_sort(steps.begin(), steps.end(),
                     [](const Step& a, const Step& b) { return a.slope < b.slope; });
    std::vector<const Option*> chosen(idx(n_));
    for (int i = 0; i < n_; ++i) chosen[idx(i)] = start[idx(p_.layer_type[idx(i)])];
    Bytes kept = 0, transient = p_.base_transient, shared = p_.base_shared;
    for (const Option* o : chosen) {
      kept += o->bytes;
      transient = std::max(transient, o->transient);
      shared = std::max(shared, o->shared);
    }
    if (kept + transient + shared > p_.budget) return;
    for (const Step& step : steps)
      for (int i = n_ - 1; i >= 0; --i) {
        if (p_.layer_type[idx(i)] != step.type ||
            weight(chosen[idx(i)]->cost) <= weight(step.to->cost))
          continue;
        const Bytes t = std::max(transient, step.to->transient);
        const Bytes s = std::max(shared, step.to->shared);
        const Bytes k = kept - chosen[idx(i)]->bytes + step.to->bytes;
        if (k + t + s > p_.budget) break;
        kept = k;
        transient = t;
        shared = s;
        chosen[idx(i)] = step.to;
      }
    // canonical order inside runs of one type
    for (int i = 0; i < n_;) {
      int end = i;
      while (end < n_ && p_.layer_type[idx(end)] == p_.layer_type[idx(i)]) ++end;
      std::sort(chosen.begin() + i, chosen.begin() + end,
                [](const Option* a, const Option* b) { return a->strategy < b->strategy; });
      i = end;
    }
    offer(chosen);
  }

  // Options without those that another one of the same layout can replace.
  std::vector<Option> undominated(const std::vector<Option>& all) const {
    const auto no_worse = [&](const Option& a, const Option& b) {
      return a.layout == b.layout && a.bytes <= b.bytes && a.transient <= b.transient &&
             a.shared <= b.shared && weight(a.cost) <= weight(b.cost);
    };
    std::vector<Option> kept;
    for (const Option& o : all) {
      if (std::any_of(kept.begin(), kept.end(), [&](const Option& k) { return no_worse(k, o); }))
        continue;
      std::erase_if(kept, [&](const Option& k) { return no_worse(o, k); });
      kept.push_back(o);
    }
    return kept;
  }

  // As many layers of the faster strategy as fit, the rest with the other one; one type only.
  void mix_pairs() {
    const int type = p_.layer_type.front();
    const std::vector<Option> options = undominated(p_.options[idx(type)]);
    std::vector<const Option*> chosen(idx(n_));
    double best_weight = -1.0;
    const Option* best_a = nullptr;
    const Option* best_b = nullptr;
    int best_k = 0;
    for (const Option& a : options)
      for (const Option& b : options) {
        if (!p_.exit_allowed[idx(b.layout)]) continue;
        const Bytes room = p_.budget - std::max({a.transient, b.transient, p_.base_transient}) -
                           std::max({a.shared, b.shared, p_.base_shared});
        // k layers of a, then n-k of b
        int k;
        if (a.bytes * n_ <= room && weight(a.cost) <= weight(b.cost))
          k = n_;
        else if (a.bytes == b.bytes)
          continue;
        else if (a.bytes > b.bytes) {
          const Bytes spare = room - b.bytes * n_;
          if (spare < 0) continue;
          k = static_cast<int>(std::min<Bytes>(n_, spare / (a.bytes - b.bytes)));
        } else {
          const Bytes excess = b.bytes * n_ - room;
          const Bytes step = b.bytes - a.bytes;
          k = excess <= 0 ? 0
                          : static_cast<int>(std::min<Bytes>(n_ + 1, (excess + step - 1) / step));
          if (k > n_) continue;
        }
        if (k == n_ && !p_.exit_allowed[idx(a.layout)]) continue;
        const auto& first = k > 0 ? a : b;
        const auto& last = k < n_ ? b : a;
        double total = weight(a.cost) * k + weight(b.cost) * (n_ - k) +
                       weight(p_.entry[idx(first.layout)]) + weight(p_.exit[idx(last.layout)]);
        if (k > 0 && k < n_)
          total += weight(p_.redistribute[idx(type)][idx(a.layout * p_.num_layouts + b.layout)]);
        if (best_a == nullptr || total < best_weight) {
          best_weight = total;
          best_a = &a;
          best_b = &b;
          best_k = k;
        }
      }
    if (best_a == nullptr) return;
    for (int i = 0; i < n_; ++i) chosen[idx(i)] = i < best_k ? best_a : best_b;
    offer(chosen);
  }

  void offer(const std::vector<const Option*>& chosen) {
    StagePoint<D> point;
    point.cost = p_.base + p_.entry[idx(chosen.front()->layout)];
    point.cost = point.cost + p_.exit[idx(chosen.back()->layout)];
    Bytes transient = p_.base_transient, shared = p_.base_shared;
    for (int i = 0; i < n_; ++i) {
      const Option& o = *chosen[idx(i)];
      point.cost = point.cost + o.cost;
      if (i > 0) {
        const Cost<D>& move =
            p_.redistribute[idx(p_.layer_type[idx(i) - 1])]
                           [idx(chosen[idx(i) - 1]->layout * p_.num_layouts + o.layout)];
        if (move[0] >= kForbidden) return;
        point.cost = point.cost + move;
      }
      point.bytes += o.bytes;
      transient = std::max(transient, o.transient);
      shared = std::max(shared, o.shared);
      point.strategies.push_back(o.strategy);
    }
    point.bytes += transient + shared;
    if (point.bytes > p_.budget) return;
    point.first_layout = chosen.front()->layout;
    point.exit_layout = chosen.back()->layout;
    typename StepBound<D>::Vector cost{};
    for (std::size_t d = 0; d < D; ++d) cost[d] = static_cast<double>(point.cost[d]);
    const double value = p_.bound.least(cost);
    if (!best_ || value < best_value_) {
      best_value_ = value;
      best_ = std::move(point);
    }
  }
};

}  // namespace

template <int D>
std::optional<StagePoint<D>> quick_point(const StageProblem<D>& problem) {
  if (problem.layer_type.empty()) return std::nullopt;
  return QuickPoint<D>(problem).run();
}

template std::optional<StagePoint<1>> quick_point<1>(const StageProblem<1>&);
template std::optional<StagePoint<2>> quick_point<2>(const StageProblem<2>&);
template std::optional<StagePoint<3>> quick_point<3>(const StageProblem<3>&);

}  // namespace autopar
