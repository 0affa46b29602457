#include "planner/stage/chain_bound.hpp"

#include <algorithm>
#include <functional>
#include <limits>

namespace autopar {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kSearches = 40;  // prices per search, which ends by itself after about ten
constexpr int kLooks = 10;     // prices for a bound of many caps, which later bounds sharpen
constexpr double kHugePrice = 0x1p60;
// Prices prepared around the implied one, as shares of it: they bound labels that still need more
// or less than the average.
constexpr double kAround[] = {1.0 / 64, 1.0 / 16, 1.0 / 4, 0.5,   0.7,   0.8,   0.87,  0.92, 0.95,
                              0.97,     0.98,     0.99,    0.995, 0.998, 1.002, 1.005, 1.01, 1.02,
                              1.03,     1.05,     1.09,    1.15,  1.25,  1.4,   2.0,   4.0,  16.0};

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

}  // namespace

ChainBound::ChainBound(const StageProblem<1>& problem)
    : p_(problem),
      n_(problem.layer_type.size()),
      layouts_(idx(problem.num_layouts)),
      // every layer adds its option and a redistribution, each rounded; pricing rounds once more
      margin_(1.0 - static_cast<double>(6 * n_ + 32) * 0x1p-53),
      allowed_(problem.options.size()),
      best_(problem.options.size() * layouts_) {}

bool ChainBound::allow(OptionLists<1>& lists, Bytes transient_cap, Bytes shared_cap) {
  for (const std::size_t k : lists.used()) {
    allowed_[k].clear();
    for (const std::int32_t o : lists.under(k, transient_cap, shared_cap).kept)
      allowed_[k].push_back(p_.options[k][idx(o)]);
    if (allowed_[k].empty()) return false;
  }
  used_ = lists.used();
  return true;
}

// Cheapest choice of all layers at a price. `table`, unless null, receives for every layer and
// layout the cheapest choice of the layers before it. Negative if there is no choice.
ChainBound::Tangent ChainBound::path(double price, Tangent* table) {
  for (const std::size_t k : used_) {
    Tangent* best = &best_[k * layouts_];
    std::fill(best, best + layouts_, Tangent{kInf, 0, 0, 0, 0});
    for (const auto& o : allowed_[k]) {
      const Tangent option{static_cast<double>(o.cost[0]) + price * static_cast<double>(o.bytes),
                           o.cost[0], o.bytes, o.transient, o.shared};
      Tangent& known = best[idx(o.layout)];
      if (less(option, known)) known = option;
    }
  }
  now_.resize(layouts_);
  then_.resize(layouts_);
  for (std::size_t y = 0; y < layouts_; ++y)
    now_[y] = {static_cast<double>(p_.entry[y][0]), p_.entry[y][0], 0, p_.base_transient,
               p_.base_shared};
  for (std::size_t i = 0; i < n_; ++i) {
    if (table != nullptr) std::copy(now_.begin(), now_.end(), table + i * layouts_);
    const std::size_t k = idx(p_.layer_type[i]);
    for (std::size_t x = 0; x < layouts_; ++x) {
      const Tangent& own = best_[k * layouts_ + x];
      now_[x] = {now_[x].priced + own.priced, now_[x].cost + own.cost, now_[x].bytes + own.bytes,
                 std::max(now_[x].transient, own.transient), std::max(now_[x].shared, own.shared)};
    }
    if (i + 1 == n_) break;
    std::fill(then_.begin(), then_.end(), Tangent{kInf, 0, 0, 0, 0});
    const Cost<1>* moves = p_.redistribute[k].data();
    for (std::size_t x = 0; x < layouts_; ++x) {
      if (now_[x].priced == kInf) continue;
      for (std::size_t y = 0; y < layouts_; ++y) {
        const Ticks move = moves[x * layouts_ + y][0];
        if (move >= kForbidden) continue;
        const double priced = now_[x].priced + static_cast<double>(move);
        if (priced > then_[y].priced) continue;
        Tangent moved = now_[x];
        moved.priced = priced;
        moved.cost += move;
        if (less(moved, then_[y])) then_[y] = moved;
      }
    }
    now_.swap(then_);
  }
  Tangent least{kInf, 0, 0, 0, 0};
  for (std::size_t x = 0; x < layouts_; ++x) {
    if (p_.exit_allowed[x] == 0 || now_[x].priced == kInf) continue;
    const Ticks outside = p_.base[0] + p_.exit[x][0];
    Tangent whole = now_[x];
    whole.priced += static_cast<double>(outside);
    whole.cost += outside;
    if (less(whole, least)) least = whole;
  }
  least.priced *= margin_;
  return least;
}

ChainBound::Answer ChainBound::bound(Bytes most, double price, double limit) {
  Answer answer{-kInf, price, kInfTicks};
  const double budget = static_cast<double>(most);
  Tangent above, below;  // the choices on both sides of the budget
  double above_price = -1.0, below_price = -1.0;
  for (int look = 0; look < kLooks; ++look) {
    const Tangent at = path(price, nullptr);
    if (at.priced == kInf) return {kInf, price, kInfTicks};
    if (at.bytes + at.transient + at.shared <= p_.budget)
      answer.cost = std::min(answer.cost, at.cost);
    const double bound = at.priced - price * budget;
    if (bound > answer.bound) {
      answer.bound = bound;
      answer.price = price;
    }
    if (answer.bound > limit) break;
    const bool fits = at.bytes <= most;
    if (fits && price == 0.0) break;
    (fits ? below : above) = at;
    (fits ? below_price : above_price) = price;
    double next;
    if (above_price < 0)
      next = look == 0 ? price * 0.9 : 0.0;
    else if (below_price < 0)
      next = look == 0 && price > 0.0 ? price * 1.1 : kHugePrice;
    else
      next = static_cast<double>(below.cost - above.cost) /
             static_cast<double>(above.bytes - below.bytes);
    if (next == above_price || next == below_price) break;
    price = next;
  }
  return answer;
}

double ChainBound::prepare(Bytes budget, double price, Ticks& found) {
  // secant search for the price at which the choice passes the budget
  const double room = static_cast<double>(budget);
  found = kInfTicks;
  prices_.assign(1, 0.0);
  Tangent above = path(0.0, nullptr);
  double bound = above.priced;
  if (above.priced < kInf && above.bytes > budget) {
    prices_.push_back(kHugePrice);
    Tangent below = path(kHugePrice, nullptr);
    for (int search = 0; search < kSearches && below.bytes <= budget; ++search) {
      price = static_cast<double>(below.cost - above.cost) /
              static_cast<double>(above.bytes - below.bytes);
      const Tangent at = path(price, nullptr);
      bound = std::max(bound, at.priced - price * room);
      if (at.bytes == above.bytes || at.bytes == below.bytes) break;
      (at.bytes > budget ? above : below) = at;
    }
    if (below.bytes <= budget) found = below.cost;
  } else if (above.priced < kInf) {
    found = above.cost;
  }
  if (price > 0.0) {
    prices_.push_back(price);
    for (const double share : kAround) prices_.push_back(price * share);
  }
  std::sort(prices_.begin(), prices_.end(), std::greater<>());
  const std::size_t cells = n_ * layouts_;
  std::vector<Tangent> table(cells);
  tangents_.resize(cells * prices_.size());
  for (std::size_t j = 0; j < prices_.size(); ++j) {
    path(prices_[j], table.data());
    for (std::size_t c = 0; c < cells; ++c) {
      tangents_[c * prices_.size() + j] = table[c];
      tangents_[c * prices_.size() + j].priced *= margin_;
    }
  }
  return bound;
}

double ChainBound::rest(int first, int layout, Bytes left, Ticks& found) const {
  const std::size_t size = prices_.size();
  const Tangent* tangents = &tangents_[(idx(first) * layouts_ + idx(layout)) * size];
  found = kInfTicks;
  if (tangents->priced == kInf) return kInf;
  // bytes rise as prices fall: the nearest tangents on both sides are the tightest
  const Tangent* beyond = std::upper_bound(tangents, tangents + size, left,
                                           [](Bytes b, const Tangent& t) { return b < t.bytes; });
  double bound = -kInf;
  const double room = static_cast<double>(left);
  if (beyond != tangents + size)
    bound = beyond->priced - prices_[static_cast<std::size_t>(beyond - tangents)] * room;
  if (beyond != tangents) {
    const Tangent* within = beyond - 1;
    if (within->bytes <= left) found = within->cost;
    bound = std::max(bound,
                     within->priced - prices_[static_cast<std::size_t>(within - tangents)] * room);
  }
  return bound;
}

}  // namespace autopar
