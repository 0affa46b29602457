// Machine of an analytic model: rates that depend on the size of an operation, and networks.
// search/closed_form/native.py defines the same numbers in Python.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace autopar::analytic {

enum Collective : int { kP2p, kReduceScatter, kAllGather, kAllReduce, kNumCollectives };

// Work per second by the size of one operation: steps in descending order, the last from 0. An
// operation takes amount / (peak * efficiency of its size); an amount of 0 takes no time.
struct Rate {
  double peak_per_s = 0.0;
  std::vector<double> smallest;
  std::vector<double> per_s;  // peak times efficiency

  double seconds(double amount) const {
    if (amount == 0.0) return 0.0;
    std::size_t step = 0;
    while (amount < smallest[step]) ++step;
    return amount / per_s[step];
  }
};

// One network tier; a collective runs on exactly one.
struct Tier {
  double bytes_per_s = 1.0;
  double latency_s = 0.0;
  long size = 1;
  bool must_be_filled = false;
  double processor_usage = 0.0;
  std::array<double, kNumCollectives> scalar{};
  std::array<double, kNumCollectives> offset{};

  // Bytes on the slowest link per byte of the buffer: a ring of g ranks moves scalar * (1 - 1 / g).
  double traffic(Collective operation, double ranks) const {
    return scalar[operation] * (1.0 + offset[operation] / ranks);
  }
  // A collective without bytes still pays the latency.
  double seconds(Collective operation, double size_bytes, double ranks) const {
    return latency_s +
           size_bytes * scalar[operation] * (1.0 + offset[operation] / ranks) / bytes_per_s;
  }
};

}  // namespace autopar::analytic
