// Plans priced in plain doubles from the formulas of search/planning/cost/tables.py, and all plans
// of a small problem, independently of the planner.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "planner/problem.hpp"

namespace planner_plans {

using autopar::Bytes;
using autopar::Choice;
using autopar::SearchSettings;
using autopar::Tables;

struct Price {
  bool allowed = true;  // every row is valid and every restriction holds
  double step_s = 0.0;
  Bytes peak = 0;  // of the peak stage
};

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Samples of one step.
inline double batch_of(const Tables& t, int candidate) {
  return static_cast<double>(t.table_microbatch[t.candidate_table[candidate]] *
                             t.candidate_microbatches[candidate]);
}

inline Price priced(const Tables& t, const SearchSettings& settings, const Choice& plan) {
  const std::int64_t K = t.num_types, S = t.num_strategies, Y = t.num_layouts, E = t.num_vocab;
  const std::int64_t n = t.candidate_table[plan.candidate], e = plan.vocab;
  const int m = t.candidate_microbatches[plan.candidate], p = t.table_stages[n];
  const std::int64_t rows = t.num_tables * K * S, vocab_rows = t.num_tables * 3 * E;
  const std::int64_t many = m == 1 ? 0 : 1;
  Price price;
  price.allowed =
      t.vocab_valid[n * E + e] != 0 && (t.division.empty() || t.division == plan.stage_sizes);
  double sum = 0.0, sends = 0.0, slowest_send = 0.0, largest_tail = 0.0;
  std::vector<double> forward, backward;
  const auto move = [&](const double* table, std::int64_t type, int from, int to) {
    return table[((n * K + type) * Y + from) * Y + to];
  };
  std::int64_t layer = 0;
  for (int j = 0; j < p; ++j) {
    const bool last = j == p - 1;
    const Bytes held = p == 1 ? 1 : t.gpipe ? m : p - j;
    double f = 0.0, g = 0.0, tail = 0.0;
    const int kind = p == 1 ? 0 : j == 0 ? 1 : last ? 3 : 2;
    Bytes kept = t.stage_fixed_bytes[n * 4 + kind], transient = 0, shared = 0;
    if (kind != 2) {
      const std::int64_t r = (n * 3 + (kind == 3 ? 2 : kind)) * E + e;
      f += t.vocab_forward_s[r];
      g += t.vocab_backward_s[r];
      tail += t.vocab_tail_s[r];
      kept += t.vocab_static_bytes[many * vocab_rows + r] + t.vocab_activation_bytes[r] * held;
      transient = t.vocab_transient_bytes[many * vocab_rows + r];
      shared = t.vocab_shared_bytes[r];
    }
    for (int i = 0; i < plan.stage_sizes[at(j)]; ++i, ++layer) {
      const int s = plan.strategies[at(layer)], type = t.layer_type[layer];
      const std::int64_t r = (n * K + type) * S + s;
      price.allowed = price.allowed && t.valid[r] != 0 &&
                      (j >= t.num_stage_rules || t.stage_allowed[j * S + s] != 0) &&
                      (!settings.uniform || s == plan.strategies[0]);
      const int producer = layer == 0 ? type : t.layer_type[layer - 1];
      const int from =
          layer == 0 ? t.vocab_layout[e] : t.strategy_layout[plan.strategies[at(layer - 1)]];
      f += t.forward_s[r] + move(t.redistribute_forward_s, producer, from, t.strategy_layout[s]);
      g += t.backward_s[r] + move(t.redistribute_backward_s, producer, from, t.strategy_layout[s]);
      tail += t.tail_s[r];
      kept += t.static_bytes[many * rows + r] + t.activation_bytes[r] * held;
      transient = std::max(transient, t.transient_bytes[many * rows + r]);
      shared = std::max(shared, t.shared_bytes[r]);
    }
    const int type = t.layer_type[layer - 1],
              layout = t.strategy_layout[plan.strategies[at(layer - 1)]];
    if (last) {
      f += move(t.redistribute_forward_s, type, layout, t.vocab_layout[e]);
      g += move(t.redistribute_backward_s, type, layout, t.vocab_layout[e]);
    } else {
      const double send = t.send_s[(n * K + type) * Y + layout];
      sends += send;
      slowest_send = std::max(slowest_send, send);
    }
    forward.push_back(f);
    backward.push_back(g);
    sum += f + g;
    largest_tail = std::max(largest_tail, tail);
    price.peak = std::max(price.peak, kept + transient + shared);
  }
  if (t.gpipe) {
    const double f = *std::max_element(forward.begin(), forward.end());
    const double g = *std::max_element(backward.begin(), backward.end());
    price.step_s = sum + 2 * sends + largest_tail +
                   (m - 1) * (std::max(f, slowest_send) + std::max(g, slowest_send));
  } else {
    const double transfer = 2 * slowest_send * (p - 1) / p;
    double longest = 0.0;
    for (std::size_t j = 0; j < forward.size(); ++j)
      longest = std::max(longest, forward[j] + backward[j] + transfer);
    price.step_s = sum + p * transfer + (m - 1) * longest + largest_tail;
  }
  return price;
}

// Calls visit(sizes) for every way to write `layers` as `stages` positive numbers.
template <class Visit>
void for_each_division(int layers, int stages, std::vector<int>& sizes, Visit visit) {
  if (stages == 1) {
    sizes.push_back(layers);
    visit(sizes);
    sizes.pop_back();
    return;
  }
  for (int first = 1; first <= layers - stages + 1; ++first) {
    sizes.push_back(first);
    for_each_division(layers - first, stages - 1, sizes, visit);
    sizes.pop_back();
  }
}

struct Candidate {
  Choice plan;
  double samples_per_s;
  Bytes peak;
};

// The number of plans, allowed or not: divisions, strategies and embeddings; exact enough to
// compare.
inline double num_plans(const Tables& t) {
  double total = 0.0;
  for (int q = 0; q < t.num_candidates; ++q) {
    const int stages = t.table_stages[t.candidate_table[q]];
    if (stages > t.num_layers) continue;
    double divisions = 1.0;  // (layers - 1) over (stages - 1)
    for (int i = 1; i < stages; ++i) divisions *= static_cast<double>(t.num_layers - i) / i;
    total += divisions * std::pow(t.num_strategies, t.num_layers) * t.num_vocab;
  }
  return total;
}

// Every allowed plan, whatever its memory; none at all when there are more than `most` to try.
inline std::vector<Candidate> all_plans(const Tables& t, const SearchSettings& settings,
                                        double most) {
  std::vector<Candidate> plans;
  if (num_plans(t) > most) return plans;
  for (int q = 0; q < t.num_candidates; ++q) {
    const int stages = t.table_stages[t.candidate_table[q]];
    if (stages > t.num_layers) continue;
    std::vector<int> prefix;
    for_each_division(t.num_layers, stages, prefix, [&](const std::vector<int>& sizes) {
      for (int e = 0; e < t.num_vocab; ++e) {
        Choice plan{q, e, 0.0, sizes, std::vector<int>(at(t.num_layers), 0)};
        while (true) {
          const Price price = priced(t, settings, plan);
          if (price.allowed) {
            plan.step_time_s = price.step_s;
            plans.push_back({plan, batch_of(t, q) / price.step_s, price.peak});
          }
          std::size_t i = 0;
          while (i < plan.strategies.size() && ++plan.strategies[i] == t.num_strategies)
            plan.strategies[i++] = 0;
          if (i == plan.strategies.size()) break;
        }
      }
    });
  }
  return plans;
}

}  // namespace planner_plans
