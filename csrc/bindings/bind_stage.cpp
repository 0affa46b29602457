#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "planner/solve_stage.hpp"

namespace py = pybind11;

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

void register_stage(py::module_& m) {
  m.def(
      "solve_stage",
      [](const Doubles& time_s, const Doubles& memory_bytes, const Doubles& transition_s,
         double budget_bytes, const py::object& transient_bytes) {
        autopar::StageArrays in;
        in.num_layers = static_cast<int>(time_s.shape(0));
        in.num_strategies = static_cast<int>(time_s.shape(1));
        in.time_s = time_s.data();
        in.memory_bytes = memory_bytes.data();
        in.transition_s = transition_s.data();
        Doubles transient;
        if (!transient_bytes.is_none()) {
          transient = transient_bytes.cast<Doubles>();
          in.transient_bytes = transient.data();
        }
        in.budget_bytes = budget_bytes;
        autopar::StageAnswer answer;
        {
          py::gil_scoped_release release;
          answer = autopar::solve_stage(in);
        }
        return py::make_tuple(answer.feasible, answer.choice, answer.states);
      },
      py::arg("time_s"), py::arg("memory_bytes"), py::arg("transition_s"), py::arg("budget_bytes"),
      py::arg("transient_bytes") = py::none());
}
