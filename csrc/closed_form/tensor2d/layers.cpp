// Operations of one transformer layer on one GPU, and of the embedding and head, summed as they are
// listed. Volumes are in elements.
// Source: arXiv 2410.00273; every default deviation from it has a switch in `Quirks`.
#include <algorithm>
#include <cstdint>

#include "closed_form/tensor2d/rows.hpp"
#include "closed_form/tensor2d/tensor2d.hpp"

namespace autopar::analytic::tensor2d {
namespace {

double real(std::int64_t number) { return static_cast<double>(number); }

// Operations of one model layer under one strategy, for one micro-batch. `kWhole`: see Adder.
template <bool kWhole>
class Rows {
 public:
  Rows(const Engine& engine, const Quirks& quirks, const Candidate& c, const Group& columns,
       const Group& rows, bool links, const Way& way = {}, std::vector<LayerRow>* table = nullptr)
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
        way_(way),
        sums_(engine, quirks, links, table) {}

  Sums layer() {
    const std::int64_t e = m_.hidden, f = m_.feedforward;
    const double wide = real(f / m1_), middle = b_ * l2_ * wide;
    const bool panels = strategy_ == k2d;
    const double narrow = real(e / m1_);
    double residual = b_ * l2_ * narrow;
    if (!panels) residual = scattered(real(m_.seq), m1_ * m2_) * e_;
    const double whole = b_ * l2_, shard = scattered(l2_, m1_);
    product(kFc1, e, m_.gpt ? f : 2 * f, false);
    bias(kFc1Bias, whole, wide);
    m_.gpt ? activation(middle) : gated(middle);
    dropout(kDpr1, middle);
    product(kFc2, f, e, true);
    if (panels) {
      bias(kFc2Bias, whole, narrow);
    } else {
      bias(kFc2Bias, strategy_ == k1d && quirks_.bias_shapes ? whole : shard, e_);
    }
    dropout(kDpr2, residual);
    norm(kLn1);
    product(kQkv, e, qkv_width(), false);
    attention();
    product(kVproj, e, e, true);
    if (panels) {
      bias(kVprojBias, whole, narrow);
    } else if (!quirks_.bias_shapes) {
      bias(kVprojBias, shard, e_);
    } else {
      bias(kVprojBias, whole, strategy_ == k1d ? e_ : narrow);
    }
    dropout(kDprV, residual);
    norm(kLn2);
    return sums_.taken();
  }

  // Embedding look-up, to which backward adds its gradients. The published model has nothing around
  // the layers. Columns divide the vocabulary, padded to a multiple of them, and look-ups of tokens
  // outside a GPU's part are reduced. Under SUMMA columns divide the hidden size and rows the
  // vocabulary.
  Sums embedding() {
    const bool panels = strategy_ == k2d;
    const double columns = real(m1_), whole = b_ * l2_ * e_;
    const double n = panels ? whole / columns : whole;
    const double volume = panels ? whole * real(m2_) / columns : whole;
    const Group& group = panels ? rows_ : columns_;
    sums_.add(kEmbedding, false, real(local_vocab()) * real(m_.hidden / (panels ? m2_ : 1)), 0.0,
              {0.0, 2 * n, 1, {Link{kReduceScatter, volume, &group}}},
              {n, 3 * n, 1, {Link{kAllGather, volume, &group}}});
    return sums_.taken();
  }

  // The last norm, the output GEMM and the loss, which exchanges its maximum, its sum and the logit
  // of the label: 4 bytes per token each.
  Sums head() {
    norm(kLnF);
    product(kHead, m_.hidden, local_vocab() * m1_, false);
    const double r = b_ * l2_, n = r * real(local_vocab());
    const Link exchange = over_columns(kAllReduce, kWord * r);
    sums_.add(kLoss, false, 0.0, (1 + kWord) * n,
              {5 * n, (1 + kWord) * n, 3, {exchange, exchange, exchange}},
              {2 * n, (1 + kWord) * n});
    return sums_.taken();
  }

  double hop() const { return hop_; }

 private:
  static constexpr double kWord = 2;  // elements of a 4-byte number

  std::int64_t local_vocab() const { return (m_.vocab + m1_ - 1) / m1_; }
  // Columns share a key head if there are fewer heads than columns.
  std::int64_t key_heads() const { return std::max<std::int64_t>(m_.key_heads() / m1_, 1); }
  std::int64_t qkv_width() const {
    if (m_.kv_heads == 0) return 3 * m_.hidden;
    return m_.hidden + 2 * key_heads() * m1_ * (m_.hidden / m_.heads);
  }

  // Tokens of the micro-batch on one GPU of the columns between layers.
  double scattered(double seq, std::int64_t columns) const {
    if (quirks_.dropped_rows) return b_ * real(static_cast<std::int64_t>(seq) / columns);
    return b_ * seq / real(columns);
  }

  Link over_columns(Collective operation, double volume) const {
    return {operation, volume, &columns_};
  }
  Link over_rows(Collective operation, double volume) const { return {operation, volume, &rows_}; }

  void product(Operation name, std::int64_t inputs, std::int64_t outputs, bool split_inputs) {
    if (strategy_ == k2d) {
      summa(name, inputs, outputs);
    } else {
      linear(name, inputs, outputs, split_inputs);
    }
  }

  // Columns divide the outputs or the inputs. Partial sums of the undivided side are reduced, in
  // forward or in backward.
  void linear(Operation name, std::int64_t inputs, std::int64_t outputs, bool split_inputs) {
    const double i = real(split_inputs ? inputs / m1_ : inputs);
    const double o = real(split_inputs ? outputs : outputs / m1_);
    const double x = b_ * l2_ * i, y = b_ * l2_ * o, w = i * o;
    Pass forward{y * (2 * i - 1), x + y + w};
    Pass backward{x * (2 * o - 1) + w * (2 * b_ * l2_ - 1), 2 * (w + x + y)};
    Pass& divided = split_inputs ? forward : backward;
    if constexpr (kWhole) {  // the table lists both; the other one is over a single rank
      forward.num_links = backward.num_links = 1;
      forward.links[0] = backward.links[0] = {kReduceScatter, 0.0, &alone_};
    }
    divided.num_links = 1;
    divided.links[0] =
        over_columns(kReduceScatter, b_ * l2_ * real(split_inputs ? outputs : inputs));
    sums_.add(name, true, w, x, forward, backward);
  }

  // Elements that a SUMMA GEMM writes: its outputs, once per panel.
  double panel_writes(double outputs) const {
    const bool alone = m1_ == 1 && m2_ == 1 && !quirks_.repeated_panels;
    return alone ? outputs : panels_ * outputs;
  }

  // Rows and columns broadcast panels of both factors. Backward has two such GEMMs, whose partial
  // sums are reduced. A dot product of i factors has i - 1 additions.
  void summa(Operation name, std::int64_t inputs, std::int64_t outputs) {
    const double i = real(inputs), o = real(outputs / m1_);
    const double x = b_ * l2_ * i, w = i * o, y = b_ * l2_ * o;
    const double writes = panel_writes(y);
    const double per_output = quirks_.repeated_panels ? 2 * i : 2 * i - 1;
    const Link bx = over_columns(kBroadcast, x), bw = over_rows(kBroadcast, w);
    const Link rx = over_columns(kReduce, x), rw = over_rows(kReduce, w);
    const Pass forward{y * per_output, x + w + writes, 2, {bx, bw}};
    const Pass backward{
        x * (2 * o - 1) + w * (2 * b_ * l2_ - 1), 2 * (x + w + writes), 4, {bw, rx, bx, rw}};
    sums_.add(name, true, real(inputs / m2_) * o, b_ * l2_ * real(inputs / m1_), forward, backward,
              panels_);
  }

  // After a reduce-scatter, a GPU has its share of the rows and all columns.
  void bias(Operation name, double rows, double outputs) {
    if (!m_.gpt) return;
    const double n = rows * outputs;
    const Pass one{n, n + outputs};
    sums_.add(name, false, outputs, 0.0, one, one);
  }

  // GELU: 8 FLOP an element, and 13 for its derivative and the product with it.
  void activation(double n) { sums_.add(kAct1, false, 0.0, n, {8 * n, 2 * n}, {13 * n, 3 * n}); }

  // SiLU of one half times the other half; backward needs both.
  void gated(double n) { sums_.add(kAct1, false, 0.0, 2 * n, {6 * n, 3 * n}, {10 * n, 5 * n}); }

  // Saves its mask.
  void dropout(Operation name, double n, bool recompute = false) {
    if (!m_.gpt) return;
    const Pass one{n, (2 + mask_) * n};
    sums_.add(name, false, 0.0, recompute ? 0.0 : mask_ * n, one, one, 0, recompute);
  }

  void norm(Operation name) { strategy_ == k2d ? norm_of_columns(name) : norm_of_rows(name); }

  // Parameters of a column, and statistics of a row; FLOP of an RMS norm: squares, their sum and
  // two scalings.
  double norm_width() const { return m_.gpt ? 2 : 1; }
  double norm_forward(double n) const { return m_.gpt ? 9 * n : 4 * n; }
  double norm_backward(double n, double rows) const { return m_.gpt ? 12 * n - 4 * rows : 9 * n; }

  // Norm of whole rows, scattered over the columns.
  void norm_of_rows(Operation name) {
    const double r = scattered(l2_, m1_), n = r * e_, whole = b_ * l2_ * e_;
    const double k = norm_width();
    hop_ = n;
    sums_.add(name, false, k * e_, n,
              {norm_forward(n), 2 * n + k * r + k * e_, 1, {over_columns(kAllGather, whole)}},
              {norm_backward(n, r), 5 * n + k * e_, 1, {over_columns(kReduceScatter, whole)}});
  }

  // Norm of divided rows: statistics are reduced over the columns.
  void norm_of_columns(Operation name) {
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
    sums_.add(name, false, k * w, n,
              {norm_forward(n), 2 * n + k * r + k * w, 1, {over_columns(kAllReduce, k * r)}},
              backward);
  }

  void attention() {
    if constexpr (kWhole) {
      if (way_.attention == kPlain) return plain();
      if (way_.attention == kSumma) return summa_attention();
    }
    flash();
  }

  // Query heads times samples, key heads times samples, and queries per key.
  struct Heads {
    double queries, keys, shared;
  };
  Heads heads() const {
    const std::int64_t mine = m_.heads / m1_;
    return {b_ * real(mine), b_ * real(key_heads()), real(mine / key_heads())};
  }

  // Keys or values with a divided sequence are gathered in both passes, and their gradients
  // scattered.
  void gather(Pass& forward, Pass& backward, double volume) const {
    if (strategy_ == k1d) return;
    const Link all = over_rows(kAllGather, volume);
    forward.num_links = 1;
    forward.links[0] = all;
    backward.num_links = 2;
    backward.links = {all, over_rows(kReduceScatter, volume)};
  }

  // Attention that saves no scores. A causal mask halves the keys of a query, evenly over GPUs.
  void flash() {
    const double l = real(m_.seq), q = real(m_.hidden / m_.heads);
    const auto [h, lanes, shared] = heads();
    const double keys = lanes * l * q;
    const double seen = m_.causal ? (l + 1) / 2 : l;
    const double met = shared * l2_ * seen / l;  // queries per key on one GPU
    const double z = h * l2_ * seen, r = h * l2_, queries = h * l2_ * q, parts = lanes * l2_ * q;
    const double again = quirks_.flash_traffic ? 2 * parts + 2 * keys : 4 * keys;
    const double drops = m_.gpt ? 1 : 0;
    Pass forward{z * (2 * q - 1) + queries * (2 * seen - 1) + rho_ * ((3 + drops) * z - r),
                 2 * queries + 2 * keys + r};
    Pass backward{2 * z * (2 * q - 1) + queries * (2 * seen - 1) + 2 * keys * (2 * met - 1) +
                      rho_ * ((7 + 2 * drops) * z - 2 * r),
                  4 * queries + again + 2 * r};
    gather(forward, backward, 2 * keys);
    const double kept = 2 * queries + 2 * parts + (1 + drops) * r;
    sums_.add(kFlashAttention, true, 0.0, kept, forward, backward);
  }

  // Softmax between the two GEMMs. Its output for z scores in r rows is the first part of the
  // activations that `attend` saves, and without dropout the only one; it is saved once.
  void softmax(double z, double r, const Pass& forward, const Pass& backward) {
    const bool again = way_.recompute;
    Pass ahead = forward, back = backward;
    ahead.flops = 3 * z - r;
    ahead.traffic = 2 * z;
    back.flops = 4 * z - r;
    back.traffic = 3 * z;
    sums_.add(kSoftmax, false, 0.0, again || !m_.gpt ? 0.0 : z, ahead, back, 0, again);
    dropout(kDprAt, z, again);
  }

  // Attention that writes its scores to memory.
  void plain() {
    const double l = real(m_.seq), q = real(m_.hidden / m_.heads);
    const auto [h, lanes, shared] = heads();
    const double keys = lanes * l * q;
    const double z = h * l2_ * l, queries = h * l2_ * q, parts = lanes * l2_ * q;
    const bool again = way_.recompute;
    {
      Pass forward{z * (2 * q - 1), queries + keys + z};
      Pass backward{queries * (2 * l - 1) + keys * (2 * shared * l2_ - 1),
                    2 * queries + parts + keys + 2 * z};
      gather(forward, backward, keys);
      sums_.add(kLogits, true, 0.0, queries + parts, forward, backward, 0, again);
    }
    softmax(z, h * l2_, {}, {});
    Pass forward{queries * (2 * l - 1), z + keys + queries};
    Pass backward{z * (2 * q - 1) + keys * (2 * shared * l2_ - 1),
                  2 * queries + parts + 2 * z + keys};
    gather(forward, backward, keys);
    const double kept = z + queries;
    sums_.add(kAttend, true, 0.0, again ? kept - z : kept, forward, backward);
  }

  // The same with both GEMMs in panels: columns divide the width of heads, and the keys.
  void summa_attention() {
    const double l = real(m_.seq), p = real(m_.hidden / m_.heads / m1_);
    const double lanes = b_ * real(m_.heads);
    const double keys = b_ * real(m_.key_heads()) * l * p;
    const double scores = lanes * l2_ * l, outputs = lanes * l2_ * p;
    const double shared = real(m_.heads / m_.key_heads());
    const Link bk = over_rows(kBroadcast, keys), rk = over_rows(kReduce, keys);
    const Link bs = over_columns(kBroadcast, scores), rs = over_columns(kReduce, scores);
    const double writes = panel_writes(outputs);
    const bool again = way_.recompute;
    sums_.add(kLogits, true, 0.0, outputs + outputs / shared,
              {scores * (2 * p - 1), keys + scores + writes, 2, {bk, rs}},
              {outputs * (2 * l - 1) + keys * (2 * shared * l2_ - 1),
               2 * (keys + scores + writes),
               4,
               {bs, bk, bs, rk}},
              panels_, again);
    const double r = lanes * l2_, z = r * real(m_.seq / m1_);
    const Pass one{0.0, 0.0, 1, {over_columns(kAllReduce, r)}};
    softmax(z, r, one, one);
    const double kept = z + outputs;
    const double per_output = quirks_.repeated_panels ? 2 * l : 2 * l - 1;
    sums_.add(kAttend, true, 0.0, again ? kept - z : kept,
              {outputs * per_output, scores + keys + writes, 2, {bs, bk}},
              {scores * (2 * p - 1) + keys * (2 * shared * l2_ - 1),
               2 * (scores + keys + writes),
               4,
               {bk, rs, bs, rk}},
              panels_);
  }

  const Model& m_;
  const Quirks& quirks_;
  Strategy strategy_;
  const Group& columns_;
  const Group& rows_;
  int panels_;
  std::int64_t m1_, m2_;
  double b_, l2_, e_, mask_, rho_;
  Way way_;
  Adder<kWhole> sums_;
  inline static const Group alone_{};
  double hop_ = 0;
};

}  // namespace

Work Engine::work(const Candidate& c, const Group& columns, const Group& rows, bool links) const {
  Rows<false> table(*this, quirks_, c, columns, rows, links);
  Work work;
  work.layer = table.layer();
  work.hop = table.hop();
  if (model_.vocab) {
    work.first = table.embedding();
    work.last = table.head();
  }
  return work;
}

Work Engine::work(const Candidate& c, const Way& way, std::vector<LayerRow>* rows) const {
  const Group first = group(c.tp1, c.nv_tp1), second = group(c.tp2, c.nv_tp2);
  Rows<true> table(*this, quirks_, c, first, second, true, way, rows);
  Work work;
  if (model_.vocab) work.first = table.embedding();
  work.layer = table.layer();
  work.hop = table.hop();
  if (model_.vocab) work.last = table.head();
  return work;
}

}  // namespace autopar::analytic::tensor2d
