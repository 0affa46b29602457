#include "planner/step/schedules.hpp"

#include <algorithm>
#include <cstddef>

namespace autopar {
namespace {

std::size_t idx(std::int64_t i) { return static_cast<std::size_t>(i); }

bool splits(Schedule schedule) {
  return schedule == Schedule::kInterleavedZeroBubble || schedule == Schedule::kZeroBubbleV ||
         schedule == Schedule::kDualPipeV;
}

bool v_shaped(Schedule schedule) {
  return schedule == Schedule::kZeroBubbleV || schedule == Schedule::kDualPipeV;
}

// Index of the model part, in model order, that is a chunk of a rank.
std::int64_t part_of(const Shape& shape, std::int64_t rank, std::int64_t chunk) {
  if (v_shaped(shape.schedule) && chunk % 2 != 0) return (chunk + 1) * shape.stages - 1 - rank;
  return chunk * shape.stages + rank;
}

std::int64_t rank_of(const Shape& shape, std::int64_t part) {
  const std::int64_t place = part % shape.stages;
  const bool back = v_shaped(shape.schedule) && (part / shape.stages) % 2 != 0;
  return back ? shape.stages - 1 - place : place;
}

// All forwards first; breadth-first runs the backwards from the last micro-batch.
std::vector<Action> all_forwards_first(const Shape& shape) {
  std::vector<Action> work;
  const auto chunks = static_cast<std::int32_t>(shape.chunks);
  for (std::int32_t chunk = 0; chunk < chunks; ++chunk)
    for (std::int64_t i = 0; i < shape.microbatches; ++i)
      work.push_back({Kind::kForward, chunk, i});
  for (std::int32_t chunk = chunks - 1; chunk >= 0; --chunk)
    for (std::int64_t i = 0; i < shape.microbatches; ++i) {
      const bool in_order = shape.schedule == Schedule::kGpipe;
      work.push_back({Kind::kBackward, chunk, in_order ? i : shape.microbatches - 1 - i});
    }
  return work;
}

// Warm-up forwards, pairs of one forward and one backward, remaining backwards. Groups of
// micro-batches pass through all chunks before the next group, backwards from the last chunk.
std::vector<Action> pairs(const Shape& shape, std::int64_t rank) {
  const bool split = splits(shape.schedule);
  const auto chunks = static_cast<std::int32_t>(shape.chunks);
  std::vector<Action> forwards;
  for (std::int64_t first = 0; first < shape.microbatches; first += shape.group)
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk)
      for (std::int64_t i = first; i < std::min(first + shape.group, shape.microbatches); ++i)
        forwards.push_back({Kind::kForward, chunk, i});
  std::vector<Action> backwards;
  for (const Action& forward : forwards)
    backwards.push_back(
        {split ? Kind::kInputs : Kind::kBackward, chunks - 1 - forward.chunk, forward.microbatch});

  const auto number = static_cast<std::int64_t>(forwards.size());
  // two forwards per later stage, and a group per chunk but the last; one forward if the gradient
  // of inputs goes ahead of that of weights, or with one chunk
  const std::int64_t each = shape.schedule == Schedule::kInterleaved ? 2 : 1;
  const std::int64_t warmup = std::min(
      each * (shape.stages - 1 - rank) + (shape.chunks - 1) * shape.group + shape.ahead, number);
  // gradients of weights are delayed by the number of ranks before this one
  const std::int64_t delay = rank;
  std::vector<Action> work(forwards.begin(), forwards.begin() + warmup);
  const auto weights = [&](std::int64_t k) {
    work.push_back({Kind::kWeights, backwards[idx(k)].chunk, backwards[idx(k)].microbatch});
  };
  for (std::int64_t k = 0; k < number; ++k) {
    if (warmup + k < number) work.push_back(forwards[idx(warmup + k)]);
    work.push_back(backwards[idx(k)]);
    if (split && k >= delay) weights(k - delay);
  }
  for (std::int64_t k = std::max<std::int64_t>(0, number - delay); split && k < number; ++k)
    weights(k);
  return work;
}

// Work of a rank with two chunks: next micro-batch of each kind, and delayed gradients of weights.
class TwoChunks {
 public:
  void forward(std::int32_t chunk) { add(Kind::kForward, chunk, forwards_[idx(chunk)]++); }
  void whole(std::int32_t chunk) { add(Kind::kBackward, chunk, backwards_[idx(chunk)]++); }
  void inputs(std::int32_t chunk) {
    const std::int64_t i = backwards_[idx(chunk)]++;
    add(Kind::kInputs, chunk, i);
    waiting_.push_back({Kind::kWeights, chunk, i});
  }
  // The oldest of either chunk, or of one chunk.
  void weights() { take(waiting_.begin()); }
  void weights(std::int32_t chunk) {
    take(std::find_if(waiting_.begin(), waiting_.end(),
                      [chunk](const Action& one) { return one.chunk == chunk; }));
  }
  std::int64_t forwards(std::int32_t chunk) const { return forwards_[idx(chunk)]; }
  bool waits(std::int32_t chunk) const {
    return std::any_of(waiting_.begin(), waiting_.end(),
                       [chunk](const Action& one) { return one.chunk == chunk; });
  }
  std::vector<Action> work;

 private:
  void add(Kind kind, std::int32_t chunk, std::int64_t i) { work.push_back({kind, chunk, i}); }
  void take(std::vector<Action>::iterator at) {
    if (at == waiting_.end()) return;
    work.push_back(*at);
    waiting_.erase(at);
  }

  std::int64_t forwards_[2] = {0, 0};
  std::int64_t backwards_[2] = {0, 0};
  std::vector<Action> waiting_;  // at most a few per stage
};

std::vector<Action> zero_bubble_v(const Shape& shape, std::int64_t rank) {
  // fewer micro-batches use the order of this number, without the missing ones
  const std::int64_t number = std::max(shape.microbatches, 2 * shape.stages - 1);
  const std::int64_t behind = shape.stages - rank;
  TwoChunks two;
  for (std::int64_t k = 0; k < 2 * behind - 1; ++k) two.forward(0);
  for (std::int64_t k = 0; k < rank; ++k) {
    two.forward(1);
    two.forward(0);
  }
  const auto through = [&two](std::int32_t chunk) {
    two.inputs(chunk);
    two.weights(chunk);
  };
  for (std::int64_t k = 0; k < behind; ++k) {
    two.forward(1);
    through(1);
  }
  while (two.forwards(1) < number) {
    if (two.forwards(0) < number) two.forward(0);
    through(0);
    two.forward(1);
    through(1);
  }
  for (std::int64_t k = 0; k < rank; ++k) {
    two.inputs(0);
    two.inputs(1);
  }
  for (std::int64_t k = 0; k < behind; ++k) through(0);
  for (const std::int32_t chunk : {1, 0})
    while (two.waits(chunk)) two.weights(chunk);
  std::erase_if(two.work, [&](const Action& one) { return one.microbatch >= shape.microbatches; });
  return std::move(two.work);
}

std::vector<Action> dual_pipe_v(const Shape& shape, std::int64_t rank) {
  const std::int64_t behind = shape.stages - 1 - rank;
  TwoChunks two;
  for (std::int64_t k = 0; k < 2 * behind; ++k) two.forward(0);
  for (std::int64_t k = 0; k <= rank; ++k) {
    two.forward(0);
    two.forward(1);
  }
  for (std::int64_t k = 0; k < behind; ++k) {
    two.inputs(1);
    two.weights();
    two.forward(1);
  }
  for (std::int64_t k = 0; k < shape.microbatches - 2 * shape.stages + rank + 1; ++k) {
    two.forward(0);
    two.whole(1);
    two.forward(1);
    two.whole(0);
  }
  for (std::int64_t k = 0; k < behind; ++k) {
    two.whole(1);
    two.forward(1);
    two.whole(0);
  }
  // from the middle on, backwards are split: even ranks start within a pair, odd ranks before it
  bool split = false;
  const auto back = [&](std::int32_t chunk) {
    if (split) {
      two.inputs(chunk);
    } else {
      two.whole(chunk);
    }
  };
  for (std::int64_t k = 0; k <= rank; ++k) {
    const bool middle = k == (rank + 1) / 2;
    split = split || (middle && rank % 2 != 0);
    back(1);
    split = split || middle;
    back(0);
  }
  for (std::int64_t k = 0; k < behind; ++k) {
    two.weights();
    two.inputs(0);
  }
  for (std::int64_t k = 0; k <= rank; ++k) two.weights();
  return std::move(two.work);
}

}  // namespace

std::vector<Action> actions_of(const Shape& shape, std::int64_t rank) {
  if (shape.stages == 1 && shape.chunks == 1 && shape.ahead == 0) {
    // one micro-batch after the other, whatever the schedule
    std::vector<Action> work;
    for (std::int64_t i = 0; i < shape.microbatches; ++i) {
      work.push_back({Kind::kForward, 0, i});
      work.push_back({Kind::kBackward, 0, i});
    }
    return work;
  }
  switch (shape.schedule) {
    case Schedule::kGpipe:
    case Schedule::kLoopedBfs:
      return all_forwards_first(shape);
    case Schedule::kZeroBubbleV:
      return zero_bubble_v(shape, rank);
    case Schedule::kDualPipeV:
      return dual_pipe_v(shape, rank);
    default:
      return pairs(shape, rank);
  }
}

double replay_schedule_s(const Shape& shape, const ChunkTimes& times, Monitor& monitor) {
  const std::int64_t p = shape.stages;
  const std::int64_t v = shape.chunks;
  const std::int64_t m = shape.microbatches;
  const std::int64_t parts = p * v;
  constexpr double kNotYet = -1.0;
  // time at which the input of a part's forward, or of its backward, is available
  std::vector<double> there[2];
  for (auto& column : there) column.assign(idx(parts * m), kNotYet);
  std::fill_n(there[0].begin(), m, 0.0);
  std::fill_n(there[1].end() - m, m, 0.0);
  std::vector<double> clock(idx(p), 0.0);
  std::vector<double> link(idx(p * p), 0.0);  // free from, by sender and receiver
  std::vector<std::size_t> done(idx(p), 0);
  std::vector<std::vector<Action>> work;
  for (std::int64_t rank = 0; rank < p; ++rank) {
    work.push_back(actions_of(shape, rank));
    monitor.poll();
  }
  std::vector<std::int64_t> waiting;  // the first rank is popped first
  for (std::int64_t rank = p - 1; rank >= 0; --rank) waiting.push_back(rank);
  while (!waiting.empty()) {
    const std::int64_t rank = waiting.back();
    waiting.pop_back();
    const std::vector<Action>& todo = work[idx(rank)];
    double& now = clock[idx(rank)];
    for (std::size_t& at = done[idx(rank)]; at < todo.size(); ++at) {
      const Action& one = todo[at];
      const std::size_t chunk = idx(rank * v + one.chunk);
      if (one.kind == Kind::kWeights) {
        now += times.weight_s[chunk];
        continue;
      }
      const bool down = one.kind == Kind::kForward;
      const std::int64_t part = part_of(shape, rank, one.chunk);
      const double came = there[down ? 0 : 1][idx(part * m + one.microbatch)];
      if (came == kNotYet) break;  // woken when it comes
      double seconds = down ? times.forward_s[chunk] : times.input_s[chunk];
      if (one.kind == Kind::kBackward) seconds += times.weight_s[chunk];
      now = std::max(now, came) + seconds;
      const std::int64_t to = down ? part + 1 : part - 1;
      if (to < 0 || to >= parts) continue;
      double arrival = now;
      const std::int64_t receiver = rank_of(shape, to);
      if (receiver != rank) {
        if (times.overlapped) {
          double& free = link[idx(rank * p + receiver)];
          arrival = free = std::max(now, free) + times.send_s;
        } else {
          arrival = now += times.send_s;
        }
        waiting.push_back(receiver);
      }
      there[down ? 0 : 1][idx(to * m + one.microbatch)] = arrival;
    }
    monitor.poll();
  }
  for (std::int64_t rank = 0; rank < p; ++rank)
    if (done[idx(rank)] < work[idx(rank)].size()) return -1.0;
  return *std::max_element(clock.begin(), clock.end());
}

}  // namespace autopar
