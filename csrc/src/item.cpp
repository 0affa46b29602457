// The three questions about an item, dispatched on the kind of its cost vector and, for 1F1B,
// repeated for every transfer time that can be the slowest one.
#include <tuple>

#include "subproblem.hpp"

namespace autopar {
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

}  // namespace autopar
