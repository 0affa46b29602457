#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings/closed_form.hpp"
#include "closed_form/tensor2d/tensor2d.hpp"

namespace py = pybind11;
using namespace autopar::analytic;
using namespace autopar::analytic::tensor2d;

namespace {

Model model_of(const py::dict& d) {
  const auto get = [&](const char* name) { return d[name].cast<std::int64_t>(); };
  Model m;
  m.seq = get("l");
  m.hidden = get("e");
  m.heads = get("h");
  m.depth = get("depth");
  m.feedforward = get("f");
  m.kv_heads = get("kv_heads");
  m.vocab = get("vocab");
  m.causal = d["causal"].cast<bool>();
  m.gpt = d["gpt"].cast<bool>();
  m.tied = d["tied"].cast<bool>();
  m.gradients = d["gradients"].cast<double>();
  return m;
}

System system_of(const py::dict& d) {
  const auto get = [&](const char* name) { return d[name].cast<double>(); };
  System s;
  s.matrix_flops = get("matrix_flops_fp16");
  s.vector_flops = get("vector_flops_fp16");
  s.hbm_bandwidth = get("hbm_bandwidth");
  s.hbm_capacity = get("hbm_capacity");
  s.fast_bandwidth = get("nvlink_bandwidth") * get("nvlink_eff");
  s.fast_latency = get("nvlink_latency");
  s.slow_bandwidth = get("ib_bandwidth") * get("ib_eff");
  s.slow_latency = get("ib_latency");
  s.adapters = get("nic_factor");
  s.domain = d["nvlink_size"].cast<std::int64_t>();
  s.element_size = get("element_size");
  s.mask_element_size = get("mask_element_size");
  s.flops_units = get("flops_units");
  return s;
}

template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
  py::array_t<T> array(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

using Candidates = py::array_t<Candidate, py::array::c_style>;

py::tuple price_whole(const Engine& engine, const Candidates& candidate, int attention,
                      bool recompute, bool rows) {
  if (candidate.size() != 1) throw py::value_error("expected one candidate");
  const Way way{static_cast<Attention>(attention), recompute};
  const Answer answer = evaluate(engine, *candidate.data(), way, rows);
  py::array_t<double> statistics(static_cast<py::ssize_t>(kNumStatistics));
  std::copy(answer.statistics.begin(), answer.statistics.end(), statistics.mutable_data());
  return py::make_tuple(static_cast<int>(answer.reason), statistics, array_of(answer.rows));
}

// Seconds of one collective, or of one point-to-point transfer for kNumCollectives.
double link_s(const py::dict& system, const py::dict& quirks, int operation, double volume_gb,
              std::int64_t ranks, std::int64_t in_domain) {
  const Engine engine({}, system_of(system), quirks_of(quirks, kQuirks), k1d, ranks, 1);
  if (operation != kNumCollectives)
    return engine.collective_s(static_cast<Collective>(operation), volume_gb,
                               engine.group(ranks, in_domain));
  return ranks > 1 && volume_gb > 0 ? engine.transfer_s(volume_gb, in_domain > 1) : 0.0;
}

py::tuple price_many(const Engine& engine, const Candidates& candidates, int threads,
                     bool statistics, const Halt& halt) {
  py::array_t<Outcome> outcomes(candidates.size());
  py::array_t<double> table(
      std::vector<py::ssize_t>{statistics ? candidates.size() : py::ssize_t{0}, kNumStatistics});
  const auto count = static_cast<std::size_t>(candidates.size());
  const Candidate* in = candidates.data();
  Outcome* out = outcomes.mutable_data();
  double* rows = statistics ? table.mutable_data() : nullptr;
  {
    py::gil_scoped_release release;
    evaluate_many(engine, in, count, threads, out, rows, halt);
  }
  return py::make_tuple(outcomes, table);
}

py::dict search(const Engine& engine, std::size_t top, bool memory, bool all, int threads,
                std::uint64_t most, const Halt& halt) {
  Exploration found;
  {
    py::gil_scoped_release release;
    found = explore(engine, top, memory ? kMemory : kTime, all, threads, most, halt);
  }
  py::dict d;
  d["best"] = array_of(found.best);
  d["all"] = array_of(found.all);
  d["candidates"] = found.candidates;
  d["feasible"] = found.feasible;
  d["bounded"] = found.bounded;
  d["too_many"] = found.too_many;
  d["rejected"] =
      array_of(std::vector<std::uint64_t>(found.rejected.begin(), found.rejected.end()));
  return d;
}

}  // namespace

void register_tensor2d(py::module_& parent) {
  PYBIND11_NUMPY_DTYPE(Candidate, dp, tp1, tp2, pp, mbs, nb, nv_tp1, nv_tp2, nv_dp, nv_pp);
  PYBIND11_NUMPY_DTYPE(Outcome, ok, reason, time_s, memory_gb);
  PYBIND11_NUMPY_DTYPE(Found, candidate, time_s, memory_gb);
  PYBIND11_NUMPY_DTYPE(PassFigures, flops, time_s, link_s, compute_s, memory_s, intensity,
                       volumes_gb, collectives, num_links);
  PYBIND11_NUMPY_DTYPE(LayerRow, operation, in_panels, weights_gb, kept_gb, forward, backward);
  py::module_ m = parent.def_submodule("tensor2d");
  m.attr("CANDIDATE") = py::dtype::of<Candidate>();
  m.attr("QUIRKS") = quirk_meanings(kQuirks);
  m.attr("NUM_COLLECTIVES") = static_cast<int>(kNumCollectives);
  m.attr("NUM_OPERATIONS") = static_cast<int>(kNumOperations);
  m.attr("NUM_STATISTICS") = kNumStatistics;
  m.attr("NUM_REASONS") = static_cast<int>(kNumReasons);
  py::class_<Engine>(m, "Engine")
      .def(py::init([](const py::dict& model, const py::dict& system, const py::dict& quirks,
                       int strategy, std::int64_t num_gpus, std::int64_t batch) {
             return Engine(model_of(model), system_of(system), quirks_of(quirks, kQuirks),
                           static_cast<Strategy>(strategy), num_gpus, batch);
           }),
           py::arg("model"), py::arg("system"), py::arg("quirks"), py::arg("strategy"),
           py::arg("num_gpus"), py::arg("batch"))
      .def("evaluate", &price_whole, py::arg("candidate"), py::arg("attention"),
           py::arg("recompute"), py::arg("rows"))
      .def("evaluate_many", &price_many, py::arg("candidates"), py::arg("threads"),
           py::arg("statistics"), py::arg("halt"))
      .def("explore", &search, py::arg("top"), py::arg("memory"), py::arg("all"),
           py::arg("threads"), py::arg("most"), py::arg("halt"));
  m.def("link_s", &link_s, py::arg("system"), py::arg("quirks"), py::arg("operation"),
        py::arg("volume_gb"), py::arg("ranks"), py::arg("in_domain"));
}
