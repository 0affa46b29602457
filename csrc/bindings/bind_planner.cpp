#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "planner/problem.hpp"

namespace py = pybind11;

namespace {

// Owns the numpy arrays that the views of `tables` point into.
class TablesHolder {
 public:
  explicit TablesHolder(const py::dict& arrays) : arrays_(arrays) {
    autopar::Tables& t = tables;
    t.layer_type = view<std::int32_t>("layer_type");
    t.num_layers = length("layer_type", 0);
    t.strategy_layout = view<std::int32_t>("strategy_layout");
    t.num_strategies = length("strategy_layout", 0);
    t.vocab_layout = view<std::int32_t>("vocab_layout");
    t.num_vocab = length("vocab_layout", 0);
    t.table_stages = view<std::int32_t>("table_stages");
    t.num_tables = length("table_stages", 0);
    t.table_microbatch = view<std::int64_t>("table_microbatch");
    t.table_group = view<std::int32_t>("table_group");
    t.valid = view<std::uint8_t>("valid");
    t.num_types = length("valid", 1);
    t.forward_s = view<double>("forward_s");
    t.backward_s = view<double>("backward_s");
    t.tail_s = view<double>("tail_s");
    t.static_bytes = view<std::int64_t>("static_bytes");
    t.activation_bytes = view<std::int64_t>("activation_bytes");
    t.transient_bytes = view<std::int64_t>("transient_bytes");
    t.shared_bytes = view<std::int64_t>("shared_bytes");
    t.redistribute_forward_s = view<double>("redistribute_forward_s");
    t.num_layouts = length("redistribute_forward_s", 2);
    t.redistribute_backward_s = view<double>("redistribute_backward_s");
    t.send_s = view<double>("send_s");
    t.vocab_valid = view<std::uint8_t>("vocab_valid");
    t.vocab_forward_s = view<double>("vocab_forward_s");
    t.vocab_backward_s = view<double>("vocab_backward_s");
    t.vocab_tail_s = view<double>("vocab_tail_s");
    t.vocab_static_bytes = view<std::int64_t>("vocab_static_bytes");
    t.vocab_activation_bytes = view<std::int64_t>("vocab_activation_bytes");
    t.vocab_transient_bytes = view<std::int64_t>("vocab_transient_bytes");
    t.vocab_shared_bytes = view<std::int64_t>("vocab_shared_bytes");
    t.stage_fixed_bytes = view<std::int64_t>("stage_fixed_bytes");
    t.candidate_table = view<std::int32_t>("candidate_table");
    t.num_candidates = length("candidate_table", 0);
    t.candidate_microbatches = view<std::int32_t>("candidate_microbatches");
    t.stage_allowed = view<std::uint8_t>("stage_allowed");
    t.num_stage_rules = length("stage_allowed", 0);
    if (t.num_layouts > 64) throw std::invalid_argument("at most 64 layouts are supported");
  }

  autopar::Tables tables;

 private:
  py::dict arrays_;
  std::vector<py::array> kept_;

  template <class T>
  const T* view(const char* name) {
    using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
    if (!arrays_.contains(name)) throw std::invalid_argument(std::string("missing array ") + name);
    Array array = Array::ensure(arrays_[name]);
    if (!array) throw std::invalid_argument(std::string("array has the wrong type: ") + name);
    kept_.push_back(array);
    return array.data();
  }
  int length(const char* name, int axis) const {
    return static_cast<int>(arrays_[name].cast<py::array>().shape(axis));
  }
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
  m.def(
      "search_plan",
      [](const py::dict& arrays, bool gpipe, const std::vector<int>& division, std::int64_t budget,
         int threads, double time_limit_s, int alternatives, bool uniform) {
        TablesHolder holder(arrays);
        holder.tables.gpipe = gpipe;
        holder.tables.division = division;
        autopar::SearchSettings settings;
        settings.budget = budget;
        settings.threads = threads;
        settings.time_limit_s = time_limit_s;
        settings.alternatives = alternatives;
        settings.uniform = uniform;
        autopar::Outcome outcome;
        {
          py::gil_scoped_release release;
          outcome = autopar::search_plan(holder.tables, settings);
        }
        py::dict d;
        const char* names[] = {"optimal", "infeasible", "time_limit"};
        d["status"] = names[static_cast<int>(outcome.status)];
        d["found"] = outcome.found;
        d["best"] = choice_dict(outcome.best);
        d["bound_s_per_sample"] = outcome.bound_s_per_sample;
        py::list alternatives_list;
        for (const auto& a : outcome.alternatives) alternatives_list.append(choice_dict(a));
        d["alternatives"] = alternatives_list;
        d["smallest_budget"] = outcome.smallest_budget;
        d["binding_candidate"] = outcome.binding_candidate;
        d["binding_stage"] = outcome.binding_stage;
        d["states"] = outcome.states;
        d["items"] = outcome.items;
        d["opened"] = outcome.opened;
        return d;
      },
      py::arg("arrays"), py::arg("gpipe"), py::arg("division"), py::arg("budget"),
      py::arg("threads"), py::arg("time_limit_s"), py::arg("alternatives"), py::arg("uniform"));
}
