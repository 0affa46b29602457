#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/signals.hpp"
#include "planner/step/replay.hpp"

namespace py = pybind11;

namespace {

using autopar::Event;

template <class T, class Field>
py::array_t<T> column(const std::vector<Event>& events, Field field) {
  py::array_t<T> values(static_cast<py::ssize_t>(events.size()));
  T* out = values.mutable_data();
  for (const Event& event : events) *out++ = static_cast<T>(event.*field);
  return values;
}

py::object columns(const std::vector<Event>& events) {
  return py::make_tuple(
      column<std::int32_t>(events, &Event::stage), column<std::uint8_t>(events, &Event::work),
      column<std::int64_t>(events, &Event::microbatch), column<double>(events, &Event::start_s),
      column<double>(events, &Event::end_s));
}

}  // namespace

void register_replay(py::module_& m) {
  m.def(
      "replay",
      [](std::vector<double> forward_s, std::vector<double> backward_s, std::vector<double> send_s,
         std::vector<double> tail_s, std::int64_t num_microbatches, bool gpipe, bool timeline) {
        const std::size_t p = forward_s.size();
        if (p == 0 || backward_s.size() != p || tail_s.size() != p || send_s.size() + 1 < p)
          throw py::value_error("forward_s, backward_s, send_s and tail_s have several lengths");
        if (num_microbatches < 1) throw py::value_error("num_microbatches is below 1");
        const autopar::Pipeline pipeline{gpipe,
                                         num_microbatches,
                                         std::move(forward_s),
                                         std::move(backward_s),
                                         std::move(tail_s),
                                         std::move(send_s)};
        std::vector<Event> events;
        double step_s = 0.0;
        try {
          py::gil_scoped_release release;
          autopar::Monitor monitor(0.0, autopar::signalled);
          step_s = autopar::replay_s(pipeline, monitor, timeline ? &events : nullptr);
        } catch (const autopar::Stopped&) {
          throw py::error_already_set();
        }
        return py::make_tuple(step_s, timeline ? columns(events) : py::none());
      },
      py::arg("forward_s"), py::arg("backward_s"), py::arg("send_s"), py::arg("tail_s"),
      py::arg("num_microbatches"), py::arg("gpipe"), py::arg("timeline"));
}
