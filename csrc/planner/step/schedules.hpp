// Event-by-event replay of one training step of a pipeline under any of its schedules.
//
// A rank works in the order of its schedule. A forward waits for the part of the model before it,
// the gradient of a part's inputs for the part after it. A message between two ranks takes time,
// one within a rank none. Orders are those of Megatron-Core and of torch 2.13; the caller checks
// the requirements of a schedule on stages and micro-batches.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

enum class Schedule : std::uint8_t {
  k1f1b,
  kGpipe,
  kInterleaved,
  kLoopedBfs,
  kInterleavedZeroBubble,
  kZeroBubbleV,
  kDualPipeV,
};

// A forward, a whole backward, and its two halves: gradients of inputs and of weights.
enum class Kind : std::uint8_t { kForward, kBackward, kInputs, kWeights };

struct Action {
  Kind kind = Kind::kForward;
  std::int32_t chunk = 0;  // chunk of the rank, in model order
  std::int64_t microbatch = 0;
};

struct Shape {
  Schedule schedule = Schedule::k1f1b;
  std::int64_t stages = 1;
  std::int64_t chunks = 1;  // of every stage
  std::int64_t microbatches = 1;
  std::int64_t group = 1;  // consecutive micro-batches of a chunk
  std::int64_t ahead = 0;  // additional warm-up forwards
};

// Seconds of a micro-batch on every chunk of every stage; index is stage times chunks, plus chunk.
struct ChunkTimes {
  std::vector<double> forward_s;
  std::vector<double> input_s;
  std::vector<double> weight_s;
  double send_s = 0.0;  // of a message between two stages
  // Messages occupy no stage, and a link carries one at a time in each direction; otherwise the
  // sender waits until its message is there.
  bool overlapped = false;
};

// Returns the ordered work of a rank in a step.
std::vector<Action> actions_of(const Shape& shape, std::int64_t rank);

// Returns the seconds of the step, or -1 if ranks wait for each other forever. Time and memory grow
// with stages, chunks and micro-batches. Throws Stopped when the monitor's caller interrupts.
double replay_schedule_s(const Shape& shape, const ChunkTimes& times, Monitor& monitor);

}  // namespace autopar
