// Layer types that cost the same in everything are one type to the search.
#pragma once

#include <memory>

#include "planner/problem.hpp"

namespace autopar {

// The tables with one type for all that have the same rows, moves and transfers: the first of them.
// Plans, their costs and every bound are the same, and what is known of layers is shared by more of
// them. Where no two types are alike, the views are those that were given.
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
