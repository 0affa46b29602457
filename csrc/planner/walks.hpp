// The cheapest walks over sets of layouts.
//
// A walk begins in one layout of the set, ends in one, and visits all of them. Layers of a layout
// are what lets it visit that layout: each visit takes one at least. Visits beyond the first may
// pay, because a way through a third layout can be cheaper than the direct one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

class Walks {
 public:
  // Most layouts of a set.
  static constexpr std::size_t kMostLayouts = 8;

  struct Set {
    std::vector<int> layouts;  // ascending
    // If layers are plenty in each layout: least costs, (first, last) by position, at least
    // kForbidden if there is no walk; and the visits of such a walk, eight bits per position.
    std::vector<Ticks> least;
    std::vector<std::uint64_t> visits;
  };

  // `moves`: (layout, layout), from * num_layouts + to; staying in a layout is free.
  Walks(std::vector<Ticks> moves, int num_layouts);

  Ticks move(int from, int to) const { return moves_[cell(from, to)]; }
  // The layouts whose bits are set. Null if they are more than kMostLayouts.
  const Set* over(std::uint64_t bits);
  // Least cost from one position to another, given the layers in each layout of the set; none if
  // there are too many walks to look at.
  std::optional<Ticks> cost(const Set& set, const std::vector<int>& layers, std::size_t first,
                            std::size_t last);
  // The layouts of a walk of that cost in order.
  std::vector<int> walk(const std::vector<int>& layouts, const std::vector<int>& layers,
                        std::size_t first, std::size_t last) const;

 private:
  // Most entries of a table of partial walks.
  static constexpr std::size_t kMostEntries = std::size_t{1} << 16;
  // Partial walks from one layout, by visits of each layout (a mixed-radix number) and by last one.
  struct Table {
    std::vector<std::size_t> stride;
    std::vector<int> visits;  // the most
    std::size_t codes = 1;
    std::vector<Ticks> least;
    bool complete(std::size_t code) const;
  };

  const std::vector<Ticks> moves_;
  const std::size_t num_layouts_;
  std::map<std::uint64_t, Set> sets_;
  // by set, and by visits that can pay (four bits each) and the first position: costs to each last
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<Ticks>> of_few_;

  std::size_t cell(int from, int to) const {
    return static_cast<std::size_t>(from) * num_layouts_ + static_cast<std::size_t>(to);
  }
  Set over_layouts(std::vector<int> layouts) const;
  std::vector<int> useful_visits(const std::vector<int>& layouts, const std::vector<int>& layers,
                                 std::size_t first) const;
  Table table(const std::vector<int>& layouts, std::vector<int> visits, std::size_t first) const;
};

}  // namespace autopar
