// Constraints on an execution, checked before pricing in a fixed order; the first contradiction is
// reported.
#include <algorithm>

#include "closed_form/calculon/calculon.hpp"

namespace autopar::analytic::calculon {
namespace {

constexpr double kBytes[kNumDatatypes] = {1, 2, 2, 4};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Reason check_tiers(const Execution& x, const System& system, const Quirks& quirks,
                   std::int32_t* refusing) {
  const std::int32_t sizes[3] = {x.tensor_par, x.pipeline_par, x.data_par};
  const std::int32_t nets[3] = {x.tensor_par_net, x.pipeline_par_net, x.data_par_net};
  const auto count = static_cast<std::int32_t>(system.tiers.size());
  for (std::int32_t tier = 0; tier < count; ++tier) {
    std::int64_t used = 1;
    bool any = false;
    for (int i = 0; i < 3; ++i) {
      if (nets[i] != tier || sizes[i] <= 1) continue;
      used *= sizes[i];
      any = true;
    }
    if (!any) continue;
    const Tier& network = system.tiers[static_cast<std::size_t>(tier)];
    // several groups may fill a domain together if processors make up whole domains
    const bool full =
        network.size % used == 0 && (quirks.divisor_fills_tier || x.num_procs % network.size == 0);
    const Reason reason = used > network.size               ? kTierTooSmall
                          : network.must_be_filled && !full ? kTierNotFull
                                                            : kOk;
    if (reason == kOk) continue;
    if (refusing) *refusing = tier;
    return reason;
  }
  return kOk;
}

}  // namespace

Reason Model::check(const Execution& x, std::int32_t* tier) const {
  if (published_ && (x.attention_type == kFlash || x.structure_type == kLlama)) return kUnpublished;
  if (x.num_procs <= 0 || x.tensor_par <= 0 || x.pipeline_par <= 0 || x.data_par <= 0)
    return kCounts;
  // stepwise, because the product of three may exceed 2^63
  const std::int64_t model_procs = std::int64_t{x.tensor_par} * x.pipeline_par;
  if (model_procs > x.num_procs || model_procs * x.data_par != x.num_procs) return kProduct;
  if (x.batch_size <= 0 || x.microbatch_size <= 0) return kCounts;
  if (x.batch_size % x.data_par || x.batch_size / x.data_par % x.microbatch_size) return kBatch;
  // callers fill rows, and codes are indices into tables
  if (x.attention_type > kFlash || x.activation_recompute > kFull) return kUnknownCode;
  if (x.activation_recompute != kNoRecompute && !x.training) return kRecomputeInference;
  if (x.pipeline_interleaving <= 0) return kInterleaving;
  if (x.pipeline_par == 1 && x.pipeline_interleaving != 1) return kInterleavingOneStage;
  if (x.optimizer_sharding && x.data_par == 1) return kShardingAlone;
  if (x.tensor_par_comm_type > kRsAg || x.tensor_par_overlap > kPipe || x.structure_type > kLlama)
    return kUnknownCode;
  if (x.tensor_par_overlap != kNoOverlap && x.tensor_par == 1) return kOverlapAlone;
  if (x.seq_par_ag_redo && x.tensor_par_comm_type != kRsAg) return kRedoWithoutGather;
  if (x.seq_par_ag_redo && x.activation_recompute == kFull) return kRedoFull;
  if (x.data_par_overlap && !x.training) return kDataOverlapInference;
  if (x.data_par_overlap && x.data_par == 1) return kDataOverlapAlone;
  if (x.optimizer_offload && !x.training) return kOffloadInference;
  const auto tiers = static_cast<std::int32_t>(system_.tiers.size());
  for (const std::int32_t net : {x.tensor_par_net, x.pipeline_par_net, x.data_par_net})
    if (net < 0 || net >= tiers) return kNoTier;
  if (const Reason reason = check_tiers(x, system_, quirks_, tier); reason != kOk) return reason;
  if (x.datatype >= kNumDatatypes) return kUnknownCode;
  if (system_.vector[x.datatype].smallest.empty() || system_.matrix[x.datatype].smallest.empty())
    return kDatatype;
  const Application& a = application_;
  const std::int64_t blocks = ceil_div(a.blocks, x.pipeline_par);
  if (x.pipeline_interleaving > blocks) return kInterleavingTooLarge;
  if (blocks % x.pipeline_interleaving) return kInterleavingNoFactor;
  if ((x.weight_offload || x.activations_offload || x.optimizer_offload) && blocks <= 2)
    return kOffloadBlocks;
  const std::int64_t t = x.tensor_par;
  if (x.tensor_par_comm_type != kAr && std::int64_t{x.microbatch_size} * a.seq % t)
    return kSplitSequence;
  if (a.hidden % t) return kSplitHidden;
  if (a.feedforward % t) return kSplitFeedforward;
  if (a.heads % t) return kSplitHeads;
  const std::int64_t kv = x.attention_type == kMultiquery ? 1 : a.kv_heads;
  if (a.heads % kv) return kKvHeads;
  if (kv % t && t % kv) return kSplitKvHeads;
  return kOk;
}

Shape Model::shape(const Execution& x) const {
  const Application& a = application_;
  Shape s{};
  s.hidden = a.hidden;
  s.feedforward = a.feedforward;
  s.seq = a.seq;
  s.heads = a.heads;
  s.head_size = a.head_size;
  s.microbatch = x.microbatch_size;
  s.tokens = x.microbatch_size * a.seq;
  s.elements = static_cast<double>(s.tokens) * static_cast<double>(a.hidden);
  s.kv_heads = x.attention_type == kMultiquery ? 1 : a.kv_heads;
  s.vocab = ceil_div(a.vocab, x.tensor_par);
  s.element_bytes = kBytes[x.datatype];
  s.tensor = x.tensor_par;
  s.shards = x.optimizer_sharding ? x.data_par : 1;
  s.blocks = ceil_div(a.blocks, x.pipeline_par);
  s.missing_blocks = (x.pipeline_par - a.blocks % x.pipeline_par) % x.pipeline_par;
  s.chunks = x.pipeline_interleaving;
  s.chunk_blocks = s.blocks / s.chunks;
  s.microbatches = x.batch_size / x.data_par / x.microbatch_size;
  s.fused = x.fused_activation;
  s.shared_kv = s.kv_heads % x.tensor_par != 0;
  s.flash = x.attention_type == kFlash;
  s.causal = a.causal;
  s.gated = x.structure_type == kLlama;
  s.tied = a.tied;
  s.rs = x.tensor_par_comm_type == kRsAg;
  s.rs_at_edges = x.tensor_par_comm_type == kP2pRsAg;
  s.tiled = x.tensor_par_overlap != kNoOverlap;
  s.pipe = x.tensor_par_overlap == kPipe;
  s.training = x.training;
  s.recompute_all = x.activation_recompute == kFull;
  s.recompute_attention = x.activation_recompute != kNoRecompute;
  s.regather_attention = s.recompute_attention || x.seq_par_ag_redo;
  s.regather_mlp = s.recompute_all || x.seq_par_ag_redo;
  s.local_elements = s.rs ? s.elements / s.tensor : s.elements;
  s.kv_width =
      static_cast<double>(s.head_size) * std::max(static_cast<double>(s.kv_heads) / s.tensor, 1.0);
  return s;
}

Reason Model::fits(const Figures& figures) const {
  if (figures.tier1_bytes > system_.first.bytes) return kMemoryFirst;
  if (figures.tier2_bytes > system_.second.bytes) return kMemorySecond;
  return kOk;
}

}  // namespace autopar::analytic::calculon
