#include "planner/walks.hpp"

#include <algorithm>
#include <array>

namespace autopar {

Walks::Walks(std::vector<Ticks> moves, int num_layouts)
    : moves_(std::move(moves)), num_layouts_(static_cast<std::size_t>(num_layouts)) {}

const Walks::Set* Walks::over(std::uint64_t bits) {
  const auto known = sets_.find(bits);
  if (known != sets_.end()) return &known->second;
  std::vector<int> layouts;
  for (std::size_t y = 0; y < num_layouts_; ++y)
    if ((bits >> y & 1U) != 0) layouts.push_back(static_cast<int>(y));
  if (layouts.size() > kMostLayouts) return nullptr;
  return &sets_.emplace(bits, over_layouts(std::move(layouts))).first->second;
}

// The cheapest orders of the layouts, by shortest ways between them through others of the set.
Walks::Set Walks::over_layouts(std::vector<int> layouts) const {
  const std::size_t size = layouts.size();
  struct Way {
    Ticks cost = kInfTicks;
    std::uint64_t visits = 0;  // without the first one
  };
  const auto visit = [](std::size_t y) { return std::uint64_t{1} << (8 * y); };
  std::array<std::array<Way, kMostLayouts>, kMostLayouts> way;
  for (std::size_t x = 0; x < size; ++x)
    for (std::size_t y = 0; y < size; ++y)
      if (x != y) way[x][y] = {move(layouts[x], layouts[y]), visit(y)};
  for (std::size_t z = 0; z < size; ++z)
    for (std::size_t x = 0; x < size; ++x)
      for (std::size_t y = 0; y < size; ++y)
        if (x != y && x != z && y != z && way[x][z].cost + way[z][y].cost < way[x][y].cost)
          way[x][y] = {way[x][z].cost + way[z][y].cost, way[x][z].visits + way[z][y].visits};
  Set set;
  const std::size_t orders = std::size_t{1} << size;
  std::vector<std::array<Way, kMostLayouts>> best(orders);  // by layouts visited, and last one
  for (std::size_t first = 0; first < size; ++first) {
    std::fill(best.begin(), best.end(), std::array<Way, kMostLayouts>{});
    best[std::size_t{1} << first][first] = {0, visit(first)};
    for (std::size_t seen = std::size_t{1} << first; seen < orders; ++seen)
      for (std::size_t x = 0; x < size; ++x) {
        const Way here = best[seen][x];
        if (here.cost >= kForbidden) continue;
        for (std::size_t y = 0; y < size; ++y) {
          // the first one again: only as the end of all
          const bool again = y == first && seen + 1 == orders && x != first;
          if ((seen >> y & 1U) != 0 && !again) continue;
          Way& there = best[seen | std::size_t{1} << y][y];
          const Ticks cost = here.cost + way[x][y].cost;
          if (cost < there.cost) there = {cost, here.visits + way[x][y].visits};
        }
      }
    for (const Way& end : best.back()) {
      if (set.least.size() == (first + 1) * size) break;
      set.least.push_back(end.cost);
      set.visits.push_back(end.visits);
    }
  }
  set.layouts = std::move(layouts);
  return set;
}

std::optional<Ticks> Walks::cost(const Set& set, const std::vector<int>& layers, std::size_t first,
                                 std::size_t last) {
  const std::size_t size = set.layouts.size(), at = first * size + last;
  bool enough = true;
  for (std::size_t y = 0; y < size; ++y)
    enough = enough && static_cast<int>(set.visits[at] >> (8 * y) & 255U) <= layers[y];
  if (enough || set.least[at] >= kForbidden) return set.least[at];
  const std::vector<int> visits = useful_visits(set.layouts, layers, first);
  std::pair<std::uint64_t, std::uint64_t> key{0, first};
  for (std::size_t y = 0; y < size; ++y) {
    key.first |= std::uint64_t{1} << set.layouts[y];
    key.second = key.second << 4U | static_cast<std::uint64_t>(visits[y]);
  }
  std::vector<Ticks>& known = of_few_[key];
  if (known.empty()) {
    const Table t = table(set.layouts, visits, first);
    if (t.least.empty()) return std::nullopt;
    known.assign(size, kInfTicks);
    for (std::size_t code = 0; code < t.codes; ++code)
      if (t.complete(code))
        for (std::size_t y = 0; y < size; ++y)
          known[y] = std::min(known[y], t.least[code * size + y]);
  }
  return known[last];
}

// No cheapest walk needs more visits than these. Between two visits of a layout lies another one
// that is visited nowhere else, or the way between them is needless. And where no way is
// cheaper through a layout, it is passed by: only the first one is visited again, as the last.
std::vector<int> Walks::useful_visits(const std::vector<int>& layouts,
                                      const std::vector<int>& layers, std::size_t first) const {
  const auto hub = [&](int y) {
    for (const int x : layouts)
      for (const int z : layouts)
        if (x != y && z != y && x != z && move(x, y) + move(y, z) < move(x, z)) return true;
    return false;
  };
  std::vector<int> visits;
  for (std::size_t y = 0; y < layouts.size(); ++y) {
    const int most = hub(layouts[y]) ? static_cast<int>(layouts.size()) : y == first ? 2 : 1;
    visits.push_back(std::min(layers[y], most));
  }
  return visits;
}

bool Walks::Table::complete(std::size_t code) const {
  for (std::size_t y = 0; y < visits.size(); ++y)
    if (code / stride[y] % (static_cast<std::size_t>(visits[y]) + 1) == 0) return false;
  return true;
}

// Without entries if there would be too many.
Walks::Table Walks::table(const std::vector<int>& layouts, std::vector<int> visits,
                          std::size_t first) const {
  const std::size_t size = layouts.size();
  Table t;
  for (const int most : visits) {
    t.stride.push_back(t.codes);
    t.codes *= static_cast<std::size_t>(most) + 1;
    if (t.codes * size > kMostEntries) return t;
  }
  t.visits = std::move(visits);
  t.least.assign(t.codes * size, kInfTicks);
  t.least[t.stride[first] * size + first] = 0;
  for (std::size_t code = t.stride[first]; code < t.codes; ++code)
    for (std::size_t x = 0; x < size; ++x) {
      const Ticks here = t.least[code * size + x];
      if (here >= kForbidden) continue;
      for (std::size_t y = 0; y < size; ++y) {
        const std::size_t most = static_cast<std::size_t>(t.visits[y]);
        if (y == x || code / t.stride[y] % (most + 1) == most) continue;
        Ticks& there = t.least[(code + t.stride[y]) * size + y];
        there = std::min(there, here + move(layouts[x], layouts[y]));
      }
    }
  return t;
}

std::vector<int> Walks::walk(const std::vector<int>& layouts, const std::vector<int>& layers,
                             std::size_t first, std::size_t last) const {
  const std::size_t size = layouts.size();
  const Table t = table(layouts, useful_visits(layouts, layers, first), first);
  std::size_t code = t.codes;
  for (std::size_t c = 0; c < t.codes; ++c)
    if (t.complete(c) &&
        (code == t.codes || t.least[c * size + last] < t.least[code * size + last]))
      code = c;
  std::vector<int> walk{layouts[last]};
  for (std::size_t at = last; code != t.stride[first];) {
    const Ticks here = t.least[code * size + at];
    code -= t.stride[at];
    std::size_t from = 0;
    while (from == at || t.least[code * size + from] + move(layouts[from], layouts[at]) != here)
      ++from;
    walk.push_back(layouts[from]);
    at = from;
  }
  std::reverse(walk.begin(), walk.end());
  return walk;
}

}  // namespace autopar
