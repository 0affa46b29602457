// The operations of one block and their sums, as search/closed_form/calculon/{layers,block}.py have
// them.
#include <optional>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/kinds.hpp"

namespace autopar::analytic::calculon {
namespace {

enum Stage { kFw, kAgrad, kWgrad };
struct Flags {
  bool recomputed = false, recommunicated = false, reused = false, kept = true, output_kept = true;
};

// Adds operations to a block one by one, in the order of the forward.
class Sum : Kinds {
 public:
  Sum(const Shape& shape, const Quirks& quirks, const System& system, const Execution& x)
      : Kinds(shape, quirks),
        matrix_(system.matrix[x.datatype]),
        vector_(system.vector[x.datatype]),
        memory_(system.first.rate),
        tier_(system.tiers[static_cast<std::size_t>(x.tensor_par_net)]),
        roofline_(system.roofline) {}

  Block run() {
    const bool full = s_.recompute_all;
    const Flags first{.recomputed = full};
    const Flags second{.recomputed = full, .reused = true, .kept = false};
    // attention and MLP begin and end with the same operations, which are priced once
    const Priced branch = price(fork(s_.local_elements, 2), first),
                 normed = price(norm(s_.local_elements), second),
                 summed = price(residual(s_.local_elements), second);
    const auto dropped = s_.gated ? Priced{} : price(dropout(s_.local_elements), first);
    const auto entry = [&] {
      add(branch);
      add(normed);
    };
    const auto leave = [&] {
      if (!s_.gated) add(dropped);
      add(summed);
    };
    entry();
    projections();
    s_.flash ? flash_attention() : written_attention();
    reduced(static_cast<double>(s_.heads * s_.head_size));
    leave();
    entry();
    feed_forward();
    reduced(static_cast<double>(s_.feedforward));
    leave();
    if (s_.recompute_all) block_.stored = 0.0;
    return block_;
  }

 private:
  // ---- the sequence of operations
  void projections() {
    const bool full = s_.recompute_all, again = s_.regather_attention;
    const auto width = static_cast<double>(s_.heads * s_.head_size);
    const Flags narrow{.recomputed = full, .reused = true, .kept = false};
    const Flags tiled{.recomputed = full, .recommunicated = again};
    if (!s_.tiled) {
      const bool dropped = again && (s_.rs || q_.attention_input_dropped);
      add(collective(kGathers), {.recommunicated = again});
      add(fork(whole_, 3), {.recomputed = again, .kept = !dropped});
      add(linear(h_, width / s_.tensor), narrow);
    } else if (!s_.shared_kv) {
      const auto kv = static_cast<double>(s_.kv_heads * s_.head_size);
      add(tiled_gather(h_, width + 2 * kv), tiled);
      return;
    } else {
      add(tiled_gather(h_, width), tiled);
      add(fork(whole_, 2), {.recomputed = again, .kept = !again});
    }
    const Priced keys = price(linear(h_, s_.kv_width), narrow);
    add(keys);
    add(keys);  // the values
  }
  void written_attention() {
    const bool att = s_.recompute_attention, full = s_.recompute_all;
    const std::int64_t whole_lanes =
        s_.microbatch * s_.heads / static_cast<std::int64_t>(s_.tensor);
    const auto lanes = static_cast<double>(whole_lanes), seq = static_cast<double>(s_.seq);
    const double scores = lanes * seq * seq, d = static_cast<double>(s_.head_size);
    if (s_.gated) {  // without dropout, what the softmax made is what the sums keep
      add(product(lanes, seq, d, seq), {.recomputed = att});
      add(softmax(scores), {.recomputed = att, .reused = true, .kept = false, .output_kept = !att});
    } else {
      add(product(lanes, seq, d, seq), {.recomputed = att, .output_kept = !att});
      add(softmax(scores), {.recomputed = att, .output_kept = !att});
      add(dropout(scores), {.recomputed = att, .kept = !att});
    }
    add(product(lanes, seq, seq, d), {.recomputed = full});
  }
  // backward computes the scores again itself, so only full recomputation repeats it
  void flash_attention() { add(flash(), {.recomputed = s_.recompute_all}); }
  void feed_forward() {
    const bool full = s_.recompute_all, again = s_.regather_mlp;
    const double f = static_cast<double>(s_.feedforward), ways = s_.gated ? 2 : 1;
    const double inner = f * n_ / s_.tensor;
    if (s_.tiled) {
      add(tiled_gather(h_, ways * f), {.recomputed = full, .recommunicated = again});
    } else {
      add(collective(kGathers), {.recommunicated = again});
      add(linear(h_, ways * f / s_.tensor), {.recomputed = full, .kept = !again});
    }
    if (s_.gated)
      add(gated_silu(inner), {.recomputed = full, .output_kept = !s_.fused});
    else
      add(gelu(inner), {.recomputed = full});
  }
  void reduced(double inputs) {
    const bool full = s_.recompute_all;
    if (s_.tiled) {
      add(tiled_reduce(inputs, h_), {.recomputed = full, .recommunicated = full});
    } else {
      add(linear(inputs / s_.tensor, h_), {.recomputed = full});
      add(collective(kReduces), {.recommunicated = full, .kept = false});
    }
  }

  // ---- sums
  double processing(double flops_s, double memory_s) const {
    return roofline_ ? std::max(flops_s, memory_s) : flops_s + memory_s;
  }

  std::optional<Collective> operation(Role role, Stage stage, bool edge, bool repeated) const {
    if (role == kComputes || s_.tensor == 1) return std::nullopt;
    if (stage == kWgrad && !repeated) return std::nullopt;
    const bool split = s_.rs || (s_.rs_at_edges && edge);
    const bool gathers = (role == kGathers) == (stage != kAgrad);
    if (gathers) return split ? std::optional{kAllGather} : std::nullopt;
    return split ? kReduceScatter : kAllReduce;
  }

  struct Link {
    double bytes = 0, seconds = 0;
    double required = 0;  // bytes that a bandwidth is required for: ring traffic
  };
  Link link(const Kind& k, Stage stage, bool edge, bool repeated, double alone_s) const {
    Link result;
    const auto op = operation(k.role, stage, edge, repeated);
    if (op) {
      result.bytes = whole_ * s_.element_bytes;
      result.seconds = tier_.seconds(*op, result.bytes, s_.tensor);
      result.required =
          result.bytes * (q_.overlap_requirements ? 1.0 : tier_.traffic(*op, s_.tensor));
    }
    if (stage == kFw || stage == kAgrad) {
      if (!k.matrix)
        result.seconds += alone_s;
      else if (op && (*op == kAllReduce || *op == kReduceScatter))
        result.seconds += vector_.seconds(whole_ * (s_.tensor - 1) / s_.tensor);
    }
    return result;
  }

  struct Tiles {
    double processing_s, exposed_s;
  };
  Tiles tiles(double flops_s, double memory_s, double alone_s, double link_s) const {
    if (link_s == 0.0) return {alone_s, 0.0};
    const double t = s_.tensor, free = 1.0 - tier_.processor_usage;
    const double slowed_s = processing(flops_s / free, memory_s);
    const double over_s = link_s / t - flops_s / free / t;
    Tiles result{};
    if (over_s > 0.0)
      result = {alone_s / t + (t - 1) * slowed_s / t, (t - 1) * over_s};
    else
      result = {alone_s + (t - 1) * tier_.processor_usage * link_s / t, 0.0};
    if (s_.pipe) {
      result.exposed_s += link_s / t;
      if (q_.pipe_tile_twice) result.processing_s += link_s / t;
    }
    return result;
  }

  struct Alone {
    double flops_s = 0, memory_s = 0, alone_s = 0;
  };
  Alone alone(const Kind& k, double flops, double bytes) const {
    Alone r;
    r.flops_s = (k.matrix ? matrix_ : vector_).seconds(flops);
    r.memory_s = memory_.seconds(bytes);
    r.alone_s = processing(r.flops_s, r.memory_s);
    return r;
  }

  // ... of an operation that communicates, in base and edge blocks.
  struct Timing : Alone {
    double processing_s[2] = {0, 0}, exposed_s[2] = {0, 0};
    Link links[2];
  };
  Timing time(const Kind& k, Stage stage, double flops, double bytes, bool repeated) const {
    Timing r{alone(k, flops, bytes), {0, 0}, {0, 0}, {}};
    for (const int j : {0, 1}) {
      if (j == 1 && !s_.rs_at_edges) {  // both blocks communicate alike
        r.links[1] = r.links[0];
        r.processing_s[1] = r.processing_s[0];
        r.exposed_s[1] = r.exposed_s[0];
        break;
      }
      r.links[j] = link(k, stage, j == 1, repeated, r.alone_s);
      if (!k.matrix) {
        r.processing_s[j] = 0.0;
        r.exposed_s[j] = r.links[j].seconds;
        continue;
      }
      const double beside = q_.edge_overlaps_as_base ? r.links[0].seconds : r.links[j].seconds;
      const Tiles tile = tiles(r.flops_s, r.memory_s, r.alone_s, beside);
      r.processing_s[j] = tile.processing_s;
      r.exposed_s[j] = tile.exposed_s;
    }
    return r;
  }

  static void pass(Work& work, const Alone& r, double flops, double bytes) {
    work.flops += flops;
    work.flops_s += r.flops_s;
    work.bytes += bytes;
    work.memory_s += r.memory_s;
    for (double& time_s : work.time_s) time_s += r.alone_s;
  }
  static void pass(Work& work, const Timing& r, double flops, double bytes, bool counted,
                   bool linked) {
    if (counted) {
      work.flops += flops;
      work.flops_s += r.flops_s;
      work.bytes += bytes;
      work.memory_s += r.memory_s;
    }
    for (const int j : {0, 1}) {
      work.time_s[j] += r.processing_s[j];
      if (!linked) continue;
      work.link_bytes[j] += r.links[j].bytes;
      work.link_s[j] += r.links[j].seconds;
      work.exposed_s[j] += r.exposed_s[j];
    }
  }

  void require(const Kind& k, const Timing& r) {
    if (!k.matrix) return;
    for (const int j : {0, 1})
      block_.required_bytes_per_s =
          std::max(block_.required_bytes_per_s,
                   r.links[j].required * (1.0 - tier_.processor_usage) / r.flops_s);
  }

  // An operation without communication, with its times; some are summed twice.
  struct Priced {
    Kind kind;
    Flags flags;
    double fw_bytes = 0, agrad_bytes = 0, wgrad_bytes = 0;
    Alone fw, agrad, wgrad;
  };
  Priced price(const Kind& k, const Flags& f) const {
    Priced o;
    o.kind = k;
    o.flags = f;
    o.fw_bytes = fw_bytes(k);
    o.fw = alone(k, k.fw_flops, o.fw_bytes);
    if (!s_.training) return o;
    o.agrad_bytes = agrad_bytes(k);
    o.agrad = alone(k, k.agrad_flops, o.agrad_bytes);
    if (k.parameters == 0) return o;
    o.wgrad_bytes = backward_bytes(k);
    o.wgrad = alone(k, k.wgrad_flops, o.wgrad_bytes);
    return o;
  }
  void add(const Priced& o) {
    const Kind& k = o.kind;
    add_sizes(k, o.flags);
    pass(block_.fw, o.fw, k.fw_flops, o.fw_bytes);
    if (!s_.training) return;
    repeat_forward(k, o.flags, o.fw, o.fw_bytes);
    pass(block_.agrad, o.agrad, k.agrad_flops, o.agrad_bytes);
    if (k.parameters > 0) pass(block_.wgrad, o.wgrad, k.wgrad_flops, o.wgrad_bytes);
  }

  void add(const Kind& k, const Flags& f) {
    if (k.role == kComputes) return add(price(k, f));
    const bool counted = k.matrix || q_.communication_flops;
    add_sizes(k, f);
    const double forward_bytes = fw_bytes(k);
    const Timing fw = time(k, kFw, k.fw_flops, forward_bytes, f.recommunicated);
    pass(block_.fw, fw, k.fw_flops, forward_bytes, counted, true);
    require(k, fw);
    if (!s_.training) return;
    repeat_forward(k, f, fw, forward_bytes);
    const Timing agrad = time(k, kAgrad, k.agrad_flops, agrad_bytes(k), f.recommunicated);
    pass(block_.agrad, agrad, k.agrad_flops, agrad_bytes(k), counted, true);
    require(k, agrad);
    if (k.parameters == 0 && !f.recommunicated) return;
    const double bytes = k.parameters > 0 ? backward_bytes(k) : 0.0;
    const Timing wgrad = time(k, kWgrad, k.wgrad_flops, bytes, f.recommunicated);
    pass(block_.wgrad, wgrad, k.wgrad_flops, bytes, counted, false);
    if (f.recommunicated) repeat_link(k, fw, wgrad);
  }

  double fw_bytes(const Kind& k) const {
    return k.fw_bytes == kDefault ? (k.inputs + k.outputs + k.parameters) * s_.element_bytes
                                  : k.fw_bytes;
  }
  double backward_bytes(const Kind& k) const {
    return (k.parameters + k.activation + k.gradient) * s_.element_bytes;
  }
  double agrad_bytes(const Kind& k) const {
    return k.agrad_bytes == kDefault ? backward_bytes(k) : k.agrad_bytes;
  }

  void add_sizes(const Kind& k, const Flags& f) {
    const double e = s_.element_bytes, p = k.parameters;
    const double kept_bytes =
        k.activation_bytes == kDefault ? k.activation * e : k.activation_bytes;
    block_.weight += p * e;
    if (!f.reused) block_.working += kept_bytes;
    if (f.kept || !s_.training) block_.stored += kept_bytes;
    if (!s_.training) return;
    if (!f.output_kept) block_.stored -= k.outputs * e;
    block_.activation_gradient += k.gradient_bytes == kDefault ? k.gradient * e : k.gradient_bytes;
    if (p == 0) return;
    block_.parameters[block_.num_parameters++] = p;
    block_.whole_weight_gradient += p * 4;
  }

  void repeat_forward(const Kind& k, const Flags& f, const Alone& fw, double bytes) {
    running_.flops += k.fw_flops;
    running_.flops_s += fw.flops_s;
    running_.bytes += bytes;
    running_.memory_s += fw.memory_s;
    if (!f.recomputed) return;
    if (q_.running_recompute_totals)
      pass(block_.again, {running_.flops_s, running_.memory_s, fw.alone_s}, running_.flops,
           running_.bytes);
    else
      pass(block_.again, fw, k.fw_flops, bytes);
  }
  void repeat_forward(const Kind& k, const Flags& f, const Timing& fw, double bytes) {
    repeat_forward(k, f, static_cast<const Alone&>(fw), bytes);
    // the slowdown beside a repeated collective is counted with the weight gradient
    if (!f.recomputed || (k.matrix && !q_.recommunication_as_forward)) return;
    for (const int j : {0, 1}) block_.again.time_s[j] += fw.processing_s[j] - fw.alone_s;
  }

  void repeat_link(const Kind& k, const Timing& fw, const Timing& wgrad) {
    const bool as_forward = k.matrix && q_.recommunication_as_forward;
    for (const int j : {0, 1}) {
      block_.again_link.link_bytes[j] += wgrad.links[j].bytes;
      block_.again_link.link_s[j] += wgrad.links[j].seconds;
      block_.again_link.exposed_s[j] += (as_forward ? fw : wgrad).exposed_s[j];
    }
  }

  const Rate &matrix_, &vector_, &memory_;
  const Tier& tier_;
  bool roofline_;
  Block block_;
  Work running_;
};

}  // namespace

Block Model::block(const Execution& x, const Shape& shape) const {
  Block block = Sum(shape, quirks_, system_, x).run();
  share_optimizer(x, shape, block);
  return block;
}

void Model::share_optimizer(const Execution& x, const Shape& s, Block& block) const {
  const Rate &vector = system_.vector[x.datatype], &memory = system_.first.rate;
  Work work;
  block.optimizer = block.weight_gradient = 0.0;
  for (std::size_t i = 0; i < block.num_parameters; ++i) {
    const double e = s.element_bytes, p = block.parameters[i];
    const double bytes = (e < 4 ? 12 : 8) * p / s.shards, flops = 11 * p / s.shards;
    const double flops_s = vector.seconds(flops), memory_s = memory.seconds(bytes);
    work.flops += flops;
    work.flops_s += flops_s;
    work.bytes += bytes;
    work.memory_s += memory_s;
    work.time_s[0] += system_.roofline ? std::max(flops_s, memory_s) : flops_s + memory_s;
    block.optimizer += bytes;
    block.weight_gradient += p * (quirks_.weight_gradient_bytes ? e : 4) / s.shards;
  }
  work.time_s[1] = work.time_s[0];
  block.optim = work;
}

}  // namespace autopar::analytic::calculon
