// Time and memory of one training step in closed form, with tensor parallelism over one or two
// dimensions. Source: arXiv 2410.00273.
// tests/oracles/tensor2d is the readable model and the oracle of this one: same names, same order
// of operations, so that figures agree to the last bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "closed_form/halt.hpp"
#include "closed_form/quirks.hpp"

namespace autopar::analytic::tensor2d {

struct Model {
  std::int64_t seq = 0, hidden = 0, heads = 0, depth = 0, feedforward = 0;
  std::int64_t kv_heads = 0;  // 0: queries are not grouped
  std::int64_t vocab = 0;     // 0: no embedding, head and loss
  bool causal = false, gpt = true, tied = false;
  double gradients = 1.0;  // size of a parameter's gradient over that of a weight

  std::int64_t key_heads() const { return kv_heads ? kv_heads : heads; }
};

// Machine in GB, GB/s and seconds; peaks are in the unit that `flops_units` defines for a FLOP.
struct System {
  double matrix_flops = 0, vector_flops = 0, hbm_bandwidth = 0, hbm_capacity = 0;
  double fast_bandwidth = 0, fast_latency = 0;  // efficiency included
  double slow_bandwidth = 0, slow_latency = 0, adapters = 1;
  std::int64_t domain = 1;
  double element_size = 0, mask_element_size = 0, flops_units = 0;
};

enum Strategy : std::uint8_t { k1d, k2d, k2dSeqp, kNumStrategies };
enum Objective : std::uint8_t { kTime, kMemory };
// No scores in memory; scores in memory; scores in memory and SUMMA GEMMs.
enum Attention : std::uint8_t { kFlash, kPlain, kSumma };

// Options that no search varies: searches use flash attention only.
struct Way {
  Attention attention = kFlash;
  bool recompute = false;  // recompute the results of plain attention in backward
};

// One configuration of a model. A NumPy row: order and types are part of the interface.
struct Candidate {
  std::int32_t dp, tp1, tp2, pp, mbs, nb;
  std::int32_t nv_tp1, nv_tp2, nv_dp, nv_pp;

  friend auto operator<=>(const Candidate&, const Candidate&) = default;
};

// Reasons why a candidate cannot run; search/closed_form/tensor2d/engine.py defines the messages.
enum Reason : std::uint8_t {
  kOk,
  kCounts,
  kProduct,
  kHeads,
  kHidden,
  kFeedforward,
  kDepth,
  kBatch,
  kRows,
  kSequence,
  kTokens,
  kPanels,
  kKvHeads,
  kPlacement,
  kDomain,
  kHeadWidth,
  kMemoryFull,
  kNumReasons
};

// Cost of a collective over a group of ranks, `in_domain` of which share a fast domain.
struct Group {
  std::int64_t ranks = 1;
  double share = 0;  // share of a gathered tensor that a rank lacks
  double bandwidth = 1, latency_s = 0, allreduce_moves = 1, allreduce_latencies = 1;
};

// search/closed_form/tensor2d/engine.py lists the names of these, and those of operations and of
// statistics, in the same order.
enum Collective : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kReduce,
  kBroadcast,
  kNumCollectives
};

// Operations of a layer, embedding and head.
enum Operation : std::uint8_t {
  kEmbedding,
  kFc1,
  kFc1Bias,
  kAct1,
  kDpr1,
  kFc2,
  kFc2Bias,
  kDpr2,
  kLn1,
  kQkv,
  kFlashAttention,
  kLogits,
  kSoftmax,
  kDprAt,
  kAttend,
  kVproj,
  kVprojBias,
  kDprV,
  kLn2,
  kLnF,
  kHead,
  kLoss,
  kNumOperations
};

// Sums over operations, for one micro-batch on one GPU: seconds, elements and FLOP.
struct Sums {
  double forward_s = 0, backward_s = 0, compute_s = 0, memory_s = 0, link_s = 0;
  double weights = 0, kept = 0, flops = 0;

  double time_s() const { return forward_s + backward_s; }
  Sums plus(const Sums& other) const;
};

// Work of one layer, of the layers around it on the first and the last stage, and the volume sent
// to the next stage.
struct Work {
  Sums layer, first, last;
  double hop = 0;
};

inline constexpr std::size_t kMostLinks = 4;  // collectives of one pass over one operation

// One pass over one operation: 1e12 FLOP, seconds, and 1e9 bytes of its collectives.
struct PassFigures {
  double flops, time_s, link_s, compute_s;
  double memory_s;  // of traffic that computation does not hide
  double intensity;
  std::array<double, kMostLinks> volumes_gb;
  std::array<std::uint8_t, kMostLinks> collectives;
  std::uint8_t num_links;
};

// One operation on one GPU, for one micro-batch: a row of the table of a layer.
struct LayerRow {
  std::uint8_t operation, in_panels;
  double weights_gb, kept_gb;
  PassFigures forward, backward;
};

// Main results of a step.
struct Figures {
  double time_s = 0, memory_gb = 0;
};

inline constexpr int kNumStatistics = 19;  // without the placement

class Engine {
 public:
  Engine(Model model, System system, Quirks quirks, Strategy strategy, std::int64_t num_gpus,
         std::int64_t batch)
      : model_(model),
        system_(system),
        quirks_(quirks),
        strategy_(strategy),
        num_gpus_(num_gpus),
        batch_(batch) {}

  // All checks that need no prices.
  Reason check(const Candidate& c) const;
  // The same checks for one candidate with any attention. If several fail, it may return another
  // reason. The caller, whose integers have any size, checks whether degrees make up all GPUs.
  Reason check(const Candidate& c, const Way& way) const;
  // Checks of a division of tensors, whatever the rest of a candidate.
  Reason check_tensors(std::int64_t columns, std::int64_t rows) const;
  // True if the tokens of a micro-batch divide over the GPUs that share them.
  bool tokens_divide(std::int64_t microbatch, std::int64_t columns, std::int64_t rows) const;
  // True if the number of panels changes a figure.
  bool panels_matter(std::int64_t columns, std::int64_t rows) const {
    return columns * rows > 1 || quirks_.repeated_panels;
  }

  // Reads tp1, tp2, mbs and nb; collectives are over `columns` and `rows`. Without `links` they
  // take no time: a lower bound for every placement.
  Work work(const Candidate& c, const Group& columns, const Group& rows, bool links = true) const;
  // The same for any attention. Adds rows to `table`, unless it is null.
  Work work(const Candidate& c, const Way& way, std::vector<LayerRow>* table) const;
  double memory_gb(const Candidate& c, const Work& work) const;
  // `statistics`: room for kNumStatistics numbers, or null.
  Figures step(const Candidate& c, const Work& work, double* statistics = nullptr) const;
  // Lower bound of the time of all candidates that differ only in placement.
  double least_s(const Candidate& c, const Work& without_links) const;

  Group group(std::int64_t ranks, std::int64_t in_domain) const;
  double collective_s(Collective operation, double volume_gb, const Group& group) const;
  double transfer_s(double volume_gb, bool fast) const;

  const Model& model() const { return model_; }
  const System& system() const { return system_; }
  Strategy strategy() const { return strategy_; }
  std::int64_t num_gpus() const { return num_gpus_; }
  std::int64_t batch() const { return batch_; }

 private:
  double hop_s(const Candidate& c, double volume_gb) const;
  double data_s(const Candidate& c, const Work& work) const;

  Model model_;
  System system_;
  Quirks quirks_;
  Strategy strategy_;
  std::int64_t num_gpus_, batch_;
};

// All figures of one candidate. The caller checks whether its memory fits.
struct Answer {
  Reason reason = kOk;
  std::array<double, kNumStatistics> statistics{};  // 0 where it cannot run
  std::vector<LayerRow> rows;
};

Answer evaluate(const Engine& engine, const Candidate& candidate, const Way& way, bool rows);

struct Outcome {
  std::uint8_t ok, reason;
  double time_s, memory_gb;
};

// Prices candidates in any order; repeated layers are computed once. `statistics`: a row of
// kNumStatistics for each, or null.
void evaluate_many(const Engine& engine, const Candidate* candidates, std::size_t count,
                   int threads, Outcome* outcomes, double* statistics, const Halt& halt = kGoOn);

struct Found {
  Candidate candidate;
  double time_s, memory_gb;
};

struct Exploration {
  std::vector<Found> best;  // first is best; ties by the other figure, then by the candidate
  std::vector<Found> all;   // every feasible one, in the order of `Candidate`
  std::uint64_t candidates = 0, feasible = 0;
  std::uint64_t bounded = 0;  // feasible, not priced because of a bound; differs with threads
  std::array<std::uint64_t, kNumReasons> rejected{};
  bool too_many = false;  // more `candidates` than allowed; none is searched
};

// Searches every candidate of the engine's strategy, GPUs and batch; exact for any `top`. More than
// `most` candidates are only counted, up to that number.
Exploration explore(const Engine& engine, std::size_t top, Objective objective, bool all,
                    int threads, std::uint64_t most = UINT64_MAX, const Halt& halt = kGoOn);

}  // namespace autopar::analytic::tensor2d
