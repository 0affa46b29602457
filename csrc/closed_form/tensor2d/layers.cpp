// The operations of one transformer layer on one GPU, summed as they are listed; row by row the
// table of search/closed_form/tensor2d/layers.py with flash attention. Volumes are in elements.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "closed_form/tensor2d/tensor2d.hpp"

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

class Adder {
 public:
  Adder(const Engine& engine, const Quirks& quirks, bool links)
      : engine_(engine), system_(engine.system()), quirks_(quirks), links_(links) {}

  void add(bool matrix, double weights, double kept, const Pass& forward, const Pass& backward,
           int panels = 0) {
    sums.forward_s += seconds(matrix, forward, panels);
    sums.backward_s += seconds(matrix, backward, panels);
    sums.weights += weights;
    sums.kept += kept;
    sums.flops += forward.flops + backward.flops;
  }

  Sums sums;

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

  Sums layer() {
    const std::int64_t e = m_.hidden, f = m_.feedforward;
    const double wide = real(f / m1_), middle = b_ * l2_ * wide;
    const bool panels = strategy_ == k2d;
    const double narrow = real(e / m1_);
    double residual = b_ * l2_ * narrow;
    if (!panels) residual = scattered(real(m_.seq), m1_ * m2_) * e_;
    const double whole = b_ * l2_, shard = scattered(l2_, m1_);
    product(e, m_.gpt ? f : 2 * f, false);
    bias(whole, wide);
    m_.gpt ? activation(middle) : gated(middle);
    dropout(middle);
    product(f, e, true);
    if (panels) {
      bias(whole, narrow);
    } else {
      bias(strategy_ == k1d && quirks_.bias_shapes ? whole : shard, e_);
    }
    dropout(residual);
    norm();
    product(e, qkv_width(), false);
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
    return taken();
  }

  // The look-up, which backward adds its gradients to.
  Sums embedding() {
    const bool panels = strategy_ == k2d;
    const double columns = real(m1_), whole = b_ * l2_ * e_;
    const double n = panels ? whole / columns : whole;
    const double volume = panels ? whole * real(m2_) / columns : whole;
    const Group& group = panels ? rows_ : columns_;
    sums_.add(false, real(local_vocab()) * real(m_.hidden / (panels ? m2_ : 1)), 0.0,
              {0.0, 2 * n, 1, {Link{kReduceScatter, volume, &group}}},
              {n, 3 * n, 1, {Link{kAllGather, volume, &group}}});
    return taken();
  }

  // The last norm, the product with the output matrix, and the loss.
  Sums head() {
    norm();
    product(m_.hidden, local_vocab() * m1_, false);
    const double r = b_ * l2_, n = r * real(local_vocab());
    const Link exchange = over_columns(kAllReduce, kWord * r);
    sums_.add(false, 0.0, (1 + kWord) * n,
              {5 * n, (1 + kWord) * n, 3, {exchange, exchange, exchange}},
              {2 * n, (1 + kWord) * n});
    return taken();
  }

  double hop() const { return hop_; }

 private:
  static constexpr double kWord = 2;  // elements of a 4-byte number

  Sums taken() { return std::exchange(sums_.sums, Sums{}); }

  std::int64_t local_vocab() const { return (m_.vocab + m1_ - 1) / m1_; }
  std::int64_t key_heads() const { return std::max<std::int64_t>(m_.key_heads() / m1_, 1); }
  std::int64_t qkv_width() const {
    if (m_.kv_heads == 0) return 3 * m_.hidden;
    return m_.hidden + 2 * key_heads() * m1_ * (m_.hidden / m_.heads);
  }

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
    if (!m_.gpt) return;
    const double n = rows * outputs;
    const Pass one{n, n + outputs};
    sums_.add(false, outputs, 0.0, one, one);
  }

  void activation(double n) { sums_.add(false, 0.0, n, {8 * n, 2 * n}, {13 * n, 3 * n}); }

  // SiLU of one half times the other half, which backward needs both.
  void gated(double n) { sums_.add(false, 0.0, 2 * n, {6 * n, 3 * n}, {10 * n, 5 * n}); }

  void dropout(double n) {
    if (!m_.gpt) return;
    const Pass one{n, (2 + mask_) * n};
    sums_.add(false, 0.0, mask_ * n, one, one);
  }

  void norm() { strategy_ == k2d ? norm_of_columns() : norm_of_rows(); }

  // Parameters of a column, and statistics of a row; FLOP of an RMS norm: squares, their sum and
  // two scalings.
  double norm_width() const { return m_.gpt ? 2 : 1; }
  double norm_forward(double n) const { return m_.gpt ? 9 * n : 4 * n; }
  double norm_backward(double n, double rows) const { return m_.gpt ? 12 * n - 4 * rows : 9 * n; }

  // Whole rows, scattered over the columns.
  void norm_of_rows() {
    const double r = scattered(l2_, m1_), n = r * e_, whole = b_ * l2_ * e_;
    const double k = norm_width();
    hop_ = n;
    sums_.add(false, k * e_, n,
              {norm_forward(n), 2 * n + k * r + k * e_, 1, {over_columns(kAllGather, whole)}},
              {norm_backward(n, r), 5 * n + k * e_, 1, {over_columns(kReduceScatter, whole)}});
  }

  // Rows that are divided: statistics are reduced over the columns.
  void norm_of_columns() {
    const double r = b_ * l2_;
    const double w = real((quirks_.norm_width_of_sequence ? m_.seq : m_.hidden) / m1_);
    const double n = r * w;
    const double k = norm_width();
    hop_ = n;
    Pass backward{norm_backward(n, r), 5 * n + k * w};
    if (quirks_.norm_gradient_group) {
      const auto batch = static_cast<std::int64_t>(b_), width = static_cast<std::int64_t>(k);
      backward.num_links = 1;
      backward.links[0] = over_columns(
          kAllReduce, real((width * m_.hidden) / m1_ + (width * batch * m_.seq) / m2_));
    } else {
      backward.num_links = 2;
      backward.links[0] = over_rows(kAllReduce, k * e_ / real(m1_));
      backward.links[1] = over_columns(kAllReduce, k * b_ * real(m_.seq) / real(m2_));
    }
    sums_.add(false, k * w, n,
              {norm_forward(n), 2 * n + k * r + k * w, 1, {over_columns(kAllReduce, k * r)}},
              backward);
  }

  void flash() {
    const double l = real(m_.seq), q = real(m_.hidden / m_.heads);
    const std::int64_t heads = m_.heads / m1_;
    const double h = b_ * real(heads), lanes = b_ * real(key_heads()), keys = lanes * l * q;
    const double shared = real(heads / key_heads());
    const double seen = m_.causal ? (l + 1) / 2 : l, met = shared * l2_ * seen / l;
    const double z = h * l2_ * seen, r = h * l2_, queries = h * l2_ * q, parts = lanes * l2_ * q;
    const double again = quirks_.flash_traffic ? 2 * parts + 2 * keys : 4 * keys;
    const double drops = m_.gpt ? 1 : 0;
    Pass forward{z * (2 * q - 1) + queries * (2 * seen - 1) + rho_ * ((3 + drops) * z - r),
                 2 * queries + 2 * keys + r};
    Pass backward{2 * z * (2 * q - 1) + queries * (2 * seen - 1) + 2 * keys * (2 * met - 1) +
                      rho_ * ((7 + 2 * drops) * z - 2 * r),
                  4 * queries + again + 2 * r};
    if (strategy_ != k1d) {
      const Link gather = over_rows(kAllGather, 2 * keys);
      forward.num_links = 1;
      forward.links[0] = gather;
      backward.num_links = 2;
      backward.links = {gather, over_rows(kReduceScatter, 2 * keys)};
    }
    sums_.add(true, 0.0, 2 * queries + 2 * parts + (1 + drops) * r, forward, backward);
  }

  const Model& m_;
  const Quirks& quirks_;
  Strategy strategy_;
  const Group& columns_;
  const Group& rows_;
  int panels_;
  std::int64_t m1_, m2_;
  double b_, l2_, e_, mask_, rho_;
  Adder sums_;
  double hop_ = 0;
};

}  // namespace

Work Engine::work(const Candidate& c, const Group& columns, const Group& rows, bool links) const {
  Rows table(*this, quirks_, c, columns, rows, links);
  Work work;
  work.layer = table.layer();
  work.hop = table.hop();
  if (model_.vocab) {
    work.first = table.embedding();
    work.last = table.head();
  }
  return work;
}

}  // namespace autopar::analytic::tensor2d
