// Types shared by the planner core. Times are integers ("ticks") inside the core: a power of two
// of seconds chosen so that the largest possible step time fits. Integer sums do not depend on
// the order of addition, so equal plans tie exactly and answers are reproducible to the byte.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

namespace autopar {

inline constexpr int kAbiVersion = 6;

using Ticks = std::int64_t;
using Bytes = std::int64_t;

inline constexpr Ticks kInfTicks = std::numeric_limits<Ticks>::max() / 4;
// A forbidden transition; every valid total is below half of it.
inline constexpr Ticks kForbidden = Ticks{1} << 58;
inline constexpr Bytes kInfBytes = std::numeric_limits<Bytes>::max() / 4;

// Cost of a stage. The last dimension is the tail (its maximum over stages counts once); the
// others are bottleneck dimensions (sum over stages + (m-1) * maximum over stages):
//   D = 1  one stage only:   { m * (f + g) + tail }
//   D = 2  1F1B:             { f + g, tail }
//   D = 3  GPipe:            { f, g, tail }
template <int D>
using Cost = std::array<Ticks, D>;

template <std::size_t D>
inline std::array<Ticks, D> operator+(std::array<Ticks, D> a, const std::array<Ticks, D>& b) {
  for (std::size_t d = 0; d < D; ++d) a[d] += b[d];
  return a;
}

// Reasons to stop early; thrown by polls, caught where partial results exist.
struct DeadlinePassed {};
struct Stopped {};  // the caller no longer wants the answer

// Polled during a call: the deadline, and whether the caller was interrupted.
class Monitor {
 public:
  using Clock = std::chrono::steady_clock;

  Monitor() = default;
  Monitor(double time_limit_s, std::function<bool()> interrupted)
      : interrupted_(std::move(interrupted)) {
    if (time_limit_s <= 0) return;
    limited_ = true;
    deadline_ = Clock::now() + in_clock(std::min(time_limit_s, 1e9));
  }
  bool passed() const { return limited_ && Clock::now() > deadline_; }
  bool limited() const { return limited_; }
  // Another deadline, in seconds from now, while this guard lives; the old one is then restored.
  class Period {
   public:
    Period(Monitor& monitor, double seconds) : monitor_(monitor), before_(monitor.deadline_) {
      monitor.deadline_ = Clock::now() + in_clock(seconds);
    }
    ~Period() { monitor_.deadline_ = before_; }
    Period(const Period&) = delete;
    Period& operator=(const Period&) = delete;

   private:
    Monitor& monitor_;
    const Clock::time_point before_;
  };
  double seconds_left() const {
    return std::chrono::duration<double>(deadline_ - Clock::now()).count();
  }

  // Throws Stopped or DeadlinePassed. Costs one read of the clock.
  void poll() {
    const Clock::time_point now = Clock::now();
    if (interrupted_ && now - asked_ > kAskEvery) {
      asked_ = now;
      if (interrupted_()) throw Stopped{};
    }
    if (limited_ && now > deadline_) throw DeadlinePassed{};
  }

 private:
  static constexpr std::chrono::milliseconds kAskEvery{50};
  static Clock::duration in_clock(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  Clock::time_point asked_{};  // when the caller was last asked
  Clock::time_point deadline_{};
  bool limited_ = false;
  std::function<bool()> interrupted_;
};

// View of the monitor for inner loops.
class Watch {
 public:
  explicit Watch(Monitor& monitor) : monitor_(&monitor) {}

  void poll() const { monitor_->poll(); }
  // Polls once in many calls, for inner loops.
  void poll_rarely() const {
    if ((++calls_ & 1023U) == 0) poll();
  }

 private:
  Monitor* monitor_;
  mutable std::uint32_t calls_ = 0;
};

// Seconds <-> ticks.
class TickScale {
 public:
  // `largest_s`: an upper bound of every sum that the search can form, in seconds.
  explicit TickScale(double largest_s) {
    int exponent = 0;
    if (largest_s > 0 && std::isfinite(largest_s)) std::frexp(largest_s, &exponent);
    scale_ = std::ldexp(1.0, std::min(58 - exponent, 1000));
  }
  Ticks ticks(double seconds) const { return static_cast<Ticks>(std::llround(seconds * scale_)); }
  double seconds(Ticks ticks) const { return static_cast<double>(ticks) / scale_; }

 private:
  double scale_ = 1.0;
};

// Relative slack of lower bounds computed in floating point: never prunes a true optimum.
inline constexpr double kBoundSlack = 1e-12;

}  // namespace autopar
