#include "planner/step/replay.hpp"

#include <algorithm>
#include <cstddef>

namespace autopar {
namespace {

// State of every stage between two pieces of work. A stage reads the message that arrived last
// before its neighbour sends the next. Both schedules below ensure this, so one slot is enough.
template <bool kTimeline>
class Stages {
 public:
  Stages(const Pipeline& pipeline, Monitor& monitor, std::vector<Event>* timeline)
      : pipeline_(pipeline),
        monitor_(monitor),
        timeline_(timeline),
        p_(static_cast<std::int64_t>(pipeline.forward_s.size())),
        clock_(pipeline.forward_s.size(), 0.0),
        activation_(clock_),
        gradient_(clock_),
        link_down_(clock_),
        link_up_(clock_) {}

  double run() {
    if (pipeline_.gpipe) {
      gpipe();
    } else {
      one_forward_one_backward();
    }
    double step = 0.0;
    for (std::size_t j = 0; j < clock_.size(); ++j) {
      const double end = clock_[j] + pipeline_.tail_s[j];
      if (kTimeline)
        timeline_->push_back({static_cast<std::int32_t>(j), Work::kTail, -1, clock_[j], end});
      step = j == 0 ? end : std::max(step, end);
    }
    return step;
  }

 private:
  static std::size_t idx(std::int64_t i) { return static_cast<std::size_t>(i); }

  void record(std::int64_t stage, Work work, std::int64_t i, double start, double end) {
    if (kTimeline) timeline_->push_back({static_cast<std::int32_t>(stage), work, i, start, end});
  }

  void forward(std::int64_t stage, std::int64_t i) {
    const std::size_t j = idx(stage);
    const double start = std::max(clock_[j], activation_[j]);
    const double end = start + pipeline_.forward_s[j];
    clock_[j] = end;
    record(stage, Work::kForward, i, start, end);
    if (stage + 1 == p_) return;
    // one message at a time in each direction: it waits for the one before
    link_down_[j] = std::max(end, link_down_[j]) + pipeline_.send_s[j];
    activation_[j + 1] = link_down_[j];
  }

  void backward(std::int64_t stage, std::int64_t i) {
    const std::size_t j = idx(stage);
    const double start = std::max(clock_[j], gradient_[j]);
    const double end = start + pipeline_.backward_s[j];
    clock_[j] = end;
    record(stage, Work::kBackward, i, start, end);
    if (stage == 0) return;
    link_up_[j] = std::max(end, link_up_[j]) + pipeline_.send_s[j - 1];
    gradient_[j - 1] = link_up_[j];
  }

  // Stage j of p runs p - 1 - j forwards ahead, one per later stage, so that a gradient meets its
  // micro-batch without waiting. Round k contains backward k of every stage, preceded by the
  // forward that far ahead: all inputs are from this round or the one before.
  void one_forward_one_backward() {
    const std::int64_t m = pipeline_.num_microbatches;
    for (std::int64_t k = 1 - p_; k < m; ++k) {
      const std::int64_t last = std::min(p_ - 1, p_ - 1 + k);  // its forward is 0 or later
      const std::int64_t first = std::max<std::int64_t>(0, p_ + k - m);  // m - 1 or earlier
      // the last stage first: it reads what the one before it sent a round ago
      for (std::int64_t j = last; j >= first; --j) forward(j, k + p_ - 1 - j);
      if (k >= 0)
        for (std::int64_t j = p_ - 1; j >= 0; --j) backward(j, k);
      poll();
    }
  }

  void gpipe() {
    const std::int64_t m = pipeline_.num_microbatches;
    for (std::int64_t i = 0; i < m; ++i, poll())
      for (std::int64_t j = 0; j < p_; ++j) forward(j, i);
    for (std::int64_t i = 0; i < m; ++i, poll())
      for (std::int64_t j = p_ - 1; j >= 0; --j) backward(j, i);
  }

  void poll() {
    constexpr std::int64_t kSome = 1 << 16;  // less than a millisecond
    since_poll_ += p_;
    if (since_poll_ < kSome) return;
    since_poll_ = 0;
    monitor_.poll();
  }

  const Pipeline& pipeline_;
  Monitor& monitor_;
  std::vector<Event>* timeline_;
  std::int64_t p_;
  std::int64_t since_poll_ = 0;
  std::vector<double> clock_;       // when a stage has done its work so far
  std::vector<double> activation_;  // arrival of the last activation; 0 at the first stage
  std::vector<double> gradient_;    // arrival of the last gradient; 0 at the last stage
  std::vector<double> link_down_;   // when the link to the next stage is free
  std::vector<double> link_up_;     // when the link to the stage before is free
};

}  // namespace

double replay_s(const Pipeline& pipeline, Monitor& monitor, std::vector<Event>* timeline) {
  if (timeline == nullptr) return Stages<false>(pipeline, monitor, nullptr).run();
  const double step = Stages<true>(pipeline, monitor, timeline).run();
  // stable: pieces of no duration keep the order of their stage
  std::stable_sort(timeline->begin(), timeline->end(), [](const Event& a, const Event& b) {
    return a.start_s != b.start_s ? a.start_s < b.start_s : a.stage < b.stage;
  });
  return step;
}

}  // namespace autopar
