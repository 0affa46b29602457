// Collectives, checks, and what a step makes of the sums over one layer.
#include <algorithm>
#include <utility>

#include "autopar/analytic/tensor2d.hpp"

namespace autopar::analytic::tensor2d {

Group Engine::group(std::int64_t ranks, std::int64_t in_domain) const {
  Group g;
  g.ranks = static_cast<int>(ranks);
  if (ranks == 1) return g;
  const auto all = static_cast<double>(ranks), near = static_cast<double>(in_domain);
  const auto domains = static_cast<double>(ranks / in_domain);
  const double repeated = quirks_.single_allreduce ? 1.0 : 2.0;
  g.share = (all - 1) / all;
  g.allreduce_moves = g.allreduce_latencies = repeated;
  if (in_domain == 1) {
    const double gain = quirks_.one_adapter ? 1.0 : std::max(1.0, system_.adapters);
    g.bandwidth = system_.slow_bandwidth * gain;
    g.latency_s = system_.slow_latency * (all - 1);
  } else if (ranks == in_domain) {
    g.bandwidth = system_.fast_bandwidth;
    g.latency_s = system_.fast_latency * (all - 1);
  } else {
    g.bandwidth =
        std::min(system_.adapters * near * system_.slow_bandwidth, system_.fast_bandwidth);
    g.latency_s = system_.slow_latency * (domains - 1) + system_.fast_latency * (all - domains);
    g.allreduce_moves = 2.0;
  }
  return g;
}

double Engine::collective_s(Operation operation, double volume_gb, const Group& group) const {
  if (group.ranks == 1 || !(volume_gb > 0)) return 0.0;
  const double share = operation == kReduce || operation == kBroadcast ? 1.0 : group.share;
  const double moved_s = share * volume_gb / group.bandwidth;
  if (operation != kAllReduce) return group.latency_s + moved_s;
  return group.allreduce_latencies * group.latency_s + group.allreduce_moves * moved_s;
}

double Engine::transfer_s(double volume_gb, bool fast) const {
  if (fast) return system_.fast_latency + volume_gb / system_.fast_bandwidth;
  const double gain = quirks_.one_adapter ? 1.0 : std::max(1.0, system_.adapters);
  return system_.slow_latency + volume_gb / (system_.slow_bandwidth * gain);
}

double Engine::hop_s(const Candidate& c, double volume_gb) const {
  if (c.pp == 1) return 0.0;
  if (c.nv_pp == 1) return transfer_s(volume_gb, false);
  const int slow_links = c.pp / c.nv_pp - 1;
  const int fast_links = c.pp - 1 - slow_links;
  double seconds = fast_links * transfer_s(volume_gb, true);
  if (!quirks_.free_slow_links) seconds += slow_links * transfer_s(volume_gb, false);
  return seconds / (c.pp - 1);
}

Reason Engine::check_tensors(std::int64_t columns, std::int64_t rows) const {
  if (model_.seq < columns * rows) return kSequence;
  if (model_.heads % columns) return kHeads;
  if (model_.hidden % columns) return kHidden;
  if (model_.feedforward % columns) return kFeedforward;
  if (strategy_ == k2d && model_.hidden % rows) return kRows;
  return kOk;
}

Reason Engine::check(const Candidate& c) const {
  for (const std::int32_t value :
       {c.dp, c.tp1, c.tp2, c.pp, c.mbs, c.nb, c.nv_tp1, c.nv_tp2, c.nv_dp, c.nv_pp})
    if (value < 1) return kCounts;
  if (strategy_ == k1d && c.tp2 != 1) return kCounts;
  std::int64_t left = num_gpus_;  // divided, as a product may overflow
  for (const std::int32_t value : {c.tp1, c.tp2, c.pp, c.dp}) {
    if (left % value) return kProduct;
    left /= value;
  }
  if (left != 1) return kProduct;
  if (const Reason reason = check_tensors(c.tp1, c.tp2); reason != kOk) return reason;
  if (model_.depth % c.pp) return kDepth;
  if (batch_ % (static_cast<std::int64_t>(c.dp) * c.mbs)) return kBatch;
  if (c.tp1 % c.nv_tp1 || c.tp2 % c.nv_tp2 || c.dp % c.nv_dp || c.pp % c.nv_pp) return kPlacement;
  std::int64_t used = 1;  // each divides its degree, so that the product divides num_gpus
  for (const std::int32_t value : {c.nv_tp1, c.nv_tp2, c.nv_dp, c.nv_pp}) used *= value;
  return used > system_.domain ? kDomain : kOk;
}

namespace {

// How often a GPU runs a layer in one step.
struct Repeats {
  double layers, steps, both, pipeline;

  Repeats(const Candidate& c, std::int64_t depth, std::int64_t batch)
      : layers(static_cast<double>(depth / c.pp)),
        steps(static_cast<double>(batch / c.dp / c.mbs)),
        both(layers * steps),
        pipeline(static_cast<double>(c.pp)) {}
};

struct Memory {
  double weights, optimizer, activations;

  double total() const { return 2 * weights + optimizer + activations; }
};

Memory memory_of(const Candidate& c, const Layer& layer, const Repeats& n, double element_size,
                 Strategy strategy) {
  const double weights = layer.weights * element_size * n.layers;
  const double shards = static_cast<double>(c.dp) * (strategy == k2dSeqp ? c.tp2 : 1);
  return {weights, 6 * weights / shards,
          layer.kept * element_size * n.layers * std::min(n.pipeline, n.steps)};
}

}  // namespace

double Engine::memory_gb(const Candidate& c, const Layer& layer) const {
  return memory_of(c, layer, Repeats(c, model_.depth, batch_), system_.element_size, strategy_)
      .total();
}

double Engine::least_s(const Candidate& c, const Layer& without_links) const {
  const Repeats n(c, model_.depth, batch_);
  const double layers_s = (without_links.forward_s + without_links.backward_s) * n.both;
  // the same operations as in a step, in the same order: rounding cannot lift it above one
  return layers_s + (n.pipeline - 1) * layers_s / n.steps;
}

Figures Engine::step(const Candidate& c, const Layer& layer, double* statistics) const {
  const Repeats n(c, model_.depth, batch_);
  const double tf = layer.forward_s, tb = layer.backward_s;
  const double weights = layer.weights * system_.element_size;

  const bool spread = strategy_ == k2dSeqp;  // weights are whole on every row
  const Group data = group(static_cast<std::int64_t>(c.dp) * (spread ? c.tp2 : 1),
                           static_cast<std::int64_t>(c.nv_dp) * (spread ? c.nv_tp2 : 1));
  double dp_s = 0.0;
  for (const auto& [operation, hidden] :
       {std::pair{kAllGather, tf}, std::pair{kReduceScatter, tb}}) {
    const double one = collective_s(operation, weights, data);
    dp_s += one + std::max(one - hidden, 0.0) * (n.layers - 1);
  }
  const double pp_s = 2 * n.steps * hop_s(c, layer.hop * system_.element_size);
  const double bubble_s = (n.pipeline - 1) * ((tf + tb) * n.both + pp_s) / n.steps;
  const double time_s = (tf + tb) * n.both + pp_s + bubble_s + dp_s;
  const Memory memory = memory_of(c, layer, n, system_.element_size, strategy_);
  if (statistics) {
    const double parts[] = {n.both * layer.compute_s,
                            n.both * layer.memory_s,
                            n.both * layer.link_s,
                            dp_s,
                            pp_s,
                            bubble_s};
    double* out = statistics;
    *out++ = time_s;
    *out++ = layer.flops * system_.flops_units * n.both;
    *out++ = memory.total();
    for (const double part : parts) *out++ = part;
    for (const double part : parts) *out++ = part / time_s;
    *out++ = memory.weights;
    *out++ = memory.weights;
    *out++ = memory.optimizer;
    *out++ = memory.activations;
  }
  return {time_s, memory.total()};
}

}  // namespace autopar::analytic::tensor2d
