// Reads tests/data/planner: planning problems with their answers, in the format that
// tests/oracles/dump.py documents and writes.
#pragma once

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "planner/problem.hpp"

namespace planner_dump {

// Owns the arrays that the views of `tables` point into, so it must not move.
struct Problem {
  Problem() = default;
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  std::string name;
  std::string oracle;          // independent solver of the optimum
  double samples_per_s = 0.0;  // optimum according to it; -1 if nothing fits
  autopar::Tables tables;
  autopar::SearchSettings settings;  // no time limit
  autopar::Outcome answer;

  std::map<std::string, std::vector<std::int32_t>> i4;
  std::map<std::string, std::vector<std::int64_t>> i8;
  std::map<std::string, std::vector<std::uint8_t>> u1;
  std::map<std::string, std::vector<double>> f8;
  std::map<std::string, std::vector<int>> shape;
};

// strtod, unlike streams, reads hexadecimal reals.
inline double real(const std::string& word) {
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  if (word.empty() || *end != '\0') throw std::runtime_error("not a number: " + word);
  return value;
}

inline std::string next(std::istream& line) {
  std::string word;
  if (!(line >> word)) throw std::runtime_error("the line is too short");
  return word;
}

inline std::int64_t whole(std::istream& line) { return std::stoll(next(line)); }

template <class T>
std::vector<T> elements(std::istream& line, std::size_t size) {
  std::vector<T> values;
  const std::int64_t distinct = whole(line);
  for (std::int64_t i = 0; i < distinct; ++i) {
    if constexpr (std::is_same_v<T, double>)
      values.push_back(real(next(line)));
    else
      values.push_back(static_cast<T>(whole(line)));
  }
  std::vector<T> all;
  for (std::string word; line >> word;) {
    const std::size_t star = word.find('*');
    const std::size_t times = star == std::string::npos ? 1 : std::stoul(word.substr(star + 1));
    all.insert(all.end(), times, values.at(std::stoul(word.substr(0, star))));
  }
  if (all.size() != size) throw std::runtime_error("an array has the wrong number of elements");
  return all;
}

inline void read_array(Problem& problem, std::istream& line) {
  const std::string name = next(line), type = next(line);
  std::vector<int>& shape = problem.shape[name];
  shape.resize(static_cast<std::size_t>(whole(line)));
  std::size_t size = 1;
  for (int& length : shape) {
    length = static_cast<int>(whole(line));
    size *= static_cast<std::size_t>(length);
  }
  if (type == "i4")
    problem.i4[name] = elements<std::int32_t>(line, size);
  else if (type == "i8")
    problem.i8[name] = elements<std::int64_t>(line, size);
  else if (type == "u1")
    problem.u1[name] = elements<std::uint8_t>(line, size);
  else if (type == "f8")
    problem.f8[name] = elements<double>(line, size);
  else
    throw std::runtime_error("unknown type " + type);
}

inline autopar::Choice read_choice(std::istream& line) {
  autopar::Choice choice;
  choice.candidate = static_cast<int>(whole(line));
  choice.vocab = static_cast<int>(whole(line));
  choice.step_time_s = real(next(line));
  const std::int64_t stages = whole(line);
  for (std::int64_t j = 0; j < stages; ++j)
    choice.stage_sizes.push_back(static_cast<int>(whole(line)));
  for (int strategy; line >> strategy;) choice.strategies.push_back(strategy);
  return choice;
}

// Points the views at the arrays, by the names and axes of csrc/bindings/bind_planner.cpp.
inline void connect(Problem& problem) {
  const auto i4 = [&](const char* name) { return problem.i4.at(name).data(); };
  const auto i8 = [&](const char* name) { return problem.i8.at(name).data(); };
  const auto u1 = [&](const char* name) { return problem.u1.at(name).data(); };
  const auto f8 = [&](const char* name) { return problem.f8.at(name).data(); };
  const auto length = [&](const char* name, std::size_t axis) {
    return problem.shape.at(name).at(axis);
  };
  autopar::Tables& t = problem.tables;
  t.num_layers = length("layer_type", 0);
  t.num_types = length("valid", 1);
  t.num_strategies = length("strategy_layout", 0);
  t.num_layouts = length("redistribute_forward_s", 2);
  t.num_vocab = length("vocab_layout", 0);
  t.num_tables = length("table_stages", 0);
  t.num_candidates = length("candidate_table", 0);
  t.num_stage_rules = length("stage_allowed", 0);
  t.layer_type = i4("layer_type");
  t.strategy_layout = i4("strategy_layout");
  t.vocab_layout = i4("vocab_layout");
  t.table_stages = i4("table_stages");
  t.table_microbatch = i8("table_microbatch");
  t.table_group = i4("table_group");
  t.valid = u1("valid");
  t.forward_s = f8("forward_s");
  t.backward_s = f8("backward_s");
  t.tail_s = f8("tail_s");
  t.static_bytes = i8("static_bytes");
  t.activation_bytes = i8("activation_bytes");
  t.transient_bytes = i8("transient_bytes");
  t.shared_bytes = i8("shared_bytes");
  t.redistribute_forward_s = f8("redistribute_forward_s");
  t.redistribute_backward_s = f8("redistribute_backward_s");
  t.send_s = f8("send_s");
  t.vocab_valid = u1("vocab_valid");
  t.vocab_forward_s = f8("vocab_forward_s");
  t.vocab_backward_s = f8("vocab_backward_s");
  t.vocab_tail_s = f8("vocab_tail_s");
  t.vocab_static_bytes = i8("vocab_static_bytes");
  t.vocab_activation_bytes = i8("vocab_activation_bytes");
  t.vocab_transient_bytes = i8("vocab_transient_bytes");
  t.vocab_shared_bytes = i8("vocab_shared_bytes");
  t.stage_fixed_bytes = i8("stage_fixed_bytes");
  t.candidate_table = i4("candidate_table");
  t.candidate_microbatches = i4("candidate_microbatches");
  t.stage_allowed = u1("stage_allowed");
}

inline void read_line(Problem& problem, const std::string& key, std::istream& line) {
  autopar::Outcome& answer = problem.answer;
  if (key == "oracle") {
    problem.oracle = next(line);
    problem.samples_per_s = real(next(line));
  } else if (key == "gpipe") {
    problem.tables.gpipe = whole(line) != 0;
  } else if (key == "division") {
    for (int layers; line >> layers;) problem.tables.division.push_back(layers);
  } else if (key == "budget") {
    problem.settings.budget = whole(line);
  } else if (key == "alternatives") {
    problem.settings.alternatives = static_cast<int>(whole(line));
  } else if (key == "uniform") {
    problem.settings.uniform = whole(line) != 0;
  } else if (key == "array") {
    read_array(problem, line);
  } else if (key == "status") {
    const std::string status = next(line);
    if (status != "optimal" && status != "infeasible") throw std::runtime_error(status);
    answer.status = status == "optimal" ? autopar::Status::kOptimal : autopar::Status::kInfeasible;
  } else if (key == "best") {
    answer.best = read_choice(line);
    answer.found = answer.best.candidate >= 0;
  } else if (key == "bound") {
    answer.bound_s_per_sample = real(next(line));
  } else if (key == "alternative") {
    answer.alternatives.push_back(read_choice(line));
  } else if (key == "smallest_budget") {
    answer.smallest_budget = whole(line);
    answer.binding_candidate = static_cast<int>(whole(line));
    answer.binding_stage = static_cast<int>(whole(line));
  } else {
    throw std::runtime_error("unknown key " + key);
  }
}

using Problems = std::vector<std::unique_ptr<Problem>>;

// Returns the problems of tests/data/planner/FILE; throws std::runtime_error naming an invalid
// line.
inline Problems read(const std::string& file) {
  const std::string path = std::string(AUTOPAR_TEST_DATA) + "/planner/" + file;
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path + " cannot be read");
  Problems problems;
  bool open = false;
  int number = 0;
  for (std::string text; std::getline(in, text);) {
    ++number;
    if (text.empty() || text[0] == '#') continue;
    std::istringstream line(text);
    try {
      const std::string key = next(line);
      if (key == "problem" && !open) {
        problems.push_back(std::make_unique<Problem>());
        problems.back()->name = next(line);
        open = true;
      } else if (!open) {
        throw std::runtime_error("a problem starts with its name");
      } else if (key == "end") {
        connect(*problems.back());
        open = false;
      } else {
        read_line(*problems.back(), key, line);
      }
    } catch (const std::exception& error) {
      throw std::runtime_error(path + ":" + std::to_string(number) + ": " + error.what());
    }
  }
  if (open || problems.empty()) throw std::runtime_error(path + " ends too early");
  return problems;
}

}  // namespace planner_dump
