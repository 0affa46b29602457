// Seconds of one operation of a block, its collective included, and the bytes that it moves.
#pragma once

#include <algorithm>
#include <optional>

#include "closed_form/calculon/kinds.hpp"

namespace autopar::analytic::calculon {

// Forward, gradient of activations, gradient of weights; the optimizer's step has no collective.
enum Stage { kFw, kAgrad, kWgrad };

// The collective of an operation in one stage.
struct Link {
  double bytes = 0;     // size of the buffer
  double seconds = 0;   // network and additions
  double required = 0;  // ring traffic, for the required bandwidth
};

// One operation without its collective.
struct Alone {
  double flops_s = 0, memory_s = 0;
  double alone_s = 0;  // of both, without a concurrent collective
};

// One operation overlapped with its collective, in base and edge blocks.
struct Timing : Alone {
  double processing_s[2] = {0, 0};
  double exposed_s[2] = {0, 0};  // exposed communication
  Link links[2];
};

// Optimizer step over a number of parameters: Adam in 4 bytes, 11 FLOP per parameter; master
// weights and two moments, the former only if weights have fewer bytes.
struct OptimizerStep {
  double flops, bytes, gradient_bytes;
};

inline OptimizerStep optimizer_step(const Shape& s, const Quirks& q, double parameters) {
  const double e = s.element_bytes, p = parameters;
  return {11 * p / s.shards, (e < 4 ? 12 : 8) * p / s.shards,
          p * (q.weight_gradient_bytes ? e : 4) / s.shards};
}

// Times operations of one execution.
class Timings {
 public:
  Timings(const Shape& shape, const Quirks& quirks, const System& system, const Execution& x)
      : s_(shape),
        q_(quirks),
        matrix_(system.matrix[x.datatype]),
        vector_(system.vector[x.datatype]),
        memory_(system.first.rate),
        tier_(system.tiers[static_cast<std::size_t>(x.tensor_par_net)]),
        roofline_(system.roofline) {}

  // Share of the processor that a concurrent collective leaves for computation.
  double free_share() const { return 1.0 - tier_.processor_usage; }

  Alone alone(const Kind& k, double flops, double bytes) const {
    return alone(k.matrix ? matrix_ : vector_, flops, bytes);
  }
  Alone optimizer(const OptimizerStep& step) const {
    return alone(vector_, step.flops, step.bytes);
  }

  // Times an operation that communicates. `repeated`: its collective runs again in backward, which
  // is counted with the gradient of weights.
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
      if (!k.matrix) {  // communication only
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

  // Most operations read inputs and parameters and write outputs; backward reads parameters,
  // activation and its gradient.
  double fw_bytes(const Kind& k) const {
    return k.fw_bytes == kDefault ? (k.inputs + k.outputs + k.parameters) * s_.element_bytes
                                  : k.fw_bytes;
  }
  double agrad_bytes(const Kind& k) const {
    return k.agrad_bytes == kDefault ? backward_bytes(k) : k.agrad_bytes;
  }
  double wgrad_bytes(const Kind& k) const { return k.parameters > 0 ? backward_bytes(k) : 0.0; }
  double activation_bytes(const Kind& k) const {
    return k.activation_bytes == kDefault ? k.activation * s_.element_bytes : k.activation_bytes;
  }
  double gradient_bytes(const Kind& k) const {
    return k.gradient_bytes == kDefault ? k.gradient * s_.element_bytes : k.gradient_bytes;
  }

 private:
  double backward_bytes(const Kind& k) const {
    return (k.parameters + k.activation + k.gradient) * s_.element_bytes;
  }

  double processing(double flops_s, double memory_s) const {
    return roofline_ ? std::max(flops_s, memory_s) : flops_s + memory_s;
  }
  Alone alone(const Rate& engine, double flops, double bytes) const {
    Alone r;
    r.flops_s = engine.seconds(flops);
    r.memory_s = memory_.seconds(bytes);
    r.alone_s = processing(r.flops_s, r.memory_s);
    return r;
  }

  // Collective of the operation, if any. A gather of whole tensors is none: all ranks have them.
  std::optional<Collective> operation(Role role, Stage stage, bool edge, bool repeated) const {
    if (role == kComputes || s_.tensor == 1) return std::nullopt;
    if (stage == kWgrad && !repeated) return std::nullopt;
    const bool split = s_.rs || (s_.rs_at_edges && edge);
    const bool gathers = (role == kGathers) == (stage != kAgrad);  // backward mirrors forward
    if (gathers) return split ? std::optional{kAllGather} : std::nullopt;
    return split ? kReduceScatter : kAllReduce;
  }

  Link link(const Kind& k, Stage stage, bool edge, bool repeated, double alone_s) const {
    Link result;
    const auto op = operation(k.role, stage, edge, repeated);
    if (op) {
      result.bytes = s_.elements * s_.element_bytes;
      result.seconds = tier_.seconds(*op, result.bytes, s_.tensor);
      result.required =
          result.bytes * (q_.overlap_requirements ? 1.0 : tier_.traffic(*op, s_.tensor));
    }
    if (stage == kFw || stage == kAgrad) {
      if (!k.matrix)
        result.seconds += alone_s;
      else if (op && (*op == kAllReduce || *op == kReduceScatter))
        result.seconds += vector_.seconds(s_.elements * (s_.tensor - 1) / s_.tensor);
    }
    return result;
  }

  struct Tiles {
    double processing_s, exposed_s;
  };
  // A GEMM in t tiles: the collective of one tile overlaps the GEMM of the next, which it slows
  // down. The excess over a tile is exposed t - 1 times, and with `pipe` no GEMM hides the last
  // tile's collective.
  Tiles tiles(double flops_s, double memory_s, double alone_s, double link_s) const {
    if (link_s == 0.0) return {alone_s, 0.0};
    const double t = s_.tensor, free = free_share();
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

  const Shape& s_;
  const Quirks& q_;
  const Rate &matrix_, &vector_, &memory_;
  const Tier& tier_;
  bool roofline_;
};

}  // namespace autopar::analytic::calculon
