// Event replay compared with hand-drawn timelines, and with a program that walks lists of work.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "planner/step/replay.hpp"

namespace {

using autopar::Event;
using autopar::Monitor;
using autopar::Pipeline;
using autopar::Work;

double replayed(const Pipeline& pipeline, std::vector<Event>* timeline = nullptr) {
  Monitor monitor;
  return autopar::replay_s(pipeline, monitor, timeline);
}

bool same(const Event& a, const Event& b) {
  return a.stage == b.stage && a.work == b.work && a.microbatch == b.microbatch &&
         a.start_s == b.start_s && a.end_s == b.end_s;
}

// Every stage has a list of its work and does the next piece as soon as its message is there.
double walked(const Pipeline& pipe) {
  const int p = static_cast<int>(pipe.forward_s.size());
  const int m = static_cast<int>(pipe.num_microbatches);
  const auto idx = [](int i) { return static_cast<std::size_t>(i); };
  std::vector<std::vector<std::pair<int, int>>> work(idx(p));  // of a stage: 1 for backward, which
  for (int j = 0; j < p; ++j) {
    const int ahead = pipe.gpipe ? m : std::min(m, p - 1 - j);
    for (int i = 0; i < ahead; ++i) work[idx(j)].push_back({0, i});
    for (int i = 0; i < m; ++i) {
      if (ahead + i < m) work[idx(j)].push_back({0, ahead + i});
      work[idx(j)].push_back({1, i});
    }
  }
  std::vector<std::vector<double>>
      there[2];  // when a message is, by stage and micro-batch; < 0: no
  for (auto& times : there) times.assign(idx(p), std::vector<double>(idx(m), -1.0));
  std::fill(there[0].front().begin(), there[0].front().end(), 0.0);
  std::fill(there[1].back().begin(), there[1].back().end(), 0.0);
  std::vector<double> clock(idx(p), 0.0);
  std::vector<double> link[2] = {clock, clock};  // free from, by sender
  std::vector<std::size_t> done(idx(p), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int j = 0; j < p; ++j) {
      while (done[idx(j)] < work[idx(j)].size()) {
        const auto [back, i] = work[idx(j)][done[idx(j)]];
        const double arrival = there[back][idx(j)][idx(i)];
        if (arrival < 0.0) break;
        clock[idx(j)] = std::max(clock[idx(j)], arrival) +
                        (back != 0 ? pipe.backward_s[idx(j)] : pipe.forward_s[idx(j)]);
        ++done[idx(j)];
        moved = true;
        const int to = back != 0 ? j - 1 : j + 1;
        if (to < 0 || to >= p) continue;
        double& free = link[back][idx(j)];
        free = std::max(clock[idx(j)], free) + pipe.send_s[idx(std::min(j, to))];
        there[back][idx(to)][idx(i)] = free;
      }
    }
  }
  double step = 0.0;
  for (int j = 0; j < p; ++j) {
    REQUIRE(done[idx(j)] == work[idx(j)].size());
    step = std::max(step, clock[idx(j)] + pipe.tail_s[idx(j)]);
  }
  return step;
}

Pipeline random_pipeline(std::mt19937& random) {
  const auto pick = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const std::size_t p = static_cast<std::size_t>(pick(1, 7));
  const auto seconds = [&](std::size_t count) {
    std::vector<double> values(count);
    for (double& value : values) value = pick(0, 3) == 0 ? 0.0 : pick(1, 1000) * 0.137;
    return values;
  };
  Pipeline pipe{pick(0, 1) == 1, pick(1, 12), seconds(p), seconds(p), seconds(p), {}};
  pipe.send_s = seconds(p - 1);
  return pipe;
}

}  // namespace

TEST_CASE("1F1B of two stages is what a drawing says") {
  const Pipeline pipe{false, 2, {1.0, 1.0}, {2.0, 2.0}, {0.0, 1.0}, {0.5}};
  std::vector<Event> timeline;
  CHECK(replayed(pipe, &timeline) == 10.0);
  const std::vector<Event> drawn = {
      {0, Work::kForward, 0, 0.0, 1.0},   {0, Work::kForward, 1, 1.0, 2.0},
      {1, Work::kForward, 0, 1.5, 2.5},   {1, Work::kBackward, 0, 2.5, 4.5},
      {1, Work::kForward, 1, 4.5, 5.5},   {0, Work::kBackward, 0, 5.0, 7.0},
      {1, Work::kBackward, 1, 5.5, 7.5},  {1, Work::kTail, -1, 7.5, 8.5},
      {0, Work::kBackward, 1, 8.0, 10.0}, {0, Work::kTail, -1, 10.0, 10.0},
  };
  REQUIRE(timeline.size() == drawn.size());
  for (std::size_t i = 0; i < drawn.size(); ++i) CHECK(same(timeline[i], drawn[i]));
}

TEST_CASE("GPipe queues activations on a slow link") {
  // received at 3, 5 and 7; gradients leave at 9, 10 and 11 and arrive at 11, 13 and 15
  CHECK(replayed({true, 3, {1.0, 1.0}, {1.0, 1.0}, {0.0, 0.0}, {2.0}}) == 16.0);
}

TEST_CASE("one stage is a sum, and a step is as long as its last tail") {
  CHECK(replayed({false, 4, {1.0}, {2.0}, {0.5}, {}}) == 12.5);
  CHECK(replayed({true, 4, {1.0}, {2.0}, {0.5}, {}}) == 12.5);
}

TEST_CASE("a replay is what walking lists of work gives, with and without its timeline") {
  std::mt19937 random(11);
  for (int n = 0; n < 2000; ++n) {
    const Pipeline pipe = random_pipeline(random);
    const double expected = walked(pipe);
    std::vector<Event> timeline;
    CHECK(replayed(pipe) == expected);
    CHECK(replayed(pipe, &timeline) == expected);
    const auto pieces = 2 * static_cast<std::size_t>(pipe.num_microbatches) + 1;
    CHECK(timeline.size() == pipe.forward_s.size() * pieces);
  }
}

TEST_CASE("an interruption ends a replay") {
  for (const bool gpipe : {false, true}) {
    Monitor monitor(0.0, [] { return true; });
    const Pipeline pipe{gpipe, std::int64_t{1} << 60, {1.0, 1.0}, {1.0, 1.0}, {0.0, 0.0}, {0.0}};
    CHECK_THROWS_AS(autopar::replay_s(pipe, monitor), autopar::Stopped);
  }
}
