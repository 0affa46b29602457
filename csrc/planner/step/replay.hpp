// Event-by-event replay of one training step of a pipeline: dependencies only, no formula.
//
// A stage runs its micro-batches in the order of its schedule; an activation or gradient leaves
// when its computation ends, transfers do not occupy the stages, and each direction of a link
// carries one of them at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

struct Pipeline {
  bool gpipe = false;
  std::int64_t num_microbatches = 1;
  // Seconds, one entry per stage; the first two per micro-batch, `tail_s` per step.
  std::vector<double> forward_s;
  std::vector<double> backward_s;
  std::vector<double> tail_s;
  std::vector<double> send_s;  // p - 1 entries or more: between stages j and j + 1, the same back
};

enum class Work : std::uint8_t { kForward, kBackward, kTail };

// One piece of work of one stage, in seconds since the start of the step.
struct Event {
  std::int32_t stage = 0;
  Work work = Work::kForward;
  std::int64_t microbatch = -1;  // -1 for the tail, which belongs to the step
  double start_s = 0.0;
  double end_s = 0.0;
};

// Returns the seconds of the step, in O(p*m) time and O(p) memory. `timeline`: null, or where the
// events go, by start and then by stage. Throws Stopped when the monitor's caller interrupts.
double replay_s(const Pipeline& pipeline, Monitor& monitor, std::vector<Event>* timeline = nullptr);

}  // namespace autopar
