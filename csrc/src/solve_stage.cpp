#include "autopar/solve_stage.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "autopar/quick_point.hpp"
#include "autopar/stage_kernel.hpp"

namespace autopar {
namespace {

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

bool equal_rows(const double* a, const double* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(double)) == 0;
}

// Strategies with equal rows and columns in every transition table share a layout.
std::vector<int> group_layouts(const StageArrays& in, int& num_layouts) {
  const std::size_t S = idx(in.num_strategies);
  std::vector<int> layout(S, -1);
  std::vector<std::size_t> representative;
  for (std::size_t s = 0; s < S; ++s) {
    for (std::size_t r = 0; r < representative.size() && layout[s] < 0; ++r) {
      const std::size_t q = representative[r];
      bool same = true;
      for (int i = 1; i < in.num_layers && same; ++i) {
        const double* t = in.transition_s + idx(i) * S * S;
        same = equal_rows(t + s * S, t + q * S, S);
        for (std::size_t x = 0; x < S && same; ++x) same = t[x * S + s] == t[x * S + q];
      }
      if (same) layout[s] = static_cast<int>(r);
    }
    if (layout[s] < 0) {
      layout[s] = static_cast<int>(representative.size());
      representative.push_back(s);
    }
  }
  num_layouts = static_cast<int>(representative.size());
  return layout;
}

// Layers with equal rows (and an equal transition behind them) share a type.
std::vector<int> group_types(const StageArrays& in) {
  const std::size_t S = idx(in.num_strategies);
  std::vector<int> type(idx(in.num_layers), 0);
  std::vector<int> representative;
  for (int i = in.num_layers - 1; i >= 0; --i) {
    const int last = in.num_layers - 1;
    int found = -1;
    for (std::size_t r = 0; r < representative.size() && found < 0; ++r) {
      const int q = representative[r];
      bool same = equal_rows(in.time_s + idx(i) * S, in.time_s + idx(q) * S, S) &&
                  equal_rows(in.memory_bytes + idx(i) * S, in.memory_bytes + idx(q) * S, S);
      if (same && in.transient_bytes != nullptr)
        same = equal_rows(in.transient_bytes + idx(i) * S, in.transient_bytes + idx(q) * S, S);
      if (same && i != last && q != last)
        same = equal_rows(in.transition_s + idx(i + 1) * S * S,
                          in.transition_s + idx(q + 1) * S * S, S * S);
      if (same) {
        found = static_cast<int>(r);
        if (q == last) representative[r] = i;  // the last layer has no transition behind it
      }
    }
    if (found < 0) {
      found = static_cast<int>(representative.size());
      representative.push_back(i);
    }
    type[idx(i)] = found;
  }
  return type;
}

// Whole numbers stay as they are; others are scaled by a power of two (relative error 2^-50).
struct ByteScale {
  double scale = 1.0;
  Bytes slack = 0;

  ByteScale(const StageArrays& in) {
    const std::size_t cells = idx(in.num_layers) * idx(in.num_strategies);
    double largest = std::abs(in.budget_bytes);
    bool whole = true;
    double sum_of_layers = 0.0;
    for (const double* table : {in.memory_bytes, in.transient_bytes}) {
      if (table == nullptr) continue;
      double top = 0.0;
      for (std::size_t c = 0; c < cells; ++c) {
        if (!std::isfinite(table[c])) continue;
        top = std::max(top, std::abs(table[c]));
        whole = whole && table[c] == std::floor(table[c]);
      }
      sum_of_layers += top * in.num_layers;
    }
    if (std::isfinite(largest))
      largest = std::max(largest, sum_of_layers);
    else
      largest = sum_of_layers;
    if ((whole && largest < 0x1p51) || largest == 0.0) return;
    int exponent = 0;
    std::frexp(largest, &exponent);
    scale = std::ldexp(1.0, 51 - exponent);
    slack = in.num_layers + 1;
  }
  Bytes bytes(double value) const { return static_cast<Bytes>(std::llround(value * scale)); }
  Bytes budget(double value) const {
    if (!std::isfinite(value)) return value > 0 ? Bytes{1} << 53 : -1;
    return static_cast<Bytes>(std::floor(value * scale)) + slack;
  }
};

}  // namespace

StageAnswer solve_stage(const StageArrays& in) {
  const std::size_t S = idx(in.num_strategies);
  StageAnswer answer;
  if (in.num_layers == 0) {
    answer.feasible = in.budget_bytes >= 0;
    return answer;
  }
  double largest = 0.0;
  for (int i = 0; i < in.num_layers; ++i) {
    double top = 0.0;
    for (std::size_t s = 0; s < S; ++s)
      if (std::isfinite(in.time_s[idx(i) * S + s]))
        top = std::max(top, std::abs(in.time_s[idx(i) * S + s]));
    double move = 0.0;
    if (i > 0)
      for (std::size_t c = 0; c < S * S; ++c) {
        const double t = in.transition_s[idx(i) * S * S + c];
        if (std::isfinite(t)) move = std::max(move, std::abs(t));
      }
    largest += top + move;
  }
  const TickScale ticks(2.0 * largest);
  const ByteScale bytes(in);
  const Ticks forbidden =
      static_cast<Ticks>(0x1p58);  // an infinite transition: beyond every valid total

  StageProblem<1> problem;
  const std::vector<int> layout = group_layouts(in, problem.num_layouts);
  const std::size_t Y = idx(problem.num_layouts);
  std::vector<int> representative(Y, -1);
  for (std::size_t s = 0; s < S; ++s)
    if (representative[idx(layout[s])] < 0) representative[idx(layout[s])] = static_cast<int>(s);
  problem.layer_type = group_types(in);
  const int num_types = *std::max_element(problem.layer_type.begin(), problem.layer_type.end()) + 1;
  problem.options.resize(idx(num_types));
  problem.redistribute.assign(idx(num_types), std::vector<Cost<1>>(Y * Y, Cost<1>{0}));
  std::vector<std::uint8_t> done(idx(num_types), 0);
  for (int i = 0; i < in.num_layers; ++i) {
    const std::size_t type = idx(problem.layer_type[idx(i)]);
    if (i + 1 < in.num_layers)
      for (std::size_t x = 0; x < Y; ++x)
        for (std::size_t y = 0; y < Y; ++y) {
          const double t = in.transition_s[idx(i + 1) * S * S + idx(representative[x]) * S +
                                           idx(representative[y])];
          problem.redistribute[type][x * Y + y] = {std::isfinite(t) ? ticks.ticks(t) : forbidden};
        }
    if (done[type]) continue;
    done[type] = 1;
    for (std::size_t s = 0; s < S; ++s) {
      const std::size_t at = idx(i) * S + s;
      if (!std::isfinite(in.time_s[at]) || !std::isfinite(in.memory_bytes[at])) continue;
      if (in.transient_bytes != nullptr && !std::isfinite(in.transient_bytes[at])) continue;
      problem.options[type].push_back(
          {static_cast<int>(s),
           layout[s],
           bytes.bytes(in.memory_bytes[at]),
           in.transient_bytes == nullptr ? 0 : bytes.bytes(in.transient_bytes[at]),
           0,
           {ticks.ticks(in.time_s[at])}});
    }
    if (problem.options[type].empty()) return answer;
  }
  problem.entry.assign(Y, Cost<1>{0});
  problem.exit.assign(Y, Cost<1>{0});
  problem.exit_allowed.assign(Y, 1);
  problem.budget = bytes.budget(in.budget_bytes);
  problem.bound.incumbent = 0x1p57;  // TickScale keeps every valid total below it
  if (const auto quick = quick_point<1>(problem))
    problem.bound.incumbent =
        std::min(problem.bound.incumbent, static_cast<double>(quick->cost[0]));
  const auto points = solve_stage_frontier<1>(problem, answer.states);
  const StagePoint<1>* best = nullptr;
  for (const auto& point : points)
    if (best == nullptr || point.cost[0] < best->cost[0] ||
        (point.cost[0] == best->cost[0] && point.strategies < best->strategies))
      best = &point;
  if (best == nullptr) return answer;
  answer.feasible = true;
  answer.choice = best->strategies;
  return answer;
}

}  // namespace autopar
