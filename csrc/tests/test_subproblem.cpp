// The parts of the joint planner: ticks and bounds of an item on tables worked out by hand, bounds
// and optima of the items of the dumped problems, frontiers and quick points of random stages.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "planner/instance.hpp"
#include "planner/stage/narrowed.hpp"
#include "planner/stage/stage_kernel.hpp"
#include "planner_dump.hpp"
#include "planner_plans.hpp"
#include "random_stage.hpp"

using namespace autopar;
using random_stage::RandomStage, random_stage::contains, random_stage::no_slower;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Three layers of two types, two strategies with a layout each, two embeddings; one stage of four
// samples (m = 1 and m = 2) and two stages of two samples (m = 4). Seconds are multiples of 1/8.
struct ByHand {
  std::vector<std::int32_t> layer_type{0, 0, 1}, strategy_layout{0, 1}, vocab_layout{0, 1},
      stages{1, 2}, group{0, 0}, candidate_table{0, 0, 1}, microbatches{1, 2, 4};
  std::vector<std::int64_t> microbatch{4, 2};
  std::vector<std::uint8_t> valid = std::vector<std::uint8_t>(8, 1),
                            vocab_valid = std::vector<std::uint8_t>(4, 1), stage_allowed{1, 0};
  std::vector<double> forward{1, 2, 2, 3, 0.5, 1, 1, 1.5}, backward{2, 4, 4, 6, 1, 2, 2, 3},
      tail{0.5, 0.25, 0.5, 0, 0.25, 0.125, 0.25, 0};
  std::vector<std::int64_t> fixed{100, 10, 200, 20, 100, 10, 200, 20,
                                  101, 11, 201, 21, 101, 11, 201, 21};
  std::vector<std::int64_t> activation{10, 1, 20, 2, 10, 1, 20, 2};
  std::vector<std::int64_t> transient{5, 3, 7, 4, 5, 3, 7, 4, 6, 3, 8, 4, 6, 3, 8, 4};
  std::vector<std::int64_t> shared{2, 1, 2, 1, 2, 1, 2, 1};
  std::vector<double> move_forward, move_backward;
  std::vector<double> send{0.125, 0.25, 0.125, 0.25, 0.125, 0.25, 0.125, 0.25};
  // (N, 3, E): only, first, last
  std::vector<double> vocab_forward{1, 2, 0.5, 1, 0.5, 1, 1, 2, 0.5, 1, 0.5, 1}, vocab_backward,
      vocab_tail;
  std::vector<std::int64_t> vocab_fixed, vocab_activation, vocab_transient, vocab_shared;
  std::vector<std::int64_t> stage_fixed{1000, 1001, 1002, 1003, 1000, 1001, 1002, 1003};
  Tables tables;

  ByHand() {
    for (int i = 0; i < 4; ++i) {
      move_forward.insert(move_forward.end(), {0, 0.25, 0.25, 0});
      move_backward.insert(move_backward.end(), {0, 0.5, 0.5, 0});
    }
    for (const double f : vocab_forward) vocab_backward.push_back(2 * f);
    for (int i = 0; i < 6; ++i) {
      vocab_tail.insert(vocab_tail.end(), {0.25, 0.125});
      vocab_activation.insert(vocab_activation.end(), {4, 1});
      vocab_shared.insert(vocab_shared.end(), {3, 1});
    }
    for (int many = 0; many < 2; ++many)
      for (int i = 0; i < 6; ++i) {
        vocab_fixed.insert(vocab_fixed.end(), {50 + many, 5 + many});
        vocab_transient.insert(vocab_transient.end(), {9 + many, 2});
      }
    Tables& t = tables;
    t.num_layers = 3;
    t.num_types = t.num_strategies = t.num_layouts = t.num_vocab = t.num_tables = 2;
    t.num_candidates = 3;
    t.layer_type = layer_type.data();
    t.strategy_layout = strategy_layout.data();
    t.vocab_layout = vocab_layout.data();
    t.table_stages = stages.data();
    t.table_microbatch = microbatch.data();
    t.table_group = group.data();
    t.valid = valid.data();
    t.forward_s = forward.data();
    t.backward_s = backward.data();
    t.tail_s = tail.data();
    t.static_bytes = fixed.data();
    t.activation_bytes = activation.data();
    t.transient_bytes = transient.data();
    t.shared_bytes = shared.data();
    t.redistribute_forward_s = move_forward.data();
    t.redistribute_backward_s = move_backward.data();
    t.send_s = send.data();
    t.vocab_valid = vocab_valid.data();
    t.vocab_forward_s = vocab_forward.data();
    t.vocab_backward_s = vocab_backward.data();
    t.vocab_tail_s = vocab_tail.data();
    t.vocab_static_bytes = vocab_fixed.data();
    t.vocab_activation_bytes = vocab_activation.data();
    t.vocab_transient_bytes = vocab_transient.data();
    t.vocab_shared_bytes = vocab_shared.data();
    t.stage_fixed_bytes = stage_fixed.data();
    t.candidate_table = candidate_table.data();
    t.candidate_microbatches = microbatches.data();
    t.stage_allowed = stage_allowed.data();
  }
  ByHand(const ByHand&) = delete;
  ByHand& operator=(const ByHand&) = delete;
};

Instance instance(const ByHand& by_hand, Bytes budget = 1 << 20) {
  SearchSettings settings;
  settings.budget = budget;
  return Instance(by_hand.tables, settings);
}

ItemPlan optimum(const Instance& in, const Item& item, double limit = kInf) {
  std::int64_t states = 0;
  autopar::Monitor monitor;
  const autopar::Watch watch(monitor);
  return solve_item(in, item, limit, watch, states);
}

}  // namespace

TEST_CASE("ticks are seconds without rounding, and leave room for every sum") {
  const ByHand by_hand;
  const Instance in = instance(by_hand);
  for (const double seconds : {0.0, 0.125, 2.5, 31.75})
    CHECK(in.scale.seconds(in.scale.ticks(seconds)) == seconds);
  CHECK(in.scale.ticks(31.75) < kForbidden);
  CHECK(in.forward[in.row(1, 1, 1)] == in.scale.ticks(1.5));
  CHECK(in.backward[in.row(0, 1, 0)] == in.scale.ticks(4));
  CHECK(in.vocab_backward[in.vocab_row(1, 2, 1)] == in.scale.ticks(2));
  CHECK(TickScale(0.0).ticks(0.0) == 0);
}

TEST_CASE("an instance counts layers, samples and what an item may use") {
  const ByHand by_hand;
  const Instance in = instance(by_hand);
  CHECK(in.count == std::vector<int>{2, 1});
  CHECK(in.prefix == std::vector<int>{0, 0, 1, 0, 2, 0, 2, 1});
  const Item item{2, 1, kAllLayouts, -1};
  CHECK(in.stages(item) == 2);
  CHECK(in.microbatches(item) == 4);
  CHECK(in.batch(item) == 8);
  CHECK(in.batch({1, 0, kAllLayouts, -1}) == 8);
  CHECK(in.allowed(item, 0, 0));
  CHECK(in.allowed(item, 0, 1));
  CHECK_FALSE(in.allowed({2, 1, 0b10, -1}, 0, 0));  // without its layout
  CHECK(in.allowed({2, 1, 0b10, -1}, 0, 1));
  CHECK_FALSE(in.allowed({2, 1, kAllLayouts, 1}, 0, 0));  // the other strategy only
  ByHand ruled;
  ruled.tables.num_stage_rules = 1;  // stage 0 may not use strategy 1
  const Instance rules = instance(ruled);
  CHECK_FALSE(rules.allowed(item, 0, 1));
  CHECK(rules.allowed(item, 1, 1));
}

TEST_CASE("what any embedding costs at least is the least of each component") {
  ByHand by_hand;
  const Instance in = instance(by_hand);
  const VocabCost any = in.vocab_cost({2, kAnyVocab, kAllLayouts, -1}, 1, 1);
  CHECK(any.forward == in.scale.ticks(0.5));  // of embedding 0
  CHECK(any.backward == in.scale.ticks(1));
  CHECK(any.tail == in.scale.ticks(0.125));  // of embedding 1, like what follows
  CHECK(any.fixed == 6);
  CHECK(any.activation == 1);
  CHECK(any.transient == 2);
  CHECK(any.shared == 1);
  const VocabCost once = in.vocab_cost({0, 0, kAllLayouts, -1}, 0, 0);
  CHECK(once.forward == in.scale.ticks(1));
  CHECK(once.fixed == 50);
  CHECK(once.transient == 9);
  CHECK(in.vocabs({2, kAnyVocab, kAllLayouts, -1}) == std::vector<int>{0, 1});
  by_hand.vocab_valid[2] = 0;  // embedding 0 in table 1
  CHECK(in.vocabs({2, kAnyVocab, kAllLayouts, -1}) == std::vector<int>{1});
  CHECK(in.vocabs({2, 0, kAllLayouts, -1}).empty());
}

TEST_CASE("bounds without memory are sums that can be added up by hand") {
  ByHand by_hand;
  const Instance in = instance(by_hand);
  const auto bound_s = [&](const Item& item) {
    return in.simple_bound(item) * in.scale.seconds(1);
  };
  // m = 2: layers 2 * (2 * 3 + 0.5) + (2 * 6 + 0.5), embedding 2 * 3 + 0.25
  CHECK(bound_s({1, 0, kAllLayouts, -1}) == 31.75);
  // p = 2, m = 4: layers 6 and embedding 3 are 9, the slower stage 4.5; half of the tails 0.75
  CHECK(bound_s({2, 0, kAllLayouts, -1}) == 9 + 3 * 4.5 + 0.375);
  CHECK(bound_s({1, 0, kAllLayouts, 1}) == 2 * 12.25 + 18 + 6.25);  // strategy 1 only
  CHECK(in.simple_bound({1, 0, 0, -1}) == kInf);                    // no layout is left
  by_hand.tables.division = {3};
  CHECK(instance(by_hand).simple_bound({2, 0, kAllLayouts, -1}) == kInf);  // two stages, not one
  by_hand.tables.division.clear();
  by_hand.microbatches[2] = 1;
  CHECK(in.simple_bound({2, 0, kAllLayouts, -1}) == kInf);  // 1F1B needs m >= p
}

TEST_CASE("types that are alike in everything are one, others are not") {
  ByHand by_hand;
  const auto like_first = [](auto& values, std::size_t width) {
    for (std::size_t i = 0; i < values.size(); i += 2 * width)
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(i), width,
                  values.begin() + static_cast<std::ptrdiff_t>(i + width));
  };
  like_first(by_hand.forward, 2);
  like_first(by_hand.backward, 2);
  like_first(by_hand.tail, 2);
  like_first(by_hand.fixed, 2);
  like_first(by_hand.activation, 2);
  CHECK(instance(by_hand).t.num_types == 2);  // transient bytes differ
  like_first(by_hand.transient, 2);
  const Instance in = instance(by_hand);
  CHECK(in.t.num_types == 1);
  CHECK(in.count == std::vector<int>{3});
  CHECK(in.prefix == std::vector<int>{0, 1, 2, 3});
  CHECK(in.forward[in.row(1, 0, 1)] == in.scale.ticks(1));
  CHECK(in.send.size() == 4);
  const Tables& given = by_hand.tables;  // which stays as it was
  CHECK(given.num_types == 2);
  CHECK(given.layer_type[2] == 1);
  const ItemPlan plan = optimum(in, {2, 0, kAllLayouts, -1});
  const Choice choice{2, 0, in.scale.seconds(plan.step), plan.stage_sizes, plan.strategies};
  SearchSettings settings;
  settings.budget = 1 << 20;
  CHECK(planner_plans::priced(given, settings, choice).step_s == choice.step_time_s);
  by_hand.send[1] += 1;
  CHECK(instance(by_hand).t.num_types == 2);
}

TEST_CASE("the most micro-batches of a table stand for fewer where memory is the same") {
  ByHand by_hand;
  by_hand.candidate_table = {0, 0, 0};
  by_hand.tables.candidate_table = by_hand.candidate_table.data();
  {
    const Instance in = instance(by_hand);  // one stage, m = 1, 2, 4
    CHECK(in.fewer_microbatches(2) == 1);
    CHECK(in.fewer_microbatches(1) == -1);  // a single one keeps less
    CHECK(in.fewer_microbatches(0) == -1);
    CHECK(in.most_microbatches(1) == 2);
    CHECK(in.most_microbatches(0) == 0);
    // least tails 2 * 0.25 + 0 are shared by half as many micro-batches of 4 samples
    const Item more{2, 0, kAllLayouts, -1}, fewer{1, 0, kAllLayouts, -1};
    const double slower = in.at_least_slower(more, 1) * in.scale.seconds(1);
    CHECK(slower == 0.5 * (1.0 / 2 - 1.0 / 4) / 4);
    const auto per_sample = [&](const Item& item) {
      return in.scale.seconds(optimum(in, item).step) / static_cast<double>(in.batch(item));
    };
    CHECK(per_sample(fewer) >= per_sample(more) + slower);
  }
  std::fill(by_hand.candidate_table.begin(), by_hand.candidate_table.end(), 1);
  {
    const Instance in = instance(by_hand);  // two stages: 1F1B cannot have a single one
    CHECK(in.fewer_microbatches(2) == 1);
    CHECK(in.fewer_microbatches(1) == -1);
    CHECK(in.at_least_slower({2, 0, kAllLayouts, -1}, 1) * in.scale.seconds(1) ==
          1.5 * (1.0 / 2 - 1.0 / 4) / 2);
  }
  by_hand.tables.gpipe = true;  // keeps every micro-batch
  CHECK(instance(by_hand).fewer_microbatches(2) == -1);
}

TEST_CASE("optima and smallest budgets of items worked out by hand") {
  autopar::Monitor monitor;
  const autopar::Watch watch(monitor);
  ByHand by_hand;
  const Item one{1, 0, kAllLayouts, -1}, two{2, 0, kAllLayouts, -1};
  {
    const Instance in = instance(by_hand, 1511);  // 1000 + 55 + 403 + 40 + 10 + 3, to the byte
    const ItemPlan plan = optimum(in, one);
    CHECK(in.scale.seconds(plan.step) == 31.75);
    CHECK(plan.strategies == std::vector<int>{0, 0, 0});
    CHECK(plan.stage_sizes == std::vector<int>{3});
    CHECK(plan.exact);
  }
  {
    const Instance in = instance(by_hand, 1510);
    CHECK(in.scale.seconds(optimum(in, one).step) > 31.75);
    CHECK(optimum(in, one, 31.75 / in.scale.seconds(1)).step == kInfTicks);
  }
  {
    const Instance in = instance(by_hand);
    const ItemPlan plan = optimum(in, two);
    // 1F1B: both stages 4.5 + 0.125; the larger tail is that of the first stage
    CHECK(in.scale.seconds(plan.step) == 5 * 4.625 + 0.75);
    CHECK(plan.stage_sizes == std::vector<int>{2, 1});
    CHECK(plan.strategies == std::vector<int>{0, 0, 0});
    int stage = -1;
    // all layers with strategy 1: 1000 + 55 + 43 + 4 + 10 + 3
    CHECK(smallest_budget(in, one, kInfBytes / 4, stage, watch) == 1115);
    CHECK(stage == 0);
    CHECK(smallest_budget(in, one, 1115, stage, watch) == 1115);  // nothing below the limit
  }
  by_hand.tables.gpipe = true;
  const Instance in = instance(by_hand);
  // GPipe: 9 + 3 * (1.5 + 3) + 2 * 0.125 + 0.75
  CHECK(in.scale.seconds(optimum(in, two).step) == 23.5);
}

TEST_CASE("bounds of an item are never above its optimum; the limit does not change it") {
  autopar::Monitor monitor;
  const autopar::Watch watch(monitor);
  int solved = 0, without = 0;
  for (const char* file : {"small.dump", "wild.dump", "large.dump"})
    for (const auto& problem : planner_dump::read(file)) {
      CAPTURE(problem->name);
      const Tables& t = problem->tables;
      const Instance in(t, problem->settings);
      SearchSettings unlimited = problem->settings;
      unlimited.budget = kInfBytes / 2;
      const Instance free(t, unlimited);
      double best = kInf;
      const int first = problem->settings.uniform ? 0 : -1;
      const int last = problem->settings.uniform ? t.num_strategies : 0;
      for (int q = 0; q < t.num_candidates; ++q)
        for (int e = 0; e < t.num_vocab; ++e)
          for (int s = first; s < last; ++s) {
            const Item item{q, e, kAllLayouts, s}, any{q, kAnyVocab, kAllLayouts, s};
            if (in.simple_bound(item) == kInf) continue;
            const ItemPlan plan = optimum(in, item);
            int stage = -1;
            const Bytes need = smallest_budget(free, item, kInfBytes / 4, stage, watch);
            CHECK((need <= problem->settings.budget) == (plan.step < kInfTicks));
            if (plan.step >= kInfTicks) {
              ++without;
              continue;
            }
            ++solved;
            const double step = static_cast<double>(plan.step);
            const double most = step * (1.0 + 1e-12);
            CHECK(in.simple_bound(item) <= most);
            CHECK(in.simple_bound(any) <= most);
            const double relaxed = relaxed_bound(in, item, kInf, watch);
            CHECK(relaxed <= most);
            CHECK(relaxed_bound(in, any, kInf, watch) <= relaxed * (1.0 + 1e-12));
            CHECK(relaxed_bound(free, item, kInf, watch) <= relaxed * (1.0 + 1e-12));
            // independent of other results: the optimum, and of equally fast plans the one that is
            // found below it, do not change
            const ItemPlan settled = optimum(in, item, step);
            for (const double factor : {1.0, 1.01, 1.5}) {
              const ItemPlan again = optimum(in, item, step * factor);
              CHECK(again.step == plan.step);
              const ItemPlan below = optimum(in, item, static_cast<double>(again.step));
              CHECK(below.stage_sizes == settled.stage_sizes);
              CHECK(below.strategies == settled.strategies);
            }
            if (plan.step > 0)
              CHECK(optimum(in, item, step * (1.0 - 1e-9) - 1.0).step == kInfTicks);
            const Choice choice{q, e, in.scale.seconds(plan.step), plan.stage_sizes,
                                plan.strategies};
            const auto price = planner_plans::priced(t, problem->settings, choice);
            CHECK(price.allowed);
            CHECK(price.peak <= problem->settings.budget);
            CHECK(choice.step_time_s == doctest::Approx(price.step_s).epsilon(1e-9));
            best = std::min(best, step / static_cast<double>(in.batch(item)));
          }
      REQUIRE((best < kInf) == problem->answer.found);
      if (!problem->answer.found) continue;
      const Item winner{problem->answer.best.candidate, problem->answer.best.vocab, kAllLayouts,
                        -1};
      CHECK(in.scale.seconds(1) * best * static_cast<double>(in.batch(winner)) ==
            doctest::Approx(problem->answer.best.step_time_s).epsilon(1e-12));
    }
  CHECK(solved >= 150);
  CHECK(without >= 30);
}

namespace {

// The frontier beats every point for any exit of the previous stage; the quick point is one of
// them.
template <int D>
void check_stages(int rounds) {
  std::mt19937 random(D);
  int feasible = 0, quick_found = 0;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    const RandomStage<D> stage(random);
    const StageProblem<D>& p = stage.problem;
    const auto all = stage.all();
    std::int64_t states = 0;
    const auto frontier = solve_stage_frontier<D>(p, states);
    REQUIRE(frontier.empty() == all.empty());
    const auto quick = quick_point<D>(p);
    if (quick) {
      ++quick_found;
      CHECK(contains(all, *quick));
      CHECK(quick->bytes <= p.budget);
    }
    if (all.empty()) continue;
    ++feasible;
    CHECK(states > 0);
    for (const auto& point : frontier) CHECK(contains(all, point));
    const auto behind = [&](int from, const StagePoint<D>& point) {
      return p.predecessor == nullptr
                 ? point.cost
                 : point.cost + (*p.predecessor)[planner_plans::at(from * p.num_layouts +
                                                                   point.first_layout)];
    };
    for (const auto& point : all)
      for (int from = 0; from < p.num_layouts; ++from)
        CHECK(std::any_of(frontier.begin(), frontier.end(), [&](const auto& kept) {
          return (D == 1 || kept.exit_layout == point.exit_layout) &&
                 no_slower<D>(behind(from, kept), behind(from, point));
        }));
  }
  CHECK(feasible > rounds / 4);
  CHECK(quick_found > feasible / 2);
  CHECK(feasible < rounds);
}

}  // namespace

namespace {

// Ways to run a stage that the bound admits keep their options, and a frontier of these is as good
// as any of them.
template <int D>
void check_narrowed(int rounds) {
  std::mt19937 random(D + 10);
  int narrowed = 0, fewer_layouts = 0, through = 0;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    RandomStage<D> stage(random);
    const auto all = stage.all();
    if (all.empty()) continue;
    const auto vector = [&](const StagePoint<D>& point) {
      typename StepBound<D>::Vector cost{};
      const std::size_t entries = D == 1 ? 1 : D + 3;
      for (std::size_t d = 0; d < entries; ++d) cost[d] = stage.problem.bound.entry(point.cost, d);
      return cost;
    };
    // a limit that some of them are within
    StageProblem<D>& p = stage.problem;
    p.bound.tail_weight = 0.25;
    p.bound.incumbent = p.bound.least(vector(all[random() % all.size()]));
    const Narrowed<D> narrow(p);
    std::size_t before = 0, after = 0;
    for (const auto& options : p.options) before += options.size();
    if (narrow.possible()) {
      for (const auto& options : narrow.problem().options) after += options.size();
      narrowed += after < before;
      fewer_layouts += narrow.problem().num_layouts < p.num_layouts;
    }
    std::int64_t states = 0;
    const auto frontier = solve_stage_frontier<D>(p, states);
    for (const auto& point : all) {
      if (p.bound.prunes(vector(point))) continue;
      ++through;
      REQUIRE(narrow.possible());
      for (std::size_t i = 0; i < point.strategies.size(); ++i) {
        const auto& kept = narrow.problem().options[planner_plans::at(p.layer_type[i])];
        CHECK(std::any_of(kept.begin(), kept.end(), [&](const auto& option) {
          return option.strategy == point.strategies[i];
        }));
      }
      CHECK(std::any_of(frontier.begin(), frontier.end(), [&](const auto& kept) {
        return p.bound.least(vector(kept)) <= p.bound.least(vector(point));
      }));
    }
  }
  CHECK(narrowed > rounds / 8);
  CHECK(fewer_layouts > rounds / 16);
  CHECK(through > rounds);
}

}  // namespace

TEST_CASE("options are left out that nothing within the bound has") {
  SUBCASE("one stage") { check_narrowed<1>(1500); }
  SUBCASE("1F1B") { check_narrowed<2>(1500); }
  SUBCASE("GPipe") { check_narrowed<3>(1500); }
}

namespace {

// Below a floor tails are alike, and a frontier of few points is as good as all of them.
template <int D>
void check_floor(int rounds) {
  std::mt19937 random(D + 20);
  int fewer = 0;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    RandomStage<D> stage(random);
    StageProblem<D>& p = stage.problem;
    std::int64_t states = 0;
    const std::size_t whole = solve_stage_frontier<D>(p, states).size();
    p.tail_floor = static_cast<Ticks>(random() % 40);
    const auto frontier = solve_stage_frontier<D>(p, states);
    fewer += frontier.size() < whole;
    const auto behind = [&](int from, const StagePoint<D>& point) {
      Cost<D> cost = point.cost;
      if (p.predecessor != nullptr)
        cost =
            cost + (*p.predecessor)[planner_plans::at(from * p.num_layouts + point.first_layout)];
      cost[D - 1] = std::max(cost[D - 1], p.tail_floor);
      return cost;
    };
    for (const auto& point : stage.all())
      for (int from = 0; from < p.num_layouts; ++from)
        CHECK(std::any_of(frontier.begin(), frontier.end(), [&](const auto& kept) {
          return kept.exit_layout == point.exit_layout &&
                 no_slower<D>(behind(from, kept), behind(from, point));
        }));
  }
  CHECK(fewer > rounds / 16);
}

}  // namespace

TEST_CASE("shorter tails than that of another stage are alike") {
  SUBCASE("1F1B") { check_floor<2>(1000); }
  SUBCASE("GPipe") { check_floor<3>(1000); }
}

TEST_CASE("stage frontiers beat every way to run the stage, quick points are such a way") {
  SUBCASE("one stage") { check_stages<1>(1500); }
  SUBCASE("1F1B") { check_stages<2>(1500); }
  SUBCASE("GPipe") { check_stages<3>(1500); }
}
