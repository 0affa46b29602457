// The lower convex hull and the relaxed minimum on which bounds are based.
#include <doctest/doctest.h>

#include <vector>

#include "planner/hull.hpp"

using autopar::HullPoint;

TEST_CASE("lower_hull keeps the corners and nothing else") {
  // (2, 6) lies on the line, (3, 9) above it, (5, 1) costs more than (4, 0.5)
  std::vector<HullPoint> points{{3, 9}, {4, 0.5}, {1, 10}, {2, 6}, {3, 2}, {5, 1}, {1, 12}};
  autopar::lower_hull(points);
  REQUIRE(points.size() == 3);
  CHECK(points[0].bytes == 1);
  CHECK(points[0].cost == 10);
  CHECK(points[1].bytes == 3);
  CHECK(points[1].cost == 2);
  CHECK(points[2].bytes == 4);
  CHECK(points[2].cost == 0.5);
}

TEST_CASE("relaxed minimum spends bytes where they save most") {
  autopar::RelaxedLayers layers;
  layers.assign({{{1, 10}, {2, 6}}, {{1, 10}, {3, 4}}});  // slopes -4 and -3
  const std::vector<int> one_each{1, 1};

  CHECK(layers.minimum(one_each, 1.5) < 0);  // 2 bytes are the least
  CHECK(layers.minimum(one_each, 2) == doctest::Approx(20));
  CHECK(layers.minimum(one_each, 2.5) == doctest::Approx(18));  // half of the first step
  CHECK(layers.minimum(one_each, 4) == doctest::Approx(13));    // all of it, half of the second
  CHECK(layers.minimum(one_each, 99) == doctest::Approx(10));
  CHECK(layers.minimum(std::vector<int>{2, 0}, 4) == doctest::Approx(12));
}

TEST_CASE("breakpoints describe the same function as minimum") {
  autopar::RelaxedLayers layers;
  layers.assign({{{1, 10}, {2, 6}}, {{1, 10}, {3, 4}}});
  const std::vector<int> count{2, 3};
  std::vector<HullPoint> function;
  REQUIRE(layers.breakpoints(count, function));
  for (double budget = 4; budget < 16; budget += 0.25)
    CHECK(autopar::value_at(function, budget) == doctest::Approx(layers.minimum(count, budget)));
}

TEST_CASE("a type without options has no minimum unless none is asked for") {
  autopar::RelaxedLayers layers;
  layers.assign({{}, {{1, 10}}});
  std::vector<HullPoint> function;
  CHECK_FALSE(layers.breakpoints(std::vector<int>{1, 1}, function));
  CHECK(layers.breakpoints(std::vector<int>{0, 1}, function));
}

TEST_CASE("costs that cancel to nothing never look like nothing fits") {
  for (int i = 0; i < 200; ++i) {
    const double a = 0.1 + 0.0137 * i;
    autopar::RelaxedLayers layers;
    layers.assign({{{1, a}, {2, a / 3}, {8, 0}}});
    const std::vector<int> count{16};
    std::vector<HullPoint> function;
    REQUIRE(layers.breakpoints(count, function));
    CHECK(function.back().cost >= 0);
    CHECK(autopar::value_at(function, 16 * 8) >= 0);
    CHECK(layers.minimum(count, 16 * 8) >= 0);
    CHECK(layers.minimum(count, 16 * 8 - 1e-9) >= 0);
  }
}
