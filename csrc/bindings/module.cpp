// Table of contents of the private module `_autopar_core`.
#include <pybind11/pybind11.h>

#include "planner/common.hpp"

namespace py = pybind11;

void register_stage(py::module_& m);
void register_planner(py::module_& m);
void register_replay(py::module_& m);
void register_documents(py::module_& m);
void register_calculon(py::module_& m);
void register_tensor2d(py::module_& m);

PYBIND11_MODULE(_autopar_core, m) {
  m.doc() = "Planner core of autopar; private, use search.planning.layered";
  m.attr("ABI_VERSION") = autopar::kAbiVersion;
  register_stage(m);
  register_planner(m);
  register_replay(m);
  register_documents(m);
  register_calculon(m);
  register_tensor2d(m);
}
