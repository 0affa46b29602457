// The joint planning problem as tables; axes and formulas are those of
// search/planning/cost/tables.py.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

// Views of the arrays of search.tables.PlanTables (C order).
struct Tables {
  int num_layers = 0;      // L
  int num_types = 0;       // K
  int num_strategies = 0;  // S, canonical order
  int num_layouts = 0;     // Y, at most 64
  int num_vocab = 0;       // E
  int num_tables = 0;      // N
  int num_candidates = 0;  // Q
  bool gpipe = false;

  const std::int32_t* layer_type = nullptr;
  const std::int32_t* strategy_layout = nullptr;
  const std::int32_t* vocab_layout = nullptr;
  const std::int32_t* table_stages = nullptr;
  const std::int64_t* table_microbatch = nullptr;
  const std::int32_t* table_group = nullptr;  // default dp type as a number

  const std::uint8_t* valid = nullptr;
  const double* forward_s = nullptr;
  const double* backward_s = nullptr;
  const double* tail_s = nullptr;
  const std::int64_t* static_bytes = nullptr;
  const std::int64_t* activation_bytes = nullptr;
  const std::int64_t* transient_bytes = nullptr;
  const std::int64_t* shared_bytes = nullptr;
  const double* redistribute_forward_s = nullptr;
  const double* redistribute_backward_s = nullptr;
  const double* send_s = nullptr;

  const std::uint8_t* vocab_valid = nullptr;
  const double* vocab_forward_s = nullptr;
  const double* vocab_backward_s = nullptr;
  const double* vocab_tail_s = nullptr;
  const std::int64_t* vocab_static_bytes = nullptr;
  const std::int64_t* vocab_activation_bytes = nullptr;
  const std::int64_t* vocab_transient_bytes = nullptr;
  const std::int64_t* vocab_shared_bytes = nullptr;
  const std::int64_t* stage_fixed_bytes = nullptr;

  const std::int32_t* candidate_table = nullptr;
  const std::int32_t* candidate_microbatches = nullptr;

  // restrictions
  int num_stage_rules = 0;
  const std::uint8_t* stage_allowed = nullptr;  // (num_stage_rules, S), for the first stages
  std::vector<int> division;                    // required layers per stage; empty: free
};

class Knowledge;  // planner/search/knowledge.hpp

struct SearchSettings {
  Bytes budget = 0;
  double time_limit_s = 0.0;  // 0: none
  int alternatives = 0;
  bool uniform = false;  // one strategy for all layers
  // Results of searches of the same tables at other budgets; this search adds its own.
  Knowledge* known = nullptr;
  // Polled; true ends the search.
  std::function<bool()> interrupted;
};

struct Choice {
  int candidate = -1;
  int vocab = -1;
  double step_time_s = 0.0;
  std::vector<int> stage_sizes;
  std::vector<int> strategies;
};

enum class Status { kOptimal, kInfeasible, kTimeLimit, kInterrupted };

struct Outcome {
  Status status = Status::kInfeasible;
  Choice best;  // valid unless infeasible (or nothing found in time)
  bool found = false;
  // lower bound of every plan; 0 if infeasible, or if time ran out at once
  double bound_s_per_sample = 0.0;
  std::vector<Choice> alternatives;   // each optimal in its class
  bool alternatives_complete = true;  // false: the time limit excluded some from the search
  // when infeasible: the smallest budget that works (0: none), and where it binds
  Bytes smallest_budget = 0;
  int binding_candidate = -1;
  int binding_stage = -1;
  bool too_large = false;  // ended because a stage had more labels than the memory limit allows
  std::int64_t states = 0;
  std::int64_t items = 0;
  std::int64_t opened = 0;
};

// Best first over (G, m, p, embedding), exact for T; see search/planner.cpp. Throws
// std::invalid_argument for what check.hpp refuses.
Outcome search_plan(const Tables& tables, const SearchSettings& settings);

}  // namespace autopar
