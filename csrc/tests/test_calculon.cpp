// The closed-form engine on a machine whose figures can be worked out by hand.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/explore.hpp"

using namespace autopar::analytic;
using namespace autopar::analytic::calculon;

namespace {

Rate flat(double per_s) { return {per_s, {0.0}, {per_s}}; }

Application small() {
  Application a;
  a.hidden = 8;
  a.feedforward = 32;
  a.seq = 4;
  a.heads = a.kv_heads = 2;
  a.head_size = 4;
  a.blocks = 6;
  return a;
}

System machine() {
  System s;
  s.matrix[kFloat16] = flat(1e6);
  s.vector[kFloat16] = flat(1e5);
  s.first = {1e6, flat(1e7)};
  s.second = {0.0, flat(1e5)};
  Tier tier;
  tier.bytes_per_s = 1e5;
  tier.latency_s = 1e-6;
  tier.size = 64;
  tier.scalar = {1, 1, 1, 2};
  tier.offset = {0, -1, -1, -1};
  s.tiers = {tier};
  return s;
}

Execution plain() {
  Execution x{};
  x.num_procs = x.tensor_par = x.pipeline_par = x.data_par = 1;
  x.batch_size = x.microbatch_size = x.pipeline_interleaving = 1;
  x.datatype = kFloat16;
  x.training = 1;
  return x;
}

}  // namespace

TEST_CASE("a block on one processor, by hand") {
  const Model model(small(), machine(), Quirks{}, false);
  const Execution x = plain();
  REQUIRE(model.check(x) == kOk);
  const Shape shape = model.shape(x);
  const Block block = model.block(x, shape);
  const double n = 4, h = 8, f = 32, scores = 2 * 4 * 4;
  const double weights = 4 * h * h + 2 * h * f + 2 * 2 * h;
  CHECK(block.weight == weights * 2);
  CHECK(block.optimizer == weights * 12);
  CHECK(block.whole_weight_gradient == weights * 4);
  const double products = 2 * n * (4 * h * h + 2 * h * f) + 2 * 2 * scores * 4;
  // norms 9, softmax 5, dropout 1, GELU 8, residual sums 1
  const double rest = 2 * 9 * n * h + 5 * scores + scores + 8 * n * f + 2 * n * h + 2 * n * h;
  CHECK(block.fw.flops == products + rest);
  CHECK(block.fw.flops_s == doctest::Approx(products / 1e6 + rest / 1e5));
  CHECK(block.wgrad.flops == 2 * n * (4 * h * h + 2 * h * f) + 2 * 7 * n * h);
  CHECK(block.fw.link_s[0] == 0.0);
  const Figures figures = model.step(x, shape, block, Outer{}, nullptr);
  CHECK(figures.total_time_s ==
        doctest::Approx(6 * (block.fw.time_s[0] + block.agrad.time_s[0] + block.wgrad.time_s[0] +
                             block.optim.time_s[0])));
}

TEST_CASE("what cannot run is refused for its reason") {
  const Model model(small(), machine(), Quirks{}, false);
  Execution x = plain();
  x.tensor_par = 2;
  CHECK(model.check(x) == kProduct);
  x.num_procs = 2;
  CHECK(model.check(x) == kOk);
  x.tensor_par = x.num_procs = 3;
  CHECK(model.check(x) == kSplitHidden);
  x = plain();
  x.tensor_par_net = 1;
  CHECK(model.check(x) == kNoTier);
  x = plain();
  x.datatype = kFloat8;
  CHECK(model.check(x) == kDatatype);
  x = plain();
  x.pipeline_interleaving = 2;
  CHECK(model.check(x) == kInterleavingOneStage);
}

TEST_CASE("outcomes do not depend on the threads") {
  const Model model(small(), machine(), Quirks{}, false);
  std::vector<Execution> executions;
  for (std::int32_t t : {1, 2})
    for (std::int32_t p : {1, 2, 3})
      for (std::int32_t b : {1, 2, 4}) {
        Execution x = plain();
        x.tensor_par = t;
        x.pipeline_par = p;
        x.num_procs = t * p;
        x.batch_size = 8;
        x.microbatch_size = b;
        executions.push_back(x);
      }
  std::vector<Outcome> one(executions.size()), many(executions.size());
  evaluate_many(model, executions.data(), executions.size(), 1, one.data(), nullptr);
  evaluate_many(model, executions.data(), executions.size(), 5, many.data(), nullptr);
  for (std::size_t i = 0; i < one.size(); ++i) {
    CHECK(one[i].ok);
    CHECK(one[i].total_time_s == many[i].total_time_s);
  }
}

TEST_CASE("the best of a space is the best of all its points") {
  const Model model(small(), machine(), Quirks{}, false);
  Space space;
  space.num_procs = 4;
  space.max_batch = 8;
  Want want;
  want.all = true;
  Found found;
  double best = 1e9;
  std::int64_t feasible = 0;
  for (const auto& [t, p] : degree_pairs(model, space)) {
    const Found part = explore(model, space, t, p, want);
    for (const Candidate& c : part.all) best = std::min(best, c.outcome.total_time_s);
    feasible += static_cast<std::int64_t>(part.all.size());
    Want bounded = want;
    bounded.all = false;
    bounded.bound = bound_of(found, want);
    absorb(found, explore(model, space, t, p, bounded), want);
  }
  REQUIRE(found.top.size() == 1);
  CHECK(found.top[0].outcome.total_time_s == best);
  CHECK(found.counts.feasible == feasible);
  CHECK(found.counts.considered == feasible + found.counts.network + found.counts.layout +
                                       found.counts.memory_first + found.counts.memory_second);
}
