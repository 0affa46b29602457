// Searches the executions of one application on one system: every tensor and pipeline degree,
// chunk, recomputation, switch, micro-batch and network tier, as in the published tool, and also
// uneven stages.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/halt.hpp"

namespace autopar::analytic::calculon {

enum Objective : std::uint8_t { kRate, kTime, kLeastMemory };

struct Space {
  std::int32_t num_procs = 1, max_batch = 1;
  std::uint8_t datatype = kFloat16, attention = kMultihead, structure = kGpt;
  bool fused_on = true, fused_off = false;  // values of the switch that are tried
  bool fixed_batch = true;                  // the batch is max_batch, not the next multiple below
  bool uneven = true;                       // stages may differ by one block
  bool tensor_overlap = true, data_overlap = true, offload = true;
};

struct Candidate {
  Execution execution;
  Outcome outcome;
};

struct Counts {
  std::int64_t considered = 0;  // points of the space
  std::int64_t network = 0;     // rejected for the network tiers
  std::int64_t layout = 0;      // rejected for shapes that cannot be divided, or too few blocks
  std::int64_t memory_first = 0, memory_second = 0;
  std::int64_t feasible = 0;
};

struct Want {
  int top = 1;
  Objective objective = kRate;
  bool all = false;         // return every feasible point
  bool frontier = false;    // return the Pareto frontier of time and memory
  bool duplicates = false;  // keep points that differ in switches without effect
  // Points that cannot be better than this are not priced. Unit: seconds per sample, or seconds for
  // kTime.
  double bound = std::numeric_limits<double>::infinity();
};

struct Found {
  std::vector<Candidate> top, frontier, all;
  Counts counts;
};

// Tensor and pipeline degrees of a space; each pair is searched separately.
std::vector<std::pair<std::int32_t, std::int32_t>> degree_pairs(const Model& model,
                                                                const Space& space);
Found explore(const Model& model, const Space& space, std::int32_t tensor, std::int32_t pipeline,
              const Want& want, const Halt& halt = kGoOn);
// Number of points that `explore` would consider; none is priced.
std::int64_t count_points(const Model& model, const Space& space, std::int32_t tensor,
                          std::int32_t pipeline);
// Bound that a point must beat to be among the best, in the unit of `Want::bound`.
double bound_of(const Found& found, const Want& want);
// Merges best points, frontier and counts of a part, but not its list of all points. The result
// does not depend on the order of the parts.
void absorb(Found& found, const Found& part, const Want& want);

}  // namespace autopar::analytic::calculon
