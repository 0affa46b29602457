// Rows (operations) of a layer and their prices. layers.cpp lists the operations and their sizes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "closed_form/tensor2d/tensor2d.hpp"

namespace autopar::analytic::tensor2d {

inline constexpr double kEfficiency = 0.8;  // share of the peak that every operation reaches
inline constexpr double kLaunchS = 20e-6;   // latency of one kernel

struct Link {
  Collective operation;
  double volume;
  const Group* group;
};

// Forward or backward of a row. In a SUMMA GEMM, links in pairs are the loops over panels.
struct Pass {
  double flops, traffic;
  int num_links = 0;
  std::array<Link, kMostLinks> links{};
};

// Sums rows as they come. With `kWhole` it also stores their figures and supports recomputation;
// searches need neither and do not pay for them.
template <bool kWhole>
class Adder {
 public:
  Adder(const Engine& engine, const Quirks& quirks, bool links, std::vector<LayerRow>* table)
      : engine_(engine), system_(engine.system()), quirks_(quirks), links_(links), table_(table) {}

  // `panels`: of a SUMMA GEMM. `recomputed`: forward is repeated in backward.
  void add(Operation operation, bool matrix, double weights, double kept, const Pass& ahead,
           const Pass& back, int panels = 0, bool recomputed = false) {
    const Seconds forward = seconds(matrix, ahead, panels);
    Seconds backward = seconds(matrix, back, panels);
    double backward_flops = back.flops;
    if constexpr (kWhole) {
      const double intensity = backward.compute / traffic_s(back);  // of one pass alone
      if (recomputed) {
        backward.time += forward.time;
        if (!quirks_.recompute_time_only) {
          backward.link += forward.link;
          backward.compute += forward.compute;
          backward.memory += forward.memory;
          backward_flops += ahead.flops;
        }
      }
      if (table_) {
        table_->push_back(
            {operation, panels > 0, weights * system_.element_size, kept * system_.element_size,
             figures_of(ahead, forward, ahead.flops, forward.compute / traffic_s(ahead)),
             figures_of(back, backward, backward_flops, intensity)});
      }
    }
    // both passes of a row first: statistics are then the sums of the table
    sums_.forward_s += forward.time;
    sums_.backward_s += backward.time;
    sums_.compute_s += forward.compute + backward.compute;
    sums_.memory_s += forward.memory + backward.memory;
    sums_.link_s += forward.link + backward.link;
    sums_.weights += weights;
    sums_.kept += kept;
    sums_.flops += ahead.flops + backward_flops;
  }

  // Returns the sums since the last call.
  Sums taken() { return std::exchange(sums_, Sums{}); }

 private:
  struct Seconds {
    double time, link, compute, memory;
  };

  double links_s(const Pass& pass, int first, int last, int parts) const {
    double seconds = 0.0;
    for (int i = first; i < last; ++i) {
      const Link& x = pass.links[static_cast<std::size_t>(i)];
      seconds +=
          engine_.collective_s(x.operation, x.volume * system_.element_size / parts, *x.group);
    }
    return seconds;
  }

  double traffic_s(const Pass& pass) const {
    return pass.traffic * system_.element_size / system_.hbm_bandwidth;
  }

  // Inlined, so that a search keeps the four numbers in registers.
  [[gnu::always_inline]] Seconds seconds(bool matrix, const Pass& pass, int panels) const {
    const double peak = matrix ? system_.matrix_flops : system_.vector_flops;
    const double compute_s = kLaunchS + pass.flops * system_.flops_units / (kEfficiency * peak);
    const double moved_s = traffic_s(pass);
    const double roof_s = std::max(compute_s, moved_s);
    double link_s = 0.0;
    if (!links_ || pass.num_links == 0) {
    } else if (panels == 0) {
      link_s = links_s(pass, 0, pass.num_links, 1);
    } else if (quirks_.extra_panel) {
      const double panel_s = links_s(pass, 0, pass.num_links, panels);
      link_s = panel_s + std::max(panel_s * panels - roof_s, 0.0);
    } else {
      const int loops = pass.num_links / 2;
      const double share_s = roof_s / loops / panels;
      for (int loop = 0; loop < loops; ++loop) {
        const double panel_s = links_s(pass, 2 * loop, 2 * loop + 2, panels);
        link_s += panel_s + (panels - 1) * std::max(panel_s - share_s, 0.0);
      }
    }
    return {roof_s + link_s, link_s, compute_s, std::max(moved_s - compute_s, 0.0)};
  }

  PassFigures figures_of(const Pass& pass, const Seconds& s, double flops, double intensity) const {
    PassFigures found{};
    found.flops = flops * system_.flops_units;
    found.time_s = s.time;
    found.link_s = s.link;
    found.compute_s = s.compute;
    found.memory_s = s.memory;
    found.intensity = intensity;
    found.num_links = static_cast<std::uint8_t>(pass.num_links);
    for (std::size_t i = 0; i < found.num_links; ++i) {
      const Link& x = pass.links[i];
      found.collectives[i] = x.operation;
      // one rank has nothing to send
      found.volumes_gb[i] = x.group->ranks > 1 ? x.volume * system_.element_size : 0.0;
    }
    return found;
  }

  const Engine& engine_;
  const System& system_;
  const Quirks& quirks_;
  bool links_;
  std::vector<LayerRow>* table_;
  Sums sums_;
};

}  // namespace autopar::analytic::tensor2d
