// Forward and backward of a base and an edge block, with transfers and offload around them.
#pragma once

#include <algorithm>

#include "closed_form/calculon/calculon.hpp"

namespace autopar::analytic::calculon {

constexpr int kBase = 0, kEdge = 1;

// Sum over a chunk of `blocks` blocks, one of which is the edge block.
inline double chunk_of(const double (&pair)[2], double blocks) {
  return (blocks - 1) * pair[kBase] + pair[kEdge];
}

// Transfers of one micro-batch: activations to the next stage, gradient to the previous one.
struct Transfers {
  double forward_bytes = 0, backward_bytes = 0, forward_s = 0, backward_s = 0;
};

inline Transfers transfers_of(const Execution& x, const Shape& s, const Tier& tier,
                              const Quirks& q) {
  Transfers r;
  const bool alone = x.pipeline_par == 1, latency = q.latency_without_neighbour;
  if (!alone) {
    r.forward_bytes = s.elements * s.element_bytes;
    if (s.rs || s.rs_at_edges) r.forward_bytes /= s.tensor;
  }
  r.backward_bytes = s.training ? r.forward_bytes : 0.0;
  if (!alone || latency) r.forward_s = tier.seconds(kP2p, r.forward_bytes, 2);
  if ((!alone && s.training) || latency) r.backward_s = tier.seconds(kP2p, r.backward_bytes, 2);
  return r;
}

// Bytes that one block moves between the memories while it runs, in the busier direction.
struct Offload {
  double stored_bytes = 0;  // activations or checkpoints, offloaded or not
  double forward_bytes = 0, backward_bytes = 0;
};

inline Offload offload_of(const Execution& x, const Shape& s, const Block& b, double checkpoint,
                          const Quirks& q) {
  Offload r;
  r.stored_bytes = s.recompute_all ? checkpoint : b.stored;
  const double weights = x.weight_offload ? b.weight : 0.0,
               activations = x.activations_offload ? r.stored_bytes : 0.0,
               states = x.optimizer_offload ? b.optimizer : 0.0,
               gradients = x.optimizer_offload ? b.weight_gradient : 0.0;
  r.forward_bytes = std::max(weights, activations);
  if (!s.training) return r;
  // in: reads of backward and optimizer; out: their results
  r.backward_bytes = weights + activations + states;
  if (!q.offload_sums) r.backward_bytes = std::max(r.backward_bytes, weights + gradients + states);
  return r;
}

// Times of one block, with communication.
struct Passes {
  Transfers transfers;
  Offload offload;
  double memory_s = 0;                      // of gradient traffic, which competes with offload
  double forward_s[2], backward_s[2];       // without offload
  double exposed_fw_s[2], exposed_bw_s[2];  // exposed offload
  double whole_fw_s[2], whole_bw_s[2];      // sum of both
};

inline Passes passes_of(const Execution& x, const Shape& s, const Block& b, double checkpoint,
                        const System& system, const Quirks& q) {
  Passes r{transfers_of(x, s, system.tiers[static_cast<std::size_t>(x.pipeline_par_net)], q),
           offload_of(x, s, b, checkpoint, q),
           b.agrad.memory_s + b.wgrad.memory_s,
           {},
           {},
           {},
           {},
           {},
           {}};
  const Rate& second = system.second.rate;
  const double moved_fw_s = second.seconds(r.offload.forward_bytes) + b.fw.memory_s,
               moved_bw_s = second.seconds(r.offload.backward_bytes) + r.memory_s;
  for (const int j : {kBase, kEdge}) {
    const bool edge = j == kEdge;
    r.forward_s[j] = b.fw.time_s[j] + b.fw.exposed_s[j] + (edge ? r.transfers.forward_s : 0.0);
    r.backward_s[j] = b.again.time_s[j] + b.again_link.exposed_s[j] + b.agrad.time_s[j] +
                      b.wgrad.time_s[j] + b.agrad.exposed_s[j] +
                      (edge ? r.transfers.backward_s : 0.0);
    r.exposed_fw_s[j] = std::max(0.0, moved_fw_s - r.forward_s[j]);
    r.exposed_bw_s[j] = std::max(0.0, moved_bw_s - r.backward_s[j]);
    r.whole_fw_s[j] = r.forward_s[j] + r.exposed_fw_s[j];
    r.whole_bw_s[j] = r.backward_s[j] + r.exposed_bw_s[j];
  }
  return r;
}

}  // namespace autopar::analytic::calculon
