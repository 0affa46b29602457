// solve_stage against brute force over every chain of a small stage.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "planner/stage/mix_of_three.hpp"
#include "planner/stage/solve_stage.hpp"

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Instance {
  int num_layers = 0;
  int num_strategies = 0;
  std::vector<double> time_s;
  std::vector<double> memory_bytes;
  std::vector<double> transition_s;
  std::vector<double> transient_bytes;
  double budget_bytes = 0.0;

  autopar::StageArrays arrays() const {
    return {num_layers,          num_strategies,
            time_s.data(),       memory_bytes.data(),
            transition_s.data(), transient_bytes.empty() ? nullptr : transient_bytes.data(),
            budget_bytes,        nullptr};
  }

  std::size_t at(int layer, int strategy) const {
    return static_cast<std::size_t>(layer * num_strategies + strategy);
  }

  double total_s(const std::vector<int>& choice) const {
    double total = 0.0;
    for (int i = 0; i < num_layers; ++i) {
      const int s = choice[static_cast<std::size_t>(i)];
      total += time_s[at(i, s)];
      if (i > 0) {
        const int from = choice[static_cast<std::size_t>(i - 1)];
        total += transition_s[static_cast<std::size_t>(
            (i * num_strategies + from) * num_strategies + s)];
      }
    }
    return total;
  }

  double bytes(const std::vector<int>& choice) const {
    double sum = 0.0;
    double transient = 0.0;
    for (int i = 0; i < num_layers; ++i) {
      const std::size_t k = at(i, choice[static_cast<std::size_t>(i)]);
      sum += memory_bytes[k];
      if (!transient_bytes.empty()) transient = std::max(transient, transient_bytes[k]);
    }
    return sum + transient;
  }

  // The smallest total of all chains that fit; infinite if none does.
  double best_s() const {
    std::vector<int> choice(static_cast<std::size_t>(num_layers), 0);
    double best = kInf;
    while (true) {
      if (bytes(choice) <= budget_bytes) best = std::min(best, total_s(choice));
      std::size_t i = 0;
      while (i < choice.size() && ++choice[i] == num_strategies) choice[i++] = 0;
      if (i == choice.size()) return best;
    }
  }
};

// Layers that are all the same, with the same transition between any two of them.
Instance equal_layers(std::mt19937& random) {
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  Instance x;
  x.num_layers = 2 + below(6);
  x.num_strategies = 2 + below(3);
  std::vector<double> moves;
  for (int k = 0; k < x.num_strategies * x.num_strategies; ++k)
    moves.push_back(below(3) == 0 ? 0.0 : below(9) == 0 ? kInf : 0.25 * below(9));
  for (int s = 0; s < x.num_strategies; ++s) {
    x.time_s.push_back(1.0 + below(30));
    x.memory_bytes.push_back(1.0 + below(30));
    x.transient_bytes.push_back(below(2) * below(8));
  }
  for (int i = 0; i < x.num_layers; ++i)
    x.transition_s.insert(x.transition_s.end(), moves.begin(), moves.end());
  for (std::vector<double>* row : {&x.time_s, &x.memory_bytes, &x.transient_bytes}) {
    const std::vector<double> once = *row;
    for (int i = 1; i < x.num_layers; ++i) row->insert(row->end(), once.begin(), once.end());
  }
  x.budget_bytes = x.num_layers * (2 + below(24)) + below(5);
  return x;
}

// Whole numbers of seconds and bytes, so that ties and exact fits are common.
Instance random_instance(std::mt19937& random) {
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  Instance x;
  x.num_layers = 1 + below(5);
  x.num_strategies = 1 + below(4);
  const int cells = x.num_layers * x.num_strategies;
  const bool equal_layers = below(2) == 0;
  const bool transients = below(2) == 0;
  for (int k = 0; k < cells; ++k) {
    const bool repeat = equal_layers && k >= x.num_strategies;
    const auto before = static_cast<std::size_t>(repeat ? k - x.num_strategies : 0);
    x.time_s.push_back(repeat ? x.time_s[before] : below(12) == 0 ? kInf : 1.0 + below(20));
    x.memory_bytes.push_back(repeat ? x.memory_bytes[before] : 1.0 + below(20));
    if (transients) x.transient_bytes.push_back(repeat ? x.transient_bytes[before] : below(8));
  }
  for (int k = 0; k < cells * x.num_strategies; ++k) {
    const bool diagonal = k / x.num_strategies % x.num_strategies == k % x.num_strategies;
    x.transition_s.push_back(diagonal ? 0.0 : below(4));
  }
  x.budget_bytes = x.num_layers * (2 + below(16));
  return x;
}

}  // namespace

TEST_CASE("solve_stage finds what brute force finds") {
  std::mt19937 random(20240229);
  int feasible = 0;
  for (int round = 0; round < 3000; ++round) {
    const Instance x = random_instance(random);
    const double best = x.best_s();
    const autopar::StageAnswer answer = autopar::solve_stage(x.arrays());
    CAPTURE(round);
    REQUIRE(answer.feasible == (best < kInf));
    if (!answer.feasible) continue;
    ++feasible;
    REQUIRE(answer.choice.size() == static_cast<std::size_t>(x.num_layers));
    CHECK(x.bytes(answer.choice) <= x.budget_bytes);
    CHECK(x.total_s(answer.choice) == doctest::Approx(best).epsilon(1e-12));
  }
  CHECK(feasible > 1000);
  CHECK(feasible < 2900);  // the mix also has infeasible instances
}

TEST_CASE("solve_stage finds what brute force finds where all layers are the same") {
  std::mt19937 random(17);
  for (int round = 0; round < 3000; ++round) {
    const Instance x = equal_layers(random);
    const double best = x.best_s();
    const autopar::StageAnswer answer = autopar::solve_stage(x.arrays());
    CAPTURE(round);
    REQUIRE(answer.feasible == (best < kInf));
    if (!answer.feasible) continue;
    CHECK(x.total_s(answer.choice) == doctest::Approx(best).epsilon(1e-12));
    CHECK(answer.total_s == doctest::Approx(best).epsilon(1e-12));
    CHECK(answer.memory_bytes == x.bytes(answer.choice));
    CHECK(answer.memory_bytes <= x.budget_bytes);
  }
}

TEST_CASE("a mix of three strategies is the best one where changes are free, and exists") {
  std::mt19937 random(23);
  int cheaper = 0;
  for (int round = 0; round < 500; ++round) {
    Instance x = equal_layers(random);
    x.num_strategies = 3;
    const std::size_t n = static_cast<std::size_t>(x.num_layers);
    autopar::StageProblem<1> problem;
    problem.num_layouts = 1;
    problem.layer_type.assign(n, 0);
    problem.options.resize(1);
    x.time_s.clear();
    x.memory_bytes.clear();
    x.transient_bytes.clear();
    x.transition_s.assign(9 * n, 0.0);
    for (int s = 0; s < 3; ++s) {
      const auto bytes = static_cast<autopar::Bytes>(1 + random() % 30);
      const auto ticks = static_cast<autopar::Ticks>(1 + random() % 30);
      problem.options[0].push_back({s, 0, bytes, 0, 0, {ticks}});
      for (std::size_t i = 0; i < n; ++i) {
        x.time_s.resize(3 * n);
        x.memory_bytes.resize(3 * n);
        x.time_s[3 * i + static_cast<std::size_t>(s)] = static_cast<double>(ticks);
        x.memory_bytes[3 * i + static_cast<std::size_t>(s)] = static_cast<double>(bytes);
      }
    }
    problem.redistribute = {{{0}}};
    problem.entry = {{0}};
    problem.exit = {{0}};
    problem.exit_allowed = {1};
    problem.budget = static_cast<autopar::Bytes>(x.budget_bytes);
    const double best = x.best_s();
    const autopar::Ticks known = 31 * 8;
    const autopar::Ticks found = autopar::mix_of_three(problem, known);
    CAPTURE(round);
    CHECK(static_cast<double>(found) == std::min(best, static_cast<double>(known)));
    if (found < known) ++cheaper;
  }
  CHECK(cheaper > 200);
}

TEST_CASE("a budget that fits exactly is enough, one byte less is not") {
  Instance x;
  x.num_layers = 2;
  x.num_strategies = 2;
  x.time_s = {1, 5, 1, 5};
  x.memory_bytes = {10, 3, 10, 3};
  x.transition_s = std::vector<double>(8, 0.0);
  x.transient_bytes = {0, 4, 0, 4};

  x.budget_bytes = 10;  // 3 + 3 + max(4, 4)
  autopar::StageAnswer answer = autopar::solve_stage(x.arrays());
  REQUIRE(answer.feasible);
  CHECK(answer.choice == std::vector<int>{1, 1});

  x.budget_bytes = 9;
  CHECK_FALSE(autopar::solve_stage(x.arrays()).feasible);
}

TEST_CASE("the transition in front of the first layer is not charged") {
  Instance x;
  x.num_layers = 1;
  x.num_strategies = 2;
  x.time_s = {2, 3};
  x.memory_bytes = {1, 1};
  x.transition_s = {100, 0, 100, 0};  // would make strategy 0 the worse one
  x.budget_bytes = 1;
  const autopar::StageAnswer answer = autopar::solve_stage(x.arrays());
  REQUIRE(answer.feasible);
  CHECK(answer.choice == std::vector<int>{0});
}

TEST_CASE("the same question gets the same answer") {
  std::mt19937 random(7);
  for (int round = 0; round < 100; ++round) {
    const Instance x = random_instance(random);
    CHECK(autopar::solve_stage(x.arrays()).choice == autopar::solve_stage(x.arrays()).choice);
  }
}
