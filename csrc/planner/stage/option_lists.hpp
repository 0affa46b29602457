// The options of every layer type under caps of transient and shared bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/hull.hpp"
#include "planner/stage/stage_kernel.hpp"

namespace autopar {

// There are many caps, because every type has separate needs. The options that a type may use under
// them depend only on how many of its own needs they admit: a list is made once for each such pair.
template <int D>
class OptionLists {
 public:
  struct List {
    bool made = false;
    std::vector<std::int32_t> kept;  // ascending; none dominated by another of the same layout
    Bytes transient = 0;             // largest needs of the kept options
    Bytes shared = 0;
    std::vector<std::vector<HullPoint>> hulls;  // by entry of the bound, made when asked for
  };

  OptionLists(const StageProblem<D>& problem, const std::vector<int>& counts) : p_(problem) {
    types_.resize(p_.options.size());
    for (std::size_t k = 0; k < types_.size(); ++k) {
      if (counts[k] == 0) continue;
      used_.push_back(k);
      Type& type = types_[k];
      for (const auto& o : p_.options[k]) {
        type.transients.push_back(o.transient);
        type.shareds.push_back(o.shared);
      }
      sort_unique(type.transients);
      sort_unique(type.shareds);
      type.lists.resize((type.transients.size() + 1) * (type.shareds.size() + 1));
    }
  }

  // Types of at least one layer.
  const std::vector<std::size_t>& used() const { return used_; }

  // All needs, at least the stage's own, ascending.
  std::vector<Bytes> transients() const { return needs(p_.base_transient, &Type::transients); }
  std::vector<Bytes> shareds() const { return needs(p_.base_shared, &Type::shareds); }

  List& under(std::size_t k, Bytes transient_cap, Bytes shared_cap) {
    Type& type = types_[k];
    const std::size_t t = admitted(type.transients, transient_cap);
    const std::size_t s = admitted(type.shareds, shared_cap);
    List& list = type.lists[t * (type.shareds.size() + 1) + s];
    if (!list.made) make(list, p_.options[k], transient_cap, shared_cap);
    return list;
  }

 private:
  struct Type {
    std::vector<Bytes> transients, shareds;  // distinct needs of the type, ascending
    std::vector<List> lists;                 // by number of admitted needs of both kinds
  };

  const StageProblem<D>& p_;
  std::vector<Type> types_;
  std::vector<std::size_t> used_;

  static void sort_unique(std::vector<Bytes>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
  }
  static std::size_t admitted(const std::vector<Bytes>& needs, Bytes cap) {
    return static_cast<std::size_t>(std::upper_bound(needs.begin(), needs.end(), cap) -
                                    needs.begin());
  }
  std::vector<Bytes> needs(Bytes base, std::vector<Bytes> Type::* own) const {
    std::vector<Bytes> values{base};
    for (const std::size_t k : used_)
      for (const Bytes need : types_[k].*own) values.push_back(std::max(base, need));
    sort_unique(values);
    return values;
  }

  static bool no_worse(const StageOption<D>& a, const StageOption<D>& b) {
    if (a.layout != b.layout || a.bytes > b.bytes) return false;
    for (std::size_t d = 0; d < D; ++d)
      if (a.cost[d] > b.cost[d]) return false;
    return true;
  }

  static void make(List& list, const std::vector<StageOption<D>>& options, Bytes transient_cap,
                   Bytes shared_cap) {
    list.made = true;
    for (std::size_t b = 0; b < options.size(); ++b) {
      const StageOption<D>& option = options[b];
      if (option.transient > transient_cap || option.shared > shared_cap) continue;
      bool needless = false;
      for (std::size_t i = 0; i < list.kept.size() && !needless; ++i)
        needless = no_worse(options[static_cast<std::size_t>(list.kept[i])], option);
      if (needless) continue;
      std::erase_if(list.kept, [&](std::int32_t a) {
        return no_worse(option, options[static_cast<std::size_t>(a)]);
      });
      list.kept.push_back(static_cast<std::int32_t>(b));
    }
    for (const std::int32_t o : list.kept) {
      list.transient = std::max(list.transient, options[static_cast<std::size_t>(o)].transient);
      list.shared = std::max(list.shared, options[static_cast<std::size_t>(o)].shared);
    }
  }
};

}  // namespace autopar
