// Types of operations: FLOP, traffic and tensors of one operation on one processor.
//
// FLOP per element, forward, gradient of activations and of weights: layer norms 9, 14 and 7; RMS
// norms 4, 6 and 3 (squares, their sum, two scalings); softmax with its scaling 5 and 8; GELU 8 and
// 13; gated SiLU 6 and 10; dropout 1 and 1. A matrix product has 2 per multiplication.
#pragma once

#include <cstdint>

#include "closed_form/calculon/calculon.hpp"

namespace autopar::analytic::calculon {

enum Role : std::uint8_t { kComputes, kGathers, kReduces };

constexpr double kDefault = -1.0;  // use the rule of most types

// Numbers of one operation on one processor, in elements unless they end in `_bytes`.
struct Kind {
  bool matrix = false;
  Role role = kComputes;
  double fw_flops = 0, agrad_flops = 0, wgrad_flops = 0;
  double inputs = 0, outputs = 0, parameters = 0, activation = 0, gradient = 0;
  double fw_bytes = kDefault, agrad_bytes = kDefault, activation_bytes = kDefault,
         gradient_bytes = kDefault;
};

// Creates the kinds for the sizes of one block.
class Kinds {
 protected:
  Kinds(const Shape& shape, const Quirks& quirks)
      : s_(shape),
        q_(quirks),
        n_(static_cast<double>(shape.tokens)),
        h_(static_cast<double>(shape.hidden)),
        whole_(shape.elements) {}

  // A tensor with several consumers: backward adds their gradients.
  Kind fork(double elements, double ways) const {
    Kind k;
    k.agrad_flops = ways * elements;
    k.inputs = k.activation = elements;
    k.fw_bytes = 0.0;
    k.agrad_bytes = (ways + 1) * elements * s_.element_bytes;
    return k;
  }
  // A layer norm with scale and shift; gated blocks have RMS norms with one weight per column.
  Kind norm(double elements) const {
    Kind k;
    k.fw_flops = (s_.gated ? 4 : 9) * elements;
    k.agrad_flops = (s_.gated ? 6 : 14) * elements;
    k.wgrad_flops = (s_.gated ? 3 : 7) * elements;
    k.inputs = k.outputs = k.activation = k.gradient = elements;
    k.parameters = (s_.gated ? 1 : 2) * h_;
    return k;
  }
  // A GEMM over the tokens of a micro-batch, without bias.
  Kind linear(double inputs, double outputs) const {
    Kind k;
    k.matrix = true;
    k.fw_flops = k.agrad_flops = k.wgrad_flops = 2 * n_ * inputs * outputs;
    k.inputs = k.activation = n_ * inputs;
    k.outputs = k.gradient = n_ * outputs;
    k.parameters = inputs * outputs;
    return k;
  }
  // `lanes` GEMMs of (rows, inner) by (inner, columns). Backward has two of them, neither a
  // gradient of weights.
  Kind product(double lanes, double rows, double inner, double columns) const {
    Kind k;
    k.matrix = true;
    k.fw_flops = 2 * lanes * rows * inner * columns;
    k.agrad_flops = 2 * k.fw_flops;
    k.inputs = k.activation = lanes * (rows * inner + inner * columns);
    k.outputs = k.gradient = lanes * rows * columns;
    return k;
  }
  Kind softmax(double elements) const {
    Kind k;
    k.fw_flops = 5 * elements;
    k.agrad_flops = 8 * elements;
    k.inputs = k.outputs = k.activation = k.gradient = elements;
    k.agrad_bytes = 2 * elements * s_.element_bytes;
    return k;
  }
  // Saves a mask of one byte per element.
  Kind dropout(double elements) const {
    const double e = s_.element_bytes;
    Kind k;
    k.fw_flops = k.agrad_flops = elements;
    k.inputs = k.outputs = k.activation = k.gradient = elements;
    k.fw_bytes = k.agrad_bytes = (2 * e + 1) * elements;
    k.activation_bytes = elements;
    k.gradient_bytes = (q_.dropout_gradient_bytes ? 1 : e) * elements;
    return k;
  }
  // Saves nothing if it is fused with its linear layer.
  Kind gelu(double elements) const {
    Kind k;
    k.fw_flops = 8 * elements;
    k.agrad_flops = 13 * elements;
    k.inputs = k.outputs = elements;
    k.activation = k.gradient = s_.fused ? 0.0 : elements;
    k.agrad_bytes = 2 * elements * s_.element_bytes;
    return k;
  }
  // SiLU of one half times the other half; backward needs both.
  Kind gated_silu(double elements) const {
    Kind k;
    k.fw_flops = 6 * elements;
    k.agrad_flops = 10 * elements;
    k.outputs = elements;
    k.inputs = k.activation = k.gradient = 2 * elements;
    k.agrad_bytes = 5 * elements * s_.element_bytes;
    return k;
  }
  // Attention that saves its inputs and one number per query and head (4 bytes). Backward
  // recomputes the scores: 5 GEMMs where forward has 2. With a causal mask half of the scores are
  // skipped. Source: FlashAttention-2, arXiv 2307.08691.
  Kind flash() const {
    const double e = s_.element_bytes, seq = static_cast<double>(s_.seq);
    const double lanes = static_cast<double>(s_.microbatch * s_.heads) / s_.tensor;
    const double d = static_cast<double>(s_.head_size);
    const double scores = 2 * lanes * seq * seq * d * (s_.causal ? 0.5 : 1.0);
    const double queries = lanes * seq * d;
    const double keys = static_cast<double>(s_.microbatch * s_.seq) * s_.kv_width;
    const double statistics = 4 * lanes * seq;
    const double inputs = queries + 2 * keys;
    Kind k;
    k.matrix = true;
    k.fw_flops = 2 * scores;
    k.agrad_flops = 5 * scores;
    k.inputs = k.activation = k.gradient = inputs;
    k.outputs = queries;
    k.fw_bytes = (inputs + queries) * e + statistics;
    k.agrad_bytes = (2 * inputs + 2 * queries) * e + statistics;
    k.activation_bytes = inputs * e + statistics;
    return k;
  }
  // The sum of a branch and the residual stream.
  Kind residual(double elements) const {
    Kind k;
    k.fw_flops = k.outputs = k.gradient = elements;
    k.agrad_flops = k.inputs = k.activation = 2 * elements;
    return k;
  }
  // A collective that gathers before column-parallel layers, or reduces after row-parallel ones, in
  // forward; backward mirrors it. A reduction of n elements adds (t - 1) / t * n on each processor.
  Kind collective(Role role) const {
    Kind k;
    k.role = role;
    if (s_.tensor == 1) return k;
    const bool forward = role == kReduces;
    const double added = whole_ * (s_.tensor - 1) / s_.tensor;
    const double bytes = whole_ * s_.element_bytes, shard = bytes / s_.tensor;
    const double reduced = s_.rs ? shard : bytes, gathered = s_.rs ? shard : 0.0;
    const double moved = 2.0 * bytes, moved_gathering = s_.rs ? moved : 0.0;
    k.fw_flops = forward ? added : 0.0;
    k.agrad_flops = forward ? 0.0 : added;
    k.inputs = k.outputs = k.activation = k.gradient = whole_;
    k.fw_bytes = forward ? moved : moved_gathering;
    k.agrad_bytes = forward ? moved_gathering : moved;
    k.activation_bytes = forward ? reduced : gathered;
    k.gradient_bytes = forward ? gathered : reduced;
    return k;
  }
  // A column-parallel linear layer in tiles, with the gather of its input.
  Kind tiled_gather(double inputs, double outputs) const {
    const double t = s_.tensor;
    Kind k;
    k.matrix = true;
    k.role = kGathers;
    k.fw_flops = k.agrad_flops = k.wgrad_flops = 2 * n_ * inputs * outputs / t;
    k.inputs = n_ * inputs;
    k.outputs = n_ * outputs / t;
    k.parameters = inputs * outputs / t;
    k.activation = s_.rs ? n_ * inputs / t : n_ * inputs;
    k.gradient = q_.overlapped_activations && !s_.rs ? 0.0 : n_ * outputs / t;
    return k;
  }
  // A row-parallel linear layer in tiles, with the reduction of its output.
  Kind tiled_reduce(double inputs, double outputs) const {
    const double t = s_.tensor;
    Kind k;
    k.matrix = true;
    k.role = kReduces;
    k.fw_flops = k.agrad_flops = k.wgrad_flops = 2 * n_ * inputs * outputs / t;
    k.inputs = n_ * inputs / t;
    k.outputs = n_ * outputs;
    k.parameters = inputs * outputs / t;
    k.activation = n_ * inputs / t;
    k.gradient = n_ * outputs;
    if (q_.overlapped_activations) {
      if (!s_.rs) k.activation = 0.0;
      k.gradient = s_.rs ? 2 * n_ * outputs / t : 2 * n_ * outputs;
    }
    return k;
  }

  const Shape& s_;
  const Quirks& q_;
  double n_, h_, whole_;
};

}  // namespace autopar::analytic::calculon
