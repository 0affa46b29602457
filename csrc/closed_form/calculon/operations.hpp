// The operations of one transformer block on one processor, in forward order. Costs are computed
// elsewhere: block.cpp sums them, layers.cpp tabulates them.
#pragma once

#include "closed_form/calculon/kinds.hpp"

namespace autopar::analytic::calculon {

struct Flags {
  bool recomputed = false;      // forward is repeated in backward
  bool recommunicated = false;  // its collective is repeated in backward
  bool reused = false;          // shares its activation with another operation
  bool kept = true;             // the activation is stored from forward to backward
  bool output_kept = true;
};

// The half of the block and the operation in it, as published: "AttnBlock" "_Fork".
struct Name {
  const char* half;
  const char* rest;
};

// Passes every operation to a sink, which provides
//   price(kind, flags)        figures of an operation that is added several times,
//   add(name, priced)         adds one of those,
//   add(name, kind, flags)    prices and adds an operation that is added once.
// Attention and MLP begin and end with the same operations, and keys are as large as values. A
// search sums hundreds of thousands of blocks, so each of these operations is timed once.
template <class Sink>
class Operations : Kinds {
 public:
  Operations(const Shape& shape, const Quirks& quirks, Sink& sink)
      : Kinds(shape, quirks), sink_(sink) {}

  void run() {
    const bool full = s_.recompute_all;
    const Flags first{.recomputed = full};
    const Flags second{.recomputed = full, .reused = true, .kept = false};
    const auto branch = sink_.price(fork(s_.local_elements, 2), first),
               normed = sink_.price(norm(s_.local_elements), second),
               summed = sink_.price(residual(s_.local_elements), second);
    decltype(sink_.price(Kind{}, first)) dropped{};
    if (!s_.gated) dropped = sink_.price(dropout(s_.local_elements), first);
    const auto enter = [&](const char* half) {
      sink_.add({half, "_Fork"}, branch);
      sink_.add({half, "_LayerNorm"}, normed);
    };
    const auto leave = [&](const char* half) {
      if (!s_.gated) sink_.add({half, "_DropOut"}, dropped);
      sink_.add({half, "_Residual"}, summed);
    };
    enter(kAttention);
    projections();
    s_.flash ? flash_attention() : written_attention();
    reduced(kAttention, "_MLP", "_MLP_RS", static_cast<double>(s_.heads * s_.head_size));
    leave(kAttention);
    enter(kMlp);
    feed_forward();
    reduced(kMlp, "_Mlp2", "_Mlp2_RS", static_cast<double>(s_.feedforward));
    leave(kMlp);
  }

 private:
  static constexpr const char *kAttention = "AttnBlock", *kMlp = "MlpBlock";

  // Query, key and value projections, and the gather before them.
  void projections() {
    const bool full = s_.recompute_all, again = s_.regather_attention;
    const auto width = static_cast<double>(s_.heads * s_.head_size);
    const Flags narrow{.recomputed = full, .reused = true, .kept = false};
    const Flags tiled{.recomputed = full, .recommunicated = again};
    if (!s_.tiled) {
      const bool dropped = again && (s_.rs || q_.attention_input_dropped);
      sink_.add({kAttention, "_F"}, collective(kGathers), {.recommunicated = again});
      sink_.add({kAttention, "_Multihead_Fork"}, fork(whole_, 3),
                {.recomputed = again, .kept = !dropped});
      sink_.add({kAttention, "_Query"}, linear(h_, width / s_.tensor), narrow);
    } else if (!s_.shared_kv) {
      const auto kv = static_cast<double>(s_.kv_heads * s_.head_size);
      sink_.add({kAttention, "_QKV_AG"}, tiled_gather(h_, width + 2 * kv), tiled);
      return;
    } else {
      // processors that share keys and values each compute them
      sink_.add({kAttention, "_Query_AG"}, tiled_gather(h_, width), tiled);
      sink_.add({kAttention, "_KV_Fork"}, fork(whole_, 2), {.recomputed = again, .kept = !again});
    }
    const auto keys = sink_.price(linear(h_, s_.kv_width), narrow);
    sink_.add({kAttention, "_Key"}, keys);
    sink_.add({kAttention, "_Value"}, keys);
  }

  // Attention that writes its scores to memory.
  void written_attention() {
    const bool att = s_.recompute_attention, full = s_.recompute_all;
    const std::int64_t whole_lanes =
        s_.microbatch * s_.heads / static_cast<std::int64_t>(s_.tensor);
    const auto lanes = static_cast<double>(whole_lanes), seq = static_cast<double>(s_.seq);
    const double scores = lanes * seq * seq, d = static_cast<double>(s_.head_size);
    const Name products{kAttention, "_Multihead_Key_Query"},
        softmaxed{kAttention, "_Multihead_SoftMax"};
    if (s_.gated) {  // without dropout, the value GEMM saves the softmax output
      sink_.add(products, product(lanes, seq, d, seq), {.recomputed = att});
      sink_.add(softmaxed, softmax(scores),
                {.recomputed = att, .reused = true, .kept = false, .output_kept = !att});
    } else {
      const Flags again{.recomputed = att, .output_kept = !att};
      sink_.add(products, product(lanes, seq, d, seq), again);
      sink_.add(softmaxed, softmax(scores), again);
      sink_.add({kAttention, "_Multihead_DropOut"}, dropout(scores),
                {.recomputed = att, .kept = !att});
    }
    sink_.add({kAttention, "_Multihead_Attn"}, product(lanes, seq, seq, d), {.recomputed = full});
  }

  // backward recomputes the scores anyway, so only full recomputation repeats it
  void flash_attention() {
    sink_.add({kAttention, "_Flash"}, flash(), {.recomputed = s_.recompute_all});
  }

  void feed_forward() {
    const bool full = s_.recompute_all, again = s_.regather_mlp;
    const double f = static_cast<double>(s_.feedforward), ways = s_.gated ? 2 : 1;
    const double inner = f * n_ / s_.tensor;
    if (s_.tiled) {
      sink_.add({kMlp, "_Mlp1_AG"}, tiled_gather(h_, ways * f),
                {.recomputed = full, .recommunicated = again});
    } else {
      sink_.add({kMlp, "_F"}, collective(kGathers), {.recommunicated = again});
      sink_.add({kMlp, "_Mlp1"}, linear(h_, ways * f / s_.tensor),
                {.recomputed = full, .kept = !again});
    }
    if (s_.gated)
      sink_.add({kMlp, "_SwiGLU"}, gated_silu(inner),
                {.recomputed = full, .output_kept = !s_.fused});
    else
      sink_.add({kMlp, "_GeLU"}, gelu(inner), {.recomputed = full});
  }

  // The row-parallel GEMM at the end of a half, and its reduction.
  void reduced(const char* half, const char* plain, const char* tiled, double inputs) {
    const bool full = s_.recompute_all;
    if (s_.tiled) {
      sink_.add({half, tiled}, tiled_reduce(inputs, h_),
                {.recomputed = full, .recommunicated = full});
    } else {
      sink_.add({half, plain}, linear(inputs / s_.tensor, h_), {.recomputed = full});
      sink_.add({half, "_G"}, collective(kReduces), {.recommunicated = full, .kept = false});
    }
  }

  Sink& sink_;
};

}  // namespace autopar::analytic::calculon
