// Layers around the blocks: embedding on the first stage, head and loss on the last. The published
// model has none of them. The tensor group divides the vocabulary, as in Megatron-LM: the look-up
// is reduced over the group, the head gathers its input, and the loss exchanges its maximum, its
// sum and the logit of the label, 4 bytes per token each.
#include <algorithm>

#include "closed_form/calculon/calculon.hpp"

namespace autopar::analytic::calculon {

// Per logit: maximum, difference, exponential and sum forward; difference and scale backward.
constexpr double kLossFlops = 7.0;

Vocab Model::vocab(const Execution& x, const Shape& s) const {
  Vocab result;
  if (!s.vocab) return result;
  const Rate &matrix = system_.matrix[x.datatype], &vector = system_.vector[x.datatype],
             &memory = system_.first.rate;
  const Tier& tier = system_.tiers[static_cast<std::size_t>(x.tensor_par_net)];
  const auto processing = [&](double flops_s, double memory_s) {
    return system_.roofline ? std::max(flops_s, memory_s) : flops_s + memory_s;
  };
  const double e = s.element_bytes, t = s.tensor;
  const auto tokens = static_cast<double>(s.tokens), h = static_cast<double>(s.hidden),
             v = static_cast<double>(s.vocab);
  const double parameters = v * h, logits = tokens * v;
  const double passes = s.training ? 3 : 1;  // backward has two GEMMs
  const double moved = (parameters + tokens * h + logits) * e;
  result.head_s = passes * processing(matrix.seconds(2 * tokens * h * v), memory.seconds(moved));
  result.head_s +=
      processing(vector.seconds(kLossFlops * logits), memory.seconds(2 * logits * (e + 4)));
  result.embedding_s = (s.training ? 2 : 1) * memory.seconds(2 * (s.local_elements * e));
  if (s.tensor > 1) {
    const double whole = s.elements * e;
    const double link_s =
        s.rs ? tier.seconds(kReduceScatter, whole, t) + tier.seconds(kAllGather, whole, t)
             : tier.seconds(kAllReduce, whole, t);
    // the forward of one is the backward of the other, so each pays for the pair once
    result.embedding_s += link_s;
    result.head_s += link_s + 3 * tier.seconds(kAllReduce, 4 * tokens, t);
  }
  const double optimizer = (e < 4 ? 12 : 8) * parameters / s.shards;
  result.table_bytes = parameters * e;
  result.logits_bytes = logits * (s.training ? e + 4 : e);
  if (s.training) {
    result.table_bytes += 4 * parameters + optimizer;
    result.optimizer_s =
        processing(vector.seconds(11 * parameters / s.shards), memory.seconds(optimizer));
  }
  return result;
}

}  // namespace autopar::analytic::calculon
