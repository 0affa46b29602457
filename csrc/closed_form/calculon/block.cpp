// Sums over the operations of one block, for base and edge blocks. The edge block of a chunk is the
// one next to another stage.
#include <algorithm>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/operations.hpp"
#include "closed_form/calculon/timing.hpp"

namespace autopar::analytic::calculon {
namespace {

// One operation without communication, with its times; some operations are added twice.
struct Priced {
  Kind kind;
  Flags flags;
  double fw_bytes = 0, agrad_bytes = 0, wgrad_bytes = 0;
  Alone fw, agrad, wgrad;
};

// Adds operations to a block one by one.
class Sum {
 public:
  Sum(const Shape& shape, const Quirks& quirks, const System& system, const Execution& x)
      : s_(shape), q_(quirks), timings_(shape, quirks, system, x) {}

  Block run() {
    Operations(s_, q_, *this).run();
    if (s_.recompute_all) block_.stored = 0.0;
    return block_;
  }

  Priced price(const Kind& k, const Flags& f) const {
    Priced o;
    o.kind = k;
    o.flags = f;
    o.fw_bytes = timings_.fw_bytes(k);
    o.fw = timings_.alone(k, k.fw_flops, o.fw_bytes);
    if (!s_.training) return o;
    o.agrad_bytes = timings_.agrad_bytes(k);
    o.agrad = timings_.alone(k, k.agrad_flops, o.agrad_bytes);
    if (k.parameters == 0) return o;
    o.wgrad_bytes = timings_.wgrad_bytes(k);
    o.wgrad = timings_.alone(k, k.wgrad_flops, o.wgrad_bytes);
    return o;
  }

  void add(Name, const Priced& o) {
    const Kind& k = o.kind;
    add_sizes(k, o.flags);
    pass(block_.fw, o.fw, k.fw_flops, o.fw_bytes);
    if (!s_.training) return;
    if (repeat_forward(k, o.flags, o.fw, o.fw_bytes))
      for (double& time_s : block_.again.time_s) time_s += o.fw.alone_s;
    pass(block_.agrad, o.agrad, k.agrad_flops, o.agrad_bytes);
    if (k.parameters > 0) pass(block_.wgrad, o.wgrad, k.wgrad_flops, o.wgrad_bytes);
  }

  void add(Name name, const Kind& k, const Flags& f) {
    if (k.role == kComputes) return add(name, price(k, f));
    const bool counted = k.matrix || q_.communication_flops;
    add_sizes(k, f);
    const double fw_bytes = timings_.fw_bytes(k), agrad_bytes = timings_.agrad_bytes(k);
    const Timing fw = timings_.time(k, kFw, k.fw_flops, fw_bytes, f.recommunicated);
    pass(block_.fw, fw, k.fw_flops, fw_bytes, counted, true);
    require(k, fw);
    if (!s_.training) return;
    if (repeat_forward(k, f, fw, fw_bytes)) {
      // the slowdown during a repeated collective is counted with the weight gradient
      const bool beside = k.matrix && !q_.recommunication_as_forward;
      for (const int j : {0, 1}) block_.again.time_s[j] += beside ? fw.alone_s : fw.processing_s[j];
    }
    const Timing agrad = timings_.time(k, kAgrad, k.agrad_flops, agrad_bytes, f.recommunicated);
    pass(block_.agrad, agrad, k.agrad_flops, agrad_bytes, counted, true);
    require(k, agrad);
    if (k.parameters == 0 && !f.recommunicated) return;
    const double wgrad_bytes = timings_.wgrad_bytes(k);
    const Timing wgrad = timings_.time(k, kWgrad, k.wgrad_flops, wgrad_bytes, f.recommunicated);
    pass(block_.wgrad, wgrad, k.wgrad_flops, wgrad_bytes, counted, false);
    if (f.recommunicated) repeat_link(k, fw, wgrad);
  }

 private:
  static void count(Work& work, const Alone& r, double flops, double bytes) {
    work.flops += flops;
    work.flops_s += r.flops_s;
    work.bytes += bytes;
    work.memory_s += r.memory_s;
  }
  static void pass(Work& work, const Alone& r, double flops, double bytes) {
    count(work, r, flops, bytes);
    for (double& time_s : work.time_s) time_s += r.alone_s;
  }
  // `counted`: FLOP and bytes belong to the block, not to its communication.
  static void pass(Work& work, const Timing& r, double flops, double bytes, bool counted,
                   bool linked) {
    if (counted) count(work, r, flops, bytes);
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
      block_.required_bytes_per_s = std::max(
          block_.required_bytes_per_s, r.links[j].required * timings_.free_share() / r.flops_s);
  }

  void add_sizes(const Kind& k, const Flags& f) {
    const double e = s_.element_bytes, p = k.parameters;
    const double kept_bytes = timings_.activation_bytes(k);
    block_.weight += p * e;
    if (!f.reused) block_.working += kept_bytes;
    if (f.kept || !s_.training) block_.stored += kept_bytes;
    if (!s_.training) return;
    if (!f.output_kept) block_.stored -= k.outputs * e;
    block_.activation_gradient += timings_.gradient_bytes(k);
    if (p == 0) return;
    block_.parameters[block_.num_parameters++] = p;
    block_.whole_weight_gradient += p * 4;  // fp32, before sharding
  }

  // Counts a repeated forward except its time; returns true if the forward is repeated.
  bool repeat_forward(const Kind& k, const Flags& f, const Alone& fw, double bytes) {
    count(running_, fw, k.fw_flops, bytes);
    if (!f.recomputed) return false;
    if (q_.running_recompute_totals)
      count(block_.again, {running_.flops_s, running_.memory_s, 0.0}, running_.flops,
            running_.bytes);
    else
      count(block_.again, fw, k.fw_flops, bytes);
    return true;
  }

  void repeat_link(const Kind& k, const Timing& fw, const Timing& wgrad) {
    const bool as_forward = k.matrix && q_.recommunication_as_forward;
    for (const int j : {0, 1}) {
      block_.again_link.link_bytes[j] += wgrad.links[j].bytes;
      block_.again_link.link_s[j] += wgrad.links[j].seconds;
      block_.again_link.exposed_s[j] += (as_forward ? fw : wgrad).exposed_s[j];
    }
  }

  const Shape& s_;
  const Quirks& q_;
  Timings timings_;
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
  const Timings timings(s, quirks_, system_, x);
  Work work;
  block.optimizer = block.weight_gradient = 0.0;
  for (std::size_t i = 0; i < block.num_parameters; ++i) {
    const OptimizerStep step = optimizer_step(s, quirks_, block.parameters[i]);
    const Alone r = timings.optimizer(step);
    work.flops += step.flops;
    work.flops_s += r.flops_s;
    work.bytes += step.bytes;
    work.memory_s += r.memory_s;
    work.time_s[0] += r.alone_s;
    block.optimizer += step.bytes;
    block.weight_gradient += step.gradient_bytes;
  }
  work.time_s[1] = work.time_s[0];
  block.optim = work;
}

}  // namespace autopar::analytic::calculon
