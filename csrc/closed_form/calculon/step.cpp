// One training step on the first stage, as search/closed_form/calculon/step.py has it.
#include <cmath>
#include <limits>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/data_parallel.hpp"
#include "closed_form/calculon/memory.hpp"
#include "closed_form/calculon/passes.hpp"

namespace autopar::analytic::calculon {
namespace {

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

// Seconds of a whole step.
struct Times {
  double forward = 0, backward = 0, optimizer = 0, recompute = 0, recomm_link = 0,
         recomm_exposed = 0, bubble = 0, tensor_link = 0, tensor_exposed = 0, pipeline = 0,
         offload_forward = 0, offload_backward = 0, embedding = 0, head = 0;
  double busy = 0;     // processing of the blocks
  double total_s = 0;  // of all but what is hidden on a link
};

// How long the first stage waits for the others, which may have fewer blocks.
double bubble_s(const Execution& x, const Shape& s, const Passes& passes) {
  const std::int64_t p = x.pipeline_par, m = s.microbatches;
  const auto c = static_cast<double>(s.chunk_blocks);
  const auto &fw = passes.whole_fw_s, &bw = passes.whole_bw_s;
  const double chunk_s = chunk_of(fw, c) + chunk_of(bw, c);
  const double block_s =
      c > 1 ? (fw[kBase] + fw[kEdge] + bw[kBase] + bw[kEdge]) / 2 : fw[kEdge] + bw[kEdge];
  const auto extra = m % p ? static_cast<double>((s.chunks - 1) * (p - m % p)) : 0.0;
  return (static_cast<double>(p) - 1 + extra) * chunk_s -
         static_cast<double>(s.missing_blocks) * block_s;
}

Times times_of(const Execution& x, const Shape& s, const Block& b, const Passes& passes,
               const Outer& outer, double tables, double data_exposed_s) {
  Times r;
  const auto k = static_cast<double>(s.blocks), c = static_cast<double>(s.chunk_blocks),
             m = static_cast<double>(s.microbatches);
  const double steps = m * static_cast<double>(s.chunks);
  const auto total = [&](const double (&pair)[2]) { return steps * chunk_of(pair, c); };
  const double blocks_optimizer = k * b.optim.time_s[kBase];
  r.forward = total(b.fw.time_s);
  r.backward = steps * (chunk_of(b.agrad.time_s, c) + chunk_of(b.wgrad.time_s, c));
  r.busy = r.forward + r.backward + blocks_optimizer;
  r.optimizer = blocks_optimizer + tables * outer.optimizer_s;
  r.recompute = total(b.again.time_s);
  r.recomm_link = total(b.again_link.link_s);
  r.recomm_exposed = total(b.again_link.exposed_s);
  r.bubble = bubble_s(x, s, passes);
  r.tensor_link = steps * (chunk_of(b.fw.link_s, c) + chunk_of(b.agrad.link_s, c));
  r.tensor_exposed = steps * (chunk_of(b.fw.exposed_s, c) + chunk_of(b.agrad.exposed_s, c));
  if (x.pipeline_par > 1)
    r.pipeline =
        steps * (passes.transfers.forward_s + (s.training ? passes.transfers.backward_s : 0.0));
  r.offload_forward = total(passes.exposed_fw_s);
  if (s.training) r.offload_backward = total(passes.exposed_bw_s);
  // the outermost stages are the slowest, so every microbatch waits for their extra work
  r.embedding = m * outer.embedding_s;
  r.head = m * outer.head_s;
  // ... and both stages for the slower of the two
  if (x.pipeline_par > 1) (r.embedding > r.head ? r.head : r.embedding) = 0.0;
  r.total_s = r.forward + r.backward + r.optimizer + r.offload_forward + r.offload_backward +
              r.recompute + r.recomm_exposed + r.bubble + r.tensor_exposed + r.pipeline +
              data_exposed_s + r.embedding + r.head;
  return r;
}

// The statistics in the order of the readable model.
void write(double* statistics, double peak_per_s, const Shape& s, const Block& b, const Sizes& z,
           const Passes& passes, const DataParallel& data, const Times& times,
           const Figures& figures, const Quirks& q) {
  const bool edge_only = s.chunk_blocks == 1;
  const int first = edge_only && !q.latency_without_neighbour ? kEdge : kBase;
  const auto window = [&](const double (&pair)[2]) { return std::min(pair[first], pair[kEdge]); };
  const double fw_window = window(passes.forward_s) - b.fw.memory_s,
               bw_window = window(passes.backward_s) - passes.memory_s;
  const Offload& moved = passes.offload;
  const double moving_fw = ratio(moved.forward_bytes, fw_window);
  const auto k = static_cast<double>(s.blocks), m = static_cast<double>(s.microbatches);
  const double useful_block = b.fw.flops + b.agrad.flops + b.wgrad.flops;
  const double useful = useful_block + b.optim.flops;
  const double ideal =
      (q.optimizer_per_microbatch ? k * m * useful : k * (m * useful_block + b.optim.flops)) /
      peak_per_s;
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
  for (const double value :
       {passes.transfers.forward_bytes,
        passes.transfers.backward_bytes,
        data.block_bytes,
        b.required_bytes_per_s,
        data.required_chunk,
        data.required_tail,
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
        times.forward,
        times.backward,
        times.optimizer,
        times.recompute,
        times.recomm_link,
        times.recomm_exposed,
        times.bubble,
        times.tensor_link,
        times.pipeline,
        k * data.block_s,
        times.tensor_exposed,
        times.pipeline,
        data.exposed_s,
        times.offload_forward,
        times.offload_backward,
        times.total_s,
        ratio(moved.stored_bytes, fw_window),
        ratio(b.weight, fw_window),
        s.training ? ratio(b.weight_gradient + b.optimizer, bw_window) : 0.0,
        s.training ? std::max(moving_fw, ratio(moved.backward_bytes, bw_window)) : moving_fw,
        z.first,
        z.second,
        useful,
        ideal / times.busy,
        times.busy / times.total_s,
        ideal / times.total_s,
        figures.sample_rate_per_s,
        times.embedding,
        times.head,
        z.outer})
    w.put(value);
}

}  // namespace

Figures Model::memory(const Execution& x, const Shape& shape, const Block& block,
                      const Outer& outer) const {
  const Sizes z = memory_of(x, shape, block, outer, quirks_);
  Figures figures;
  figures.tier1_bytes = z.first;
  figures.tier2_bytes = z.second;
  return figures;
}

Figures Model::step(const Execution& x, const Shape& s, const Block& b, const Outer& outer,
                    double* statistics) const {
  const Quirks& q = quirks_;
  const Sizes z = memory_of(x, s, b, outer, q);
  const Passes passes = passes_of(x, s, b, z.checkpoint, system_, q);
  const DataParallel data =
      data_parallel_of(x, s, b, passes, system_.tiers[static_cast<std::size_t>(x.data_par_net)], q,
                       statistics != nullptr);
  const Times times = times_of(x, s, b, passes, outer, z.tables, data.exposed_s);
  Figures figures;
  figures.total_time_s = times.total_s;
  figures.tier1_bytes = z.first;
  figures.tier2_bytes = z.second;
  figures.sample_rate_per_s = static_cast<double>(x.batch_size) / times.total_s;
  if (statistics)
    write(statistics, system_.matrix[x.datatype].peak_per_s, s, b, z, passes, data, times, figures,
          q);
  return figures;
}

}  // namespace autopar::analytic::calculon
