// Least memory of the stages of a sub-problem, regardless of time: which divisions fit.
#pragma once

#include <unordered_map>
#include <utility>
#include <vector>

#include "planner/instance.hpp"

namespace autopar {

// A stage needs the kept bytes of its layers, plus the largest transient and the largest shared
// bytes. Under caps of these two maxima every type takes the option that keeps least. The best caps
// are found by halving their ranges: options under the largest caps of a range keep least, and its
// smallest caps are the least that is added.
class LeastMemory {
 public:
  LeastMemory(const Instance& instance, const Item& item, const Watch& watch);

  // True if some division fits.
  bool fits(Bytes budget) { return starts(budget).back().back() != 0; }
  // The smallest budget with a division, if below `limit`, else `limit`; `stage` receives the
  // binding one.
  Bytes smallest_budget(Bytes limit, int& stage);
  // Layers per stage of a division that fits, near to equal sizes; empty if none fits.
  std::vector<int> division(Bytes budget);
  // Strategies of least memory in that division, by layer.
  std::vector<int> strategies(const std::vector<int>& sizes);

 private:
  struct Option {
    Bytes kept, transient, shared;
    int strategy;
  };
  struct Stage {
    Bytes base = 0;                            // kept whatever the layers are
    std::vector<std::vector<Option>> options;  // by type, those that keep least first
    std::vector<Bytes> transients, shareds;    // possible maxima, ascending
    std::unordered_map<std::int64_t, std::pair<Bytes, Bytes>> best_caps;  // by layers, see key()
  };
  struct Total {  // of the options that keep least under some caps; infinite when there are none
    Bytes kept = kInfBytes, transient = 0, shared = 0;
    Bytes need() const { return kept >= kInfBytes ? kInfBytes : kept + transient + shared; }
  };
  using Counts = std::vector<std::pair<int, int>>;  // type and number of layers

  const Instance& in_;
  const Watch& watch_;
  const int stages_;
  const int layers_;
  std::vector<Stage> all_;
  std::vector<int> stage_;  // in all_, by stage: equal stages share results
  Counts counts_;           // of the latest layers

  Stage& stage(int j) {
    return all_[static_cast<std::size_t>(stage_[static_cast<std::size_t>(j)])];
  }
  Stage build_stage(const Item& item, int j) const;
  void count(int l, int n);
  std::int64_t key(int l, int n) const {
    return (in_.t.num_types == 1 ? 0 : std::int64_t{in_.same_layers(l, n)}) * (layers_ + 1) + n;
  }
  static const Option* pick(const std::vector<Option>& options, Bytes transient, Bytes shared);
  Total total(const Stage& stage, Bytes transient, Bytes shared) const;
  std::pair<Bytes, Bytes> best_caps(Stage& stage, int l, int n);
  bool stage_fits(int j, int l, int n, Bytes budget);
  std::vector<std::vector<std::uint8_t>> starts(Bytes budget);
};

}  // namespace autopar
