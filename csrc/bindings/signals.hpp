// Ctrl-C while the core works: asked now and then by the thread that called, without the GIL held.
#pragma once

#include <pybind11/pybind11.h>

namespace autopar {

// True when a signal handler has raised, typically KeyboardInterrupt; the exception is set then,
// and the binding throws pybind11::error_already_set as soon as the core has come back.
inline bool signalled() {
  const pybind11::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

}  // namespace autopar
