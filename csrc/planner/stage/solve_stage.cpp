#include "planner/stage/solve_stage.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "planner/check.hpp"
#include "planner/stage/mix_of_three.hpp"
#include "planner/stage/stage_kernel.hpp"

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

// Layers with equal rows and an equal transition after them share a type.
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

// Remaining choices: strategies by layer, and transitions up to a limit.
struct Allowed {
  std::vector<std::uint8_t> choice;  // (L, S)
  double largest_move = std::numeric_limits<double>::infinity();

  bool move(double seconds) const { return std::isfinite(seconds) && seconds <= largest_move; }
};

double transient_of(const StageArrays& in, std::size_t at) {
  return in.transient_bytes == nullptr ? 0.0 : in.transient_bytes[at];
}

// Whole numbers stay unchanged; others are scaled by a power of two (relative error 2^-50). They
// are rounded to the nearest unit with some slack in the budget, or up without slack.
struct ByteScale {
  double scale = 1.0;
  Bytes slack = 0;
  bool up = false;

  ByteScale(const StageArrays& in, const Allowed& allowed, bool generous) {
    bool whole = in.budget_bytes < 0x1p51;
    double largest = std::isfinite(in.budget_bytes) ? in.budget_bytes : 0.0;
    double sum_of_layers = 0.0;
    const std::size_t S = idx(in.num_strategies);
    for (int i = 0; i < in.num_layers; ++i) {
      double top = 0.0;
      for (std::size_t s = 0; s < S; ++s) {
        const std::size_t at = idx(i) * S + s;
        if (!allowed.choice[at]) continue;
        for (const double value : {in.memory_bytes[at], transient_of(in, at)}) {
          top = std::max(top, value);
          whole = whole && value == std::floor(value);
        }
      }
      sum_of_layers += 2.0 * top;
    }
    if (!std::isfinite(in.budget_bytes)) {
      largest = sum_of_layers;
      whole = whole || largest < 0x1p51;
      for (std::size_t c = 0; c < allowed.choice.size(); ++c)
        if (allowed.choice[c])
          whole = whole && in.memory_bytes[c] == std::floor(in.memory_bytes[c]) &&
                  transient_of(in, c) == std::floor(transient_of(in, c));
    }
    if (whole || largest == 0.0) return;
    int exponent = 0;
    std::frexp(largest, &exponent);
    scale = std::ldexp(1.0, std::min(51 - exponent, 1000));
    slack = generous ? in.num_layers + 1 : 0;
    up = !generous;
  }
  Bytes bytes(double value) const {
    return up ? static_cast<Bytes>(std::ceil(value * scale))
              : static_cast<Bytes>(std::llround(value * scale));
  }
  Bytes budget(double value) const {
    if (!std::isfinite(value)) return Bytes{1} << 58;
    return static_cast<Bytes>(std::floor(value * scale)) + slack;
  }
};

// Largest total of the allowed choices, seconds.
double largest_total(const StageArrays& in, const Allowed& allowed) {
  const std::size_t S = idx(in.num_strategies);
  double total = 0.0;
  for (int i = 0; i < in.num_layers; ++i) {
    double top = 0.0, move = 0.0;
    for (std::size_t s = 0; s < S; ++s)
      if (allowed.choice[idx(i) * S + s]) top = std::max(top, in.time_s[idx(i) * S + s]);
    if (i > 0)
      for (std::size_t c = 0; c < S * S; ++c) {
        const double t = in.transition_s[idx(i) * S * S + c];
        if (allowed.move(t)) move = std::max(move, t);
      }
    total += top + move;
  }
  return total;
}

double total_of(const StageArrays& in, const std::vector<int>& choice) {
  const std::size_t S = idx(in.num_strategies);
  double total = 0.0;
  for (std::size_t i = 0; i < choice.size(); ++i) {
    total += in.time_s[i * S + idx(choice[i])];
    if (i > 0) total += in.transition_s[(i * S + idx(choice[i - 1])) * S + idx(choice[i])];
  }
  return total;
}

double bytes_of(const StageArrays& in, const std::vector<int>& choice) {
  const std::size_t S = idx(in.num_strategies);
  double kept = 0.0, transient = 0.0;
  for (std::size_t i = 0; i < choice.size(); ++i) {
    const std::size_t at = i * S + idx(choice[i]);
    kept += in.memory_bytes[at];
    transient = std::max(transient, transient_of(in, at));
  }
  return kept + transient;
}

// Checks the memory of the kernel's tables, which grow with layers times layer types.
void check_memory(const StageArrays& in, int num_types, std::size_t num_layouts) {
  const double layers = in.num_layers + 1.0, types = num_types, strategies = in.num_strategies;
  const double moves = 2.0 * types * static_cast<double>(num_layouts * num_layouts) * 8.0;
  const double counts = layers * (4.0 * types + 24.0);
  const double bounds = layers * (1.0 + types * std::max(0.0, strategies - 1.0)) * 16.0;
  if (moves + counts + bounds > kMostTableBytes)
    throw std::length_error("time_s, memory_bytes and transition_s have " +
                            std::to_string(num_types) + " different layers of " +
                            std::to_string(in.num_layers) +
                            ", which need more than 2 GiB of tables");
}

StageAnswer solve_allowed(const StageArrays& in, const Allowed& allowed, bool generous,
                          const Watch& watch) {
  const std::size_t S = idx(in.num_strategies);
  StageAnswer answer;
  const TickScale ticks(2.0 * largest_total(in, allowed));
  const ByteScale bytes(in, allowed, generous);

  StageProblem<1> problem;
  const std::vector<int> layout = group_layouts(in, problem.num_layouts);
  const std::size_t Y = idx(problem.num_layouts);
  std::vector<int> representative(Y, -1);
  for (std::size_t s = 0; s < S; ++s)
    if (representative[idx(layout[s])] < 0) representative[idx(layout[s])] = static_cast<int>(s);
  problem.layer_type = group_types(in);
  const int num_types = *std::max_element(problem.layer_type.begin(), problem.layer_type.end()) + 1;
  check_memory(in, num_types, Y);
  problem.watch = &watch;
  problem.options.resize(idx(num_types));
  problem.redistribute.assign(idx(num_types), std::vector<Cost<1>>(Y * Y, Cost<1>{0}));
  std::vector<std::uint8_t> done(idx(num_types), 0);
  for (int i = 0; i < in.num_layers; ++i) {
    const std::size_t type = idx(problem.layer_type[idx(i)]);
    if (i + 1 < in.num_layers)
      for (std::size_t x = 0; x < Y; ++x)
        for (std::size_t y = 0; y < Y; ++y) {
          const double t = in.transition_s[(idx(i + 1) * S + idx(representative[x])) * S +
                                           idx(representative[y])];
          problem.redistribute[type][x * Y + y] = {allowed.move(t) ? ticks.ticks(t) : kForbidden};
        }
    if (done[type]) continue;
    done[type] = 1;
    problem.options[type].reserve(S);
    for (std::size_t s = 0; s < S; ++s) {
      const std::size_t at = idx(i) * S + s;
      if (!allowed.choice[at]) continue;
      problem.options[type].push_back({static_cast<int>(s),
                                       layout[s],
                                       bytes.bytes(in.memory_bytes[at]),
                                       bytes.bytes(transient_of(in, at)),
                                       0,
                                       {ticks.ticks(in.time_s[at])}});
    }
    if (problem.options[type].empty()) return answer;
  }
  problem.entry.assign(Y, Cost<1>{0});
  problem.exit.assign(Y, Cost<1>{0});
  problem.exit_allowed.assign(Y, 1);
  problem.budget = bytes.budget(in.budget_bytes);
  Ticks known = Ticks{1} << 57;  // TickScale keeps every valid total below it
  if (const auto quick = quick_point<1>(problem))
    known = mix_of_three(problem, std::min(known, quick->cost[0]));
  problem.bound.incumbent = static_cast<double>(known);
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

// Sums in the order of NumPy, so that a caller who sums the arrays gets the same number: eight
// partial sums, and halves of long rows separately.
double sum_of(const double* values, std::size_t n) {
  constexpr std::size_t kLanes = 8, kBlock = 128;
  double sum = 0.0;
  if (n < kLanes) {
    for (std::size_t i = 0; i < n; ++i) sum += values[i];
    return sum;
  }
  if (n > kBlock) {
    const std::size_t half = n / 2 - n / 2 % kLanes;
    return sum_of(values, half) + sum_of(values + half, n - half);
  }
  std::array<double, kLanes> r;
  std::copy_n(values, kLanes, r.begin());
  std::size_t i = kLanes;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) r[lane] += values[i + lane];
  sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  for (; i < n; ++i) sum += values[i];
  return sum;
}

void add_up(const StageArrays& in, StageAnswer& answer) {
  const std::size_t S = idx(in.num_strategies), L = answer.choice.size();
  std::vector<double> room(3 * L);
  double* times = room.data();
  double* kept = times + L;
  double* moves = kept + L;
  double transient = 0.0;
  for (std::size_t i = 0; i < L; ++i) {
    const std::size_t at = i * S + idx(answer.choice[i]);
    times[i] = in.time_s[at];
    kept[i] = in.memory_bytes[at];
    transient = std::max(transient, transient_of(in, at));
    if (i > 0)
      moves[i] = in.transition_s[(i * S + idx(answer.choice[i - 1])) * S + idx(answer.choice[i])];
  }
  answer.total_s = sum_of(times, L);
  if (L > 1) answer.total_s += sum_of(moves + 1, L - 1);
  answer.memory_bytes = sum_of(kept, L) + transient;
}

StageAnswer fastest_choice(const StageArrays& in) {
  const std::size_t cells = idx(in.num_layers) * idx(in.num_strategies);
  StageAnswer answer;
  if (in.budget_bytes < 0) return answer;
  if (in.num_layers == 0) {
    answer.feasible = true;
    return answer;
  }
  Allowed allowed;
  allowed.choice.resize(cells);
  for (std::size_t c = 0; c < cells; ++c)
    allowed.choice[c] = std::isfinite(in.time_s[c]) &&
                        in.memory_bytes[c] + transient_of(in, c) <= in.budget_bytes &&
                        std::isfinite(in.memory_bytes[c] + transient_of(in, c));
  Monitor monitor(0.0, in.interrupted);
  const Watch watch(monitor);
  std::int64_t states = 0;
  while (true) {
    answer = solve_allowed(in, allowed, true, watch);
    states += answer.states;
    if (answer.feasible && bytes_of(in, answer.choice) > in.budget_bytes) {
      answer = solve_allowed(in, allowed, false, watch);
      states += answer.states;
    }
    answer.states = states;
    if (!answer.feasible) return answer;
    // Ticks are fine enough unless an allowed choice is far slower than the optimum; choices slower
    // than the whole optimum cannot be part of a better one.
    const double total = total_of(in, answer.choice);
    if (largest_total(in, allowed) <= 1024.0 * in.num_layers * total || total <= 0.0) return answer;
    const double slowest = total * (1.0 + 1e-9);
    bool narrowed = slowest < allowed.largest_move;
    allowed.largest_move = std::min(allowed.largest_move, slowest);
    for (std::size_t c = 0; c < cells; ++c)
      if (allowed.choice[c] && in.time_s[c] > slowest) {
        allowed.choice[c] = 0;
        narrowed = true;
      }
    if (!narrowed) return answer;
  }
}

}  // namespace

StageAnswer solve_stage(const StageArrays& arrays) {
  check_stage(arrays);
  StageAnswer answer = fastest_choice(arrays);
  if (answer.feasible) add_up(arrays, answer);
  return answer;
}

}  // namespace autopar
