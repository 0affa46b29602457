// Random problems, also with hostile values: the planner answers or refuses by name, with the same
// result when called twice. Meant for the sanitizers (`make asan`); `make fuzz` runs it for longer,
// from a random seed.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "planner/problem.hpp"
#include "planner/stage/solve_stage.hpp"
#include "planner_plans.hpp"

using autopar::Bytes;
using autopar::Choice;
using autopar::Outcome;
using autopar::search_plan;
using autopar::SearchSettings;
using autopar::solve_stage;
using autopar::StageAnswer;
using autopar::StageArrays;
using autopar::Status;
using autopar::Tables;
using planner_plans::at;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  // The engine's sequence is the same on all platforms, that of the standard's distributions is
  // not.
  int below(int most) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(most)); }
  bool one_in(int chances) { return below(chances) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

// Magnitude of numbers: similar and often equal, or any magnitude that is allowed.
struct Magnitude {
  bool wild;
  double seconds(Random& random) const {
    if (!wild) return random.below(6) * 0.125;
    return random.of({0.0, 1e-300, 1e-12, 3e-5, 0.1, 7.0, 1e9, 1e40});
  }
  std::int64_t bytes(Random& random) const {
    if (!wild) return random.below(12);
    return random.of<std::int64_t>({0, 1, 1000, 1 << 20, 1234567890, std::int64_t{1} << 34});
  }
};

// A problem that owns its arrays.
struct Problem {
  Tables tables;
  SearchSettings settings;
  std::vector<std::int32_t> layer_type, strategy_layout, vocab_layout, table_stages, table_group,
      candidate_table, candidate_microbatches;
  std::vector<std::int64_t> table_microbatch;
  std::vector<std::uint8_t> valid, vocab_valid, stage_allowed;
  std::vector<std::vector<double>> seconds;      // every array of seconds
  std::vector<std::vector<std::int64_t>> bytes;  // every array of bytes

  explicit Problem(Random& random) {
    const Magnitude size{random.one_in(3)};
    Tables& t = tables;
    t.gpipe = random.one_in(2);
    t.num_layers = 1 + random.below(7);
    t.num_types = 1 + random.below(3);
    t.num_strategies = 1 + random.below(5);
    t.num_layouts = 1 + random.below(3);
    t.num_vocab = 1 + random.below(3);
    t.num_tables = 1 + random.below(3);
    t.num_candidates = 1 + random.below(4);
    t.num_stage_rules = random.one_in(4) ? random.below(4) : 0;
    const auto fill = [&](auto& values, int length, auto make) {
      for (int i = 0; i < length; ++i) values.push_back(make());
      return values.data();
    };
    t.layer_type = fill(layer_type, t.num_layers, [&] { return random.below(t.num_types); });
    t.strategy_layout =
        fill(strategy_layout, t.num_strategies, [&] { return random.below(t.num_layouts); });
    t.vocab_layout = fill(vocab_layout, t.num_vocab, [&] { return random.below(t.num_layouts); });
    t.table_stages = fill(table_stages, t.num_tables, [&] { return 1 + random.below(5); });
    t.table_microbatch = fill(table_microbatch, t.num_tables, [&] { return 1 + random.below(8); });
    t.table_group = fill(table_group, t.num_tables, [&] { return random.below(2); });
    t.candidate_table =
        fill(candidate_table, t.num_candidates, [&] { return random.below(t.num_tables); });
    t.candidate_microbatches = fill(candidate_microbatches, t.num_candidates, [&] {
      return random.of({1, 2, 5, 8, size.wild ? 1 << 20 : 3});
    });
    const int rows = t.num_tables * t.num_types * t.num_strategies;
    const int moves = t.num_tables * t.num_types * t.num_layouts * t.num_layouts;
    const int vocab = t.num_tables * 3 * t.num_vocab;
    const auto often = [&]() -> std::uint8_t { return random.one_in(8) ? 0 : 1; };
    t.valid = fill(valid, rows, often);
    t.vocab_valid = fill(vocab_valid, t.num_tables * t.num_vocab, often);
    t.stage_allowed = fill(stage_allowed, t.num_stage_rules * t.num_strategies, often);
    seconds.reserve(16);
    bytes.reserve(16);
    const auto some_seconds = [&](int length) -> const double* {
      seconds.emplace_back();
      return fill(seconds.back(), length, [&] { return size.seconds(random); });
    };
    const auto some_bytes = [&](int length) -> const std::int64_t* {
      bytes.emplace_back();
      return fill(bytes.back(), length, [&] { return size.bytes(random); });
    };
    for (const double** array : {&t.forward_s, &t.backward_s, &t.tail_s})
      *array = some_seconds(rows);
    for (const double** array : {&t.redistribute_forward_s, &t.redistribute_backward_s})
      *array = some_seconds(moves);
    t.send_s = some_seconds(t.num_tables * t.num_types * t.num_layouts);
    for (const double** array : {&t.vocab_forward_s, &t.vocab_backward_s, &t.vocab_tail_s})
      *array = some_seconds(vocab);
    for (const std::int64_t** array : {&t.static_bytes, &t.transient_bytes})
      *array = some_bytes(2 * rows);
    for (const std::int64_t** array : {&t.activation_bytes, &t.shared_bytes})
      *array = some_bytes(rows);
    for (const std::int64_t** array : {&t.vocab_static_bytes, &t.vocab_transient_bytes})
      *array = some_bytes(2 * vocab);
    for (const std::int64_t** array : {&t.vocab_activation_bytes, &t.vocab_shared_bytes})
      *array = some_bytes(vocab);
    t.stage_fixed_bytes = some_bytes(t.num_tables * 4);
    if (random.one_in(6)) {
      t.division.assign(at(1 + random.below(t.num_layers)), 1);
      for (int left = t.num_layers - static_cast<int>(t.division.size()); left > 0; --left)
        ++t.division[at(random.below(static_cast<int>(t.division.size())))];
    }
    settings.budget = size.wild ? size.bytes(random) * (1 + random.below(50)) : random.below(300);
    settings.alternatives = random.below(4);
    settings.uniform = random.one_in(6);
    settings.time_limit_s = 10.0;  // far above what these need
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  template <class T>
  static void put(Random& random, std::vector<T>& values, std::initializer_list<T> hostile) {
    if (values.empty()) return;
    values[at(random.below(static_cast<int>(values.size())))] = random.of(hostile);
  }

  // Writes a value that no table of a cost model contains at a random place.
  void spoil(Random& random) {
    constexpr std::int32_t big = std::numeric_limits<std::int32_t>::max();
    constexpr std::int32_t small = std::numeric_limits<std::int32_t>::min();
    switch (random.below(12)) {
      case 0:
      case 1:
      case 2:
        put(random, seconds[at(random.below(static_cast<int>(seconds.size())))],
            {kNaN, -kInf, kInf, -1.0, -1e-300, 1e300, 1e150, 5e-324});
        break;
      case 3:
      case 4:
      case 5:
        put(random, bytes[at(random.below(static_cast<int>(bytes.size())))],
            {kMin, kMax, std::int64_t{-1}, std::int64_t{1} << 62, std::int64_t{1} << 56});
        break;
      case 6:
        put(random, layer_type, {-1, tables.num_types, big, small});
        break;
      case 7:
        put(random, random.one_in(2) ? strategy_layout : vocab_layout,
            {-1, tables.num_layouts, big, small});
        break;
      case 8:
        put(random, candidate_table, {-1, tables.num_tables, big, small});
        break;
      case 9:
        put(random, random.one_in(2) ? table_stages : candidate_microbatches,
            {0, -1, big, small, 1 << 30});
        break;
      case 10:
        put(random, table_microbatch, {kMin, std::int64_t{0}, kMax, std::int64_t{1} << 31});
        break;
      default:
        settings.budget = random.of({kMin, std::int64_t{-1}, kMax, std::int64_t{1} << 60});
        settings.alternatives = random.of({-1, 0, big});
        settings.time_limit_s = random.of({kNaN, -1.0, kInf, 1e-9});
        tables.division = {random.of({-1, 0, big}), random.of({1, big})};
    }
  }
};

void check_same(const Choice& a, const Choice& b) {
  CHECK(a.candidate == b.candidate);
  CHECK(a.vocab == b.vocab);
  CHECK(a.step_time_s == b.step_time_s);
  CHECK(a.stage_sizes == b.stage_sizes);
  CHECK(a.strategies == b.strategies);
}

void check_answer(Problem& problem) {
  const Outcome one = search_plan(problem.tables, problem.settings);
  const Outcome again = search_plan(problem.tables, problem.settings);
  REQUIRE(one.status != Status::kTimeLimit);
  CHECK(again.status == one.status);
  check_same(again.best, one.best);
  CHECK(again.bound_s_per_sample == one.bound_s_per_sample);
  REQUIRE(again.alternatives.size() == one.alternatives.size());
  for (std::size_t i = 0; i < one.alternatives.size(); ++i)
    check_same(again.alternatives[i], one.alternatives[i]);
  CHECK(again.smallest_budget == one.smallest_budget);
  CHECK(one.found == (one.status == Status::kOptimal));
  if (!one.found) return;
  const auto price = planner_plans::priced(problem.tables, problem.settings, one.best);
  CHECK(price.allowed);
  CHECK(price.peak <= problem.settings.budget);
  // without any time, a plan is still found, and it fits
  problem.settings.time_limit_s = 1e-9;
  const Outcome early = search_plan(problem.tables, problem.settings);
  REQUIRE(early.found);
  const auto first = planner_plans::priced(problem.tables, problem.settings, early.best);
  CHECK(first.allowed);
  CHECK(first.peak <= problem.settings.budget);
  CHECK(early.bound_s_per_sample <= one.bound_s_per_sample * (1.0 + 1e-9));
}

// True when the planner refused, with a sentence.
bool refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).size() > 20);
    return true;
  }
  return false;
}

bool fuzz_stage(Random& random, bool hostile) {
  const bool wild = random.one_in(3);
  const Magnitude size{wild};
  const int layers = 1 + random.below(5), strategies = 1 + random.below(4);
  std::vector<double> time, memory, transient, moves;
  for (int i = 0; i < layers * strategies; ++i) {
    time.push_back(random.one_in(9) ? kInf : size.seconds(random));
    memory.push_back(random.one_in(9) ? kInf : static_cast<double>(size.bytes(random)) / 3);
    transient.push_back(static_cast<double>(size.bytes(random)));
  }
  for (int i = 0; i < layers * strategies * strategies; ++i)
    moves.push_back(random.one_in(9) ? kInf : size.seconds(random));
  if (hostile)
    for (auto* values : {&time, &memory, &transient, &moves})
      if (random.one_in(3))
        Problem::put(random, *values, {kNaN, -kInf, -1.0, 1e300, 1e150, 5e-324});
  StageArrays in;
  in.num_layers = layers;
  in.num_strategies = strategies;
  in.time_s = time.data();
  in.memory_bytes = memory.data();
  in.transition_s = moves.data();
  if (random.one_in(2)) in.transient_bytes = transient.data();
  in.budget_bytes = random.of({0.0, 7.5, 40.0, 1e9, 1e30, kInf});
  if (hostile && random.one_in(4)) in.budget_bytes = random.of({kNaN, -kInf, -1.0, 1e300});
  return refused([&] {
    const StageAnswer answer = solve_stage(in);
    if (!answer.feasible) return;
    REQUIRE(static_cast<int>(answer.choice.size()) == layers);
    double kept = 0.0, most = 0.0;
    for (int i = 0; i < layers; ++i) {
      const std::size_t cell = at(i * strategies + answer.choice[at(i)]);
      CHECK(std::isfinite(time[cell]));
      kept += memory[cell];
      if (in.transient_bytes != nullptr) most = std::max(most, transient[cell]);
    }
    CHECK(kept + most <= in.budget_bytes);
  });
}

// One seed: a problem, the same spoiled, and stages.
struct Counts {
  int seeds = 0, refused_tables = 0, refused_stages = 0;
};

void fuzz(std::uint64_t seed, Counts& counts) {
  CAPTURE(seed);
  Random random(seed);
  ++counts.seeds;
  {
    Problem problem(random);
    CHECK_FALSE(refused([&] { check_answer(problem); }));
  }
  {
    Problem problem(random);
    problem.settings.time_limit_s = 1.0;
    for (int i = 1 + random.below(2); i > 0; --i) problem.spoil(random);
    counts.refused_tables += refused([&] { search_plan(problem.tables, problem.settings); });
  }
  CHECK_FALSE(fuzz_stage(random, false));
  counts.refused_stages += fuzz_stage(random, true);
}

double from_environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtod(text, nullptr);
}

}  // namespace

TEST_CASE("random and hostile tables are answered or refused, never a crash") {
  using Clock = std::chrono::steady_clock;
  const double limit_s = from_environment("AUTOPAR_FUZZ_SECONDS", 0.0);
  const auto first = static_cast<std::uint64_t>(from_environment("AUTOPAR_FUZZ_SEED", 0.0));
  const Clock::time_point start = Clock::now();
  const auto enough = [&](int seeds) {  // number of seeds, unless a time is given
    if (limit_s <= 0) return seeds >= 600;
    return std::chrono::duration<double>(Clock::now() - start).count() > limit_s;
  };
  Counts counts;
  while (!enough(counts.seeds)) fuzz(first + static_cast<std::uint64_t>(counts.seeds), counts);
  MESSAGE(counts.seeds, " seeds from ", first, ", refused: ", counts.refused_tables, " tables, ",
          counts.refused_stages, " stages");
  CHECK(counts.refused_tables * 4 > counts.seeds);
  CHECK(counts.refused_stages * 4 > counts.seeds);
}
