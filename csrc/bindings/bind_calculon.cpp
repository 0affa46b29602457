#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings/closed_form.hpp"
#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/explore.hpp"

namespace py = pybind11;
using namespace autopar::analytic;
using namespace autopar::analytic::calculon;

namespace {

using Steps = std::vector<std::pair<double, double>>;  // (smallest size, efficiency)

Rate rate_of(double peak_per_s, const Steps& steps) {
  Rate rate;
  rate.peak_per_s = peak_per_s;
  for (const auto& [smallest, efficiency] : steps) {
    rate.smallest.push_back(smallest);
    rate.per_s.push_back(peak_per_s * efficiency);
  }
  return rate;
}

Application application_of(const py::dict& d) {
  Application a;
  const auto get = [&](const char* name) { return d[name].cast<std::int64_t>(); };
  a.hidden = get("hidden");
  a.feedforward = get("feedforward");
  a.seq = get("seq_size");
  a.heads = get("attn_heads");
  a.head_size = get("attn_size");
  a.blocks = get("num_blocks");
  a.kv_heads = get("attn_kv_heads");
  a.vocab = get("vocab_size");
  a.tied = get("tied_embeddings") != 0;
  a.causal = get("causal") != 0;
  return a;
}

Tier tier_of(const py::dict& d) {
  Tier tier;
  tier.bytes_per_s = d["bytes_per_s"].cast<double>();
  tier.latency_s = d["latency_s"].cast<double>();
  tier.size = d["size"].cast<long>();
  tier.must_be_filled = d["must_be_filled"].cast<bool>();
  tier.processor_usage = d["processor_usage"].cast<double>();
  tier.scalar = d["scalar"].cast<std::array<double, kNumCollectives>>();
  tier.offset = d["offset"].cast<std::array<double, kNumCollectives>>();
  return tier;
}

System system_of(const py::dict& d) {
  System system;
  const auto rate = [](const py::handle& item) {
    const auto [peak, steps] = item.cast<std::pair<double, Steps>>();
    return rate_of(peak, steps);
  };
  for (const auto& [name, engines] :
       {std::pair{"matrix", &system.matrix}, std::pair{"vector", &system.vector}})
    for (const auto& [datatype, item] : d[name].cast<py::dict>())
      (*engines)[datatype.cast<std::size_t>()] = rate(item);
  system.first = {d["memory_bytes"][py::int_(0)].cast<double>(), rate(d["memory"][py::int_(0)])};
  system.second = {d["memory_bytes"][py::int_(1)].cast<double>(), rate(d["memory"][py::int_(1)])};
  system.roofline = d["roofline"].cast<bool>();
  for (const auto& item : d["tiers"]) system.tiers.push_back(tier_of(item.cast<py::dict>()));
  return system;
}

using Executions = py::array_t<Execution, py::array::c_style>;

template <std::size_t N>
py::tuple tuple_of(const std::array<const char*, N>& names) {
  py::tuple result(N);
  for (std::size_t i = 0; i < N; ++i) result[i] = names[i];
  return result;
}

const Execution& only_one(const Executions& executions) {
  if (executions.size() != 1) throw py::value_error("expected one execution");
  return *executions.data();
}

// Operation names, and one row of figures per operation.
py::tuple layers_of(const Model& model, const Execution& x) {
  const std::vector<Layer> layers = model.layers(x);
  const auto count = static_cast<py::ssize_t>(layers.size());
  py::list names;
  py::array_t<double> table(
      std::vector<py::ssize_t>{count, static_cast<py::ssize_t>(kNumLayerFigures)});
  double* row = table.mutable_data();
  for (const Layer& layer : layers) {
    names.append(layer.name);
    row = std::copy(layer.figures.begin(), layer.figures.end(), row);
  }
  return py::make_tuple(names, table);
}

Space space_of(const py::dict& d) {
  Space s;
  s.num_procs = d["num_procs"].cast<std::int32_t>();
  s.max_batch = d["max_batch"].cast<std::int32_t>();
  s.datatype = d["datatype"].cast<std::uint8_t>();
  s.attention = d["attention_type"].cast<std::uint8_t>();
  s.structure = d["structure_type"].cast<std::uint8_t>();
  s.fused_on = d["fused_on"].cast<bool>();
  s.fused_off = d["fused_off"].cast<bool>();
  s.fixed_batch = d["fixed_batch"].cast<bool>();
  s.uneven = d["uneven"].cast<bool>();
  s.tensor_overlap = d["tensor_overlap"].cast<bool>();
  s.data_overlap = d["data_overlap"].cast<bool>();
  s.offload = d["offload"].cast<bool>();
  return s;
}

Want want_of(const py::dict& d) {
  Want w;
  w.top = d["top"].cast<int>();
  w.objective = static_cast<Objective>(d["objective"].cast<int>());
  w.all = d["all"].cast<bool>();
  w.frontier = d["frontier"].cast<bool>();
  w.duplicates = d["duplicates"].cast<bool>();
  w.bound = d["bound"].cast<double>();
  return w;
}

// Candidates as two arrays, executions and outcomes, row by row.
py::tuple arrays_of(const std::vector<Candidate>& candidates) {
  const auto count = static_cast<py::ssize_t>(candidates.size());
  py::array_t<Execution> executions(count);
  py::array_t<Outcome> outcomes(count);
  Execution* x = executions.mutable_data();
  Outcome* o = outcomes.mutable_data();
  for (const Candidate& c : candidates) {
    *x++ = c.execution;
    *o++ = c.outcome;
  }
  return py::make_tuple(executions, outcomes);
}

py::dict counts_of(const Counts& c) {
  using namespace py::literals;
  return py::dict("considered"_a = c.considered, "network"_a = c.network, "layout"_a = c.layout,
                  "memory_first"_a = c.memory_first, "memory_second"_a = c.memory_second,
                  "feasible"_a = c.feasible);
}

}  // namespace

void register_calculon(py::module_& parent) {
  py::class_<Halt>(parent, "Halt")
      .def(py::init<>())
      .def("ask", &Halt::ask)
      .def("asked", &Halt::asked);
  PYBIND11_NUMPY_DTYPE(Execution, num_procs, tensor_par, pipeline_par, data_par, tensor_par_net,
                       pipeline_par_net, data_par_net, batch_size, microbatch_size,
                       pipeline_interleaving, datatype, attention_type, activation_recompute,
                       tensor_par_comm_type, tensor_par_overlap, structure_type, fused_activation,
                       optimizer_sharding, seq_par_ag_redo, data_par_overlap, weight_offload,
                       activations_offload, optimizer_offload, training);
  PYBIND11_NUMPY_DTYPE(Outcome, ok, reason, total_time_s, tier1_bytes, tier2_bytes,
                       sample_rate_per_s);
  py::module_ m = parent.def_submodule("calculon");
  m.attr("EXECUTION") = py::dtype::of<Execution>();
  m.attr("QUIRKS") = quirk_meanings(kQuirks);
  m.attr("STATISTICS") = tuple_of(statistic_names());
  m.attr("NUM_PUBLISHED") = kNumPublished;
  m.attr("LAYER_FIGURES") = tuple_of(layer_figure_names());
  m.attr("NUM_REASONS") = static_cast<int>(kNumReasons);
  py::class_<Model>(m, "Model")
      .def(py::init([](const py::dict& application, const py::dict& system, const py::dict& quirks,
                       bool published) {
             return Model(application_of(application), system_of(system),
                          quirks_of(quirks, kQuirks), published);
           }),
           py::arg("application"), py::arg("system"), py::arg("quirks"), py::arg("published"))
      .def(
          "evaluate_many",
          [](const Model& model, const Executions& executions, int threads, bool statistics,
             const Halt& halt) {
            const auto count = static_cast<std::size_t>(executions.size());
            py::array_t<Outcome> outcomes(executions.size());
            py::array_t<double> table(
                std::vector<py::ssize_t>{statistics ? executions.size() : py::ssize_t{0},
                                         static_cast<py::ssize_t>(kNumStatistics)});
            const Execution* in = executions.data();
            Outcome* out = outcomes.mutable_data();
            double* rows = statistics ? table.mutable_data() : nullptr;
            {
              py::gil_scoped_release release;
              evaluate_many(model, in, count, threads, out, rows, halt);
            }
            return py::make_tuple(outcomes, table);
          },
          py::arg("executions"), py::arg("threads"), py::arg("statistics"), py::arg("halt"))
      .def(
          "refusing_tier",
          [](const Model& model, const Executions& executions) {
            std::int32_t tier = -1;
            model.check(only_one(executions), &tier);
            return tier;
          },
          py::arg("execution"))
      .def(
          "layers",
          [](const Model& model, const Executions& executions) {
            const Execution& x = only_one(executions);
            if (model.check(x) != kOk) throw py::value_error("the execution cannot run");
            return layers_of(model, x);
          },
          py::arg("execution"))
      .def(
          "degree_pairs",
          [](const Model& model, const py::dict& space) {
            return degree_pairs(model, space_of(space));
          },
          py::arg("space"))
      .def(
          "explore",
          [](const Model& model, const py::dict& space, std::int32_t tensor, std::int32_t pipeline,
             const py::dict& want, const Halt& halt) {
            const Space s = space_of(space);
            const Want w = want_of(want);
            py::gil_scoped_release release;
            return explore(model, s, tensor, pipeline, w, halt);
          },
          py::arg("space"), py::arg("tensor"), py::arg("pipeline"), py::arg("want"),
          py::arg("halt"))
      .def(
          "count_points",
          [](const Model& model, const py::dict& space, std::int32_t tensor,
             std::int32_t pipeline) {
            const Space s = space_of(space);
            py::gil_scoped_release release;
            return count_points(model, s, tensor, pipeline);
          },
          py::arg("space"), py::arg("tensor"), py::arg("pipeline"));
  py::class_<Found>(m, "Found")
      .def(py::init<>())
      .def(
          "absorb",
          [](Found& found, const Found& part, const py::dict& want) {
            absorb(found, part, want_of(want));
          },
          py::arg("part"), py::arg("want"))
      .def(
          "bound",
          [](const Found& found, const py::dict& want) { return bound_of(found, want_of(want)); },
          py::arg("want"))
      .def_property_readonly("top", [](const Found& f) { return arrays_of(f.top); })
      .def_property_readonly("frontier", [](const Found& f) { return arrays_of(f.frontier); })
      .def_property_readonly("all", [](const Found& f) { return arrays_of(f.all); })
      .def_property_readonly("counts", [](const Found& f) { return counts_of(f.counts); });
}
