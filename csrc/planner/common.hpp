// Types shared by the planner core. Times are integers ("ticks") inside the core: a power of two
// of seconds chosen so that the largest possible step time fits. Integer sums do not depend on
// the order of addition, so equal plans tie exactly and answers are reproducible to the byte.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>

namespace autopar {

inline constexpr int kAbiVersion = 3;

using Ticks = std::int64_t;
using Bytes = std::int64_t;

inline constexpr Ticks kInfTicks = std::numeric_limits<Ticks>::max() / 4;
// A transition that is not allowed; every valid total is below half of it.
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

// A moment after which work stops that has something to show.
class Deadline {
 public:
  Deadline() = default;
  explicit Deadline(std::chrono::steady_clock::time_point moment) : set_(true), moment_(moment) {}
  bool passed() const { return set_ && std::chrono::steady_clock::now() > moment_; }

 private:
  bool set_ = false;
  std::chrono::steady_clock::time_point moment_;
};

struct DeadlinePassed {};  // thrown by the stage kernel, caught by its sub-problem

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
