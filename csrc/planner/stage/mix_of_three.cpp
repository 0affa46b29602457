#include "planner/stage/mix_of_three.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "planner/hull.hpp"

namespace autopar {
namespace {

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

using Option = StageOption<1>;

class Mix {
 public:
  Mix(const StageProblem<1>& problem, Ticks known)
      : p_(problem),
        type_(idx(problem.layer_type.front())),
        n_(static_cast<Bytes>(problem.layer_type.size())),
        best_(known) {}

  Ticks run() {
    const std::vector<const Option*> few = candidates();
    for (std::size_t a = 0; a < few.size(); ++a)
      for (std::size_t b = a + 1; b < few.size(); ++b)
        for (std::size_t c = b + 1; c < few.size(); ++c) mix(*few[a], *few[b], *few[c]);
    return best_;
  }

 private:
  static constexpr std::size_t kFew = 4;

  const StageProblem<1>& p_;
  std::size_t type_;
  Bytes n_;
  Ticks best_;

  // Strategies of least cost at the price of memory implied by the budget: the slope of the hull
  // where every layer has its share of the budget.
  std::vector<const Option*> candidates() const {
    const auto& options = p_.options[type_];
    std::vector<HullPoint> hull;
    for (const Option& o : options)
      hull.push_back({static_cast<double>(o.bytes), static_cast<double>(o.cost[0])});
    lower_hull(hull);
    const double share = static_cast<double>(p_.budget) / static_cast<double>(n_);
    double slope = 0.0;
    for (std::size_t i = 1; i < hull.size() && hull[i - 1].bytes <= share; ++i)
      slope = (hull[i].cost - hull[i - 1].cost) / (hull[i].bytes - hull[i - 1].bytes);
    if (!hull.empty() && hull.back().bytes <= share) slope = 0.0;  // all of them may be the fastest
    std::vector<std::pair<double, const Option*>> priced;
    for (const Option& o : options)
      priced.emplace_back(static_cast<double>(o.cost[0]) - slope * static_cast<double>(o.bytes),
                          &o);
    const std::size_t size = std::min(kFew, priced.size());
    std::partial_sort(priced.begin(), priced.begin() + static_cast<std::ptrdiff_t>(size),
                      priced.end(), [](const auto& x, const auto& y) {
                        return x.first != y.first ? x.first < y.first
                                                  : x.second->strategy < y.second->strategy;
                      });
    std::vector<const Option*> few;
    for (std::size_t i = 0; i < size; ++i) few.push_back(priced[i].second);
    return few;
  }

  // Tries every number of layers of `a`. Bytes and cost are linear in the number of layers of `b`,
  // so one of the ends of the feasible range is best, or next to an end where a change of strategy
  // is saved.
  void mix(const Option& a, const Option& b, const Option& c) {
    const Bytes budget = p_.budget -
                         std::max({a.transient, b.transient, c.transient, p_.base_transient}) -
                         std::max({a.shared, b.shared, c.shared, p_.base_shared});
    const Bytes more = b.bytes - c.bytes;
    for (Bytes first = 0; first <= n_; ++first) {
      const Bytes rest = n_ - first;
      const Bytes room = budget - first * a.bytes - rest * c.bytes;  // for b instead of c
      Bytes least = 0, most = rest;
      if (room < 0) {
        if (more >= 0) continue;
        least = (-room - more - 1) / -more;
      } else if (more > 0) {
        most = std::min(most, room / more);
      }
      if (least > most) continue;
      for (const Bytes second : {least, most, std::min(least + 1, most), std::max(most - 1, least)})
        if (p_.base[0] + first * a.cost[0] + second * b.cost[0] + (rest - second) * c.cost[0] <
            best_)
          in_every_order({Run{&a, first}, Run{&b, second}, Run{&c, rest - second}});
    }
  }

  struct Run {
    const Option* option;
    Bytes length;
  };

  void in_every_order(std::array<Run, 3> runs) {
    for (int turn = 0; turn < 3; ++turn) {
      offer(runs);
      std::swap(runs[0], runs[1]);
      offer(runs);
      std::swap(runs[1], runs[2]);
    }
  }

  void offer(const std::array<Run, 3>& runs) {
    Ticks total = p_.base[0];
    const Option* before = nullptr;
    for (const Run& run : runs) {
      if (run.length == 0) continue;
      const Option& o = *run.option;
      const Ticks first = before == nullptr ? p_.entry[idx(o.layout)][0] : move(*before, o);
      const Ticks repeat = run.length > 1 ? move(o, o) : 0;
      if (first >= kForbidden || repeat >= kForbidden) return;
      total += first + run.length * o.cost[0] + (run.length - 1) * repeat;
      before = &o;
    }
    if (!p_.exit_allowed[idx(before->layout)]) return;
    best_ = std::min(best_, total + p_.exit[idx(before->layout)][0]);
  }

  Ticks move(const Option& from, const Option& to) const {
    return p_.redistribute[type_][idx(from.layout * p_.num_layouts + to.layout)][0];
  }
};

}  // namespace

Ticks mix_of_three(const StageProblem<1>& problem, Ticks known) {
  const auto& types = problem.layer_type;
  const auto other = [&](int type) { return type != types.front(); };
  if (types.empty() || std::any_of(types.begin(), types.end(), other)) return known;
  if (problem.options[idx(types.front())].size() < 3) return known;
  return Mix(problem, known).run();
}

}  // namespace autopar
