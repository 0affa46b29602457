#include "planner/check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace autopar {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", value);
  return buffer;
}

std::string text(std::int64_t value) { return std::to_string(value); }
std::string text(int value) { return std::to_string(value); }

std::size_t product(std::initializer_list<int> sizes) {
  std::size_t total = 1;
  for (const int size : sizes) total *= static_cast<std::size_t>(size);
  return total;
}

// `used`: flags of the elements that are read, repeated along the array; null: all.
template <class T>
void check_range(const char* name, const T* values, std::size_t size, T least, T most,
                 const std::uint8_t* used = nullptr, std::size_t used_size = 1) {
  for (std::size_t i = 0; i < size; ++i) {
    if (used != nullptr && used[i % used_size] == 0) continue;
    if (values[i] >= least && values[i] <= most) continue;  // NaN is in no range
    refuse(std::string(name) + " contains " + text(values[i]) + ", expected numbers from " +
           text(least) + " to " + text(most));
  }
}

void check_indices(const char* name, const std::int32_t* values, int size, int count) {
  for (int i = 0; i < size; ++i)
    if (values[i] < 0 || values[i] >= count)
      refuse(std::string(name) + " contains " + std::to_string(values[i]) +
             ", expected indices below " + std::to_string(count));
}

void check_seconds(const char* name, const double* values, std::size_t size,
                   const std::uint8_t* used = nullptr, std::size_t used_size = 1) {
  check_range(name, values, size, 0.0, kLargestSeconds, used, used_size);
}

// A sum of this many bytes, with room to add a few, stays within 63 bits.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 56;

void check_bytes(const char* name, const std::int64_t* values, std::size_t size,
                 const std::uint8_t* used, std::size_t used_size) {
  check_range(name, values, size, std::int64_t{0}, kMostBytes, used, used_size);
}

void check_sizes(const Tables& t) {
  if (t.num_layers < 1 || t.num_layers > kMostLayers)
    refuse("layer_type has " + std::to_string(t.num_layers) + " layers, expected 1 to " +
           std::to_string(kMostLayers));
  if (t.num_strategies > kMostStrategies)
    refuse("strategy_layout has " + std::to_string(t.num_strategies) +
           " strategies, expected at most " + std::to_string(kMostStrategies));
  if (t.num_layouts > kMostLayouts)
    refuse("redistribute_forward_s has " + std::to_string(t.num_layouts) +
           " layouts, expected at most " + std::to_string(kMostLayouts));
}

double largest(const std::int64_t* values, std::size_t size, const std::uint8_t* used,
               std::size_t used_size) {
  std::int64_t top = 0;
  for (std::size_t i = 0; i < size; ++i)
    if (used == nullptr || used[i % used_size] != 0) top = std::max(top, values[i]);
  return static_cast<double>(top);
}

// Checks a stage with all layers and both vocabulary layers, with the most micro-batches in flight.
void check_byte_sums(const Tables& t, std::size_t rows, std::size_t vocab_rows) {
  int in_flight = 1;
  for (int n = 0; n < t.num_tables; ++n) in_flight = std::max(in_flight, t.table_stages[n]);
  if (t.gpipe)
    for (int q = 0; q < t.num_candidates; ++q)
      in_flight = std::max(in_flight, t.candidate_microbatches[q]);
  const double activation = largest(t.activation_bytes, rows, t.valid, rows);
  const double layer = largest(t.static_bytes, 2 * rows, t.valid, rows) + activation * in_flight;
  const double vocab = largest(t.vocab_static_bytes, 2 * vocab_rows, nullptr, 1) +
                       largest(t.vocab_activation_bytes, vocab_rows, nullptr, 1) * in_flight;
  if (t.num_layers * layer + 2 * vocab < 0x1p60) return;
  refuse("activation_bytes and static_bytes of " + std::to_string(t.num_layers) + " layers with " +
         std::to_string(in_flight) + " micro-batches in flight exceed 2^60");
}

void check_memory(const Tables& t) {
  bool one_type = true;
  for (int l = 1; l < t.num_layers; ++l) one_type = one_type && t.layer_type[l] == t.layer_type[0];
  int stages = 0;
  for (int n = 0; n < t.num_tables; ++n)
    if (t.table_stages[n] <= t.num_layers) stages = std::max(stages, t.table_stages[n]);
  const double width = t.num_layers + 1.0;
  // per cell a bound of at most six numbers and two flags; per list, labels of each layout, bounds
  // and ways
  const double cells = stages * width * (one_type ? 1.0 : width) * 50.0;
  const double lists = (stages + 1.0) * width * (24.0 * (t.num_layouts + 1.0) + 1024.0);
  if (cells + lists > kMostTableBytes)
    refuse("layer_type has " + std::to_string(t.num_layers) + " layers of several types and " +
           "table_stages up to " + std::to_string(stages) + " stages, which need " +
           text(std::ceil((cells + lists) / (1U << 30))) + " GiB of tables, expected at most " +
           text(kMostTableBytes / (1U << 30)));
  const double entries = static_cast<double>(t.num_candidates) * std::max(1, t.num_strategies) *
                         std::max(1, t.num_vocab);
  if (entries > kMostTableBytes)
    refuse("candidate_table has " + std::to_string(t.num_candidates) +
           " candidates, too many for " + std::to_string(t.num_strategies) + " strategies");
}

}  // namespace

void check_tables(const Tables& t) {
  check_sizes(t);
  const int N = t.num_tables, K = t.num_types, S = t.num_strategies, Y = t.num_layouts,
            E = t.num_vocab, Q = t.num_candidates;
  const std::size_t rows = product({N, K, S}), moves = product({N, K, Y, Y});
  const std::size_t vocab_rows = product({N, 3, E});
  check_indices("layer_type", t.layer_type, t.num_layers, K);
  check_indices("strategy_layout", t.strategy_layout, S, Y);
  check_indices("vocab_layout", t.vocab_layout, E, Y);
  check_indices("candidate_table", t.candidate_table, Q, N);
  check_range<std::int32_t>("table_stages", t.table_stages, product({N}), 1, 1 << 24);
  check_range("table_microbatch", t.table_microbatch, product({N}), std::int64_t{1},
              std::int64_t{1} << 31);
  check_range<std::int32_t>("candidate_microbatches", t.candidate_microbatches, product({Q}), 1,
                            1 << 30);
  check_seconds("forward_s", t.forward_s, rows, t.valid, rows);
  check_seconds("backward_s", t.backward_s, rows, t.valid, rows);
  check_seconds("tail_s", t.tail_s, rows, t.valid, rows);
  check_seconds("redistribute_forward_s", t.redistribute_forward_s, moves);
  check_seconds("redistribute_backward_s", t.redistribute_backward_s, moves);
  check_seconds("send_s", t.send_s, product({N, K, Y}));
  check_seconds("vocab_forward_s", t.vocab_forward_s, vocab_rows);
  check_seconds("vocab_backward_s", t.vocab_backward_s, vocab_rows);
  check_seconds("vocab_tail_s", t.vocab_tail_s, vocab_rows);
  check_bytes("static_bytes", t.static_bytes, 2 * rows, t.valid, rows);
  check_bytes("activation_bytes", t.activation_bytes, rows, t.valid, rows);
  check_bytes("transient_bytes", t.transient_bytes, 2 * rows, t.valid, rows);
  check_bytes("shared_bytes", t.shared_bytes, rows, t.valid, rows);
  check_bytes("vocab_static_bytes", t.vocab_static_bytes, 2 * vocab_rows, nullptr, 1);
  check_bytes("vocab_activation_bytes", t.vocab_activation_bytes, vocab_rows, nullptr, 1);
  check_bytes("vocab_transient_bytes", t.vocab_transient_bytes, 2 * vocab_rows, nullptr, 1);
  check_bytes("vocab_shared_bytes", t.vocab_shared_bytes, vocab_rows, nullptr, 1);
  check_bytes("stage_fixed_bytes", t.stage_fixed_bytes, product({N, 4}), nullptr, 1);
  check_byte_sums(t, rows, vocab_rows);
  std::int64_t divided = 0;
  for (const int layers : t.division) {
    if (layers < 1)
      refuse("division contains " + std::to_string(layers) + ", expected numbers from 1");
    divided += layers;
  }
  if (!t.division.empty() && divided != t.num_layers)
    refuse("division sums to " + std::to_string(divided) + ", expected " +
           std::to_string(t.num_layers) + " layers");
  check_memory(t);
}

void check_settings(const SearchSettings& s) {
  if (!(s.time_limit_s >= 0))
    refuse("time_limit_s is " + text(s.time_limit_s) + ", expected seconds, or 0 for no limit");
  if (s.alternatives < 0 || s.alternatives > kMostAlternatives)
    refuse("alternatives is " + std::to_string(s.alternatives) + ", expected 0 to " +
           std::to_string(kMostAlternatives));
  if (s.budget > Bytes{1} << 60 || s.budget < -(Bytes{1} << 60))
    refuse("budget is " + std::to_string(s.budget) + " bytes, expected at most 2^60");
}

void check_stage(const StageArrays& in) {
  if (in.num_layers > kMostStageLayers)
    refuse("time_s has " + std::to_string(in.num_layers) + " layers, expected at most " +
           std::to_string(kMostStageLayers));
  if (in.num_strategies > kMostStrategies)
    refuse("time_s has " + std::to_string(in.num_strategies) + " strategies, expected at most " +
           std::to_string(kMostStrategies));
  const int L = in.num_layers, S = in.num_strategies;
  const auto check = [](const char* name, const double* values, std::size_t size) {
    const auto usable =
        [](double value) {  // NaN is neither; no branches, for whole vectors at once
          return static_cast<unsigned>(value >= 0) &
                 (static_cast<unsigned>(value <= kLargestSeconds) |
                  static_cast<unsigned>(value == std::numeric_limits<double>::infinity()));
        };
    unsigned all = 1;
    for (std::size_t i = 0; i < size; ++i) all &= usable(values[i]);
    if (all != 0) return;
    const double* wrong = std::find_if(values, values + size, [&](double v) { return !usable(v); });
    refuse(std::string(name) + " contains " + text(*wrong) + ", expected numbers from 0 to " +
           text(kLargestSeconds) + ", or infinity for what is not allowed");
  };
  check("time_s", in.time_s, product({L, S}));
  check("memory_bytes", in.memory_bytes, product({L, S}));
  if (in.transient_bytes != nullptr) check("transient_bytes", in.transient_bytes, product({L, S}));
  // the first transition is not charged, so it may hold anything
  if (L > 1) check("transition_s", in.transition_s + product({S, S}), product({L - 1, S, S}));
  if (std::isnan(in.budget_bytes) ||
      (in.budget_bytes > kLargestSeconds && !std::isinf(in.budget_bytes)))
    refuse("budget_bytes is " + text(in.budget_bytes) + ", expected a number of bytes up to " +
           text(kLargestSeconds));
}

}  // namespace autopar
