// A stage without the options that no point within its bound uses.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/stage/stage_kernel.hpp"

namespace autopar {

// The same stage with fewer options and only their layouts: all points within the bound are
// unchanged. An option is excluded if the stage costs too much with one layer that uses it and the
// other layers relaxed, either all in its layout, or with at least one change of layout. Degrees,
// ZeRO and recomputation multiply, and few of their products are useful in one stage.
template <int D>
class Narrowed {
 public:
  explicit Narrowed(const StageProblem<D>& problem);
  Narrowed(const Narrowed&) = delete;
  Narrowed& operator=(const Narrowed&) = delete;

  // False when some layer has no option left: no point is within the bound.
  bool possible() const { return possible_; }
  const StageProblem<D>& problem() const { return narrow_; }
  // Layout of the whole stage with this number in the narrowed one.
  int layout(int number) const { return layouts_[static_cast<std::size_t>(number)]; }

 private:
  const StageProblem<D>& p_;
  StageProblem<D> narrow_;
  bool possible_ = true;
  std::vector<int> counts_;
  std::vector<std::size_t> used_;  // types of at least one layer
  std::vector<std::vector<StageOption<D>>> kept_;
  std::vector<int> layouts_;
  std::vector<Cost<D>> predecessor_;

  bool leave_out();
  void renumber();
};

}  // namespace autopar
