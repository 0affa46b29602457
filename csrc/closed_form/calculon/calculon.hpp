// Time and memory of one training step in closed form. Source: Calculon (SC'23), doi
// 10.1145/3581784.3607102; its errors are corrected unless a switch of Quirks keeps them.
// tests/oracles/calculon is a second, plainer model in Python with the same names and order of
// operations, so that figures agree to the last bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "closed_form/halt.hpp"
#include "closed_form/machine.hpp"
#include "closed_form/quirks.hpp"

namespace autopar::analytic::calculon {

struct Application {
  std::int64_t hidden = 0, feedforward = 0, seq = 0, heads = 0, head_size = 0, blocks = 0;
  std::int64_t kv_heads = 0;  // equals heads without grouped queries
  std::int64_t vocab = 0;     // 0: no embedding, head and loss
  bool tied = false;
  bool causal = true;
};

enum Datatype : std::uint8_t { kFloat8, kFloat16, kBfloat16, kFloat32, kNumDatatypes };
enum Attention : std::uint8_t { kMultihead, kMultiquery, kFlash };
enum Recompute : std::uint8_t { kNoRecompute, kAttentionOnly, kFull };
enum Communication : std::uint8_t { kAr, kP2pRsAg, kRsAg };
enum Overlap : std::uint8_t { kNoOverlap, kRing, kPipe };
enum Structure : std::uint8_t { kGpt, kLlama };

// One configuration of an application. A NumPy row: order and types are part of the interface.
struct Execution {
  std::int32_t num_procs, tensor_par, pipeline_par, data_par;
  std::int32_t tensor_par_net, pipeline_par_net, data_par_net;
  std::int32_t batch_size, microbatch_size, pipeline_interleaving;
  std::uint8_t datatype, attention_type, activation_recompute;
  std::uint8_t tensor_par_comm_type, tensor_par_overlap, structure_type;
  std::uint8_t fused_activation, optimizer_sharding, seq_par_ag_redo, data_par_overlap;
  std::uint8_t weight_offload, activations_offload, optimizer_offload, training;
};

struct Memory {
  double bytes = 0.0;
  Rate rate;
};

struct System {
  std::array<Rate, kNumDatatypes> matrix, vector;  // no steps for a missing datatype
  Memory first, second;
  bool roofline = false;
  std::vector<Tier> tiers;
};

// Reasons why an execution cannot run; search/closed_form/calculon/engine.py defines the messages.
enum Reason : std::uint8_t {
  kOk,
  kCounts,
  kProduct,
  kBatch,
  kRecomputeInference,
  kInterleaving,
  kInterleavingOneStage,
  kShardingAlone,
  kOverlapAlone,
  kRedoWithoutGather,
  kRedoFull,
  kDataOverlapInference,
  kDataOverlapAlone,
  kOffloadInference,
  kNoTier,
  kTierTooSmall,
  kTierNotFull,
  kDatatype,
  kInterleavingTooLarge,
  kInterleavingNoFactor,
  kOffloadBlocks,
  kSplitSequence,
  kSplitHidden,
  kSplitFeedforward,
  kSplitHeads,
  kKvHeads,
  kSplitKvHeads,
  kUnpublished,
  kMemoryFirst,
  kMemorySecond,
  kUnknownCode,
  kNumReasons
};

// One pass over a block; pairs are base and edge blocks, where these differ.
struct Work {
  double flops = 0, flops_s = 0, bytes = 0, memory_s = 0;
  double time_s[2] = {0, 0}, link_bytes[2] = {0, 0}, link_s[2] = {0, 0}, exposed_s[2] = {0, 0};
};

struct Block {
  Work fw, agrad, wgrad, optim, again, again_link;
  double weight = 0, working = 0, stored = 0, weight_gradient = 0, whole_weight_gradient = 0,
         activation_gradient = 0, optimizer = 0;
  double required_bytes_per_s = 0;
  std::array<double, 8> parameters{};  // of every operation that has parameters
  std::size_t num_parameters = 0;
};

// Sizes from which all else is derived: one micro-batch on a processor of the first stage.
struct Shape {
  std::int64_t hidden, feedforward, seq, heads, head_size, microbatch, tokens;
  std::int64_t kv_heads, vocab;
  double elements;  // may exceed 2^63
  double element_bytes, tensor, shards, local_elements, kv_width;
  std::int64_t blocks, missing_blocks, chunk_blocks, chunks, microbatches;
  bool fused, shared_kv, flash, causal, gated, tied, rs, rs_at_edges, tiled, pipe, training;
  bool recompute_all, recompute_attention, regather_attention, regather_mlp;
};

// Embedding, head and loss.
struct Vocab {
  double embedding_s = 0, head_s = 0, optimizer_s = 0, table_bytes = 0, logits_bytes = 0;
};

// Main results of a step.
struct Figures {
  double total_time_s = 0, tier1_bytes = 0, tier2_bytes = 0, sample_rate_per_s = 0;
};

// Statistics of a step: 96 in the published order, followed by those of the vocabulary.
inline constexpr std::size_t kNumPublished = 96, kNumStatistics = 99;
std::array<const char*, kNumStatistics> statistic_names();

// One operation of a block, with the figures of layer_figure_names().
inline constexpr std::size_t kNumLayerFigures = 47;
struct Layer {
  std::string name;
  std::array<double, kNumLayerFigures> figures;
};
std::array<const char*, kNumLayerFigures> layer_figure_names();

class Model {
 public:
  Model(Application application, System system, Quirks quirks, bool published)
      : application_(application),
        system_(std::move(system)),
        quirks_(quirks),
        published_(published) {}

  // All checks that need no prices: the first failed one, in a fixed order. `tier`: receives the
  // number of the network tier that is refused, or null.
  Reason check(const Execution& x, std::int32_t* tier = nullptr) const;
  Shape shape(const Execution& x) const;
  Block block(const Execution& x, const Shape& shape) const;
  // Recomputes the optimizer's work and states, the only part of a block that its shards change.
  void share_optimizer(const Execution& x, const Shape& shape, Block& block) const;
  Vocab vocab(const Execution& x, const Shape& shape) const;
  // Reads only sizes of the block, no times.
  Figures memory(const Execution& x, const Shape& shape, const Block& block,
                 const Vocab& vocab) const;
  // `statistics`: room for kNumStatistics numbers, or null.
  Figures step(const Execution& x, const Shape& shape, const Block& block, const Vocab& vocab,
               double* statistics) const;
  Reason fits(const Figures& figures) const;
  // Operations of one block in forward order; the execution must have passed check().
  std::vector<Layer> layers(const Execution& x) const;

  const Application& application() const { return application_; }
  const System& system() const { return system_; }

 private:
  Application application_;
  System system_;
  Quirks quirks_;
  bool published_;
};

struct Outcome {
  std::uint8_t ok, reason;
  double total_time_s, tier1_bytes, tier2_bytes, sample_rate_per_s;
};

// Prices executions in any order; repeated blocks are computed once. `statistics`: a row of
// kNumStatistics for each, or null.
void evaluate_many(const Model& model, const Execution* executions, std::size_t count, int threads,
                   Outcome* outcomes, double* statistics, const Halt& halt = kGoOn);

}  // namespace autopar::analytic::calculon
