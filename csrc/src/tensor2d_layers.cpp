// The operations of one transformer layer on one GPU, summed as they are listed; row by row the
// table of search/analytic/tensor2d/layers.py with flash attention. Volumes are in elements.
#include <algorithm>
#include <cstdint>

#include "autopar/analytic/tensor2d.hpp"

namespace autopar::analytic::tensor2d {
namespace {

constexpr double kEfficiency = 0.8;  // share of the peak that every operation reaches
constexpr double kLaunchS = 20e-6;   // latency of one kernel

struct Link {
  Operation operation;
  double volume;
  const Group* group;
};

// Forward or backward of a row. Of a SUMMA product, links in pairs are the loops over panels.
struct Pass {
  double flops, traffic;
  int num_links = 0;
  std::array<Link, 4> links{};
};

class Sums {
 public:
  Sums(const Engine& engine, const Quirks& quirks, bool links)
      : engine_(engine), system_(engine.system()), quirks_(quirks), links_(links) {}

  void add(bool matrix, double weights, double kept, const Pass& forward, const Pass& backward,
           int panels = 0) {
    sums.forward_s += seconds(matrix, forward, panels);
    sums.backward_s += seconds(matrix, backward, panels);
    sums.weights += weights;
    sums.kept += kept;
    sums.flops += forward.flops + backward.flops;
  }

  Layer sums;

 private:
  double links_s(const Pass& pass, int first, int last, int parts) const {
    double seconds = 0.0;
    for (int i = first; i < last; ++i) {
      const Link& x = pass.links[static_cast<std::size_t>(i)];
      seconds +=
          engine_.collective_s(x.operation, x.volume * system_.element_size / parts, *x.group);
    }
    return seconds;
  }

  double seconds(bool matrix, const Pass& pass, int panels) {
    const double peak = matrix ? system_.matrix_flops : system_.vector_flops;
    const double compute_s = kLaunchS + pass.flops * system_.flops_units / (kEfficiency * peak);
    const double traffic_s = pass.traffic * system_.element_size / system_.hbm_bandwidth;
    const double roof_s = std::max(compute_s, traffic_s);
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
    sums.compute_s += compute_s;
    sums.memory_s += std::max(traffic_s - compute_s, 0.0);
    sums.link_s += link_s;
    return roof_s + link_s;
  }

  const Engine& engine_;
  const System& system_;
  const Quirks& quirks_;
  bool links_;
};

double real(std::int64_t number) { return static_cast<double>(number); }

// One layer of a model under one strategy, for one micro-batch.
class Rows {
 public:
  Rows(const Engine& engine, const Quirks& quirks, const Candidate& c, const Group& columns,
       const Group& rows, bool links)
      : m_(engine.model()),
        quirks_(quirks),
        strategy_(engine.strategy()),
        columns_(columns),
        rows_(rows),
        panels_(c.nb),
        m1_(c.tp1),
        m2_(c.tp2),
        b_(c.mbs),
        l2_(quirks.dropped_rows ? real(m_.seq / m2_) : real(m_.seq) / real(m2_)),
        e_(real(m_.hidden)),
        mask_(engine.system().mask_element_size / engine.system().element_size),
        rho_(engine.system().matrix_flops / engine.system().vector_flops),
        sums_(engine, quirks, links) {}

  Layer sum() {
    const std::int64_t e = m_.hidden, f = m_.feedforward;
    const double wide = real(f / m1_), middle = b_ * l2_ * wide;
    const bool panels = strategy_ == k2d;
    const double narrow = real(e / m1_);
    double residual = b_ * l2_ * narrow;
    if (!panels) residual = scattered(real(m_.seq), m1_ * m2_) * e_;
    const double whole = b_ * l2_, shard = scattered(l2_, m1_);
    product(e, f, false);
    bias(whole, wide);
    activation(middle);
    dropout(middle);
    product(f, e, true);
    if (panels) {
      bias(whole, narrow);
    } else {
      bias(strategy_ == k1d && quirks_.bias_shapes ? whole : shard, e_);
    }
    dropout(residual);
    norm();
    product(e, 3 * e, false);
    flash();
    product(e, e, true);
    if (panels) {
      bias(whole, narrow);
    } else if (!quirks_.bias_shapes) {
      bias(shard, e_);
    } else {
      bias(whole, strategy_ == k1d ? e_ : narrow);
    }
    dropout(residual);
    norm();
    return sums_.sums;
  }

 private:
  // Tokens of the micro-batch that a GPU of the columns has between layers.
  double scattered(double seq, std::int64_t columns) const {
    if (quirks_.dropped_rows) return b_ * real(static_cast<std::int64_t>(seq) / columns);
    return b_ * seq / real(columns);
  }

  Link over_columns(Operation operation, double volume) const {
    return {operation, volume, &columns_};
  }
  Link over_rows(Operation operation, double volume) const { return {operation, volume, &rows_}; }

  void product(std::int64_t inputs, std::int64_t outputs, bool split_inputs) {
    if (strategy_ == k2d) {
      summa(inputs, outputs);
    } else {
      linear(inputs, outputs, split_inputs);
    }
  }

  void linear(std::int64_t inputs, std::int64_t outputs, bool split_inputs) {
    const double i = real(split_inputs ? inputs / m1_ : inputs);
    const double o = real(split_inputs ? outputs : outputs / m1_);
    const double x = b_ * l2_ * i, y = b_ * l2_ * o, w = i * o;
    Pass forward{y * (2 * i - 1), x + y + w};
    Pass backward{x * (2 * o - 1) + w * (2 * b_ * l2_ - 1), 2 * (w + x + y)};
    Pass& divided = split_inputs ? forward : backward;
    divided.num_links = 1;
    divided.links[0] =
        over_columns(kReduceScatter, b_ * l2_ * real(split_inputs ? outputs : inputs));
    sums_.add(true, w, x, forward, backward);
  }

  void summa(std::int64_t inputs, std::int64_t outputs) {
    const double i = real(inputs), o = real(outputs / m1_);
    const double x = b_ * l2_ * i, w = i * o, y = b_ * l2_ * o;
    const bool alone = m1_ == 1 && m2_ == 1 && !quirks_.repeated_panels;
    const double writes = alone ? y : panels_ * y;
    const double per_output = quirks_.repeated_panels ? 2 * i : 2 * i - 1;
    const Link bx = over_columns(kBroadcast, x), bw = over_rows(kBroadcast, w);
    const Link rx = over_columns(kReduce, x), rw = over_rows(kReduce, w);
    const Pass forward{y * per_output, x + w + writes, 2, {bx, bw}};
    const Pass backward{
        x * (2 * o - 1) + w * (2 * b_ * l2_ - 1), 2 * (x + w + writes), 4, {bw, rx, bx, rw}};
    sums_.add(true, real(inputs / m2_) * o, b_ * l2_ * real(inputs / m1_), forward, backward,
              panels_);
  }

  void bias(double rows, double outputs) {
    const double n = rows * outputs;
    const Pass one{n, n + outputs};
    sums_.add(false, outputs, 0.0, one, one);
  }

  void activation(double n) { sums_.add(false, 0.0, n, {8 * n, 2 * n}, {13 * n, 3 * n}); }

  void dropout(double n) {
    const Pass one{n, (2 + mask_) * n};
    sums_.add(false, 0.0, mask_ * n, one, one);
  }

  void norm() { strategy_ == k2d ? norm_of_columns() : norm_of_rows(); }

  // Whole rows, scattered over the columns.
  void norm_of_rows() {
    const double r = scattered(l2_, m1_), n = r * e_, whole = b_ * l2_ * e_;
    sums_.sums.hop = n;
    sums_.add(false, 2 * e_, n,
              {9 * n, 2 * n + 2 * r + 2 * e_, 1, {over_columns(kAllGather, whole)}},
              {12 * n - 4 * r, 5 * n + 2 * e_, 1, {over_columns(kReduceScatter, whole)}});
  }

  // Rows that are divided: statistics are reduced over the columns.
  void norm_of_columns() {
    const double r = b_ * l2_;
    const double w = real((quirks_.norm_width_of_sequence ? m_.seq : m_.hidden) / m1_);
    const double n = r * w;
    sums_.sums.hop = n;
    Pass backward{12 * n - 4 * r, 5 * n + 2 * w};
    if (quirks_.norm_gradient_group) {
      const auto batch = static_cast<std::int64_t>(b_);
      backward.num_links = 1;
      backward.links[0] =
          over_columns(kAllReduce, real((2 * m_.hidden) / m1_ + (2 * batch * m_.seq) / m2_));
    } else {
      backward.num_links = 2;
      backward.links[0] = over_rows(kAllReduce, 2 * e_ / real(m1_));
      backward.links[1] = over_columns(kAllReduce, 2 * b_ * real(m_.seq) / real(m2_));
    }
    sums_.add(false, 2 * w, n, {9 * n, 2 * n + 2 * r + 2 * w, 1, {over_columns(kAllReduce, 2 * r)}},
              backward);
  }

  void flash() {
    const double l = real(m_.seq), q = real(m_.hidden / m_.heads);
    const double h = b_ * real(m_.heads / m1_);
    const double z = h * l2_ * l, r = h * l2_, queries = h * l2_ * q, keys = h * l * q;
    const double moved = quirks_.flash_traffic ? 6 * queries + 2 * keys : 4 * queries + 4 * keys;
    Pass forward{z * (2 * q - 1) + queries * (2 * l - 1) + rho_ * (4 * z - r),
                 2 * queries + 2 * keys + r};
    Pass backward{2 * z * (2 * q - 1) + queries * (2 * l - 1) + 2 * keys * (2 * l2_ - 1) +
                      rho_ * (9 * z - 2 * r),
                  moved + 2 * r};
    if (strategy_ != k1d) {
      const Link gather = over_rows(kAllGather, 2 * keys);
      forward.num_links = 1;
      forward.links[0] = gather;
      backward.num_links = 2;
      backward.links = {gather, over_rows(kReduceScatter, 2 * keys)};
    }
    sums_.add(true, 0.0, 4 * queries + 2 * r, forward, backward);
  }

  const Model& m_;
  const Quirks& quirks_;
  Strategy strategy_;
  const Group& columns_;
  const Group& rows_;
  int panels_;
  std::int64_t m1_, m2_;
  double b_, l2_, e_, mask_, rho_;
  Sums sums_;
};

}  // namespace

Layer Engine::layer(const Candidate& c, const Group& columns, const Group& rows, bool links) const {
  return Rows(*this, quirks_, c, columns, rows, links).sum();
}

}  // namespace autopar::analytic::tensor2d
