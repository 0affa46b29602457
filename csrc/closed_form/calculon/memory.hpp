// Bytes of a processor of the first stage, in both memories.
#pragma once

#include <algorithm>

#include "closed_form/calculon/calculon.hpp"

namespace autopar::analytic::calculon {

struct Sizes {
  double checkpoint = 0, activations = 0, checkpoints = 0, gradients = 0, smallest = 0, vocab = 0,
         tables = 0, first = 0, second = 0;
};

// Saved activation of a recomputed block: its input.
inline double checkpoint_bytes(const Shape& s, const Quirks& q) {
  if (!s.training || !s.recompute_all) return 0.0;
  const double whole = s.elements * s.element_bytes;
  return s.rs && !q.checkpoint_unsharded ? whole / s.tensor : whole;
}

inline Sizes memory_of(const Execution& x, const Shape& s, const Block& b, const Vocab& vocab,
                       const Quirks& q) {
  Sizes r;
  const auto k = static_cast<double>(s.blocks), v = static_cast<double>(s.chunks),
             p = static_cast<double>(x.pipeline_par);
  const bool full = s.recompute_all;
  double live = std::min(static_cast<double>(s.microbatches), p);
  if (s.chunks > 1) live *= 1 + (p - 1) / (v * p);
  r.checkpoint = checkpoint_bytes(s, q);
  r.activations = s.training && !full ? b.working + b.stored * (k * live - 1) : b.working;
  r.checkpoints = k * r.checkpoint * live;
  r.gradients = s.training ? b.whole_weight_gradient + b.weight_gradient * (k - 1) : 0.0;
  r.smallest = full ? b.working : b.working + b.stored;
  // of an offloaded tensor, the current block and the next stay in the first memory
  r.first =
      (x.weight_offload ? 2 * b.weight : k * b.weight) +
      (x.activations_offload ? r.smallest + 2 * r.checkpoint : r.activations + r.checkpoints) +
      (x.optimizer_offload ? b.whole_weight_gradient + b.weight_gradient + 2 * b.optimizer
                           : r.gradients + k * b.optimizer) +
      b.activation_gradient;
  r.second = (x.weight_offload ? k * b.weight : 0.0) +
             (x.activations_offload ? (full ? r.checkpoints : r.activations) : 0.0) +
             (x.optimizer_offload ? k * (b.weight_gradient + b.optimizer) : 0.0);
  r.tables = x.pipeline_par == 1 && !s.tied ? 2 : 1;
  // logits are on the last stage, where fewer microbatches wait for their backward
  double fewer = 0.0;
  if (x.pipeline_par > 1 && s.training && !x.activations_offload)
    fewer = k * (full ? r.checkpoint : b.stored) * (live - std::min(live, ((v - 1) * p + 1) / v));
  r.vocab = r.tables * vocab.table_bytes + std::max(0.0, vocab.logits_bytes - fewer);
  r.first += r.vocab;
  return r;
}

}  // namespace autopar::analytic::calculon
