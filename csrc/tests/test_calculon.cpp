// The closed-form engine on a machine whose figures can be worked out by hand.
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
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

// Two of everything: tiles, a repeated gather, recomputed attention, shards, overlap and offload.
Execution busy() {
  Execution x = plain();
  x.num_procs = 8;
  x.tensor_par = x.pipeline_par = x.data_par = 2;
  x.batch_size = 8;
  x.activation_recompute = kAttentionOnly;
  x.tensor_par_comm_type = kRsAg;
  x.tensor_par_overlap = kRing;
  x.optimizer_sharding = x.seq_par_ag_redo = x.data_par_overlap = 1;
  x.weight_offload = x.optimizer_offload = 1;
  return x;
}

Application spoken() {
  Application a = small();
  a.vocab = 10;
  return a;
}

System roomy() {
  System s = machine();
  s.first.bytes = s.second.bytes = 1e9;
  s.tiers[0].processor_usage = 0.1;
  return s;
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
  const Figures figures = model.step(x, shape, block, Vocab{}, nullptr);
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

TEST_CASE("the tier that refuses is told") {
  System system = roomy();
  system.tiers.push_back(system.tiers[0]);
  system.tiers[1].size = 3;
  const Model model(small(), system, Quirks{}, false);
  Execution x = busy();
  std::int32_t tier = -1;
  CHECK(model.check(x, &tier) == kOk);
  CHECK(tier == -1);
  x.pipeline_par_net = x.data_par_net = 1;
  CHECK(model.check(x, &tier) == kTierTooSmall);
  CHECK(tier == 1);
  CHECK(model.check(x) == kTierTooSmall);
}

TEST_CASE("of several contradictions the first one is said") {
  const Model model(small(), machine(), Quirks{}, true);
  Execution x = plain();
  x.datatype = 200;
  CHECK(model.check(x) == kUnknownCode);
  x.tensor_par_net = 7;
  CHECK(model.check(x) == kNoTier);
  x.tensor_par_comm_type = 200;
  CHECK(model.check(x) == kUnknownCode);
  x.pipeline_interleaving = 0;
  CHECK(model.check(x) == kInterleaving);
  x.batch_size = 0;
  CHECK(model.check(x) == kCounts);
  x.attention_type = kFlash;
  CHECK(model.check(x) == kUnpublished);
}

// Figures of the oracle, tests/oracles/calculon, which is independent of this engine.
TEST_CASE("all statistics of one execution") {
  struct {
    const char* name;
    double value;
  } const expected[] = {
      {"block_fw_flops", 4288.0},
      {"block_fw_flops_time", 0.012928000000000002},
      {"block_fw_mem_accessed", 2544.0},
      {"block_fw_mem_time", 0.0002544},
      {"block_fw_time", 0.013252772222222223},
      {"baseblock_fw_tp_time", 0.0016040000000000004},
      {"edgeblock_fw_tp_time", 0.0016040000000000004},
      {"baseblock_fw_tp_time_exposed", 9.827777777777783e-05},
      {"edgeblock_fw_tp_time_exposed", 9.827777777777783e-05},
      {"block_re_flops", 224.0},
      {"block_re_flops_time", 0.001088},
      {"block_re_mem_accessed", 240.0},
      {"block_re_mem_time", 2.4e-05},
      {"block_re_time", 0.0011120000000000001},
      {"baseblock_recomm_time", 0.0006420000000000001},
      {"edgeblock_recomm_time", 0.0006420000000000001},
      {"baseblock_recomm_time_exposed", 0.0},
      {"edgeblock_recomm_time_exposed", 0.0},
      {"block_agrad_flops", 5168.0},
      {"block_agrad_flops_time", 0.019424},
      {"block_agrad_mem_accessed", 2672.0},
      {"block_agrad_mem_time", 0.0002672},
      {"block_agrad_time", 0.01976957222222222},
      {"baseblock_agrad_tp_time", 0.0016040000000000004},
      {"edgeblock_agrad_tp_time", 0.0016040000000000004},
      {"baseblock_agrad_tp_time_exposed", 1.8277777777777812e-05},
      {"edgeblock_agrad_tp_time_exposed", 1.8277777777777812e-05},
      {"block_wgrad_flops", 3296.0},
      {"block_wgrad_flops_time", 0.005312},
      {"block_wgrad_mem_accessed", 1536.0},
      {"block_wgrad_mem_time", 0.0001536},
      {"block_wgrad_time", 0.0054976999999999995},
      {"block_optim_flops", 2288.0},
      {"block_optim_flops_time", 0.02288},
      {"block_optim_mem_accessed", 2496.0},
      {"block_optim_mem_time", 0.0002496},
      {"block_optim_time", 0.0231296},
      {"baseblock_fw_tp_size", 256.0},
      {"edgeblock_fw_tp_size", 256.0},
      {"baseblock_bw_tp_size", 256.0},
      {"edgeblock_bw_tp_size", 256.0},
      {"baseblock_recomm_size", 128.0},
      {"edgeblock_recomm_size", 128.0},
      {"block_fw_pp_size", 32.0},
      {"block_bw_pp_size", 32.0},
      {"block_dp_size", 832.0},
      {"tp_bw_overlap_req", 112500.00000000001},
      {"dp_bw_overlap_req_chunk", 0.0},
      {"dp_bw_overlap_req_tail", 20799.116037568405},
      {"block_weight_space", 832.0},
      {"block_act_working_space", 624.0},
      {"block_act_storage_space", 544.0},
      {"block_act_checkpoint_size", 0.0},
      {"block_weight_grad_space", 832.0},
      {"block_weight_grad_space_no_sharding", 1664.0},
      {"block_act_grad_space", 800.0},
      {"block_optimizer_space", 2496.0},
      {"weight_space_with_offload", 1664.0},
      {"act_space_with_offload", 1168.0},
      {"act_checkpoint_size_with_offload", 0.0},
      {"act_grad_space_with_offload", 800.0},
      {"weight_grad_space_with_offload", 2496.0},
      {"optimizer_space_with_offload", 4992.0},
      {"weight_space", 2496.0},
      {"act_space", 3344.0},
      {"act_checkpoint_size", 0.0},
      {"act_grad_space", 800.0},
      {"weight_grad_space", 3328.0},
      {"optimizer_space", 7488.0},
      {"fw_time", 0.15903326666666667},
      {"bw_time", 0.30320726666666664},
      {"optim_step_time", 0.0716128},
      {"recompute_time", 0.013344000000000002},
      {"recomm_link_time", 0.007704000000000001},
      {"recomm_exposed_time", 0.0},
      {"bubble_time", 0.16643655},
      {"tp_comm_link_time", 0.03849600000000001},
      {"pp_comm_link_time", 0.0025680000000000004},
      {"dp_comm_link_time", 0.024966},
      {"tp_comm_exposed_time", 0.0013986666666666676},
      {"pp_comm_exposed_time", 0.0025680000000000004},
      {"dp_comm_exposed_time", 0.0099864},
      {"fw_offload_exposed_time", 0.0},
      {"bw_offload_exposed_time", 0.186195},
      {"total_time", 0.9280387499999999},
      {"act_offload_bw_req", 41537.33970137402},
      {"weight_offload_bw_req", 63527.696013866145},
      {"optim_offload_bw_req", 128114.56398510207},
      {"offload_mem_bw_req", 160143.20498137758},
      {"proc_mem_tier1_cap_req", 13776.0},
      {"proc_mem_tier2_cap_req", 12480.0},
      {"useful_flops", 15040.0},
      {"compute_efficiency", 0.30075089912269704},
      {"system_efficiency", 0.5728525164852581},
      {"total_efficiency", 0.17228590939764102},
      {"sample_rate", 8.62032970067252},
      {"embedding_time", 0.0},
      {"head_time", 0.0142568},
      {"outer_space", 480.0},
  };
  const Model model(spoken(), roomy(), Quirks{}, false);
  const Execution x = busy();
  Outcome outcome;
  std::array<double, kNumStatistics> found{};
  evaluate_many(model, &x, 1, 1, &outcome, found.data());
  REQUIRE(outcome.ok);
  const auto names = statistic_names();
  REQUIRE(std::size(expected) == names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    CAPTURE(names[i]);
    CHECK(std::string(names[i]) == expected[i].name);
    CHECK(found[i] == doctest::Approx(expected[i].value).epsilon(1e-12));
  }
  const auto total = std::find(names.begin(), names.end(), std::string("total_time"));
  CHECK(outcome.total_time_s == found[static_cast<std::size_t>(total - names.begin())]);
  CHECK(std::string(names[kNumPublished]) == "embedding_time");
}

TEST_CASE("statistics of what cannot run are nothing") {
  const Model model(spoken(), roomy(), Quirks{}, false);
  Execution x = busy();
  x.num_procs = 9;
  Outcome outcome;
  std::vector<double> found(kNumStatistics, -1.0);
  evaluate_many(model, &x, 1, 1, &outcome, found.data());
  CHECK(!outcome.ok);
  CHECK(found == std::vector<double>(kNumStatistics, 0.0));
}

TEST_CASE("names of figures are all there, and each once") {
  const auto statistics = statistic_names();
  const auto figures = layer_figure_names();
  CHECK(std::set<std::string>(statistics.begin(), statistics.end()).size() == kNumStatistics);
  CHECK(std::set<std::string>(figures.begin(), figures.end()).size() == kNumLayerFigures);
}

TEST_CASE("the operations of a block add up to it") {
  const auto names = layer_figure_names();
  const auto place = [&](const std::string& name) {
    const auto at = std::find(names.begin(), names.end(), name);
    REQUIRE(at != names.end());
    return static_cast<std::size_t>(at - names.begin());
  };
  for (const Structure structure : {kGpt, kLlama})
    for (const Overlap overlap : {kNoOverlap, kPipe}) {
      Execution x = busy();
      x.structure_type = structure;
      x.tensor_par_overlap = overlap;
      const Model model(spoken(), roomy(), Quirks{}, false);
      REQUIRE(model.check(x) == kOk);
      const Block block = model.block(x, model.shape(x));
      const std::vector<Layer> layers = model.layers(x);
      const auto sum = [&](const char* name) {
        double total = 0;
        for (const Layer& layer : layers) total += layer.figures[place(name)];
        return doctest::Approx(total).epsilon(1e-12);
      };
      CHECK(layers.front().name == "AttnBlock_Fork");
      CHECK(layers.back().name == "MlpBlock_Residual");
      CHECK(block.weight == sum("weight"));
      CHECK(block.optimizer == sum("optimizer"));
      CHECK(block.weight_gradient == sum("weight_grad"));
      CHECK(block.activation_gradient == sum("activation_grad"));
      CHECK(block.wgrad.flops == sum("wgrad_flops"));
      CHECK(block.optim.flops == sum("optim_flops"));
      CHECK(block.optim.bytes == sum("optim_mem_accessed"));
      CHECK(block.fw.time_s[0] == sum("fw_processing_time"));
      CHECK(block.agrad.time_s[0] == sum("agrad_processing_time"));
      CHECK(block.wgrad.time_s[0] == sum("wgrad_processing_time"));
      CHECK(block.optim.time_s[0] == sum("optim_processing_time"));
      CHECK(block.fw.link_bytes[1] == sum("edgeblock_fw_tp_comm_size"));
      CHECK(block.fw.link_s[1] == sum("edgeblock_fw_tp_comm_time"));
      CHECK(block.agrad.exposed_s[0] == sum("baseblock_bw_tp_comm_time_exposed"));
      CHECK(block.again_link.link_s[0] == sum("baseblock_recomm_time"));
      CHECK(block.again_link.link_s[0] > 0);
    }
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

TEST_CASE("numbers at the ends of what documents may say: every figure is finite") {
  const double ends[] = {1e-3, 1e12, 1e27};
  const std::int64_t sizes[] = {1, 4099, 735134400, 1000000000};
  for (const double rate : ends)
    for (const double link : ends)
      for (const std::int64_t n : sizes) {
        Application a = spoken();
        a.hidden = a.feedforward = a.seq = a.heads = a.kv_heads = a.head_size = a.blocks = n;
        a.vocab = n;
        System s = roomy();
        s.matrix[kFloat16] = flat(rate);
        s.vector[kFloat16] = flat(link);
        s.first = {1e300, flat(rate)};
        s.second = {1e300, flat(link)};
        s.tiers[0].bytes_per_s = link;
        s.tiers[0].latency_s = 1e9;
        s.tiers[0].scalar = {1e15, 1e15, 1e15, 1e15};
        const Model model(a, s, {}, false);
        Execution x = plain();
        x.batch_size = x.microbatch_size = INT32_MAX;
        Outcome out{};
        double statistics[kNumStatistics];
        evaluate_many(model, &x, 1, 1, &out, statistics);
        CHECK(out.reason == kOk);
        CHECK(out.total_time_s > 0.0);
        CHECK(std::isfinite(out.total_time_s));
        CHECK(std::isfinite(out.tier1_bytes));
        for (const double figure : statistics) CHECK(!std::isnan(figure));
      }
}

TEST_CASE("rows of any integers are refused or priced, without an overflow") {
  const std::int32_t values[] = {INT32_MIN, -1, 0, 1, 2, 46341, INT32_MAX};
  const Model model(spoken(), roomy(), {}, false);
  std::vector<Execution> rows;
  for (const std::int32_t a : values)
    for (const std::int32_t b : values)
      for (const std::int32_t c : values)
        for (const int code : {0, 1, 2, 255}) {
          Execution x = plain();
          x.num_procs = a;
          x.tensor_par = x.batch_size = b;
          x.pipeline_par = x.microbatch_size = x.tensor_par_net = c;
          x.data_par = x.pipeline_interleaving = a;
          x.datatype = x.attention_type = x.structure_type = static_cast<std::uint8_t>(code);
          rows.push_back(x);
          x = plain();
          x.batch_size = a;
          x.microbatch_size = b;
          x.data_par = x.num_procs = c;
          x.optimizer_sharding = x.data_par_overlap = 1;
          x.training = static_cast<std::uint8_t>(code);
          rows.push_back(x);
        }
  std::vector<Outcome> out(rows.size());
  evaluate_many(model, rows.data(), rows.size(), 3, out.data(), nullptr);
  for (const Outcome& one : out) {
    CHECK(one.reason < kNumReasons);
    CHECK(std::isfinite(one.total_time_s));
  }
}

TEST_CASE("points are counted without their prices, and work is given up") {
  Application a = small();
  const Model model(a, roomy(), {}, false);
  Space space;
  space.num_procs = 8;
  space.max_batch = 16;
  std::int64_t considered = 0, counted = 0;
  for (const auto& [t, p] : degree_pairs(model, space)) {
    considered += explore(model, space, t, p, Want{}).counts.considered;
    counted += count_points(model, space, t, p);
  }
  CHECK(considered > 100);
  CHECK(counted == considered);
  a.hidden = a.heads = a.kv_heads = a.feedforward = a.blocks = 735134400;
  space.num_procs = 720720;
  space.max_batch = 14414400;
  CHECK(count_points(Model(a, roomy(), {}, false), space, 720, 7) > 1000000);
  Halt halt;
  halt.ask();
  Want want;
  want.all = true;
  CHECK(explore(model, space, 1, 2, want, halt).all.empty());
  const Execution x = plain();
  Outcome out{};
  evaluate_many(model, &x, 1, 1, &out, nullptr, halt);
  CHECK(out.total_time_s == 0.0);
}
