#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "bindings/signals.hpp"
#include "planner/problem.hpp"
#include "planner/search/knowledge.hpp"

namespace py = pybind11;

namespace {

using autopar::Tables;

// Owns the numpy arrays that the views of `tables` point into; their axes must agree.
class TablesHolder {
 public:
  explicit TablesHolder(const py::dict& arrays) : arrays_(arrays) {
    Tables& t = tables;
    t.num_layers = length("layer_type", 1, 0);
    t.num_strategies = length("strategy_layout", 1, 0);
    t.num_vocab = length("vocab_layout", 1, 0);
    t.num_tables = length("table_stages", 1, 0);
    t.num_types = length("valid", 3, 1);
    t.num_layouts = length("redistribute_forward_s", 4, 2);
    t.num_candidates = length("candidate_table", 1, 0);
    t.num_stage_rules = length("stage_allowed", 2, 0);
    const py::ssize_t L = t.num_layers, N = t.num_tables, K = t.num_types, S = t.num_strategies,
                      Y = t.num_layouts, E = t.num_vocab, Q = t.num_candidates;
    t.layer_type = view<std::int32_t>("layer_type", {L});
    t.strategy_layout = view<std::int32_t>("strategy_layout", {S});
    t.vocab_layout = view<std::int32_t>("vocab_layout", {E});
    t.table_stages = view<std::int32_t>("table_stages", {N});
    t.table_microbatch = view<std::int64_t>("table_microbatch", {N});
    t.table_group = view<std::int32_t>("table_group", {N});
    t.valid = view<std::uint8_t>("valid", {N, K, S});
    t.forward_s = view<double>("forward_s", {N, K, S});
    t.backward_s = view<double>("backward_s", {N, K, S});
    t.tail_s = view<double>("tail_s", {N, K, S});
    t.static_bytes = view<std::int64_t>("static_bytes", {2, N, K, S});
    t.activation_bytes = view<std::int64_t>("activation_bytes", {N, K, S});
    t.transient_bytes = view<std::int64_t>("transient_bytes", {2, N, K, S});
    t.shared_bytes = view<std::int64_t>("shared_bytes", {N, K, S});
    t.redistribute_forward_s = view<double>("redistribute_forward_s", {N, K, Y, Y});
    t.redistribute_backward_s = view<double>("redistribute_backward_s", {N, K, Y, Y});
    t.send_s = view<double>("send_s", {N, K, Y});
    t.vocab_valid = view<std::uint8_t>("vocab_valid", {N, E});
    t.vocab_forward_s = view<double>("vocab_forward_s", {N, 3, E});
    t.vocab_backward_s = view<double>("vocab_backward_s", {N, 3, E});
    t.vocab_tail_s = view<double>("vocab_tail_s", {N, 3, E});
    t.vocab_static_bytes = view<std::int64_t>("vocab_static_bytes", {2, N, 3, E});
    t.vocab_activation_bytes = view<std::int64_t>("vocab_activation_bytes", {N, 3, E});
    t.vocab_transient_bytes = view<std::int64_t>("vocab_transient_bytes", {2, N, 3, E});
    t.vocab_shared_bytes = view<std::int64_t>("vocab_shared_bytes", {N, 3, E});
    t.stage_fixed_bytes = view<std::int64_t>("stage_fixed_bytes", {N, 4});
    t.candidate_table = view<std::int32_t>("candidate_table", {Q});
    t.candidate_microbatches = view<std::int32_t>("candidate_microbatches", {Q});
    t.stage_allowed = view<std::uint8_t>("stage_allowed", {t.num_stage_rules, S});
  }

  Tables tables;

 private:
  py::dict arrays_;
  std::vector<py::array> kept_;

  py::array array(const char* name) const {
    if (!arrays_.contains(name)) throw py::value_error(std::string(name) + " is missing");
    const py::object found = arrays_[name];
    if (!py::isinstance<py::array>(found))
      throw py::value_error(std::string(name) + " is not a numpy array");
    return py::reinterpret_borrow<py::array>(found);
  }
  int length(const char* name, py::ssize_t dimensions, int axis) const {
    const py::array found = array(name);
    if (found.ndim() != dimensions)
      throw py::value_error(std::string(name) + " has " + std::to_string(found.ndim()) +
                            " dimensions, expected " + std::to_string(dimensions));
    const py::ssize_t size = found.shape(axis);
    if (size > kMostElements)
      throw py::value_error(std::string(name) + " has " + std::to_string(size) +
                            " rows, expected at most " + std::to_string(kMostElements));
    return static_cast<int>(size);
  }
  // No lossy cast: a wrong type is an error of the caller.
  template <class T>
  const T* view(const char* name, const std::vector<py::ssize_t>& shape) {
    const py::array given = array(name);
    if (given.size() > kMostElements)
      throw py::value_error(std::string(name) + " has " + std::to_string(given.size()) +
                            " elements, expected at most " + std::to_string(kMostElements));
    if (!std::equal(shape.begin(), shape.end(), given.shape(), given.shape() + given.ndim()))
      throw py::value_error(
          std::string(name) + " has shape " +
          words(std::vector<py::ssize_t>(given.shape(), given.shape() + given.ndim())) +
          ", expected " + words(shape));
    if (!given.dtype().equal(py::dtype::of<T>()))
      throw py::value_error(std::string(name) + " has type " +
                            py::str(given.dtype()).cast<std::string>() + ", expected " +
                            py::str(py::dtype::of<T>()).cast<std::string>());
    const auto ready = py::array_t<T, py::array::c_style>::ensure(given);
    if (!ready) throw py::value_error(std::string(name) + " cannot be read as an array");
    kept_.push_back(ready);
    return ready.data();
  }
  static std::string words(const std::vector<py::ssize_t>& shape) {
    std::string all;
    for (const py::ssize_t size : shape) all += (all.empty() ? "" : ", ") + std::to_string(size);
    return "(" + all + (shape.size() == 1 ? ",)" : ")");
  }
  static constexpr py::ssize_t kMostElements = std::numeric_limits<std::int32_t>::max();
};

py::dict choice_dict(const autopar::Choice& c) {
  py::dict d;
  d["candidate"] = c.candidate;
  d["vocab"] = c.vocab;
  d["step_time_s"] = c.step_time_s;
  d["stage_sizes"] = c.stage_sizes;
  d["strategies"] = c.strategies;
  return d;
}

}  // namespace

void register_planner(py::module_& m) {
  py::class_<autopar::Knowledge>(m, "Knowledge").def(py::init<>());
  m.def(
      "search_plan",
      [](const py::dict& arrays, bool gpipe, const std::vector<int>& division, std::int64_t budget,
         double time_limit_s, int alternatives, bool uniform, autopar::Knowledge* known) {
        TablesHolder holder(arrays);
        holder.tables.gpipe = gpipe;
        holder.tables.division = division;
        autopar::SearchSettings settings;
        settings.budget = budget;
        settings.time_limit_s = time_limit_s;
        settings.alternatives = alternatives;
        settings.uniform = uniform;
        settings.known = known;
        settings.interrupted = autopar::signalled;
        autopar::Outcome outcome;
        {
          py::gil_scoped_release release;
          outcome = autopar::search_plan(holder.tables, settings);
        }
        if (outcome.status == autopar::Status::kInterrupted) throw py::error_already_set();
        py::dict d;
        const char* names[] = {"optimal", "infeasible", "time_limit"};
        d["status"] = names[static_cast<int>(outcome.status)];
        d["found"] = outcome.found;
        d["best"] = choice_dict(outcome.best);
        d["bound_s_per_sample"] = outcome.bound_s_per_sample;
        py::list alternatives_list;
        for (const auto& a : outcome.alternatives) alternatives_list.append(choice_dict(a));
        d["alternatives"] = alternatives_list;
        d["alternatives_complete"] = outcome.alternatives_complete;
        d["smallest_budget"] = outcome.smallest_budget;
        d["binding_candidate"] = outcome.binding_candidate;
        d["binding_stage"] = outcome.binding_stage;
        d["too_large"] = outcome.too_large;
        d["states"] = outcome.states;
        d["items"] = outcome.items;
        d["opened"] = outcome.opened;
        return d;
      },
      py::arg("arrays"), py::arg("gpipe"), py::arg("division"), py::arg("budget"),
      py::arg("time_limit_s"), py::arg("alternatives"), py::arg("uniform"),
      py::arg("known") = nullptr);
}
