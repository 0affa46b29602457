// Merges layer types with equal costs into one type for the search.
#pragma once

#include <memory>

#include "planner/problem.hpp"

namespace autopar {

// Tables in which all types with the same rows, moves and transfers are one type, the first of
// them. Plans, costs and bounds do not change, and results about layers apply to more of them. If
// no two types are equal, the views are those that were given.
class LikeTypes {
 public:
  explicit LikeTypes(const Tables& given);
  ~LikeTypes();
  LikeTypes(const LikeTypes&) = delete;
  LikeTypes& operator=(const LikeTypes&) = delete;

  Tables tables;

 private:
  struct Arrays;
  std::unique_ptr<Arrays> own_;
};

}  // namespace autopar
