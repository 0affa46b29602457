#include "planner/stage/counts.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "planner/hull.hpp"

namespace autopar {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Sums of at most this many reduced costs have rounding errors below kBoundSlack.
constexpr std::size_t kMostLayers = 4096;
// Search of the price of a tick of tail, by its binary logarithm.
constexpr double kLowestPrice = -12.0, kHighestPrice = 4.0;
constexpr int kPriceRounds = 14;

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

}  // namespace

bool Counts::apply(const StageProblem<2>& p) {
  const int type = p.layer_type.front();
  for (const int other : p.layer_type)
    if (other != type) return false;
  if (p.layer_type.size() > kMostLayers || p.num_layouts > 64) return false;
  const auto& moves = p.redistribute[idx(type)];
  for (int y = 0; y < p.num_layouts; ++y)
    if (moves[idx(y * p.num_layouts + y)] != Cost<2>{}) return false;
  for (const auto* costs : {&moves, &p.entry, &p.exit, p.predecessor})
    if (costs != nullptr)
      for (const Cost<2>& cost : *costs)
        if (cost[1] != 0) return false;
  return true;
}

Counts::Counts(const StageProblem<2>& problem, const std::vector<StageOption<2>>& options,
               const CountCaps& caps, StepBound<2>& bound, Walks& walks)
    : p_(problem),
      given_(options),
      caps_(caps),
      bound_(bound),
      walks_(walks),
      layers_(static_cast<int>(problem.layer_type.size())),
      layouts_(idx(problem.num_layouts)) {}

bool Counts::run(std::int64_t most_nodes) {
  most_nodes_ = most_nodes;
  found_.resize(p_.only_best() ? 1 : layouts_ * layouts_);
  layers_in_.assign(layouts_, 0);
  Ticks entry = kForbidden, exit = kForbidden;
  for (const StageOption<2>& o : given_) {
    entry = std::min(entry, p_.entry[idx(o.layout)][0]);
    if (p_.exit_allowed[idx(o.layout)] != 0) exit = std::min(exit, p_.exit[idx(o.layout)][0]);
  }
  if (entry >= kForbidden || exit >= kForbidden) return true;
  least_ends_ = entry + exit;
  double most = 0.0;
  for (const auto& other : bound_.others) most = std::max(most, other.most[1]);
  most_tail_ = p_.most_tail;
  if (most < static_cast<double>(kForbidden))
    most_tail_ = std::min(most_tail_, static_cast<Ticks>(most / (1.0 - kBoundSlack)) + 1);
  if (!find_prices()) return true;
  order_options();
  try {
    Part none;
    none.cost = p_.base;
    none.needs_transient = caps_.needs_transient;
    none.needs_shared = caps_.needs_shared;
    extend(0, layers_, none);
  } catch (const TooMany&) {
    return false;
  }
  return true;
}

double Counts::priced(const StageOption<2>& option) const {
  double cost =
      static_cast<double>(option.cost[0]) + byte_price_ * static_cast<double>(option.bytes);
  cost += tail_price_ * static_cast<double>(option.cost[1]);
  return cost;
}

// Upper limit of time + tail_price * tail of the points that the bound admits. For a given tail x,
// the time is limited by linear functions of max(x, the longest other tail); the largest value is
// where two of them cross, or at an end.
double Counts::most_at(double tail_price) const {
  double most = -kInf;
  const double incumbent = bound_.incumbent / (1.0 - kBoundSlack);
  for (const OtherStages<2>& other : bound_.others) {
    const double room = incumbent - other.sum;
    const double more = bound_.microbatches_less_1;
    const double slowest = other.largest[0], longest = other.largest[1];
    const double most_time = other.most[0] / (1.0 - kBoundSlack);
    const double most_tail = std::min(other.most[1] / (1.0 - kBoundSlack), room);
    for (const double tail : {longest, most_tail, room - more * slowest - most_time,
                              room - (more + 1.0) * most_time, room - (more + 1.0) * slowest}) {
      const double x = std::min(std::max(tail, longest), most_tail);
      const double left = room - std::max(x, longest);
      const double time = std::min({most_time, left - more * slowest, left / (more + 1.0)});
      most = std::max(most, time + tail_price * x);
    }
  }
  return most;
}

// Lower bound of time + tail_price * tail within the budget, and the price of a byte that gives it;
// infinite if nothing fits.
double Counts::relaxed_at(double tail_price, double& byte_price) const {
  thread_local std::vector<HullPoint> hull;
  hull.clear();
  for (const StageOption<2>& o : given_) {
    double cost = static_cast<double>(o.cost[0]);
    cost += tail_price * static_cast<double>(o.cost[1]);
    hull.push_back({static_cast<double>(o.bytes), cost});
  }
  lower_hull(hull);
  const double budget = static_cast<double>(caps_.budget), share = budget / layers_;
  if (hull.empty() || hull.front().bytes > share) return kInf;
  std::size_t i = 1;
  while (i < hull.size() && hull[i].bytes <= share) ++i;
  const HullPoint& corner = hull[i - 1];
  byte_price = 0.0;
  if (i < hull.size()) byte_price = (corner.cost - hull[i].cost) / (hull[i].bytes - corner.bytes);
  double fixed = static_cast<double>(p_.base[0] + least_ends_);
  fixed += tail_price * static_cast<double>(p_.base[1]);
  return fixed + layers_ * (corner.cost + byte_price * corner.bytes) - byte_price * budget;
}

// Finds the prices of the smallest gap; false if some prove that there is no point. The gap is a
// convex function of the price of a tick of tail.
bool Counts::find_prices() {
  gap_ = kInf;
  const auto gap_at = [&](double tail_price) {
    double byte_price = 0.0;
    const double relaxed = relaxed_at(tail_price, byte_price);
    const double most = most_at(tail_price);
    const double gap =
        relaxed == kInf ? -kInf : most - relaxed + kBoundSlack * std::abs(most) + 8.0;
    if (gap < gap_) {
      gap_ = gap;
      byte_price_ = byte_price;
      tail_price_ = tail_price;
      relaxed_ = relaxed;
    }
    return gap;
  };
  gap_at(0.0);
  constexpr double kGolden = 0.6180339887498949;
  double low = kLowestPrice, high = kHighestPrice;
  double a = high - kGolden * (high - low), b = low + kGolden * (high - low);
  double at_a = gap_at(std::exp2(a)), at_b = gap_at(std::exp2(b));
  for (int round = 0; round < kPriceRounds && gap_ >= 0; ++round) {
    if (at_a <= at_b) {
      high = std::exchange(b, a);
      at_b = at_a;
      a = high - kGolden * (high - low);
      at_a = gap_at(std::exp2(a));
    } else {
      low = std::exchange(a, b);
      at_a = at_b;
      b = low + kGolden * (high - low);
      at_b = gap_at(std::exp2(b));
    }
  }
  if (gap_ >= 0) limit();
  return gap_ >= 0;
}

// Sets the limits that follow from the incumbent.
void Counts::limit() {
  const double most = most_at(tail_price_), time = most_at(0.0);
  gap_ = most - relaxed_ + kBoundSlack * std::abs(most) + 8.0;
  most_time_ = time + kBoundSlack * std::abs(time) + 8.0;
}

void Counts::order_options() {
  double least = kInf;
  for (const StageOption<2>& o : given_) least = std::min(least, priced(o));
  for (const StageOption<2>& o : given_)
    if (priced(o) - least <= gap_) options_.push_back(o);
  std::stable_sort(options_.begin(), options_.end(),
                   [&](const auto& a, const auto& b) { return priced(a) > priced(b); });
  for (const StageOption<2>& o : options_) reduced_.push_back(priced(o) - least);
  least_bytes_.assign(options_.size() + 1, kInfBytes);
  least_tail_.assign(options_.size() + 1, kInfTicks);
  for (std::size_t o = options_.size(); o-- > 0;) {
    least_bytes_[o] = std::min(least_bytes_[o + 1], options_[o].bytes);
    least_tail_[o] = std::min(least_tail_[o + 1], options_[o].cost[1]);
  }
  arrival_.assign(layouts_, kForbidden);
  for (const StageOption<2>& to : options_)
    for (const StageOption<2>& from : options_)
      if (from.layout != to.layout)
        arrival_[idx(to.layout)] =
            std::min(arrival_[idx(to.layout)], walks_.move(from.layout, to.layout));
  counts_.assign(options_.size(), 0);
}

// Adds layers of one more option, of those from `from` on, and then of others.
void Counts::extend(std::size_t from, int left, const Part& part) {
  for (std::size_t o = from; o < options_.size(); ++o) {
    const StageOption<2>& option = options_[o];
    int& layers = layers_in_[idx(option.layout)];
    const bool fresh = layers == 0;
    Part next = part;
    if (fresh) {
      const Ticks arrival = arrival_[idx(option.layout)];
      if (used_ != 0) next.arrivals += std::min(next.dearest, arrival);
      next.dearest = std::max(next.dearest, arrival);
    }
    if (next.arrivals >= kForbidden) continue;
    next.needs_transient = part.needs_transient && option.transient != caps_.transient;
    next.needs_shared = part.needs_shared && option.shared != caps_.shared;
    const bool last = o + 1 == options_.size();
    used_ |= std::uint64_t{1} << option.layout;
    for (int count = 1; count <= left; ++count) {
      if (++nodes_ > most_nodes_) throw TooMany{};
      if (p_.watch != nullptr) p_.watch->poll_rarely();
      next.reduced += reduced_[o];
      if (next.reduced + static_cast<double>(next.arrivals) > gap_) break;
      next.cost = next.cost + option.cost;
      next.bytes += option.bytes;
      ++counts_[o];
      ++layers;
      const int rest = left - count;
      if (rest == 0) {
        leaf(next);
      } else if (!last && next.bytes + rest * least_bytes_[o + 1] <= caps_.budget &&
                 (next.cost[1] + rest * least_tail_[o + 1] <= most_tail_)) {
        extend(o + 1, rest, next);
      }
    }
    layers -= std::exchange(counts_[o], 0);
    if (fresh) used_ &= ~(std::uint64_t{1} << option.layout);
  }
}

Ticks Counts::ends(int first, int exit) const {
  if (p_.exit_allowed[idx(exit)] == 0) return kForbidden;
  return p_.entry[idx(first)][0] + p_.exit[idx(exit)][0];
}

// Sets the walks over the layouts used.
void Counts::find_walks() {
  set_ = walks_.over(used_);
  if (set_ == nullptr) throw TooMany{};
  least_walk_of_ = used_;
  least_walk_ = kForbidden;
  const std::size_t size = set_->layouts.size();
  for (std::size_t c = 0; c < size * size; ++c)
    least_walk_ = std::min(least_walk_,
                           set_->least[c] + ends(set_->layouts[c / size], set_->layouts[c % size]));
}

void Counts::leaf(const Part& part) {
  if (part.needs_transient || part.needs_shared || part.bytes > caps_.budget) return;
  if (part.cost[1] > most_tail_) return;
  if (least_walk_of_ != used_) find_walks();
  Cost<2> least = part.cost;
  least[0] += least_walk_;
  if (least_walk_ >= kForbidden || static_cast<double>(least[0]) > most_time_ || prunes(least))
    return;
  const std::size_t size = set_->layouts.size();
  layers_of_set_.clear();
  for (const int y : set_->layouts) layers_of_set_.push_back(layers_in_[idx(y)]);
  nodes_ += static_cast<std::int64_t>(size * size);  // about as much work
  for (std::size_t c = 0; c < size * size; ++c) {
    const int first = set_->layouts[c / size], exit = set_->layouts[c % size];
    const Ticks fixed = part.cost[0] + ends(first, exit);
    const auto admitted = [&](Ticks walk) {
      return walk < kForbidden && fixed + walk < kForbidden &&
             static_cast<double>(fixed + walk) <= most_time_;
    };
    if (!admitted(set_->least[c])) continue;
    const auto walk = walks_.cost(*set_, layers_of_set_, c / size, c % size);
    if (!walk) throw TooMany{};
    Cost<2> cost = part.cost;
    cost[0] = fixed + *walk;
    if (admitted(*walk)) offer(cost, part.bytes, first, exit);
  }
}

bool Counts::prunes(const Cost<2>& cost) const {
  StepBound<2>::Vector vector{};
  for (std::size_t d = 0; d < 5; ++d) vector[d] = bound_.entry(cost, d);
  return bound_.prunes(vector);
}

void Counts::offer(const Cost<2>& cost, Bytes bytes, int first, int exit) {
  if (prunes(cost)) return;
  auto& known = found_[p_.only_best() ? 0 : idx(first) * layouts_ + idx(exit)];
  Found made{cost, std::max(cost[1], p_.tail_floor), bytes, first, exit, counts_};
  // the last one that is no slower has the shortest tail of these
  auto at = std::upper_bound(known.begin(), known.end(), cost[0],
                             [](Ticks time, const Found& other) { return time < other.cost[0]; });
  if (at != known.begin()) {
    const Found& best = *std::prev(at);
    const bool equal = best.cost[0] == cost[0] && best.tail == made.tail;
    if (best.tail <= made.tail && !(equal && chain(made) < chain(best))) return;
    if (best.cost[0] == cost[0]) --at;
  }
  auto end = at;
  while (end != known.end() && end->tail >= made.tail) ++end;
  known.insert(known.erase(at, end), std::move(made));
  if (!p_.only_best()) return;
  StepBound<2>::Vector vector{};
  for (std::size_t d = 0; d < 5; ++d) vector[d] = bound_.entry(cost, d);
  bound_.incumbent = std::min(bound_.incumbent, bound_.least(vector));
  limit();
}

// The strategies of a chain of these counts, from the first layout to the exit.
std::vector<int> Counts::chain(const Found& found) const {
  std::vector<std::vector<int>> by_layout(layouts_);
  for (std::size_t o = 0; o < options_.size(); ++o)
    by_layout[idx(options_[o].layout)].insert(by_layout[idx(options_[o].layout)].end(),
                                              idx(found.counts[o]), options_[o].strategy);
  std::vector<int> set, layers;
  for (std::size_t y = 0; y < layouts_; ++y) {
    if (by_layout[y].empty()) continue;
    std::sort(by_layout[y].begin(), by_layout[y].end());
    set.push_back(static_cast<int>(y));
    layers.push_back(static_cast<int>(by_layout[y].size()));
  }
  const auto position = [&](int y) {
    return static_cast<std::size_t>(std::find(set.begin(), set.end(), y) - set.begin());
  };
  const std::vector<int> walk =
      walks_.walk(set, layers, position(found.first), position(found.exit));
  std::vector<int> chain;
  for (auto at = walk.begin(); at != walk.end(); ++at) {
    // one layer is left for each later visit
    auto& own = by_layout[idx(*at)];
    const auto take = std::ssize(own) - std::count(at + 1, walk.end(), *at);
    chain.insert(chain.end(), own.begin(), own.begin() + take);
    own.erase(own.begin(), own.begin() + take);
  }
  return chain;
}

std::vector<StagePoint<2>> Counts::points() const {
  std::vector<StagePoint<2>> points;
  for (const auto& known : found_)
    for (const Found& found : known)
      points.push_back({found.cost, found.bytes + caps_.transient + caps_.shared, found.first,
                        found.exit, chain(found)});
  return points;
}

}  // namespace autopar
