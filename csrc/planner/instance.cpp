#include "planner/instance.hpp"

#include <algorithm>
#include <numeric>

namespace autopar {
namespace {

// Comparing all pairs of layers takes quadratic time: above this number, layers of several types
// are compared by position only.
constexpr int kMostCompared = 4096;

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

double largest(const double* values, std::size_t n, const std::uint8_t* valid = nullptr) {
  double top = 0.0;
  for (std::size_t i = 0; i < n; ++i)
    if ((valid == nullptr || valid[i] != 0) && values[i] > top) top = values[i];
  return top;
}

// Upper bound of all step times.
double largest_step(const Tables& t) {
  const std::size_t rows = idx(t.num_tables) * idx(t.num_types) * idx(t.num_strategies);
  const std::size_t moves =
      idx(t.num_tables) * idx(t.num_types) * idx(t.num_layouts) * idx(t.num_layouts);
  const std::size_t vocab = idx(t.num_tables) * 3 * idx(t.num_vocab);
  const double layer = largest(t.forward_s, rows, t.valid) + largest(t.backward_s, rows, t.valid) +
                       largest(t.tail_s, rows, t.valid);
  const double move =
      largest(t.redistribute_forward_s, moves) + largest(t.redistribute_backward_s, moves);
  const double other = largest(t.vocab_forward_s, vocab) + largest(t.vocab_backward_s, vocab) +
                       largest(t.vocab_tail_s, vocab);
  const double send = largest(t.send_s, idx(t.num_tables) * idx(t.num_types) * idx(t.num_layouts));
  int stages = 1, microbatches = 1;
  for (int n = 0; n < t.num_tables; ++n) stages = std::max(stages, t.table_stages[n]);
  for (int q = 0; q < t.num_candidates; ++q)
    microbatches = std::max(microbatches, t.candidate_microbatches[q]);
  const double once = t.num_layers * (layer + move) + 2.0 * (other + move) + 4.0 * stages * send;
  return 2.0 * once * (microbatches + 2.0);
}

std::vector<Ticks> in_ticks(const TickScale& scale, const double* values, std::size_t n,
                            const std::uint8_t* valid = nullptr) {
  std::vector<Ticks> out(n, 0);
  for (std::size_t i = 0; i < n; ++i)
    if (valid == nullptr || valid[i] != 0) out[i] = scale.ticks(values[i]);
  return out;
}

}  // namespace

Instance::Instance(const Tables& tables, const SearchSettings& settings)
    : like_types_(tables), t(like_types_.tables), budget(settings.budget), scale(largest_step(t)) {
  const std::size_t K = idx(t.num_types), Y = idx(t.num_layouts), N = idx(t.num_tables);
  forward = in_ticks(scale, t.forward_s, num_rows(), t.valid);
  backward = in_ticks(scale, t.backward_s, num_rows(), t.valid);
  tail = in_ticks(scale, t.tail_s, num_rows(), t.valid);
  move_forward = in_ticks(scale, t.redistribute_forward_s, N * K * Y * Y);
  move_backward = in_ticks(scale, t.redistribute_backward_s, N * K * Y * Y);
  send = in_ticks(scale, t.send_s, N * K * Y);
  vocab_forward = in_ticks(scale, t.vocab_forward_s, num_vocab_rows());
  vocab_backward = in_ticks(scale, t.vocab_backward_s, num_vocab_rows());
  vocab_tail = in_ticks(scale, t.vocab_tail_s, num_vocab_rows());
  count.assign(K, 0);
  prefix.assign((idx(t.num_layers) + 1) * K, 0);
  for (int l = 0; l < t.num_layers; ++l) {
    std::copy_n(prefix.begin() + static_cast<std::ptrdiff_t>(idx(l) * K), K,
                prefix.begin() + static_cast<std::ptrdiff_t>((idx(l) + 1) * K));
    ++prefix[(idx(l) + 1) * K + idx(t.layer_type[l])];
    ++count[idx(t.layer_type[l])];
  }
  find_same_layers();
  find_fewer_microbatches();
}

// A step takes sum + (m - 1) * slowest + tail for m micro-batches, and sum >= slowest: per
// micro-batch it never rises with m. Its memory depends on m where GPipe keeps every micro-batch,
// and between one and several.
void Instance::find_fewer_microbatches() {
  const std::size_t Q = idx(t.num_candidates);
  fewer_.assign(Q, -1);
  std::vector<int> order(Q);
  std::iota(order.begin(), order.end(), 0);
  most_ = order;
  const auto key = [this](int q) {
    return std::pair(t.candidate_table[q], -t.candidate_microbatches[q]);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  for (std::size_t i = 1; i < Q; ++i) {
    const int more = order[i - 1], fewer = order[i];
    const int n = t.candidate_table[fewer];
    if (t.candidate_table[more] != n || (t.gpipe && t.table_stages[n] > 1)) continue;
    const int m = t.candidate_microbatches[fewer];
    if (m == 1 && t.candidate_microbatches[more] > 1) continue;
    if (!t.gpipe && t.table_stages[n] > m) continue;  // 1F1B has no plan for it
    fewer_[idx(more)] = fewer;
    most_[idx(fewer)] = most_[idx(more)];
  }
}

// Fewer micro-batches share sum + tail - slowest. With several stages that is at least a layer of
// every other stage, with one stage at least the tails.
double Instance::at_least_slower(const Item& item, int fewer) const {
  const int n = t.candidate_table[item.candidate];
  Ticks least = kInfTicks, tails = 0;
  for (int k = 0; k < t.num_types; ++k) {
    if (count[idx(k)] == 0) continue;
    Ticks least_tail = kInfTicks;
    for (int s = 0; s < t.num_strategies; ++s) {
      const std::size_t r = row(n, k, s);
      if (t.valid[r] == 0 || !allowed(item, t.num_stage_rules, s)) continue;
      least = std::min(least, forward[r] + backward[r]);
      least_tail = std::min(least_tail, tail[r]);
    }
    tails += least_tail * count[idx(k)];
  }
  const double shared = t.table_stages[n] > 1 ? static_cast<double>(least) * (t.table_stages[n] - 1)
                                              : static_cast<double>(tails);
  return shared *
         (1.0 / t.candidate_microbatches[fewer] - 1.0 / t.candidate_microbatches[item.candidate]) /
         static_cast<double>(t.table_microbatch[n]);
}

// Layers 1 and later are compared only with each other: the first has no layer before it.
void Instance::find_same_layers() {
  const int layers = t.num_layers;
  same_.resize(idx(layers));
  if (t.num_types == 1 || layers > kMostCompared) return;
  // number of layers from l - d on that equal those from l on, the largest distance d first: of all
  // equal runs of n layers, the first counts
  for (int d = layers - 1; d > 0; --d) {
    int like = 0;
    for (int l = layers - 1; l > d; --l) {
      like = t.layer_type[l] == t.layer_type[l - d] ? like + 1 : 0;
      if (like == 0 || t.layer_type[l - 1] != t.layer_type[l - d - 1]) continue;
      auto& same = same_[idx(l)];
      if (same.empty() || like > same.back().second) same.emplace_back(l - d, like);
    }
  }
}

std::vector<int> Instance::vocabs(const Item& item) const {
  const int n = t.candidate_table[item.candidate];
  std::vector<int> valid;
  for (int e = 0; e < t.num_vocab; ++e)
    if ((item.vocab == kAnyVocab || item.vocab == e) && t.vocab_valid[n * t.num_vocab + e] != 0)
      valid.push_back(e);
  return valid;
}

VocabCost Instance::vocab_cost(const Item& item, int position, std::size_t once) const {
  VocabCost least;
  bool first = true;
  for (const int e : vocabs(item)) {
    const std::size_t r = vocab_row(t.candidate_table[item.candidate], position, e);
    const VocabCost v{vocab_forward[r],
                      vocab_backward[r],
                      vocab_tail[r],
                      t.vocab_static_bytes[once * num_vocab_rows() + r],
                      t.vocab_activation_bytes[r],
                      t.vocab_transient_bytes[once * num_vocab_rows() + r],
                      t.vocab_shared_bytes[r]};
    if (first) {
      least = v;
      first = false;
      continue;
    }
    least.forward = std::min(least.forward, v.forward);
    least.backward = std::min(least.backward, v.backward);
    least.tail = std::min(least.tail, v.tail);
    least.fixed = std::min(least.fixed, v.fixed);
    least.activation = std::min(least.activation, v.activation);
    least.transient = std::min(least.transient, v.transient);
    least.shared = std::min(least.shared, v.shared);
  }
  return least;
}

Bytes Instance::needs(const Item& item, const std::vector<int>& sizes,
                      const std::vector<int>& strategies) const {
  const int n = t.candidate_table[item.candidate];
  const std::size_t once = microbatches(item) == 1 ? 0 : 1;
  const int p = static_cast<int>(sizes.size());
  Bytes most = 0;
  int l = 0;
  for (int j = 0; j < p; ++j) {
    const Bytes in_flight = p == 1 ? 1 : t.gpipe ? microbatches(item) : p - j;
    const int kind = p == 1 ? 0 : j == 0 ? 1 : j == p - 1 ? 3 : 2;
    Bytes kept = t.stage_fixed_bytes[n * 4 + kind], transient = 0, shared = 0;
    if (kind != 2) {
      const VocabCost vocab = vocab_cost(item, kind == 0 ? 0 : kind == 1 ? 1 : 2, once);
      kept += vocab.fixed + vocab.activation * in_flight;
      transient = vocab.transient;
      shared = vocab.shared;
    }
    for (const int end = l + sizes[idx(j)]; l < end; ++l) {
      const std::size_t r = row(n, t.layer_type[l], strategies[idx(l)]);
      kept += t.static_bytes[once * num_rows() + r] + t.activation_bytes[r] * in_flight;
      transient = std::max(transient, t.transient_bytes[once * num_rows() + r]);
      shared = std::max(shared, t.shared_bytes[r]);
    }
    most = std::max(most, kept + transient + shared);
  }
  return most;
}

double Instance::simple_bound(const Item& item) const {
  const int n = t.candidate_table[item.candidate];
  const int p = t.table_stages[n];
  const double m = microbatches(item);
  if (p > t.num_layers || vocabs(item).empty()) return std::numeric_limits<double>::infinity();
  if (!t.gpipe && p > 1 && m < p) return std::numeric_limits<double>::infinity();
  if (!t.division.empty() && static_cast<int>(t.division.size()) != p)
    return std::numeric_limits<double>::infinity();
  double pass = 0.0, tails = 0.0, both = 0.0;
  for (int k = 0; k < t.num_types; ++k) {
    if (count[idx(k)] == 0) continue;
    Ticks least = kInfTicks, least_tail = kInfTicks;
    double least_both = std::numeric_limits<double>::infinity();
    const int first = std::max(item.only_strategy, 0);
    const int behind = item.only_strategy < 0 ? t.num_strategies : first + 1;
    for (int s = first; s < behind; ++s) {
      const std::size_t r = row(n, k, s);
      if (t.valid[r] == 0 || !allowed(item, t.num_stage_rules, s)) continue;
      const Ticks time = forward[r] + backward[r];
      least = std::min(least, time);
      least_tail = std::min(least_tail, tail[r]);
      least_both =
          std::min(least_both, m * static_cast<double>(time) + static_cast<double>(tail[r]));
    }
    if (least == kInfTicks) return std::numeric_limits<double>::infinity();
    pass += static_cast<double>(least) * count[idx(k)];
    tails += static_cast<double>(least_tail) * count[idx(k)];
    both += least_both * count[idx(k)];
  }
  double other = 0.0, other_tail = 0.0;
  for (const int position : p == 1 ? std::vector<int>{0} : std::vector<int>{1, 2}) {
    const VocabCost v = vocab_cost(item, position, m == 1 ? 0 : 1);
    other += static_cast<double>(v.forward + v.backward);
    other_tail += static_cast<double>(v.tail);
  }
  if (p == 1) return both + m * other + other_tail;
  // the largest stage is at least the mean
  const double sum = pass + other;
  return sum + (m - 1) * sum / p + (tails + other_tail) / p;
}

}  // namespace autopar
