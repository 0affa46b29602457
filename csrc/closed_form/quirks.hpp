// Defects in the published numbers of both closed forms: one switch per defect.
//
// Each list is the only definition: the fields of a `Quirks`, and in Python the names and meanings
// of its switches, are generated from it. All off is the corrected model and the default; all on
// reproduces published figures (`compat`). Numbers are those of docs/concepts/closed-form.md.
#pragma once

namespace autopar::analytic {

// One switch of a `Quirks`, for callers that set it by name.
template <class Quirks>
struct Quirk {
  const char* name;
  const char* meaning;
  bool Quirks::* flag;
};

// A macro: without reflection, the language has no other way to define fields and their texts
// together.
#define AUTOPAR_QUIRK_FIELD(name, meaning) bool name = false;
#define AUTOPAR_QUIRK_ROW(name, meaning) {#name, meaning, &Quirks::name},

namespace calculon {

// B16 and B19 change no figure of the engine: a null for a number, and the kind of a refusal. The
// code that reads answers implements both.
#define AUTOPAR_CALCULON_QUIRKS(X)                                                          \
  X(running_recompute_totals,                                                               \
    "B1: a recomputed layer adds the block's running forward totals, not its own FLOP and"  \
    " bytes; right: its own.")                                                              \
  X(pipe_tile_twice,                                                                        \
    "B2: `pipe` counts its exposed tile as processing and as exposed time; right: once.")   \
  X(edge_overlaps_as_base,                                                                  \
    "B3: tiles of the edge block overlap the base block's communication; right: their "     \
    "own.")                                                                                 \
  X(recommunication_as_forward,                                                             \
    "B4: repeated communication is exposed as in the forward, and its slowdown counted in"  \
    " the recomputation too; right: as beside the weight gradient, once.")                  \
  X(attention_input_dropped,                                                                \
    "B5: without `rs_ag`, the input of query, key and value is not kept; right: it is.")    \
  X(overlapped_activations,                                                                 \
    "B6: overlapped linear layers keep other tensors than plain ones; right: the same.")    \
  X(dropout_gradient_bytes,                                                                 \
    "B7: activation gradients of dropout have one byte; right: those of the datatype.")     \
  X(weight_gradient_bytes,                                                                  \
    "B8: weight gradients have the bytes of the datatype; right: 4 while they accumulate.") \
  X(checkpoint_unsharded,                                                                   \
    "B9: a checkpoint is whole under `rs_ag`; right: divided by the tensor degree.")        \
  X(optimizer_per_microbatch,                                                               \
    "B10: efficiencies count the optimizer step once per microbatch; right: once per "      \
    "batch.")                                                                               \
  X(overlap_requirements,                                                                   \
    "B11: required bandwidths set one chunk (all blocks) against the room of all chunks "   \
    "(one block less), and leave out ring factors; right: the same set on both sides, "     \
    "ring included.")                                                                       \
  X(tail_windows,                                                                           \
    "B12: the last chunk's window counts the optimizer once too often and removes block "   \
    "times that are not in it, and charges one block's slowdown; right: c-1 windows and "   \
    "slowdowns.")                                                                           \
  X(latency_without_neighbour,                                                              \
    "B13: blocks pay the latency of a pipeline transfer without a neighbour and, "          \
    "backward, in inference, and windows look at base blocks that do not exist; right: "    \
    "neither.")                                                                             \
  X(offload_sums,                                                                           \
    "B14: bytes to move in backward add both directions of the link and leave gradients "   \
    "out; right: the busier direction, gradients included.")                                \
  X(divisor_fills_tier,                                                                     \
    "B15: a tier that must be filled takes any divisor of its size, even if too few "       \
    "processors are there; right: its size, or several groups that fill whole domains of "  \
    "it.")                                                                                  \
  X(no_checkpoint_figure, "B16: offloaded checkpoints are null in inference; right: 0.")    \
  X(communication_flops,                                                                    \
    "B17: FLOP and bytes of collectives are in the block's sums, though their time is "     \
    "not; right: left out.")                                                                \
  X(unknown_datatype_ends_search,                                                           \
    "B19: a datatype that the system lacks is an assertion; right: infeasible.")

struct Quirks {
  AUTOPAR_CALCULON_QUIRKS(AUTOPAR_QUIRK_FIELD)
};

inline constexpr Quirk<Quirks> kQuirks[] = {AUTOPAR_CALCULON_QUIRKS(AUTOPAR_QUIRK_ROW)};

}  // namespace calculon

namespace tensor2d {

#define AUTOPAR_TENSOR2D_QUIRKS(X)                                                              \
  X(single_allreduce,                                                                           \
    "Q1: an all-reduce inside one domain, or with one rank per domain, moves data once, "       \
    "and its latency is never doubled; right: twice, everywhere.")                              \
  X(free_slow_links,                                                                            \
    "Q2: pipeline links between domains cost nothing once some are inside; right: their "       \
    "time.")                                                                                    \
  X(norm_width_of_sequence,                                                                     \
    "Q3: norms of the two-dimensional model are as wide as the sequence; right: as the "        \
    "hidden size.")                                                                             \
  X(norm_gradient_group,                                                                        \
    "Q4: both gradients of such a norm are reduced over the columns; right: weights over "      \
    "the rows, statistics over the columns.")                                                   \
  X(extra_panel,                                                                                \
    "Q5: a communication-bound SUMMA product exposes one panel too many and pools the "         \
    "loops of backward; right: each loop by itself.")                                           \
  X(bias_shapes, "Q6: biases behind a reduce-scatter work on all rows; right: on their share.") \
  X(one_adapter,                                                                                \
    "Q7: more than one network adapter per GPU helps only groups with several ranks per "       \
    "domain; right: every transfer.")                                                           \
  X(flash_traffic,                                                                              \
    "Q8: keys and values gathered again in backward count as local parts; right: whole.")       \
  X(dropped_rows,                                                                               \
    "Q9: sequences that the tensor degree does not divide lose their remainder; right: "        \
    "rows are of the whole micro-batch.")                                                       \
  X(recompute_time_only, "Q10: recomputing attention adds time but no FLOP; right: both.")      \
  X(repeated_panels,                                                                            \
    "Q14: SUMMA products count 2*i per output and write every panel; right: 2*i-1, once "       \
    "when nothing is divided.")

struct Quirks {
  AUTOPAR_TENSOR2D_QUIRKS(AUTOPAR_QUIRK_FIELD)
};

inline constexpr Quirk<Quirks> kQuirks[] = {AUTOPAR_TENSOR2D_QUIRKS(AUTOPAR_QUIRK_ROW)};

}  // namespace tensor2d

#undef AUTOPAR_QUIRK_FIELD
#undef AUTOPAR_QUIRK_ROW
#undef AUTOPAR_CALCULON_QUIRKS
#undef AUTOPAR_TENSOR2D_QUIRKS

}  // namespace autopar::analytic
