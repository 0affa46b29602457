// What an analytic model runs on: rates that depend on the size of an operation, and networks.
// The Python side, search/closed_form/machine.py, is the readable version of this file.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace autopar::analytic {

enum Collective : int { kP2p, kReduceScatter, kAllGather, kAllReduce, kNumCollectives };

// Work per second by the size of one operation: steps in descending order, the last from 0.
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

// One network; collectives run on one.
struct Tier {
  double bytes_per_s = 1.0;
  double latency_s = 0.0;
  long size = 1;
  bool must_be_filled = false;
  double processor_usage = 0.0;
  std::array<double, kNumCollectives> scalar{};
  std::array<double, kNumCollectives> offset{};

  double traffic(Collective operation, double ranks) const {
    return scalar[operation] * (1.0 + offset[operation] / ranks);
  }
  double seconds(Collective operation, double size_bytes, double ranks) const {
    return latency_s +
           size_bytes * scalar[operation] * (1.0 + offset[operation] / ranks) / bytes_per_s;
  }
};

}  // namespace autopar::analytic
