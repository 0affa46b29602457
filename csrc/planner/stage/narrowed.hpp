// A stage without the options that nothing within its bound uses.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/stage/stage_kernel.hpp"

namespace autopar {

// The same stage with fewer options, and with the layouts that these have: all points within the
// bound are the same. An option is left out where the stage costs too much with one layer that has
// it: the other layers relaxed, in the layout of that one alone, or with one change of layout at
// least. Degrees, ZeRO and recomputation multiply, and few of their products are any good here.
template <int D>
class Narrowed {
 public:
  explicit Narrowed(const StageProblem<D>& problem);
  Narrowed(const Narrowed&) = delete;
  Narrowed& operator=(const Narrowed&) = delete;

  // False when some layer has no option left: no point is within the bound.
  bool possible() const { return possible_; }
  const StageProblem<D>& problem() const { return narrow_; }
  // The layout of the whole stage that has this number here.
  int layout(int number) const { return layouts_[static_cast<std::size_t>(number)]; }

 private:
  const StageProblem<D>& p_;
  StageProblem<D> narrow_;
  bool possible_ = true;
  std::vector<int> counts_;
  std::vector<std::size_t> used_;  // types that some layer has
  std::vector<std::vector<StageOption<D>>> kept_;
  std::vector<int> layouts_;
  std::vector<Cost<D>> predecessor_;

  bool leave_out();
  void renumber();
};

}  // namespace autopar
