// The joint planner on dumped problems (tests/data/planner): recorded answers, exhaustive search.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/problem.hpp"
#include "planner/search/knowledge.hpp"
#include "planner_dump.hpp"
#include "planner_plans.hpp"

using autopar::Bytes;
using autopar::Choice;
using autopar::Outcome;
using autopar::search_plan;
using autopar::SearchSettings;
using autopar::Status;
using autopar::Tables;
using planner_dump::Problem;
using planner_plans::batch_of;
using planner_plans::Price;
using planner_plans::priced;

namespace {

constexpr double kMostPlans = 4000;
constexpr int kFewLayers = 16;

// All files, read once.
const planner_dump::Problems& problems() {
  static const planner_dump::Problems all = [] {
    planner_dump::Problems found;
    for (const char* file : {"small.dump", "wild.dump", "large.dump", "real.dump"})
      for (auto& problem : planner_dump::read(file)) found.push_back(std::move(problem));
    return found;
  }();
  return all;
}

Outcome solved(const Problem& problem) { return search_plan(problem.tables, problem.settings); }

double s_per_sample(const Tables& t, const Choice& plan) {
  return plan.step_time_s / batch_of(t, plan.candidate);
}

double samples_per_s(const Tables& t, const Choice& plan) {
  return batch_of(t, plan.candidate) / plan.step_time_s;  // infinite for a step of no time
}

bool close(double ours, double theirs, double relative = 1e-9) {
  return ours == theirs || std::abs(ours - theirs) <= relative * std::abs(theirs);
}

void check_same(const Choice& found, const Choice& wanted) {
  CHECK(found.candidate == wanted.candidate);
  CHECK(found.vocab == wanted.vocab);
  CHECK(found.step_time_s == wanted.step_time_s);
  CHECK(found.stage_sizes == wanted.stage_sizes);
  CHECK(found.strategies == wanted.strategies);
}

void check_same(const Outcome& found, const Outcome& wanted) {
  CHECK(found.status == wanted.status);
  CHECK(found.found == wanted.found);
  check_same(found.best, wanted.best);
  CHECK(found.bound_s_per_sample == wanted.bound_s_per_sample);
  REQUIRE(found.alternatives.size() == wanted.alternatives.size());
  for (std::size_t i = 0; i < found.alternatives.size(); ++i)
    check_same(found.alternatives[i], wanted.alternatives[i]);
  CHECK(found.smallest_budget == wanted.smallest_budget);
  CHECK(found.binding_candidate == wanted.binding_candidate);
  CHECK(found.binding_stage == wanted.binding_stage);
}

// Checks that the plan is allowed, fits, and has the step time that it reports.
void check_plan(const Problem& problem, const Choice& plan) {
  const Tables& t = problem.tables;
  REQUIRE(plan.candidate >= 0);
  REQUIRE(static_cast<int>(plan.stage_sizes.size()) ==
          t.table_stages[t.candidate_table[plan.candidate]]);
  REQUIRE(static_cast<int>(plan.strategies.size()) == t.num_layers);
  const Price price = priced(t, problem.settings, plan);
  CHECK(price.allowed);
  CHECK(price.peak <= problem.settings.budget);
  CHECK(close(plan.step_time_s, price.step_s));
}

}  // namespace

TEST_CASE("the dumps hold problems of every kind") {
  std::map<std::string, int> oracles;
  int infeasible = 0, pipelines = 0, gpipe = 0, types = 0, uniform = 0, divided = 0, ruled = 0,
      alternatives = 0;
  for (const auto& problem : problems()) {
    const Tables& t = problem->tables;
    ++oracles[problem->oracle];
    infeasible += problem->answer.status == Status::kInfeasible;
    pipelines += problem->answer.best.stage_sizes.size() > 1;
    gpipe += t.gpipe;
    types += t.num_types > 1;
    uniform += problem->settings.uniform;
    divided += !t.division.empty();
    ruled += t.num_stage_rules > 0;
    alternatives += !problem->answer.alternatives.empty();
  }
  CHECK(oracles["exhaustive"] >= 30);
  CHECK(oracles["exhaustive-all"] >= 30);
  CHECK(oracles["integer-program"] >= 5);
  CHECK(oracles["priced"] >= 6);
  CHECK(infeasible >= 10);
  CHECK(pipelines >= 30);
  CHECK(gpipe >= 20);
  CHECK(types >= 40);
  CHECK(uniform >= 4);
  CHECK(divided >= 4);
  CHECK(ruled >= 5);
  CHECK(alternatives >= 15);
}

// Results of the other tests on recorded answers therefore hold for the current planner.
TEST_CASE("the recorded answer, again and again") {
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    check_same(solved(*problem), problem->answer);
    check_same(solved(*problem), problem->answer);
  }
}

TEST_CASE("the answer is as good as the oracle's, and its plans are what they say") {
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    const Outcome& found = problem->answer;
    REQUIRE(found.found == (problem->samples_per_s >= 0.0));
    if (!found.found) {
      CHECK(found.status == Status::kInfeasible);
      CHECK(found.alternatives.empty());
      continue;
    }
    const double relative = problem->oracle == "integer-program" ? 1e-6 : 1e-9;
    const double rate = samples_per_s(problem->tables, found.best);
    CHECK(close(rate, problem->samples_per_s, relative));
    CHECK(found.bound_s_per_sample <= s_per_sample(problem->tables, found.best) * (1.0 + 1e-12));
    check_plan(*problem, found.best);
    double before = rate;
    for (const Choice& other : found.alternatives) {
      check_plan(*problem, other);
      CHECK(samples_per_s(problem->tables, other) <= before);
      before = samples_per_s(problem->tables, other);
    }
  }
}

TEST_CASE("an exhaustive search finds nothing better, nor a smaller budget that works") {
  using Class = std::tuple<int, int, int, std::set<int>>;  // stages, dp type, embedding, layouts
  int searched = 0, others = 0;
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    const Tables& t = problem->tables;
    const auto plans = planner_plans::all_plans(t, problem->settings, kMostPlans);
    if (plans.empty()) continue;
    ++searched;
    const auto class_of = [&](const Choice& plan) {
      std::set<int> layouts;
      for (const int s : plan.strategies) layouts.insert(t.strategy_layout[s]);
      const int n = t.candidate_table[plan.candidate];
      return Class{t.table_stages[n], t.table_group[n], plan.vocab, layouts};
    };
    // the best plan that differs from all better ones: in kind, or without one of their layouts
    std::vector<Class> better;
    const auto best_rate = [&] {
      double best = -1.0;
      for (const auto& candidate : plans) {
        if (candidate.peak > problem->settings.budget || candidate.samples_per_s <= best) continue;
        const auto [stages, group, vocab, layouts] = class_of(candidate.plan);
        const bool repeats = std::any_of(better.begin(), better.end(), [&](const Class& c) {
          return std::get<0>(c) == stages && std::get<1>(c) == group && std::get<2>(c) == vocab &&
                 std::includes(layouts.begin(), layouts.end(), std::get<3>(c).begin(),
                               std::get<3>(c).end());
        });
        if (!repeats) best = candidate.samples_per_s;
      }
      return best;
    };
    const Outcome& found = problem->answer;
    if (!found.found) {
      CHECK(best_rate() == -1.0);
      autopar::Bytes smallest = std::numeric_limits<autopar::Bytes>::max();
      for (const auto& candidate : plans) smallest = std::min(smallest, candidate.peak);
      CHECK(found.smallest_budget == smallest);
      continue;
    }
    CHECK(close(samples_per_s(t, found.best), best_rate()));
    better.push_back(class_of(found.best));
    for (const Choice& other : found.alternatives) {
      CHECK(close(samples_per_s(t, other), best_rate()));
      better.push_back(class_of(other));
      ++others;
    }
    if (static_cast<int>(found.alternatives.size()) < problem->settings.alternatives)
      CHECK(best_rate() == -1.0);
  }
  CHECK(searched >= 40);
  CHECK(others >= 20);
}

TEST_CASE("of equally fast plans one with the fewest stages, then micro-batches, is found") {
  int tied = 0;
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    if (!problem->answer.found) continue;
    const Tables& t = problem->tables;
    const auto shape_of = [&](const Choice& plan) {
      return std::tuple(t.table_stages[t.candidate_table[plan.candidate]],
                        t.candidate_microbatches[plan.candidate]);
    };
    const auto found = shape_of(problem->answer.best);
    for (const auto& candidate : planner_plans::all_plans(t, problem->settings, kMostPlans)) {
      if (candidate.peak > problem->settings.budget ||
          candidate.samples_per_s != samples_per_s(t, problem->answer.best))
        continue;
      tied += shape_of(candidate.plan) != found;
      CHECK(found <= shape_of(candidate.plan));
    }
  }
  CHECK(tied >= 1);
}

TEST_CASE("the smallest budget is enough, one byte less is not") {
  int checked = 0;
  for (const auto& problem : problems()) {
    if (problem->answer.smallest_budget == 0) continue;
    CAPTURE(problem->name);
    const Tables& t = problem->tables;
    SearchSettings settings = problem->settings;
    settings.budget = problem->answer.smallest_budget;
    const Outcome enough = search_plan(t, settings);
    REQUIRE(enough.status == Status::kOptimal);
    CHECK(priced(t, settings, enough.best).peak == settings.budget);
    --settings.budget;
    const Outcome short_of = search_plan(t, settings);
    CHECK(short_of.status == Status::kInfeasible);
    CHECK_FALSE(short_of.found);
    CHECK(short_of.smallest_budget == problem->answer.smallest_budget);
    ++checked;
  }
  CHECK(checked >= 8);
}

TEST_CASE("a budget of exactly what the plan needs gives the same step time") {
  for (const auto& problem : problems()) {
    if (!problem->answer.found) continue;
    CAPTURE(problem->name);
    SearchSettings settings = problem->settings;
    settings.alternatives = 0;
    settings.budget = priced(problem->tables, settings, problem->answer.best).peak;
    const Outcome found = search_plan(problem->tables, settings);
    REQUIRE(found.status == Status::kOptimal);
    CHECK(close(samples_per_s(problem->tables, found.best),
                samples_per_s(problem->tables, problem->answer.best), 1e-12));
  }
}

TEST_CASE("what was proven at other budgets changes no answer") {
  int reused = 0;
  for (const auto& problem : problems()) {
    // twelve searches each: the small ones are enough, and sanitizers are slow
    if (!problem->answer.found || problem->tables.num_layers > kFewLayers) continue;
    CAPTURE(problem->name);
    SearchSettings fresh = problem->settings;
    const Bytes needs = priced(problem->tables, fresh, problem->answer.best).peak;
    autopar::Knowledge known;
    const Bytes start = fresh.budget;
    for (const Bytes budget :
         {start, needs - 1, needs - needs / 8, needs, start + start / 4, start}) {
      CAPTURE(budget);
      fresh.budget = budget;
      SearchSettings again = fresh;
      again.known = &known;
      const Outcome wanted = search_plan(problem->tables, fresh);
      const Outcome found = search_plan(problem->tables, again);
      CHECK(found.status == wanted.status);
      CHECK(found.smallest_budget == wanted.smallest_budget);
      CHECK(found.bound_s_per_sample == wanted.bound_s_per_sample);
      CHECK(found.best.step_time_s == wanted.best.step_time_s);
      CHECK(found.best.strategies == wanted.best.strategies);
      CHECK(found.best.stage_sizes == wanted.best.stage_sizes);
      REQUIRE(found.alternatives.size() == wanted.alternatives.size());
      for (std::size_t i = 0; i < found.alternatives.size(); ++i)
        CHECK(found.alternatives[i].strategies == wanted.alternatives[i].strategies);
      reused += found.opened < wanted.opened ? 1 : 0;
    }
  }
  CHECK(reused >= 20);
}

TEST_CASE("out of time there is still a plan that fits, and a bound that holds") {
  int stopped = 0;
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    for (const double limit_s : {1e-9, 2e-4}) {
      SearchSettings settings = problem->settings;
      settings.time_limit_s = limit_s;
      const Outcome found = search_plan(problem->tables, settings);
      CHECK(found.found == problem->answer.found);
      if (!found.found) continue;
      check_plan(*problem, found.best);
      const double optimum = samples_per_s(problem->tables, problem->answer.best);
      const double rate = samples_per_s(problem->tables, found.best);
      CHECK(rate <= optimum * (1.0 + 1e-12));
      CHECK(found.bound_s_per_sample <=
            s_per_sample(problem->tables, problem->answer.best) * (1.0 + 1e-9));
      if (found.status == Status::kTimeLimit)
        ++stopped;
      else
        CHECK(close(rate, optimum, 1e-12));
    }
  }
  CHECK(stopped >= 10);
}

TEST_CASE("an interrupted search ends with that status and nothing else") {
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    SearchSettings settings = problem->settings;
    settings.interrupted = [] { return true; };
    const Outcome found = search_plan(problem->tables, settings);
    CHECK(found.status == Status::kInterrupted);
    CHECK_FALSE(found.found);
    CHECK(found.alternatives.empty());
  }
}

TEST_CASE("what is thrown during a search is thrown by the call") {
  for (const auto& problem : problems()) {
    CAPTURE(problem->name);
    SearchSettings settings = problem->settings;
    settings.interrupted = []() -> bool { throw std::bad_alloc(); };
    CHECK_THROWS_AS(search_plan(problem->tables, settings), std::bad_alloc);
  }
}

TEST_CASE("what cannot be planned with is refused by the name of the argument") {
  const Problem& problem = *problems().front();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refusal = [&](const Tables& tables, const SearchSettings& settings) -> std::string {
    try {
      search_plan(tables, settings);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  const auto with = [&](auto change) {
    Tables tables = problem.tables;
    SearchSettings settings = problem.settings;
    change(tables, settings);
    return refusal(tables, settings);
  };
  const std::size_t moves = planner_plans::at(
      static_cast<std::int64_t>(problem.tables.num_tables) * problem.tables.num_types *
      problem.tables.num_layouts * problem.tables.num_layouts);
  const std::vector<double> none(moves, nan), below(moves, -1.0);
  const std::vector<std::int32_t> zeros(planner_plans::at(problem.tables.num_candidates), 0);
  CHECK(refusal(problem.tables, problem.settings).empty());
  CHECK(with([&](Tables& t, SearchSettings&) { t.redistribute_forward_s = none.data(); }) ==
        "redistribute_forward_s contains nan, expected numbers from 0 to 1e+150");
  CHECK(with([&](Tables& t, SearchSettings&) { t.redistribute_backward_s = below.data(); }) ==
        "redistribute_backward_s contains -1, expected numbers from 0 to 1e+150");
  CHECK(with([&](Tables& t, SearchSettings&) { t.candidate_microbatches = zeros.data(); }) ==
        "candidate_microbatches contains 0, expected numbers from 1 to 1073741824");
  CHECK(with([&](Tables& t, SearchSettings&) { t.num_layers = 100000; }) ==
        "layer_type has 100000 layers, expected 1 to 10000");
  CHECK(with([&](Tables& t, SearchSettings&) {
          t.division = {t.num_layers + 1};
        }).starts_with("division sums to "));
  CHECK(with([&](Tables&, SearchSettings& s) {
          s.time_limit_s = nan;
        }).starts_with("time_limit_s is nan"));
  CHECK(with([](Tables&, SearchSettings& s) {
          s.alternatives = -1;
        }).starts_with("alternatives is -1"));
  CHECK(with([](Tables&, SearchSettings& s) {
          s.budget = Bytes{1} << 62;
        }).starts_with("budget is 4611686018427387904 bytes"));
}
