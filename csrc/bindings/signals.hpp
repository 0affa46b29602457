// Ctrl-C during work in the core: polled by the calling thread, which does not hold the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace autopar {

// True if a signal handler has raised, typically KeyboardInterrupt. The exception is then set, and
// the binding throws pybind11::error_already_set when the core returns.
inline bool signalled() {
  const pybind11::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

}  // namespace autopar
