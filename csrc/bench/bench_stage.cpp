// Exact stage kernel and a plain dense dynamic program over 1-MB steps: same input, same run.
//
// autopar_bench [FILE [REPEATS]]: FILE contains, per problem and without padding, int32 layers,
// strategies and budget in MB, float64 time (L, S), int32 memory in MB (L, S) and float64
// transition (L, S, S), host byte order. Without FILE, seeded random problems are used. Prints one
// line of JSON per repeat; exit status 1 if the two optima differ.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "planner/stage/solve_stage.hpp"

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kMegabyte = 1048576.0;

struct Problem {
  std::int32_t layers = 0;
  std::int32_t strategies = 0;
  std::int32_t budget_mb = 0;
  std::vector<double> time_s;
  std::vector<std::int32_t> memory_mb;
  std::vector<double> transition_s;
};

// best[s][v]: least time of the layers so far with strategy s last and at most v MB. `from` allows
// a caller to walk back to the choice. The innermost loop is over v, contiguous and vectorised.
double dense_optimum(const Problem& problem) {
  if (problem.budget_mb < 0) return kInfinite;
  const auto S = static_cast<std::size_t>(problem.strategies);
  const auto V = static_cast<std::size_t>(problem.budget_mb) + 1;
  std::vector<double> best(S * V, 0.0);
  std::vector<double> next(S * V);
  std::vector<std::int16_t> from(static_cast<std::size_t>(problem.layers) * S * V);
  for (std::size_t l = 0; l < static_cast<std::size_t>(problem.layers); ++l) {
    std::fill(next.begin(), next.end(), kInfinite);
    for (std::size_t s = 0; s < S; ++s) {
      const auto need = static_cast<std::size_t>(problem.memory_mb[l * S + s]);
      for (std::size_t x = 0; x < S && need < V; ++x) {
        const double step =
            problem.time_s[l * S + s] + (l == 0 ? 0.0 : problem.transition_s[(l * S + x) * S + s]);
        const double* source = best.data() + x * V;
        double* target = next.data() + s * V + need;
        std::int16_t* mark = from.data() + (l * S + s) * V + need;
        for (std::size_t v = 0; v < V - need; ++v) {
          const double total = source[v] + step;
          const bool better = total < target[v];
          target[v] = better ? total : target[v];
          mark[v] = better ? static_cast<std::int16_t>(x) : mark[v];
        }
      }
    }
    best.swap(next);
  }
  double optimum = kInfinite;
  for (std::size_t s = 0; s < S; ++s) optimum = std::min(optimum, best[s * V + V - 1]);
  return optimum;
}

double exact_optimum(const Problem& problem) {
  const std::vector<double> memory = [&] {
    std::vector<double> bytes(problem.memory_mb.begin(), problem.memory_mb.end());
    for (double& value : bytes) value *= kMegabyte;
    return bytes;
  }();
  const auto S = static_cast<std::size_t>(problem.strategies);
  autopar::StageArrays arrays;
  arrays.num_layers = problem.layers;
  arrays.num_strategies = problem.strategies;
  arrays.time_s = problem.time_s.data();
  arrays.memory_bytes = memory.data();
  arrays.transition_s = problem.transition_s.data();
  arrays.budget_bytes = problem.budget_mb * kMegabyte;
  const autopar::StageAnswer answer = autopar::solve_stage(arrays);
  if (!answer.feasible) return kInfinite;
  double total = 0.0;
  for (std::size_t l = 0; l < answer.choice.size(); ++l) {
    const auto s = static_cast<std::size_t>(answer.choice[l]);
    total += problem.time_s[l * S + s];
    if (l > 0) {
      const auto x = static_cast<std::size_t>(answer.choice[l - 1]);
      total += problem.transition_s[(l * S + x) * S + s];
    }
  }
  return total;
}

template <typename T>
void read(std::ifstream& file, std::vector<T>& values, std::size_t count) {
  values.resize(count);
  file.read(reinterpret_cast<char*>(values.data()),
            static_cast<std::streamsize>(count * sizeof(T)));
}

std::vector<Problem> read_problems(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<Problem> problems;
  std::vector<std::int32_t> head;
  while (read(file, head, 3), file) {
    Problem problem{head[0], head[1], head[2], {}, {}, {}};
    const std::size_t rows = static_cast<std::size_t>(head[0]) * static_cast<std::size_t>(head[1]);
    read(file, problem.time_s, rows);
    read(file, problem.memory_mb, rows);
    read(file, problem.transition_s, rows * static_cast<std::size_t>(head[1]));
    if (!file) {
      std::cerr << path << ": ends in the middle of a problem\n";
      std::exit(2);
    }
    problems.push_back(std::move(problem));
  }
  return problems;
}

// Like real stages: equal layers, faster strategies need more memory, and changes cost something.
std::vector<Problem> made_up_problems() {
  std::mt19937_64 random(7);
  const auto uniform = [&random](double low, double high) {
    return low + (high - low) * static_cast<double>(random() >> 11) * 0x1p-53;
  };
  std::vector<Problem> problems;
  for (int n = 0; n < 12; ++n) {
    const int S = 4 + 2 * (n % 4);
    Problem problem{32, S, 16384, {}, {}, {}};
    std::vector<double> time;
    std::vector<std::int32_t> memory;
    for (int s = 0; s < S; ++s) {
      memory.push_back(static_cast<std::int32_t>(uniform(200.0, 1200.0)));
      time.push_back(0.02 + 4.0 / memory.back() * uniform(0.8, 1.2));
    }
    std::vector<double> change(static_cast<std::size_t>(S * S));
    for (int x = 0; x < S; ++x) {
      for (int y = 0; y < S; ++y) {
        change[static_cast<std::size_t>(x * S + y)] = x == y ? 0.0 : uniform(1e-5, 1e-3);
      }
    }
    for (int l = 0; l < problem.layers; ++l) {
      problem.time_s.insert(problem.time_s.end(), time.begin(), time.end());
      problem.memory_mb.insert(problem.memory_mb.end(), memory.begin(), memory.end());
      problem.transition_s.insert(problem.transition_s.end(), change.begin(), change.end());
    }
    problems.push_back(std::move(problem));
  }
  return problems;
}

template <typename Solver>
double cpu_seconds(const std::vector<Problem>& problems, Solver solver, std::vector<double>& out) {
  out.clear();
  const std::clock_t start = std::clock();
  for (const Problem& problem : problems) out.push_back(solver(problem));
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Problem> problems = argc > 1 ? read_problems(argv[1]) : made_up_problems();
  const int repeats = argc > 2 ? std::max(1, std::atoi(argv[2])) : 3;
  if (problems.empty()) {
    std::cerr << "autopar_bench: no problems to solve\n";
    return 2;
  }
  std::vector<double> exact;
  std::vector<double> dense;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double exact_s = cpu_seconds(problems, exact_optimum, exact);
    const double dense_s = cpu_seconds(problems, dense_optimum, dense);
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const bool same = std::isinf(exact[i]) ? std::isinf(dense[i])
                                             : std::abs(exact[i] - dense[i]) <= 1e-9 * exact[i];
      if (!same) {
        std::cerr << "problem " << i << ": exact " << exact[i] << " s, dense " << dense[i]
                  << " s\n";
        return 1;
      }
    }
    std::cout << "{\"problems\": " << problems.size() << ", \"exact_cpu_s\": " << exact_s
              << ", \"dense_1mb_cpu_s\": " << dense_s << "}\n";
  }
  return 0;
}
