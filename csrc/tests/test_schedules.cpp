// Orders and replays of every schedule: by hand, against published bubbles, and whole.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "planner/step/schedules.hpp"

namespace {

using autopar::Action;
using autopar::ChunkTimes;
using autopar::Kind;
using autopar::Monitor;
using autopar::Schedule;
using autopar::Shape;

constexpr Schedule kAll[] = {
    Schedule::k1f1b,      Schedule::kGpipe,       Schedule::kInterleaved,
    Schedule::kLoopedBfs, Schedule::kZeroBubbleV, Schedule::kInterleavedZeroBubble,
    Schedule::kDualPipeV,
};

bool one_chunk(Schedule schedule) {
  return schedule == Schedule::k1f1b || schedule == Schedule::kGpipe;
}

Shape shape_of(Schedule schedule, std::int64_t stages, std::int64_t microbatches) {
  return {schedule, stages, one_chunk(schedule) ? 1 : 2, microbatches, stages, 0};
}

// A rank's order as `F00 B00`: kind, chunk, micro-batch.
std::string drawn(const Shape& shape, std::int64_t rank) {
  std::string text;
  for (const Action& one : autopar::actions_of(shape, rank)) {
    if (!text.empty()) text += ' ';
    text += "FBIW"[static_cast<int>(one.kind)];
    text += std::to_string(one.chunk) + std::to_string(one.microbatch);
  }
  return text;
}

// Equal stages; seconds are of all chunks of a stage.
double replayed(const Shape& shape, double forward, double inputs, double weights,
                double send = 0.0, bool overlapped = false) {
  const auto parts = static_cast<std::size_t>(shape.stages * shape.chunks);
  const auto v = static_cast<double>(shape.chunks);
  const ChunkTimes times{std::vector<double>(parts, forward / v),
                         std::vector<double>(parts, inputs / v),
                         std::vector<double>(parts, weights / v), send, overlapped};
  Monitor monitor;
  return autopar::replay_schedule_s(shape, times, monitor);
}

}  // namespace

TEST_CASE("orders drawn by hand") {
  CHECK(drawn(shape_of(Schedule::k1f1b, 2, 3), 0) == "F00 F01 B00 F02 B01 B02");
  CHECK(drawn(shape_of(Schedule::kGpipe, 2, 2), 1) == "F00 F01 B00 B01");
  CHECK(drawn(shape_of(Schedule::kInterleaved, 2, 2), 1) == "F00 F01 F10 B10 F11 B11 B00 B01");
  CHECK(drawn(shape_of(Schedule::kLoopedBfs, 2, 2), 1) == "F00 F01 F10 F11 B11 B10 B01 B00");
  CHECK(drawn(shape_of(Schedule::kInterleavedZeroBubble, 2, 2), 1) ==
        "F00 F01 F10 I10 F11 I11 W10 I00 W11 I01 W00 W01");
  CHECK(drawn(shape_of(Schedule::kZeroBubbleV, 2, 2), 1) ==
        "F00 F10 F01 F11 I10 W10 I00 W00 I11 W11 I01 W01");
}

TEST_CASE("every order has every piece of work once") {
  for (const Schedule schedule : kAll)
    for (const std::int64_t stages : {1, 2, 3, 5})
      for (const std::int64_t rounds : {2, 3}) {
        const Shape shape = shape_of(schedule, stages, stages * rounds);
        for (std::int64_t rank = 0; rank < stages; ++rank) {
          std::vector<int> forwards(static_cast<std::size_t>(shape.chunks * shape.microbatches), 0);
          std::vector<int> inputs = forwards;
          std::vector<int> weights = forwards;
          for (const Action& one : autopar::actions_of(shape, rank)) {
            const auto at =
                static_cast<std::size_t>(one.chunk * shape.microbatches + one.microbatch);
            forwards[at] += one.kind == Kind::kForward;
            inputs[at] += one.kind == Kind::kInputs || one.kind == Kind::kBackward;
            weights[at] += one.kind == Kind::kWeights || one.kind == Kind::kBackward;
          }
          for (std::size_t at = 0; at < forwards.size(); ++at) {
            CHECK(forwards[at] == 1);
            CHECK(inputs[at] == 1);
            CHECK(weights[at] == 1);
          }
        }
      }
}

TEST_CASE("published bubbles of eight equal stages") {
  const auto bubble = [](Schedule schedule, double inputs, double weights) {
    return replayed(shape_of(schedule, 8, 32), 1.0, inputs, weights) -
           32.0 * (1.0 + inputs + weights);
  };
  CHECK(bubble(Schedule::kGpipe, 1, 1) == doctest::Approx(21));
  CHECK(bubble(Schedule::k1f1b, 1.3, 0.7) == doctest::Approx(21));
  CHECK(bubble(Schedule::kInterleaved, 1, 1) == doctest::Approx(10.5));
  CHECK(bubble(Schedule::kLoopedBfs, 1, 1) == doctest::Approx(10.5));
  CHECK(bubble(Schedule::kInterleavedZeroBubble, 1.3, 0.7) == doctest::Approx(5.6));
  CHECK(bubble(Schedule::kZeroBubbleV, 1.3, 0.7) == doctest::Approx(4.55));
  CHECK(bubble(Schedule::kDualPipeV, 1.3, 0.7) == doctest::Approx(6.15));
}

TEST_CASE("messages cost least where they overlap") {
  for (const Schedule schedule : kAll) {
    const Shape shape = shape_of(schedule, 4, 8);
    const double free = replayed(shape, 1, 1, 1);
    const double hidden = replayed(shape, 1, 1, 1, 0.1, true);
    const double waited = replayed(shape, 1, 1, 1, 0.1, false);
    CHECK(free < hidden);
    CHECK(hidden <= waited);
  }
}

TEST_CASE("ranks that wait for each other are said, not walked for ever") {
  // half a group comes back around the ranks before its own end
  Shape shape = shape_of(Schedule::kInterleaved, 4, 8);
  shape.group = 2;
  CHECK(replayed(shape, 1, 1, 1) < 0.0);
}

TEST_CASE("a caller that interrupts is heard") {
  Monitor monitor(0.0, [] { return true; });
  const Shape shape = shape_of(Schedule::kInterleaved, 8, 4096);
  const ChunkTimes times{std::vector<double>(16, 1.0), std::vector<double>(16, 1.0),
                         std::vector<double>(16, 1.0), 0.0, false};
  CHECK_THROWS_AS(autopar::replay_schedule_s(shape, times, monitor), autopar::Stopped);
}
