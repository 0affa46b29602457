// One training step on the first stage: its time, and the statistics by their published names.
#include <algorithm>
#include <cmath>
#include <limits>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/data_parallel.hpp"
#include "closed_form/calculon/memory.hpp"
#include "closed_form/calculon/passes.hpp"

namespace autopar::analytic::calculon {
namespace {

// An empty window cannot hide anything.
double ratio(double amount, double window) {
  if (window == 0.0) return amount > 0.0 ? std::numeric_limits<double>::infinity() : 0.0;
  return amount / window;
}

// Seconds of a whole step.
struct Times {
  double forward = 0, backward = 0, optimizer = 0, recompute = 0, recomm_link = 0,
         recomm_exposed = 0, bubble = 0, tensor_link = 0, tensor_exposed = 0, pipeline = 0,
         offload_forward = 0, offload_backward = 0, embedding = 0, head = 0;
  double busy = 0;     // processing of the blocks
  double total_s = 0;  // everything but hidden communication
};

// Seconds that the first stage waits for the others, which may have fewer blocks.
double bubble_s(const Execution& x, const Shape& s, const Passes& passes) {
  const std::int64_t p = x.pipeline_par, m = s.microbatches;
  const auto c = static_cast<double>(s.chunk_blocks);
  const auto &fw = passes.whole_fw_s, &bw = passes.whole_bw_s;
  const double both[2] = {fw[kBase] + bw[kBase], fw[kEdge] + bw[kEdge]};
  const double block_s = c > 1 ? (both[kBase] + both[kEdge]) / 2 : both[kEdge];
  const auto extra = m % p ? static_cast<double>((s.chunks - 1) * (p - m % p)) : 0.0;
  return (static_cast<double>(p) - 1 + extra) * chunk_of(both, c) -
         static_cast<double>(s.missing_blocks) * block_s;
}

Times times_of(const Execution& x, const Shape& s, const Block& b, const Passes& passes,
               const Vocab& vocab, double tables, double data_exposed_s) {
  Times r;
  const auto k = static_cast<double>(s.blocks), c = static_cast<double>(s.chunk_blocks),
             m = static_cast<double>(s.microbatches);
  const double steps = m * static_cast<double>(s.chunks);
  const auto total = [&](const double (&pair)[2]) { return steps * chunk_of(pair, c); };
  const double blocks_optimizer = k * b.optim.time_s[kBase];
  const double fw_s = chunk_of(b.fw.time_s, c), agrad_s = chunk_of(b.agrad.time_s, c),
               wgrad_s = chunk_of(b.wgrad.time_s, c);
  r.forward = steps * fw_s;
  r.backward = steps * (agrad_s + wgrad_s);
  r.busy = steps * (fw_s + agrad_s + wgrad_s) + blocks_optimizer;
  r.optimizer = blocks_optimizer + tables * vocab.optimizer_s;
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
  r.embedding = m * vocab.embedding_s;
  r.head = m * vocab.head_s;
  // both stages wait for the slower of the two
  if (x.pipeline_par > 1) (r.embedding > r.head ? r.head : r.embedding) = 0.0;
  // added in the order of the statistics
  r.total_s = r.forward + r.backward + r.optimizer + r.recompute + r.recomm_exposed + r.bubble +
              r.tensor_exposed + r.pipeline + data_exposed_s + r.offload_forward +
              r.offload_backward + (r.embedding + r.head);
  return r;
}

// All intermediate results of a step.
struct Step {
  const Shape& shape;
  const Block& block;
  const Sizes& sizes;
  const Passes& passes;
  const DataParallel& data;
  const Times& times;
  const Figures& figures;
  double peak_per_s;  // FLOP/s of the matrix engine
};

// Bandwidth of the second memory, bytes per second, that would hide the transfers of one block.
struct Requirements {
  double activations = 0, weights = 0, optimizer = 0, asked = 0;
};

Requirements requirements_of(const Step& t, const Quirks& q) {
  const Block& b = t.block;
  const Offload& moved = t.passes.offload;
  const int first = t.shape.chunk_blocks == 1 && !q.latency_without_neighbour ? kEdge : kBase;
  const auto window = [&](const double (&pair)[2], double memory_s) {
    return std::min(pair[first], pair[kEdge]) - memory_s;
  };
  const double fw_s = window(t.passes.forward_s, b.fw.memory_s),
               bw_s = window(t.passes.backward_s, t.passes.memory_s);
  Requirements r{ratio(moved.stored_bytes, fw_s), ratio(b.weight, fw_s), 0.0,
                 ratio(moved.forward_bytes, fw_s)};
  if (!t.shape.training) return r;
  r.optimizer = ratio(b.weight_gradient + b.optimizer, bw_s);
  r.asked = std::max(r.asked, ratio(moved.backward_bytes, bw_s));
  return r;
}

// Passes every statistic with its name to `put`, in the published order: seconds, bytes, FLOP and
// shares.
template <class Put>
void put_statistics(const Step& t, const Quirks& q, Put put) {
  const Shape& s = t.shape;
  const Block& b = t.block;
  const Sizes& z = t.sizes;
  const Times& times = t.times;
  const int side = s.chunk_blocks == 1 ? kEdge : kBase;  // a chunk of one has no base block
  const Requirements needed = requirements_of(t, q);
  const auto k = static_cast<double>(s.blocks), m = static_cast<double>(s.microbatches);
  const double useful_block = b.fw.flops + b.agrad.flops + b.wgrad.flops;
  const double useful = useful_block + b.optim.flops;
  const double whole =
      q.optimizer_per_microbatch ? k * m * useful : k * (m * useful_block + b.optim.flops);
  const double ideal_s = whole / t.peak_per_s;
  put("block_fw_flops", b.fw.flops);
  put("block_fw_flops_time", b.fw.flops_s);
  put("block_fw_mem_accessed", b.fw.bytes);
  put("block_fw_mem_time", b.fw.memory_s);
  put("block_fw_time", b.fw.time_s[side]);
  put("baseblock_fw_tp_time", b.fw.link_s[kBase]);
  put("edgeblock_fw_tp_time", b.fw.link_s[kEdge]);
  put("baseblock_fw_tp_time_exposed", b.fw.exposed_s[kBase]);
  put("edgeblock_fw_tp_time_exposed", b.fw.exposed_s[kEdge]);
  put("block_re_flops", b.again.flops);
  put("block_re_flops_time", b.again.flops_s);
  put("block_re_mem_accessed", b.again.bytes);
  put("block_re_mem_time", b.again.memory_s);
  put("block_re_time", b.again.time_s[side]);
  put("baseblock_recomm_time", b.again_link.link_s[kBase]);
  put("edgeblock_recomm_time", b.again_link.link_s[kEdge]);
  put("baseblock_recomm_time_exposed", b.again_link.exposed_s[kBase]);
  put("edgeblock_recomm_time_exposed", b.again_link.exposed_s[kEdge]);
  put("block_agrad_flops", b.agrad.flops);
  put("block_agrad_flops_time", b.agrad.flops_s);
  put("block_agrad_mem_accessed", b.agrad.bytes);
  put("block_agrad_mem_time", b.agrad.memory_s);
  put("block_agrad_time", b.agrad.time_s[side]);
  put("baseblock_agrad_tp_time", b.agrad.link_s[kBase]);
  put("edgeblock_agrad_tp_time", b.agrad.link_s[kEdge]);
  put("baseblock_agrad_tp_time_exposed", b.agrad.exposed_s[kBase]);
  put("edgeblock_agrad_tp_time_exposed", b.agrad.exposed_s[kEdge]);
  put("block_wgrad_flops", b.wgrad.flops);
  put("block_wgrad_flops_time", b.wgrad.flops_s);
  put("block_wgrad_mem_accessed", b.wgrad.bytes);
  put("block_wgrad_mem_time", b.wgrad.memory_s);
  put("block_wgrad_time", b.wgrad.time_s[side]);
  put("block_optim_flops", b.optim.flops);
  put("block_optim_flops_time", b.optim.flops_s);
  put("block_optim_mem_accessed", b.optim.bytes);
  put("block_optim_mem_time", b.optim.memory_s);
  put("block_optim_time", b.optim.time_s[side]);
  put("baseblock_fw_tp_size", b.fw.link_bytes[kBase]);
  put("edgeblock_fw_tp_size", b.fw.link_bytes[kEdge]);
  put("baseblock_bw_tp_size", b.agrad.link_bytes[kBase]);
  put("edgeblock_bw_tp_size", b.agrad.link_bytes[kEdge]);
  put("baseblock_recomm_size", b.again_link.link_bytes[kBase]);
  put("edgeblock_recomm_size", b.again_link.link_bytes[kEdge]);
  put("block_fw_pp_size", t.passes.transfers.forward_bytes);
  put("block_bw_pp_size", t.passes.transfers.backward_bytes);
  put("block_dp_size", t.data.block_bytes);
  put("tp_bw_overlap_req", b.required_bytes_per_s);
  put("dp_bw_overlap_req_chunk", t.data.required_chunk);
  put("dp_bw_overlap_req_tail", t.data.required_tail);
  put("block_weight_space", b.weight);
  put("block_act_working_space", b.working);
  put("block_act_storage_space", b.stored);
  put("block_act_checkpoint_size", z.checkpoint);
  put("block_weight_grad_space", b.weight_gradient);
  put("block_weight_grad_space_no_sharding", b.whole_weight_gradient);
  put("block_act_grad_space", b.activation_gradient);
  put("block_optimizer_space", b.optimizer);
  put("weight_space_with_offload", 2 * b.weight);
  put("act_space_with_offload", z.smallest);
  put("act_checkpoint_size_with_offload", 2 * z.checkpoint);
  put("act_grad_space_with_offload", b.activation_gradient);
  put("weight_grad_space_with_offload", b.whole_weight_gradient + b.weight_gradient);
  put("optimizer_space_with_offload", 2 * b.optimizer);
  put("weight_space", k * b.weight);
  put("act_space", z.activations);
  put("act_checkpoint_size", z.checkpoints);
  put("act_grad_space", b.activation_gradient);
  put("weight_grad_space", z.gradients);
  put("optimizer_space", k * b.optimizer);
  put("fw_time", times.forward);
  put("bw_time", times.backward);
  put("optim_step_time", times.optimizer);
  put("recompute_time", times.recompute);
  put("recomm_link_time", times.recomm_link);
  put("recomm_exposed_time", times.recomm_exposed);
  put("bubble_time", times.bubble);
  put("tp_comm_link_time", times.tensor_link);
  put("pp_comm_link_time", times.pipeline);
  put("dp_comm_link_time", k * t.data.block_s);
  put("tp_comm_exposed_time", times.tensor_exposed);
  put("pp_comm_exposed_time", times.pipeline);
  put("dp_comm_exposed_time", t.data.exposed_s);
  put("fw_offload_exposed_time", times.offload_forward);
  put("bw_offload_exposed_time", times.offload_backward);
  put("total_time", times.total_s);
  put("act_offload_bw_req", needed.activations);
  put("weight_offload_bw_req", needed.weights);
  put("optim_offload_bw_req", needed.optimizer);
  put("offload_mem_bw_req", needed.asked);
  put("proc_mem_tier1_cap_req", z.first);
  put("proc_mem_tier2_cap_req", z.second);
  put("useful_flops", useful);
  put("compute_efficiency", ideal_s / times.busy);
  put("system_efficiency", times.busy / times.total_s);
  put("total_efficiency", ideal_s / times.total_s);
  put("sample_rate", t.figures.sample_rate_per_s);
  put("embedding_time", times.embedding);
  put("head_time", times.head);
  put("outer_space", z.vocab);
}

}  // namespace

std::array<const char*, kNumStatistics> statistic_names() {
  const Shape shape{};
  const Block block;
  const Sizes sizes;
  const Passes passes{};
  const DataParallel data;
  const Times times;
  std::array<const char*, kNumStatistics> names{};
  std::size_t count = 0;
  put_statistics({shape, block, sizes, passes, data, times, {}, 1.0}, {},
                 [&](const char* name, double) { names.at(count++) = name; });
  return names;
}

Figures Model::memory(const Execution& x, const Shape& shape, const Block& block,
                      const Vocab& vocab) const {
  const Sizes z = memory_of(x, shape, block, vocab, quirks_);
  Figures figures;
  figures.tier1_bytes = z.first;
  figures.tier2_bytes = z.second;
  return figures;
}

Figures Model::step(const Execution& x, const Shape& s, const Block& b, const Vocab& vocab,
                    double* statistics) const {
  const Quirks& q = quirks_;
  const Sizes z = memory_of(x, s, b, vocab, q);
  const Passes passes = passes_of(x, s, b, z.checkpoint, system_, q);
  const DataParallel data =
      data_parallel_of(x, s, b, passes, system_.tiers[static_cast<std::size_t>(x.data_par_net)], q,
                       statistics != nullptr);
  const Times times = times_of(x, s, b, passes, vocab, z.tables, data.exposed_s);
  Figures figures;
  figures.total_time_s = times.total_s;
  figures.tier1_bytes = z.first;
  figures.tier2_bytes = z.second;
  figures.sample_rate_per_s = static_cast<double>(x.batch_size) / times.total_s;
  if (!statistics) return figures;
  const Step step{s, b, z, passes, data, times, figures, system_.matrix[x.datatype].peak_per_s};
  put_statistics(step, q, [&](const char*, double value) { *statistics++ = value; });
  return figures;
}

}  // namespace autopar::analytic::calculon
