// Collectives, checks, and time and memory of a step from the sums over one layer.
#include <algorithm>

#include "closed_form/tensor2d/tensor2d.hpp"

namespace autopar::analytic::tensor2d {

// A ring passes every rank and pays the latency of each hop: the slow one between domains, the fast
// one inside. If a domain has several ranks, all its adapters carry the ring, which is as fast as
// the slower of all adapters and the fast links. An all-reduce is a reduce-scatter and an
// all-gather, so everything counts twice.
Group Engine::group(std::int64_t ranks, std::int64_t in_domain) const {
  Group g;
  g.ranks = ranks;
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

double Engine::collective_s(Collective operation, double volume_gb, const Group& group) const {
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

// Mean over the links between stages, some of which are between domains.
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
  if (const std::int64_t kv = model_.kv_heads; kv && kv % columns && columns % kv) return kKvHeads;
  if (model_.heads % columns) return kHeads;
  if (model_.hidden % columns) return kHidden;
  if (model_.feedforward % columns) return kFeedforward;
  if (strategy_ == k2d && model_.hidden % rows) return kRows;
  return kOk;
}

bool Engine::tokens_divide(std::int64_t microbatch, std::int64_t columns, std::int64_t rows) const {
  const std::int64_t ranks = strategy_ == k2d ? rows : columns * rows;
  return microbatch % ranks * (model_.seq % ranks) % ranks == 0;
}

namespace {

// True if every number is positive, and 1D strategies have no rows.
inline bool counts(const Candidate& c, Strategy strategy) {
  for (const std::int32_t value :
       {c.dp, c.tp1, c.tp2, c.pp, c.mbs, c.nb, c.nv_tp1, c.nv_tp2, c.nv_dp, c.nv_pp})
    if (value < 1) return false;
  return strategy != k1d || c.tp2 == 1;
}

inline Reason check_microbatch(const Engine& engine, const Candidate& c) {
  if (!engine.tokens_divide(c.mbs, c.tp1, c.tp2)) return kTokens;
  return engine.strategy() == k2d && c.nb > engine.model().hidden ? kPanels : kOk;
}

inline Reason check_groups(const Engine& engine, const Candidate& c) {
  if (engine.model().depth % c.pp) return kDepth;
  if (engine.batch() % (static_cast<std::int64_t>(c.dp) * c.mbs)) return kBatch;
  if (c.tp1 % c.nv_tp1 || c.tp2 % c.nv_tp2 || c.dp % c.nv_dp || c.pp % c.nv_pp) return kPlacement;
  std::int64_t used = 1;
  for (const std::int32_t value : {c.nv_tp1, c.nv_tp2, c.nv_dp, c.nv_pp}) {
    used *= value;  // a domain is an int32, too: two of them do not overflow
    if (used > engine.system().domain) return kDomain;
  }
  return kOk;
}

}  // namespace

Reason Engine::check(const Candidate& c) const {
  if (!counts(c, strategy_)) return kCounts;
  std::int64_t left = num_gpus_;  // divided, because a product may overflow
  for (const std::int32_t value : {c.tp1, c.tp2, c.pp, c.dp}) {
    if (left % value) return kProduct;
    left /= value;
  }
  if (left != 1) return kProduct;
  if (const Reason reason = check_tensors(c.tp1, c.tp2); reason != kOk) return reason;
  if (const Reason reason = check_microbatch(*this, c); reason != kOk) return reason;
  return check_groups(*this, c);
}

Reason Engine::check(const Candidate& c, const Way& way) const {
  if (!counts(c, strategy_)) return kCounts;
  const Reason tensors = check_tensors(c.tp1, c.tp2);
  if (tensors == kSequence) return kSequence;
  if (const Reason reason = check_microbatch(*this, c); reason != kOk) return reason;
  if (tensors != kOk) return tensors;
  if (const Reason reason = check_groups(*this, c); reason != kOk) return reason;
  // columns divide the width of every head, and the keys of a query
  if (way.attention == kSumma && (model_.hidden / model_.heads % c.tp1 || model_.seq % c.tp1))
    return kHeadWidth;
  return kOk;
}

namespace {

// Number of runs of a layer on one GPU in one step.
struct Repeats {
  double layers, steps, both, pipeline;

  Repeats(const Candidate& c, std::int64_t depth, std::int64_t batch)
      : layers(static_cast<double>(depth / c.pp)),
        steps(static_cast<double>(batch / c.dp / c.mbs)),
        both(layers * steps),
        pipeline(static_cast<double>(c.pp)) {}
};

// Layers around a stage: those of the slower of the first and the last stage.
struct Edge {
  Sums sums;
  double waiting_s;  // by which the slower stage waits for the other, once

  Edge(const Candidate& c, const Work& work) : waiting_s(0.0) {
    const double first_s = work.first.time_s(), last_s = work.last.time_s();
    if (c.pp == 1) {
      sums = work.first.plus(work.last);
    } else {
      sums = last_s >= first_s ? work.last : work.first;
      waiting_s = std::min(first_s, last_s);
    }
  }
};

struct Memory {
  double weights, gradients, optimizer, activations;

  double total() const { return weights + gradients + optimizer + activations; }
};

// Memory of the stage that needs more. Shards divide the optimizer states, which have 12 bytes a
// parameter where a weight has 2. The first stage holds as many micro-batches as there are stages,
// the last stage one.
Memory memory_of(const Model& model, const Candidate& c, const Work& work, const Repeats& n,
                 double element_size, double shards) {
  const auto stage = [&](double kept, double weights, double in_flight) -> Memory {
    const double all = (work.layer.weights * n.layers + weights) * element_size;
    return {all, all * model.gradients, 6 * all / shards,
            (work.layer.kept * n.layers * in_flight + kept) * element_size};
  };
  const double in_flight = std::min(n.pipeline, n.steps);
  if (c.pp == 1) {
    const double shared = model.tied ? work.first.weights : 0.0;
    return stage(work.first.kept + work.last.kept, work.first.weights + work.last.weights - shared,
                 in_flight);
  }
  const Memory first = stage(work.first.kept, work.first.weights, in_flight);
  const Memory last = stage(work.last.kept, work.last.weights, 1.0);
  return last.total() > first.total() ? last : first;
}

double shards_of(const Candidate& c, Strategy strategy) {
  return static_cast<double>(c.dp) * (strategy == k2dSeqp ? c.tp2 : 1);
}

// Step time: micro-batches of one stage, their transfers, fill and drain of the pipeline, and
// exposed data-parallel communication. Bounds and times use one order of operations, so that
// rounding keeps bounds below times.
double time_of(const Work& work, const Edge& edge, const Repeats& n, double pp_s, double dp_s,
               double* bubble_s) {
  const double layers_s = work.layer.time_s() * n.both;
  const double steady_s = layers_s + edge.sums.time_s() * n.steps;
  *bubble_s = (n.pipeline - 1) * (layers_s + pp_s) / n.steps + edge.waiting_s;
  return steady_s + pp_s + *bubble_s + dp_s;
}

}  // namespace

Sums Sums::plus(const Sums& other) const {
  Sums sums = *this;
  sums.forward_s += other.forward_s;
  sums.backward_s += other.backward_s;
  sums.compute_s += other.compute_s;
  sums.memory_s += other.memory_s;
  sums.link_s += other.link_s;
  sums.weights += other.weights;
  sums.kept += other.kept;
  sums.flops += other.flops;
  return sums;
}

double Engine::memory_gb(const Candidate& c, const Work& work) const {
  return memory_of(model_, c, work, Repeats(c, model_.depth, batch_), system_.element_size,
                   shards_of(c, strategy_))
      .total();
}

double Engine::least_s(const Candidate& c, const Work& without_links) const {
  double bubble_s = 0.0;
  return time_of(without_links, Edge(c, without_links), Repeats(c, model_.depth, batch_), 0.0, 0.0,
                 &bubble_s);
}

// Exposed data-parallel communication: a layer hides that of the next one; embedding and head count
// as one more layer.
double Engine::data_s(const Candidate& c, const Work& work) const {
  const bool spread = strategy_ == k2dSeqp;  // weights are whole on every row
  const Group data = group(static_cast<std::int64_t>(c.dp) * (spread ? c.tp2 : 1),
                           static_cast<std::int64_t>(c.nv_dp) * (spread ? c.nv_tp2 : 1));
  const auto layers = static_cast<double>(model_.depth / c.pp);
  const double first = work.first.weights, last = work.last.weights;
  double around = std::max(first, last);
  if (c.pp == 1) around = model_.tied ? last : first + last;
  const auto exposed_s = [&](Collective operation, double scale, double hidden) {
    const double one = collective_s(operation, work.layer.weights * scale, data);
    const double edge = collective_s(operation, around * scale, data);
    return one + std::max(one - hidden, 0.0) * (layers - 1) + std::max(edge - hidden, 0.0);
  };
  const double size = system_.element_size, gradient = model_.gradients * size;
  double seconds = exposed_s(kAllGather, size, work.layer.forward_s);
  seconds += exposed_s(kReduceScatter, gradient, work.layer.backward_s);
  if (model_.tied && c.pp > 1)
    seconds += collective_s(kAllReduce, first * gradient, group(2, c.nv_pp == c.pp ? 2 : 1));
  return seconds;
}

Figures Engine::step(const Candidate& c, const Work& work, double* statistics) const {
  const Repeats n(c, model_.depth, batch_);
  const Edge edge(c, work);
  const double dp_s = data_s(c, work);
  const double pp_s = 2 * n.steps * hop_s(c, work.hop * system_.element_size);
  double bubble_s = 0.0;
  const double time_s = time_of(work, edge, n, pp_s, dp_s, &bubble_s);
  const Memory memory =
      memory_of(model_, c, work, n, system_.element_size, shards_of(c, strategy_));
  if (statistics) {
    const Sums &layer = work.layer, &around = edge.sums;
    const double parts[] = {n.both * layer.compute_s + n.steps * around.compute_s,
                            n.both * layer.memory_s + n.steps * around.memory_s,
                            n.both * layer.link_s + n.steps * around.link_s,
                            dp_s,
                            pp_s,
                            bubble_s};
    double* out = statistics;
    *out++ = time_s;
    *out++ = (layer.flops * n.both + around.flops * n.steps) * system_.flops_units;
    *out++ = memory.total();
    for (const double part : parts) *out++ = part;
    for (const double part : parts) *out++ = part / time_s;
    *out++ = memory.weights;
    *out++ = memory.gradients;
    *out++ = memory.optimizer;
    *out++ = memory.activations;
  }
  return {time_s, memory.total()};
}

}  // namespace autopar::analytic::tensor2d
