// Bindings shared by both closed forms: switches by name.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "closed_form/halt.hpp"
#include "closed_form/quirks.hpp"

namespace autopar::analytic {

// Every switch is required: a missing name is an error of the caller.
template <class Quirks, std::size_t N>
Quirks quirks_of(const pybind11::dict& given, const Quirk<Quirks> (&table)[N]) {
  Quirks quirks;
  for (const Quirk<Quirks>& row : table) quirks.*row.flag = given[row.name].template cast<bool>();
  return quirks;
}

// Name -> meaning, in the order of the list.
template <class Quirks, std::size_t N>
pybind11::dict quirk_meanings(const Quirk<Quirks> (&table)[N]) {
  pybind11::dict meanings;
  for (const Quirk<Quirks>& row : table) meanings[row.name] = row.meaning;
  return meanings;
}

}  // namespace autopar::analytic
