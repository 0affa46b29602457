// One training step on the first stage, as search/analytic/calculon/step.py has it.
#include <cmath>
#include <limits>

#include "autopar/analytic/calculon.hpp"

namespace autopar::analytic::calculon {
namespace {

constexpr int kBase = 0, kEdge = 1;

// A window that nothing is left of cannot hide anything.
double ratio(double amount, double window) {
  if (window == 0.0) return amount > 0.0 ? std::numeric_limits<double>::infinity() : 0.0;
  return amount / window;
}

// Writes statistics in the order of the readable model.
class Writer {
 public:
  explicit Writer(double* out) : out_(out) {}
  void put(double value) { *out_++ = value; }
  void put(const double (&pair)[2]) {
    put(pair[kBase]);
    put(pair[kEdge]);
  }
  void put(const Work& w, bool edge_only) {
    put(w.flops);
    put(w.flops_s);
    put(w.bytes);
    put(w.memory_s);
    put(w.time_s[edge_only ? kEdge : kBase]);
  }

 private:
  double* out_;
};

struct Sizes {
  double checkpoint = 0, live = 0, activations = 0, checkpoints = 0, gradients = 0, smallest = 0,
         outer_space = 0, tables = 0, tier1 = 0, tier2 = 0;
};

Sizes sizes(const Execution& x, const Shape& s, const Block& b, const Outer& outer,
            const Quirks& q) {
  Sizes r;
  const auto k = static_cast<double>(s.blocks), v = static_cast<double>(s.chunks),
             p = static_cast<double>(x.pipeline_par);
  if (s.training && s.recompute_all)
    r.checkpoint = static_cast<double>(s.elements) * s.element_bytes;
  if (s.rs && !q.checkpoint_unsharded) r.checkpoint /= s.tensor;
  r.live = static_cast<double>(std::min<std::int64_t>(s.microbatches, x.pipeline_par));
  if (s.chunks > 1) r.live *= 1 + (p - 1) / (v * p);
  r.activations =
      s.training && !s.recompute_all ? b.working + b.stored * (k * r.live - 1) : b.working;
  r.checkpoints = k * r.checkpoint * r.live;
  r.gradients = s.training ? b.whole_weight_gradient + b.weight_gradient * (k - 1) : 0.0;
  r.smallest = s.recompute_all ? b.working : b.working + b.stored;
  r.tier1 =
      (x.weight_offload ? 2 * b.weight : k * b.weight) +
      (x.activations_offload ? r.smallest + 2 * r.checkpoint : r.activations + r.checkpoints) +
      (x.optimizer_offload ? b.whole_weight_gradient + b.weight_gradient + 2 * b.optimizer
                           : r.gradients + k * b.optimizer) +
      b.activation_gradient;
  r.tier2 = (x.weight_offload ? k * b.weight : 0.0) +
            (x.activations_offload ? (s.recompute_all ? r.checkpoints : r.activations) : 0.0) +
            (x.optimizer_offload ? k * b.weight_gradient + k * b.optimizer : 0.0);
  const bool one_stage = x.pipeline_par == 1;
  r.tables = one_stage && !s.tied ? 2 : 1;
  r.outer_space = r.tables * outer.table_bytes + outer.logits_bytes;
  r.tier1 += r.outer_space;
  return r;
}

}  // namespace

Figures Model::memory(const Execution& x, const Shape& shape, const Block& block,
                      const Outer& outer) const {
  const Sizes z = sizes(x, shape, block, outer, quirks_);
  Figures figures;
  figures.tier1_bytes = z.tier1;
  figures.tier2_bytes = z.tier2;
  return figures;
}

Figures Model::step(const Execution& x, const Shape& s, const Block& b, const Outer& outer,
                    double* statistics) const {
  const Quirks& q = quirks_;
  const Sizes z = sizes(x, s, b, outer, q);
  const bool training = s.training, full = s.recompute_all;
  const std::int64_t p = x.pipeline_par, m = s.microbatches;
  const auto k = static_cast<double>(s.blocks), c = static_cast<double>(s.chunk_blocks),
             v = static_cast<double>(s.chunks), md = static_cast<double>(m),
             pd = static_cast<double>(p);
  const double whole = static_cast<double>(s.elements) * s.element_bytes;
  const auto per_chunk = [&](const double (&pair)[2]) {
    return (c - 1) * pair[kBase] + pair[kEdge];
  };

  // pipeline transfers and offload
  const Tier& pipeline = system_.tiers[static_cast<std::size_t>(x.pipeline_par_net)];
  const Tier& data = system_.tiers[static_cast<std::size_t>(x.data_par_net)];
  const Rate& second = system_.second.rate;
  const double pp_fw = p == 1 ? 0.0 : (!s.rs && !s.rs_at_edges ? whole : whole / s.tensor);
  const double pp_bw = training ? pp_fw : 0.0;
  double pf = pipeline.seconds(kP2p, pp_fw, 2), pb = pipeline.seconds(kP2p, pp_bw, 2);
  if (!q.latency_without_neighbour) {
    if (p == 1) pf = 0.0;
    if (p == 1 || !training) pb = 0.0;
  }
  const double stored = full ? z.checkpoint : b.stored;
  const double weights_moved = x.weight_offload ? b.weight : 0.0,
               activations_moved = x.activations_offload ? stored : 0.0;
  const double off_fw = std::max(weights_moved, activations_moved);
  double off_bw = 0.0;
  if (training) {
    const double states = x.optimizer_offload ? b.optimizer : 0.0,
                 gradients = x.optimizer_offload ? b.weight_gradient : 0.0;
    off_bw = weights_moved + activations_moved + states;
    // in: what backward and the optimizer read; out: what they leave
    if (!q.offload_sums) off_bw = std::max(off_bw, weights_moved + gradients + states);
  }

  // base and edge blocks
  const double bm_s = b.agrad.memory_s + b.wgrad.memory_s;
  const double off_fw_s = second.seconds(off_fw), off_bw_s = second.seconds(off_bw);
  double fw0[2], bw0[2], fw[2], bw[2], exposed_fw[2], exposed_bw[2];
  for (const int j : {kBase, kEdge}) {
    fw0[j] = b.fw.time_s[j] + b.fw.exposed_s[j] + (j == kEdge ? pf : 0.0);
    bw0[j] = b.again.time_s[j] + b.again_link.exposed_s[j] + b.agrad.time_s[j] + b.wgrad.time_s[j] +
             b.agrad.exposed_s[j] + (j == kEdge ? pb : 0.0);
    exposed_fw[j] = std::max(0.0, off_fw_s + b.fw.memory_s - fw0[j]);
    exposed_bw[j] = std::max(0.0, off_bw_s + bm_s - bw0[j]);
    fw[j] = fw0[j] + exposed_fw[j];
    bw[j] = bw0[j] + exposed_bw[j];
  }
  const double chunk_bw = per_chunk(bw);
  const double chunk = per_chunk(fw) + chunk_bw;
  const double cut =
      static_cast<double>(s.missing_blocks) *
      (c > 1 ? (fw[kBase] + fw[kEdge] + bw[kBase] + bw[kEdge]) / 2 : fw[kEdge] + bw[kEdge]);
  const double extra = m % p ? (v - 1) * static_cast<double>(p - m % p) : 0.0;
  const double bubble = (pd - 1 + extra) * chunk - cut;

  // data parallelism
  const double dp = x.data_par > 1 && training ? b.weight : 0.0;
  const auto d = static_cast<double>(x.data_par);
  double bd = 0.0;
  if (dp > 0)
    bd = x.optimizer_sharding
             ? data.seconds(kReduceScatter, dp, d) + data.seconds(kAllGather, dp, d)
             : data.seconds(kAllReduce, dp, d);
  const bool same_np = x.data_par_net == x.pipeline_par_net,
             same_nt = x.data_par_net == x.tensor_par_net;
  const double usage = data.processor_usage;
  const bool overlap = x.data_par_overlap && dp > 0;
  double dp_exposed = k * bd, required_chunk = 0.0, required_tail = 0.0;
  if (overlap) {
    const double optimizer_s = x.optimizer_sharding ? 0.0 : b.optim.time_s[0] - b.optim.memory_s;
    double window[2];
    for (const int j : {kBase, kEdge}) {
      window[j] = bw[j] - bm_s - b.again.memory_s + optimizer_s;
      if (same_nt) window[j] -= b.again_link.link_s[j] + b.agrad.link_s[j];
    }
    const double computing = b.agrad.flops_s + b.wgrad.flops_s + b.again.flops_s +
                             (x.optimizer_sharding ? 0.0 : b.optim.flops_s);
    const double windows = per_chunk(window);
    const auto slots = static_cast<double>(m % p ? m % p : p);
    const double hits = same_np ? std::min(std::floor(c * bd / chunk_bw), slots) : 0.0;
    const double inflated = c * bd - (pd * windows - hits * pb) + pd * c * computing * usage;
    const double exposed_chunks = (v - 1) * (inflated > 0 ? inflated : c * bd * usage);
    double tail = 0.0, slowed = computing * usage;
    if (q.tail_windows) {
      if (c > 1) tail = windows - pb - (bw[kBase] + bw[kEdge]) / 2 + optimizer_s;
    } else {
      if (c > 1) tail = (c - 2) * window[kBase] + window[kEdge] - (same_np ? pb : 0.0);
      slowed *= c - 1;
    }
    const double inflated_tail = (c - 1) * bd + slowed - tail;
    const double exposed_tail = inflated_tail > 0 ? inflated_tail : (c - 1) * bd * usage;
    dp_exposed = bd + exposed_chunks + exposed_tail;
    if (statistics) {
      const auto factor = [&](Collective o) {
        return q.overlap_requirements ? data.scalar[o] : data.traffic(o, d);
      };
      const double scalar =
          x.optimizer_sharding ? factor(kReduceScatter) + factor(kAllGather) : factor(kAllReduce);
      const double room_chunks =
          (v - 1) * (pd * windows + pd * c * computing * usage - (same_np ? pb : 0.0));
      const double room_tail = tail + (c - 1) * bd * usage;
      if (room_chunks > 0)
        required_chunk = c * dp * scalar / room_chunks * (q.overlap_requirements ? 1.0 : v - 1);
      if (room_tail > 0)
        required_tail = (q.overlap_requirements ? c : c - 1) * dp * scalar / room_tail;
    }
  }

  // the step
  const double steps = md * v;
  const double fw_time = steps * per_chunk(b.fw.time_s);
  const double bw_time = steps * (per_chunk(b.agrad.time_s) + per_chunk(b.wgrad.time_s));
  double optim_time = k * b.optim.time_s[0];
  const double busy = fw_time + bw_time + optim_time;
  const double pp_time = p == 1 ? 0.0 : steps * (pf + (training ? pb : 0.0));
  const double exposed_fw_s = steps * per_chunk(exposed_fw);
  const double exposed_bw_s = training ? steps * per_chunk(exposed_bw) : 0.0;
  const double recomm_exposed = steps * per_chunk(b.again_link.exposed_s);
  const double tp_exposed = steps * (per_chunk(b.fw.exposed_s) + per_chunk(b.agrad.exposed_s));
  const double recompute = steps * per_chunk(b.again.time_s);
  double total_s = fw_time + bw_time + optim_time + exposed_fw_s + exposed_bw_s + recompute +
                   recomm_exposed + bubble + tp_exposed + pp_time + dp_exposed;
  // the outermost stages are the slowest, so every microbatch waits for their extra work
  double embedding_time = md * outer.embedding_s, head_time = md * outer.head_s;
  if (p > 1) (embedding_time > head_time ? head_time : embedding_time) = 0.0;
  optim_time += z.tables * outer.optimizer_s;
  total_s += embedding_time + head_time + z.tables * outer.optimizer_s;

  Figures figures;
  figures.total_time_s = total_s;
  figures.tier1_bytes = z.tier1;
  figures.tier2_bytes = z.tier2;
  figures.sample_rate_per_s = static_cast<double>(x.batch_size) / total_s;
  if (!statistics) return figures;

  const bool edge_only = s.chunk_blocks == 1;
  const int first = edge_only && !q.latency_without_neighbour ? kEdge : kBase;
  const double fw_window = std::min(fw0[first], fw0[kEdge]) - b.fw.memory_s;
  const double bw_window = std::min(bw0[first], bw0[kEdge]) - bm_s;
  const double useful_block = b.fw.flops + b.agrad.flops + b.wgrad.flops;
  const double useful = useful_block + b.optim.flops;
  const double peak = system_.matrix[x.datatype].peak_per_s;
  const double ideal = q.optimizer_per_microbatch ? k * md * useful / peak
                                                  : k * (md * useful_block + b.optim.flops) / peak;
  Writer w(statistics);
  w.put(b.fw, edge_only);
  w.put(b.fw.link_s);
  w.put(b.fw.exposed_s);
  w.put(b.again, edge_only);
  w.put(b.again_link.link_s);
  w.put(b.again_link.exposed_s);
  w.put(b.agrad, edge_only);
  w.put(b.agrad.link_s);
  w.put(b.agrad.exposed_s);
  w.put(b.wgrad, edge_only);
  w.put(b.optim, edge_only);
  w.put(b.fw.link_bytes);
  w.put(b.agrad.link_bytes);
  w.put(b.again_link.link_bytes);
  for (const double value : {pp_fw,
                             pp_bw,
                             dp,
                             b.required_bytes_per_s,
                             required_chunk,
                             required_tail,
                             b.weight,
                             b.working,
                             b.stored,
                             z.checkpoint,
                             b.weight_gradient,
                             b.whole_weight_gradient,
                             b.activation_gradient,
                             b.optimizer,
                             2 * b.weight,
                             z.smallest,
                             2 * z.checkpoint,
                             b.activation_gradient,
                             b.whole_weight_gradient + b.weight_gradient,
                             2 * b.optimizer,
                             k * b.weight,
                             z.activations,
                             z.checkpoints,
                             b.activation_gradient,
                             z.gradients,
                             k * b.optimizer,
                             fw_time,
                             bw_time,
                             optim_time,
                             recompute,
                             steps * per_chunk(b.again_link.link_s),
                             recomm_exposed,
                             bubble,
                             steps * (per_chunk(b.fw.link_s) + per_chunk(b.agrad.link_s)),
                             pp_time,
                             k * bd,
                             tp_exposed,
                             pp_time,
                             dp_exposed,
                             exposed_fw_s,
                             exposed_bw_s,
                             total_s,
                             ratio(stored, fw_window),
                             ratio(b.weight, fw_window),
                             training ? ratio(b.weight_gradient + b.optimizer, bw_window) : 0.0,
                             training ? std::max(ratio(off_fw, fw_window), ratio(off_bw, bw_window))
                                      : ratio(off_fw, fw_window),
                             z.tier1,
                             z.tier2,
                             useful,
                             ideal / busy,
                             busy / total_s,
                             ideal / total_s,
                             figures.sample_rate_per_s,
                             embedding_time,
                             head_time,
                             z.outer_space})
    w.put(value);
  return figures;
}

}  // namespace autopar::analytic::calculon
