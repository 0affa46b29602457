// Data-parallel communication of gradients and weights, and its overlap. With overlap, the block
// that is reduced last is exposed. Blocks of the last chunk are hidden by the blocks after them,
// those of other chunks by a chunk of every stage.
#pragma once

#include <algorithm>
#include <cmath>

#include "closed_form/calculon/passes.hpp"

namespace autopar::analytic::calculon {

// Reduction of one block, and the exposed communication of a whole step.
struct DataParallel {
  double block_bytes = 0, block_s = 0, exposed_s = 0;
  // bandwidth that would hide all chunks but the last, and the last; only on request
  double required_chunk = 0, required_tail = 0;
};

inline DataParallel data_parallel_of(const Execution& x, const Shape& s, const Block& b,
                                     const Passes& passes, const Tier& tier, const Quirks& q,
                                     bool requirements) {
  DataParallel r;
  if (x.data_par == 1 || !s.training) return r;
  const double size = b.weight;
  const auto d = static_cast<double>(x.data_par), c = static_cast<double>(s.chunk_blocks),
             v = static_cast<double>(s.chunks), p = static_cast<double>(x.pipeline_par);
  const bool sharded = x.optimizer_sharding;
  r.block_bytes = size;
  r.block_s = sharded ? tier.seconds(kReduceScatter, size, d) + tier.seconds(kAllGather, size, d)
                      : tier.seconds(kAllReduce, size, d);
  if (!x.data_par_overlap) {
    r.exposed_s = static_cast<double>(s.blocks) * r.block_s;
    return r;
  }
  const bool shares_pipeline = x.data_par_net == x.pipeline_par_net;
  const double transfer_s = passes.transfers.backward_s,
               back_s = shares_pipeline ? transfer_s : 0.0, usage = tier.processor_usage;
  const double optimizer_s = sharded ? 0.0 : b.optim.time_s[kBase] - b.optim.memory_s;
  const auto& whole = passes.whole_bw_s;
  double window[2];
  for (const int j : {kBase, kEdge}) {
    window[j] = whole[j] - passes.memory_s - b.again.memory_s + optimizer_s;
    if (x.data_par_net == x.tensor_par_net) window[j] -= b.again_link.link_s[j] + b.agrad.link_s[j];
  }
  const double computing_s =
      b.agrad.flops_s + b.wgrad.flops_s + b.again.flops_s + (sharded ? 0.0 : b.optim.flops_s);
  const double slowed_s = computing_s * usage;

  // all chunks but the last: each is hidden by a chunk of every stage
  const double windows_s = chunk_of(window, c), chunk_s = c * r.block_s;
  const std::int64_t rest = s.microbatches % x.pipeline_par;
  const auto slots = static_cast<double>(rest ? rest : x.pipeline_par);
  const double hits =
      shares_pipeline ? std::min(std::floor(chunk_s / chunk_of(whole, c)), slots) : 0.0;
  const double over_s = chunk_s - (p * windows_s - hits * transfer_s) + p * c * slowed_s;
  const double chunks_s = (v - 1) * (over_s > 0 ? over_s : chunk_s * usage);

  // the last chunk: hidden by the blocks that follow
  const double hidden_s = (c - 1) * r.block_s;
  double tail_s = 0.0, tail_slowed_s = slowed_s;
  if (q.tail_windows) {
    if (c > 1) tail_s = windows_s - transfer_s - (whole[kBase] + whole[kEdge]) / 2 + optimizer_s;
  } else {
    if (c > 1) tail_s = (c - 2) * window[kBase] + window[kEdge] - back_s;
    tail_slowed_s *= c - 1;
  }
  const double over_tail_s = hidden_s + tail_slowed_s - tail_s;
  r.exposed_s = r.block_s + chunks_s + (over_tail_s > 0 ? over_tail_s : hidden_s * usage);
  if (!requirements) return r;

  const auto factor = [&](Collective o) {
    return q.overlap_requirements ? tier.scalar[o] : tier.traffic(o, d);
  };
  const double traffic =
      size * (sharded ? factor(kReduceScatter) + factor(kAllGather) : factor(kAllReduce));
  const double room_chunks_s = (v - 1) * (p * windows_s + p * c * slowed_s - back_s);
  const double room_tail_s = tail_s + hidden_s * usage;
  if (room_chunks_s > 0)
    r.required_chunk = (q.overlap_requirements ? 1.0 : v - 1) * c * traffic / room_chunks_s;
  if (room_tail_s > 0)
    r.required_tail = (q.overlap_requirements ? c : c - 1) * traffic / room_tail_s;
  return r;
}

}  // namespace autopar::analytic::calculon
