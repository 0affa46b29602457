// Walks over layouts and stages of equal layers, searched by counts: against every walk, against
// every way to run a stage, and against the search of labels.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "planner/stage/counts.hpp"
#include "planner/walks.hpp"
#include "random_stage.hpp"

using namespace autopar;
using planner_plans::at;
using random_stage::RandomStage, random_stage::contains, random_stage::no_slower;

namespace {

// Least costs of all walks, by first and last one, found by trying them.
struct EveryWalk {
  const std::vector<std::vector<Ticks>>& moves;
  const std::vector<int>& set;
  std::vector<int> left;
  std::vector<Ticks> least;
  std::size_t first = 0;

  EveryWalk(const std::vector<std::vector<Ticks>>& all, const std::vector<int>& layouts,
            const std::vector<int>& layers)
      : moves(all), set(layouts), left(layers), least(set.size() * set.size(), kInfTicks) {
    for (first = 0; first < set.size(); ++first) {
      --left[first];
      go(first, std::size_t{1} << first, 0);
      ++left[first];
    }
  }
  void go(std::size_t x, std::size_t seen, Ticks cost) {
    Ticks& known = least[first * set.size() + x];
    if (seen + 1 == std::size_t{1} << set.size()) known = std::min(known, cost);
    for (std::size_t y = 0; y < set.size(); ++y) {
      if (y == x || left[y] == 0) continue;
      --left[y];
      go(y, seen | std::size_t{1} << y, cost + moves[at(set[x])][at(set[y])]);
      ++left[y];
    }
  }
};

// Equal layers, whose moves have no tail: only staying in a layout is surely free.
void make_equal(StageProblem<2>& p) {
  std::fill(p.layer_type.begin(), p.layer_type.end(), p.layer_type.front());
  p.predecessor = nullptr;
  for (auto* costs : {&p.redistribute[at(p.layer_type.front())], &p.entry, &p.exit})
    for (Cost<2>& cost : *costs) cost[1] = 0;
  for (int y = 0; y < p.num_layouts; ++y)
    p.redistribute[at(p.layer_type.front())][at(y * p.num_layouts + y)] = Cost<2>{};
}

// The same stage in a form that counts do not apply to: a tail of the entry, taken from the base.
StageProblem<2> for_labels(StageProblem<2> p) {
  for (Cost<2>& cost : p.entry) cost[1] += 1;
  p.base[1] -= 1;
  return p;
}

StepBound<2>::Vector vector_of(const StepBound<2>& bound, const Cost<2>& cost) {
  StepBound<2>::Vector vector{};
  for (std::size_t d = 0; d < 5; ++d) vector[d] = bound.entry(cost, d);
  return vector;
}

// Counts find every point that the bound admits, in its first and exit layouts.
void check_counts(int rounds) {
  std::mt19937 random(32);
  int applied = 0, through = 0, several = 0;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    RandomStage<2> stage(random);
    StageProblem<2>& p = stage.problem;
    make_equal(p);
    REQUIRE(Counts::apply(p));
    const auto all = stage.all();
    if (all.empty()) continue;
    if (random() % 2 == 0) {
      OtherStages<2>& other = p.bound.others.front();
      other.largest[0] = static_cast<double>(random() % 30);
      other.largest[1] = static_cast<double>(random() % 20);
      other.most[0] = static_cast<double>(20 + random() % 30);
      other.most[1] = static_cast<double>(random() % 40);
      p.tail_floor = static_cast<Ticks>(other.largest[1]);
    }
    p.bound.incumbent = p.bound.least(vector_of(p.bound, all[random() % all.size()].cost));
    std::int64_t states = 0;
    const auto frontier = solve_stage_frontier<2>(p, states);
    several += frontier.size() > 1;
    for (const auto& point : frontier) CHECK(contains(all, point));
    const auto floored = [&](Cost<2> cost) {
      cost[1] = std::max(cost[1], p.tail_floor);
      return cost;
    };
    for (const auto& point : all) {
      if (p.bound.prunes(vector_of(p.bound, point.cost))) continue;
      ++through;
      CHECK(std::any_of(frontier.begin(), frontier.end(), [&](const auto& kept) {
        return kept.first_layout == point.first_layout && kept.exit_layout == point.exit_layout &&
               no_slower<2>(floored(kept.cost), floored(point.cost));
      }));
    }
    ++applied;
  }
  CHECK(applied > rounds / 4);
  CHECK(through > rounds);
  CHECK(several > rounds / 16);
}

// More layers than can be tried: chains of labels know the same best points.
void lengthen(StageProblem<2>& p, std::mt19937& random) {
  p.layer_type.assign(4 + random() % 6, p.layer_type.front());
  p.budget = static_cast<Bytes>(p.layer_type.size() * (2 + random() % 7));
}

}  // namespace

TEST_CASE("the cheapest walks are those of all walks") {
  std::mt19937 random(40);
  int hubs = 0;
  for (int round = 0; round < 400; ++round) {
    CAPTURE(round);
    const int layouts = 1 + static_cast<int>(random() % 5);
    std::vector<std::vector<Ticks>> moves(at(layouts), std::vector<Ticks>(at(layouts), 0));
    std::vector<Ticks> flat;
    for (int x = 0; x < layouts; ++x)
      for (int y = 0; y < layouts; ++y) {
        if (x != y) moves[at(x)][at(y)] = static_cast<Ticks>(random() % 12);
        if (x != y && random() % 8 == 0) moves[at(x)][at(y)] = kForbidden;
        flat.push_back(moves[at(x)][at(y)]);
      }
    Walks walks(flat, layouts);
    std::vector<int> set, layers;
    std::uint64_t bits = 0;
    for (int y = 0; y < layouts; ++y)
      if (set.size() < 4 && random() % 4 > 0) {
        set.push_back(y);
        bits |= std::uint64_t{1} << y;
        layers.push_back(1 + static_cast<int>(random() % 3));
      }
    if (set.empty()) continue;
    const EveryWalk every(moves, set, layers);
    const Walks::Set* over = walks.over(bits);
    REQUIRE(over != nullptr);
    CHECK(over->layouts == set);
    for (std::size_t c = 0; c < every.least.size(); ++c) {
      const std::size_t first = c / set.size(), last = c % set.size();
      const Ticks found = walks.cost(*over, layers, first, last).value();
      CHECK(over->least[c] <= found);
      if (every.least[c] >= kForbidden) {
        CHECK(found >= kForbidden);
        continue;
      }
      REQUIRE(found == every.least[c]);
      const auto walk = walks.walk(set, layers, first, last);
      CHECK(walk.front() == set[first]);
      CHECK(walk.back() == set[last]);
      Ticks cost = 0;
      for (std::size_t i = 1; i < walk.size(); ++i) cost += moves[at(walk[i - 1])][at(walk[i])];
      CHECK(cost == every.least[c]);
      for (std::size_t y = 0; y < set.size(); ++y) {
        const auto visits = std::count(walk.begin(), walk.end(), set[y]);
        CHECK(visits >= 1);
        CHECK(visits <= layers[y]);
        hubs += visits > 1 && y != first && y != last;
      }
    }
  }
  CHECK(hubs > 20);
}

TEST_CASE("walks over more layouts than a table holds are refused") {
  Walks walks(std::vector<Ticks>(100, 0), 10);
  CHECK(walks.over(0b1111111110) == nullptr);
  CHECK(walks.over(0b0011111111) != nullptr);
}

TEST_CASE("counts find every way to run equal layers that the bound admits") { check_counts(1500); }

TEST_CASE("counts do not apply where chains of the same counts differ in more than moves") {
  std::mt19937 random(50);
  RandomStage<2> stage(random);
  StageProblem<2>& p = stage.problem;
  make_equal(p);
  CHECK(Counts::apply(p));
  CHECK_FALSE(Counts::apply(for_labels(p)));
  StageProblem<2> after = p;  // a stage whose moves have a tail
  after.predecessor = &stage.boundary;
  CHECK_FALSE(Counts::apply(after));
  StageProblem<2> costly = p;
  costly.redistribute[at(p.layer_type.front())].front() = {1, 0};
  CHECK_FALSE(Counts::apply(costly));
  StageProblem<2> two = p;
  two.options.resize(3);
  two.layer_type = {0, 2};
  CHECK_FALSE(Counts::apply(two));
}

TEST_CASE("counts and labels find the same points of longer stages") {
  std::mt19937 random(60);
  int feasible = 0;
  for (int round = 0; round < 300; ++round) {
    CAPTURE(round);
    RandomStage<2> stage(random);
    StageProblem<2>& p = stage.problem;
    make_equal(p);
    lengthen(p, random);
    p.tail_floor = static_cast<Ticks>(random() % 40);
    std::int64_t counted = 0, labels = 0;
    const auto some = solve_stage_frontier<2>(p, counted);
    const auto others = solve_stage_frontier<2>(for_labels(p), labels);
    feasible += !some.empty();
    // labels drop what another first layout is as good as; the best of every exit is the same
    for (const auto* pair : {&some, &others})
      for (const auto& point : *pair) {
        const auto& rest = pair == &some ? others : some;
        CHECK(std::any_of(rest.begin(), rest.end(), [&](const auto& kept) {
          Cost<2> mine = point.cost, its = kept.cost;
          mine[1] = std::max(mine[1], p.tail_floor);
          its[1] = std::max(its[1], p.tail_floor);
          return kept.exit_layout == point.exit_layout && no_slower<2>(its, mine);
        }));
      }
  }
  CHECK(feasible > 100);
}

TEST_CASE("the best point within a tail is the least time of all that have no longer one") {
  std::mt19937 random(70);
  int found = 0, none = 0;
  for (int round = 0; round < 1500; ++round) {
    CAPTURE(round);
    RandomStage<2> stage(random);
    StageProblem<2>& p = stage.problem;
    make_equal(p);
    p.bound.microbatches_less_1 = 0.0;
    const Ticks tail = static_cast<Ticks>(random() % 40);
    Ticks least = kInfTicks;
    for (const auto& point : stage.all())
      if (point.cost[1] <= tail) least = std::min(least, point.cost[0]);
    p.tail_floor = p.most_tail = tail;
    p.bound.others.front().largest[1] = static_cast<double>(tail);
    p.bound.others.front().most[1] = static_cast<double>(tail);
    for (const StageProblem<2>& way : {p, for_labels(p)}) {
      std::int64_t states = 0;
      Ticks best = kInfTicks;
      for (const auto& point : solve_stage_frontier<2>(way, states)) {
        CHECK(point.cost[1] <= tail);
        best = std::min(best, point.cost[0]);
      }
      CHECK(best == least);
    }
    found += least < kInfTicks;
    none += least >= kInfTicks;
  }
  CHECK(found > 300);
  CHECK(none > 100);
}

TEST_CASE("a search of counts that is too long ends, and what it has found is kept") {
  std::mt19937 random(80);
  int ended = 0;
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    RandomStage<2> stage(random);
    StageProblem<2>& p = stage.problem;
    make_equal(p);
    const auto all = stage.all();
    StepBound<2> bound = p.bound;
    std::vector<Ticks> moves;
    for (const auto& move : p.redistribute[at(p.layer_type.front())]) moves.push_back(move[0]);
    Walks walks(moves, p.num_layouts);
    const CountCaps caps{p.budget - 7, 4, 3, false, false};
    if (caps.budget < 0) continue;
    const auto& options = p.options[at(p.layer_type.front())];
    Counts counts(p, options, caps, bound, walks);
    const bool done = counts.run(static_cast<std::int64_t>(random() % 40));
    ended += !done;
    for (const auto& point : counts.points())
      CHECK(std::any_of(all.begin(), all.end(), [&](const auto& known) {
        return known.strategies == point.strategies && known.cost == point.cost;
      }));
  }
  CHECK(ended > 20);
}
