// The two-dimensional engine on a machine whose figures can be worked out by hand, and its search
// against every candidate.
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <vector>

#include "closed_form/tensor2d/tensor2d.hpp"

using namespace autopar::analytic::tensor2d;

namespace {

Model small() {
  Model m;
  m.seq = 2048;
  m.hidden = 1024;
  m.heads = 8;
  m.depth = 8;
  m.feedforward = 4096;
  return m;
}

System machine() {
  System s;
  s.matrix_flops = 100;
  s.vector_flops = 10;
  s.hbm_bandwidth = 1000;
  s.hbm_capacity = 2;
  s.fast_bandwidth = 100;
  s.fast_latency = 1e-6;
  s.slow_bandwidth = 10;
  s.slow_latency = 1e-5;
  s.domain = 4;
  s.element_size = 2e-9;
  s.mask_element_size = 1e-9;
  s.flops_units = 1e-12;
  return s;
}

Engine engine(Strategy strategy, std::int64_t gpus, std::int64_t batch = 16, Quirks quirks = {}) {
  return Engine(small(), machine(), quirks, strategy, gpus, batch);
}

Candidate one() { return {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}; }

Figures price(const Engine& e, const Candidate& c) {
  return e.step(c, e.work(c, e.group(c.tp1, c.nv_tp1), e.group(c.tp2, c.nv_tp2)));
}

bool same(const Found& a, const Found& b) {
  return a.candidate == b.candidate && a.time_s == b.time_s && a.memory_gb == b.memory_gb;
}

}  // namespace

TEST_CASE("collectives inside a domain, between domains, and over both") {
  const Engine e = engine(k1d, 8);
  const double gb = 1.0;
  CHECK(e.collective_s(kAllGather, gb, e.group(4, 4)) == doctest::Approx(3e-6 + 0.75 / 100));
  CHECK(e.collective_s(kReduceScatter, gb, e.group(4, 1)) == doctest::Approx(3e-5 + 0.75 / 10));
  // four adapters of a domain are 40 GB/s; one hop between domains, six inside
  CHECK(e.collective_s(kAllGather, gb, e.group(8, 4)) == doctest::Approx(1e-5 + 6e-6 + 0.875 / 40));
  CHECK(e.collective_s(kBroadcast, gb, e.group(4, 4)) == doctest::Approx(3e-6 + 1.0 / 100));
  for (const std::int64_t near : {1, 2, 8})
    CHECK(e.collective_s(kAllReduce, gb, e.group(8, near)) ==
          doctest::Approx(2 * e.collective_s(kAllGather, gb, e.group(8, near))));
  CHECK(e.collective_s(kAllReduce, gb, e.group(1, 1)) == 0.0);
  CHECK(e.collective_s(kAllReduce, 0.0, e.group(8, 4)) == 0.0);
  Quirks published;
  published.single_allreduce = true;
  const Engine p = engine(k1d, 8, 16, published);
  CHECK(p.collective_s(kAllReduce, gb, p.group(4, 4)) ==
        doctest::Approx(p.collective_s(kAllGather, gb, p.group(4, 4))));
}

TEST_CASE("weights of a layer, and the memory of a step") {
  const Engine e = engine(k1d, 1, 4);
  const Candidate c = one();
  REQUIRE(e.check(c) == kOk);
  const Work work = e.work(c, Group{}, Group{});
  // products 4 e^2 + 2 e f, biases f + 2 e, two norms of 2 e
  const double weights = 12.0 * 1024 * 1024 + 4096 + 2 * 1024 + 4 * 1024;
  CHECK(work.layer.weights == doctest::Approx(weights));
  CHECK(e.memory_gb(c, work) == doctest::Approx((8 * weights + work.layer.kept) * 8 * 2e-9));
  const Figures figures = price(e, c);
  CHECK(figures.time_s == doctest::Approx(work.layer.time_s() * 8 * 4));
  double statistics[kNumStatistics];
  e.step(c, work, statistics);
  CHECK(statistics[0] == figures.time_s);
  CHECK(statistics[2] == figures.memory_gb);
  double parts = 0.0;
  for (int i = 3; i < 9; ++i) parts += statistics[i];
  CHECK(parts == doctest::Approx(figures.time_s));
}

TEST_CASE("two stages wait for one, and hand over between domains") {
  const Engine e = engine(k1d, 2, 4);
  Candidate c = one();
  c.pp = 2;
  const Work work = e.work(c, Group{}, Group{});
  const double hop_s = 1e-5 + 2048 * 1024 * 2e-9 / 10;
  CHECK(work.hop == 2048.0 * 1024);
  const double stage_s = work.layer.time_s() * 4 * 4 + 2 * 4 * hop_s;
  CHECK(price(e, c).time_s == doctest::Approx(stage_s * (1 + 1.0 / 4)));
  c.nv_pp = 2;
  CHECK(price(e, c).time_s < stage_s * (1 + 1.0 / 4));
}

TEST_CASE("a vocabulary is work for the first and the last stage") {
  Model m = small();
  m.vocab = 1000;
  for (const bool tied : {false, true}) {
    m.tied = tied;
    const Engine e(m, machine(), {}, k1d, 1, 4);
    const Work work = e.work(one(), Group{}, Group{});
    CHECK(work.first.weights == 1000.0 * 1024);
    CHECK(work.last.weights == 1000.0 * 1024 + 2 * 1024);
    const double tables = (tied ? 1 : 2) * 1000.0 * 1024 + 2 * 1024;
    const double kept = work.layer.kept * 8 + work.first.kept + work.last.kept;
    CHECK(e.memory_gb(one(), work) ==
          doctest::Approx(2e-9 * (8 * (work.layer.weights * 8 + tables) + kept)));
    CHECK(
        price(e, one()).time_s ==
        doctest::Approx(4 * (work.layer.time_s() * 8 + work.first.time_s() + work.last.time_s())));
  }
}

TEST_CASE("all that is known of one candidate") {
  Model m = small();
  m.vocab = 1000;
  const Engine e(m, machine(), {}, k2d, 8, 16);
  const Candidate c{2, 2, 2, 1, 2, 4, 2, 2, 1, 1};
  const Answer answer = evaluate(e, c, {}, true);
  REQUIRE(answer.reason == kOk);
  // equal to the result of a search, which keeps no rows
  double statistics[kNumStatistics];
  e.step(c, e.work(c, e.group(2, 2), e.group(2, 2)), statistics);
  for (int i = 0; i < kNumStatistics; ++i) CHECK(answer.statistics[i] == statistics[i]);
  CHECK(evaluate(e, c, {}, false).statistics == answer.statistics);
  CHECK(evaluate(e, c, {}, false).rows.empty());
  // embedding, 14 operations of a layer, last norm, head and loss
  REQUIRE(answer.rows.size() == 18);
  CHECK(answer.rows.front().operation == kEmbedding);
  CHECK(answer.rows[1].operation == kFc1);
  CHECK(answer.rows[10].operation == kFlashAttention);
  CHECK(answer.rows.back().operation == kLoss);
  double seconds = 0.0, flops = 0.0, weights = 0.0;
  for (const LayerRow& row : answer.rows) {
    const bool around = row.operation == kEmbedding || row.operation >= kLnF;
    const double repeated = around ? 1.0 : 8.0;
    seconds += repeated * 4 * (row.forward.time_s + row.backward.time_s);
    flops += repeated * 4 * (row.forward.flops + row.backward.flops);
    weights += repeated * row.weights_gb;
  }
  // plus the exposed seconds of data parallelism
  CHECK(answer.statistics[0] == doctest::Approx(seconds + answer.statistics[6]));
  CHECK(answer.statistics[1] == doctest::Approx(flops));
  CHECK(answer.statistics[15] == doctest::Approx(weights));
  // fc1 in four panels: each rank has a quarter of 1024 * 4096 weights, two micro-batches of rows
  const LayerRow& fc1 = answer.rows[1];
  const double x = 2.0 * 1024 * 1024, w = 1024.0 * 2048, y = 2.0 * 1024 * 2048;
  CHECK(fc1.in_panels == 1);
  CHECK(fc1.weights_gb == doctest::Approx(512.0 * 2048 * 2e-9));
  CHECK(fc1.kept_gb == doctest::Approx(2.0 * 1024 * 512 * 2e-9));
  CHECK(fc1.forward.flops == doctest::Approx(y * 2047 * 1e-12));
  CHECK(fc1.forward.compute_s == doctest::Approx(20e-6 + y * 2047 * 1e-12 / 80));
  REQUIRE(fc1.forward.num_links == 2);
  CHECK(fc1.forward.collectives[0] == kBroadcast);
  CHECK(fc1.forward.volumes_gb[0] == doctest::Approx(x * 2e-9));
  CHECK(fc1.forward.volumes_gb[1] == doctest::Approx(w * 2e-9));
  const double panel_s = 2e-6 + (x + w) / 4 * 2e-9 / 100;
  const double roof_s = fc1.forward.time_s - fc1.forward.link_s;
  CHECK(fc1.forward.link_s == doctest::Approx(panel_s + 3 * std::max(panel_s - roof_s / 4, 0.0)));
  CHECK(fc1.backward.num_links == 4);
}

TEST_CASE("attention that writes its scores, keeps them or makes them again") {
  const auto row_of = [](const Answer& answer, Operation operation) {
    for (const LayerRow& row : answer.rows)
      if (row.operation == operation) return row;
    FAIL("no such row");
    return LayerRow{};
  };
  const double z = 8.0 / 2 * 2048 / 2 * 2048;  // scores of one GPU: heads, queries, keys
  const double q = 8.0 / 2 * 2048 / 2 * 128;   // queries; as many keys
  for (const Attention attention : {kPlain, kSumma}) {
    const Engine e = engine(k2d, 4, 1);
    const Candidate c{1, 2, 2, 1, 1, 4, 2, 2, 1, 1};
    const Answer flash = evaluate(e, c, {}, true);
    const Answer kept = evaluate(e, c, {attention, false}, true);
    const Answer again = evaluate(e, c, {attention, true}, true);
    REQUIRE(kept.reason == kOk);
    CHECK(flash.rows.size() == 14);
    CHECK(kept.rows.size() == 17);
    CHECK(row_of(kept, kLogits).in_panels == (attention == kSumma));
    // z after the softmax, half of z for the mask, z before the values; keys in groups of columns
    CHECK(row_of(kept, kLogits).kept_gb == doctest::Approx(2 * q * 2e-9));
    CHECK(row_of(kept, kSoftmax).kept_gb == doctest::Approx(z * 2e-9));
    CHECK(row_of(kept, kDprAt).kept_gb == doctest::Approx(z / 2 * 2e-9));
    CHECK(row_of(kept, kAttend).kept_gb == doctest::Approx((z + q) * 2e-9));
    CHECK(row_of(again, kSoftmax).kept_gb == 0.0);
    CHECK(row_of(again, kDprAt).kept_gb == 0.0);
    CHECK(row_of(again, kAttend).kept_gb == doctest::Approx(q * 2e-9));
    CHECK(kept.statistics[2] - again.statistics[2] == doctest::Approx(8 * 2.5 * z * 2e-9));
    double repeated_s = 0.0;
    for (const Operation operation : {kLogits, kSoftmax, kDprAt}) {
      const LayerRow once = row_of(kept, operation), twice = row_of(again, operation);
      repeated_s += once.forward.time_s;
      CHECK(twice.forward.time_s == once.forward.time_s);
      CHECK(twice.backward.time_s == once.backward.time_s + once.forward.time_s);
      CHECK(twice.backward.flops == doctest::Approx(once.backward.flops + once.forward.flops));
    }
    CHECK(again.statistics[0] - kept.statistics[0] == doctest::Approx(8 * repeated_s));
    const LayerRow softmax = row_of(kept, kSoftmax);
    CHECK(softmax.forward.flops ==
          doctest::Approx((3 * z - (attention == kSumma ? 8 : 4) * 1024.0) * 1e-12));
    CHECK(softmax.forward.num_links == (attention == kSumma));
    CHECK(row_of(kept, kLogits).forward.collectives[0] ==
          (attention == kSumma ? kBroadcast : kAllGather));
  }
}

TEST_CASE("columns divide the width of heads in SUMMA, and nothing is told of what cannot run") {
  Model m = small();
  m.heads = 512;  // of width 2
  const Engine e(m, machine(), {}, k2d, 4, 4);
  const Candidate c{1, 4, 1, 1, 1, 4, 4, 1, 1, 1};
  CHECK(evaluate(e, c, {kPlain, false}, false).reason == kOk);
  const Answer answer = evaluate(e, c, {kSumma, false}, true);
  CHECK(answer.reason == kHeadWidth);
  CHECK(answer.rows.empty());
  CHECK(answer.statistics[0] == 0.0);
  // of two reasons, a single evaluation reports the tokens, and many report the tensors
  m.seq = 2047;
  m.feedforward = 4095;
  const Engine odd(m, machine(), {}, k2dSeqp, 4, 4);
  CHECK(odd.check(c) == kFeedforward);
  CHECK(evaluate(odd, c, {}, false).reason == kTokens);
}

TEST_CASE("what cannot be is refused with its reason") {
  const auto reason = [](Strategy strategy, Candidate c, std::int64_t gpus) {
    return engine(strategy, gpus).check(c);
  };
  //                    dp tp1 tp2 pp mbs nb, inside a domain: tp1 tp2 dp pp
  CHECK(reason(k1d, {1, 2, 1, 1, 0, 1, 1, 1, 1, 1}, 2) == kCounts);
  CHECK(reason(k1d, {1, 2, 2, 1, 1, 1, 1, 1, 1, 1}, 4) == kCounts);
  CHECK(reason(k1d, {1, 2, 1, 1, 1, 1, 1, 1, 1, 1}, 4) == kProduct);
  CHECK(reason(k1d, {1, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 3) == kHeads);
  CHECK(reason(k1d, {1, 1, 1, 3, 1, 1, 1, 1, 1, 1}, 3) == kDepth);
  CHECK(reason(k1d, {3, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 3) == kBatch);
  CHECK(reason(k2d, {1, 1, 3, 1, 1, 3, 1, 1, 1, 1}, 3) == kRows);
  CHECK(reason(k2dSeqp, {1, 8, 512, 1, 1, 1, 1, 1, 1, 1}, 4096) == kSequence);
  CHECK(reason(k1d, {4, 2, 1, 1, 1, 1, 1, 1, 3, 1}, 8) == kPlacement);
  CHECK(reason(k1d, {4, 2, 1, 1, 1, 1, 2, 1, 4, 1}, 8) == kDomain);
  CHECK(reason(k1d, {4, 2, 1, 1, 1, 1, 2, 1, 2, 1}, 8) == kOk);
}

TEST_CASE("the search is exact: bounds, answers and threads change nothing") {
  for (const Strategy strategy : {k1d, k2d, k2dSeqp}) {
    System tight = machine();
    tight.hbm_capacity = 0.4;
    const Engine e(small(), tight, {}, strategy, 64, 64);
    for (const Objective objective : {kTime, kMemory}) {
      const Exploration whole = explore(e, 30, objective, true, 1);
      REQUIRE(whole.feasible == whole.all.size());
      REQUIRE(whole.feasible > 30);
      CHECK(whole.rejected[kMemoryFull] > 0);
      CHECK(whole.bounded == 0);
      for (const Found& found : whole.all) {
        REQUIRE(e.check(found.candidate) == kOk);
        const Figures figures = price(e, found.candidate);
        REQUIRE(same(found, {found.candidate, figures.time_s, figures.memory_gb}));
        REQUIRE(found.memory_gb <= e.system().hbm_capacity);
      }
      for (std::size_t i = 1; i < whole.all.size(); ++i)
        REQUIRE(whole.all[i - 1].candidate < whole.all[i].candidate);
      const auto figure = [&](const Found& f) {
        return objective == kTime ? f.time_s : f.memory_gb;
      };
      std::vector<double> figures;
      for (const Found& found : whole.all) figures.push_back(figure(found));
      std::sort(figures.begin(), figures.end());
      for (std::size_t i = 0; i < whole.best.size(); ++i)
        CHECK(figure(whole.best[i]) == figures[i]);
      for (const int threads : {1, 2, 5})
        for (const std::size_t top : {0u, 1u, 7u, 30u}) {
          const Exploration found = explore(e, top, objective, false, threads);
          REQUIRE(found.best.size() == top);
          CHECK(std::equal(found.best.begin(), found.best.end(), whole.best.begin(), same));
          CHECK(found.feasible == whole.feasible);
          CHECK(found.rejected == whole.rejected);
        }
    }
  }
}

TEST_CASE("many candidates, in any order and on any number of threads") {
  const Engine e = engine(k2d, 64, 64);
  const Exploration whole = explore(e, 0, kTime, true, 1);
  std::vector<Candidate> candidates;
  for (const Found& found : whole.all) candidates.insert(candidates.begin(), found.candidate);
  candidates[3].mbs = 0;
  const std::size_t count = candidates.size();
  for (const int threads : {1, 2, 7}) {
    std::vector<Outcome> outcomes(count);
    std::vector<double> statistics(count * kNumStatistics, -1.0);
    evaluate_many(e, candidates.data(), count, threads, outcomes.data(), statistics.data());
    CHECK(outcomes[3].reason == kCounts);
    CHECK(outcomes[3].time_s == 0.0);
    CHECK(statistics[3 * kNumStatistics] == 0.0);
    for (std::size_t i = 4; i < count; ++i) {
      const Found& found = whole.all[count - 1 - i];
      REQUIRE(outcomes[i].ok == 1);
      REQUIRE(outcomes[i].time_s == found.time_s);
      REQUIRE(outcomes[i].memory_gb == found.memory_gb);
      REQUIRE(statistics[i * kNumStatistics] == found.time_s);
    }
  }
  evaluate_many(e, nullptr, 0, 3, nullptr, nullptr);
}

TEST_CASE("numbers at the ends of what documents may say: every figure is finite") {
  const double ends[] = {1e-15, 1.0, 1e15};
  const std::int64_t sizes[] = {1, 4099, 735134400, 1000000000};
  for (const double rate : ends)
    for (const double size : ends)
      for (const std::int64_t n : sizes) {
        Model m = small();
        m.seq = m.hidden = m.heads = m.feedforward = m.depth = m.vocab = n;
        m.gradients = 2.0;
        System s = machine();
        s.matrix_flops = s.hbm_bandwidth = s.slow_bandwidth = rate;
        s.vector_flops = s.fast_bandwidth = size;
        s.element_size = size;
        s.flops_units = 1e15;
        s.slow_latency = s.fast_latency = 1e9;
        s.hbm_capacity = 1e15;
        for (const Strategy strategy : {k1d, k2d, k2dSeqp}) {
          const Engine e(m, s, {}, strategy, 1, INT32_MAX);
          Candidate c = one();
          c.mbs = INT32_MAX;
          Outcome out{};
          double statistics[kNumStatistics];
          evaluate_many(e, &c, 1, 1, &out, statistics);
          CHECK((out.reason == kOk || out.reason == kMemoryFull));
          for (const double figure : statistics) CHECK(std::isfinite(figure));
          CHECK(out.time_s > 0.0);
        }
      }
}

TEST_CASE("rows of any integers are refused or priced, without an overflow") {
  const std::int32_t values[] = {INT32_MIN, -1, 0, 1, 2, 46341, INT32_MAX};
  const Engine e(small(), machine(), {}, k2dSeqp, INT32_MAX, INT64_MAX);
  std::vector<Candidate> rows;
  for (const std::int32_t a : values)
    for (const std::int32_t b : values)
      for (const std::int32_t c : values) {
        rows.push_back({a, b, c, a, b, c, a, b, c, a});
        rows.push_back({a, 1, 1, b, c, 1, 1, 1, b, c});
      }
  std::vector<Outcome> out(rows.size());
  evaluate_many(e, rows.data(), rows.size(), 3, out.data(), nullptr);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CHECK(out[i].reason < kNumReasons);
    CHECK(std::isfinite(out[i].time_s));
    for (const Attention attention : {kFlash, kPlain})
      CHECK(evaluate(e, rows[i], Way{attention, true}, true).reason < kNumReasons);
  }
}

TEST_CASE("a space that is too large is counted and not searched, and work is given up") {
  Model m = small();
  m.seq = m.hidden = m.heads = m.feedforward = m.depth = 735134400;
  System s = machine();
  s.domain = 55440;
  s.hbm_capacity = 1e15;
  const Engine e(m, s, {}, k2d, 720720, 14414400);
  const Exploration counted = explore(e, 1, kTime, true, 2, 1000);
  CHECK(counted.too_many);
  CHECK(counted.candidates > 1000);
  CHECK(counted.all.empty());
  const Engine few = engine(k2d, 8);
  const Exploration whole = explore(few, 1, kTime, true, 1);
  CHECK(!explore(few, 1, kTime, true, 1, whole.candidates).too_many);
  CHECK(explore(few, 1, kTime, true, 1, whole.candidates - 1).too_many);
  autopar::analytic::Halt halt;
  halt.ask();
  CHECK(explore(few, 1, kTime, true, 2, UINT64_MAX, halt).all.empty());
  const Candidate c = one();
  Outcome out{};
  evaluate_many(engine(k1d, 1), &c, 1, 1, &out, nullptr, halt);
  CHECK(out.time_s == 0.0);
}
