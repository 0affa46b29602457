#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "bindings/signals.hpp"
#include "planner/check.hpp"
#include "planner/stage/solve_stage.hpp"

namespace py = pybind11;

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

namespace {

void check_shape(const char* name, const py::array& array, py::ssize_t layers,
                 py::ssize_t strategies, bool square) {
  const py::ssize_t dimensions = square ? 3 : 2;
  if (array.ndim() == dimensions && array.shape(0) == layers && array.shape(1) == strategies &&
      (!square || array.shape(2) == strategies))
    return;
  const std::string S = std::to_string(strategies);
  throw py::value_error(std::string(name) + " does not have the shape (" + std::to_string(layers) +
                        ", " + S + (square ? ", " + S : "") + ") that follows from time_s");
}

}  // namespace

void register_stage(py::module_& m) {
  m.def(
      "solve_stage",
      [](const Doubles& time_s, const Doubles& memory_bytes, const Doubles& transition_s,
         double budget_bytes, const py::object& transient_bytes) {
        if (time_s.ndim() != 2)
          throw py::value_error("time_s has " + std::to_string(time_s.ndim()) +
                                " dimensions, expected 2: layers and strategies");
        const py::ssize_t layers = time_s.shape(0), strategies = time_s.shape(1);
        if (layers > autopar::kMostStageLayers)
          throw py::value_error("time_s has " + std::to_string(layers) +
                                " layers, expected at most " +
                                std::to_string(autopar::kMostStageLayers));
        if (strategies < 1 || strategies > autopar::kMostStrategies)
          throw py::value_error("time_s has " + std::to_string(strategies) +
                                " strategies, expected 1 to " +
                                std::to_string(autopar::kMostStrategies));
        check_shape("memory_bytes", memory_bytes, layers, strategies, false);
        check_shape("transition_s", transition_s, layers, strategies, true);
        autopar::StageArrays in;
        in.num_layers = static_cast<int>(layers);
        in.num_strategies = static_cast<int>(strategies);
        in.time_s = time_s.data();
        in.memory_bytes = memory_bytes.data();
        in.transition_s = transition_s.data();
        Doubles transient;
        if (!transient_bytes.is_none()) {
          transient = Doubles::ensure(transient_bytes);
          if (!transient) throw py::value_error("transient_bytes is not an array of numbers");
          check_shape("transient_bytes", transient, layers, strategies, false);
          in.transient_bytes = transient.data();
        }
        in.budget_bytes = budget_bytes;
        in.interrupted = autopar::signalled;
        autopar::StageAnswer answer;
        try {
          py::gil_scoped_release release;
          answer = autopar::solve_stage(in);
        } catch (const autopar::Stopped&) {
          throw py::error_already_set();
        }
        py::tuple choice(answer.choice.size());
        for (std::size_t i = 0; i < answer.choice.size(); ++i) choice[i] = answer.choice[i];
        return py::make_tuple(answer.feasible, choice, answer.total_s, answer.memory_bytes);
      },
      py::arg("time_s"), py::arg("memory_bytes"), py::arg("transition_s"), py::arg("budget_bytes"),
      py::arg("transient_bytes") = py::none());
}
