// Least memory of the stages of a sub-problem, and a plan found from it.
#include "planner/subproblem/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "planner/subproblem/subproblem.hpp"

namespace autopar {
namespace {

void sort_distinct(std::vector<Bytes>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

}  // namespace

LeastMemory::LeastMemory(const Instance& instance, const Item& item, const Watch& watch)
    : in_(instance), watch_(watch), stages_(instance.stages(item)), layers_(instance.t.num_layers) {
  for (int j = 0; j < stages_; ++j) {
    watch_.poll();
    // with GPipe every stage between the ends keeps all micro-batches
    const bool again = in_.t.gpipe && j > 1 && j + 1 < stages_ && j > in_.t.num_stage_rules;
    if (!again) all_.push_back(build_stage(item, j));
    stage_.push_back(static_cast<int>(all_.size()) - 1);
  }
}

LeastMemory::Stage LeastMemory::build_stage(const Item& item, int j) const {
  const Tables& t = in_.t;
  const int table = t.candidate_table[item.candidate];
  const int microbatches = in_.microbatches(item);
  const std::size_t once = microbatches == 1 ? 0 : 1;
  const Bytes in_flight = stages_ == 1 ? 1 : (t.gpipe ? microbatches : stages_ - j);
  const int kind = stages_ == 1 ? 0 : j == 0 ? 1 : j == stages_ - 1 ? 3 : 2;
  Stage stage;
  stage.base = t.stage_fixed_bytes[table * 4 + kind];
  Bytes transient = 0, shared = 0;
  if (kind != 2) {
    const VocabCost vocab = in_.vocab_cost(item, kind == 0 ? 0 : kind == 1 ? 1 : 2, once);
    stage.base += vocab.fixed + vocab.activation * in_flight;
    transient = vocab.transient;
    shared = vocab.shared;
  }
  stage.transients.push_back(transient);
  stage.shareds.push_back(shared);
  stage.options.resize(at(t.num_types));
  for (int k = 0; k < t.num_types; ++k) {
    if (in_.count[at(k)] == 0) continue;
    std::vector<Option> found;
    for (int s = 0; s < t.num_strategies; ++s) {
      const std::size_t r = in_.row(table, k, s);
      if (t.valid[r] == 0 || !in_.allowed(item, j, s)) continue;
      found.push_back(
          {t.static_bytes[once * in_.num_rows() + r] + t.activation_bytes[r] * in_flight,
           std::max(transient, t.transient_bytes[once * in_.num_rows() + r]),
           std::max(shared, t.shared_bytes[r]), s});
    }
    std::sort(found.begin(), found.end(), [](const Option& a, const Option& b) {
      return std::tie(a.kept, a.transient, a.shared, a.strategy) <
             std::tie(b.kept, b.transient, b.shared, b.strategy);
    });
    // an option that an earlier one undercuts in everything is never chosen
    std::vector<Option>& options = stage.options[at(k)];
    for (const Option& o : found) {
      if (pick(options, o.transient, o.shared) != nullptr) continue;
      options.push_back(o);
      stage.transients.push_back(o.transient);
      stage.shareds.push_back(o.shared);
    }
  }
  sort_distinct(stage.transients);
  sort_distinct(stage.shareds);
  return stage;
}

void LeastMemory::count(int l, int n) {
  counts_.clear();
  const std::size_t types = at(in_.t.num_types);
  const int* before = in_.prefix.data() + at(l) * types;
  const int* behind = in_.prefix.data() + at(l + n) * types;
  for (std::size_t k = 0; k < types; ++k)
    if (behind[k] > before[k]) counts_.emplace_back(static_cast<int>(k), behind[k] - before[k]);
}

const LeastMemory::Option* LeastMemory::pick(const std::vector<Option>& options, Bytes transient,
                                             Bytes shared) {
  for (const Option& o : options)
    if (o.transient <= transient && o.shared <= shared) return &o;
  return nullptr;
}

LeastMemory::Total LeastMemory::total(const Stage& stage, Bytes transient, Bytes shared) const {
  // the smallest values already include embedding and head
  Total sum{stage.base, stage.transients.front(), stage.shareds.front()};
  for (const auto& [type, layers] : counts_) {
    const Option* o = pick(stage.options[at(type)], transient, shared);
    if (o == nullptr) return {};
    sum.kept += o->kept * layers;
    sum.transient = std::max(sum.transient, o->transient);
    sum.shared = std::max(sum.shared, o->shared);
  }
  return sum;
}

// Caps under which layers l..l+n-1, counted in counts_, need least.
std::pair<Bytes, Bytes> LeastMemory::best_caps(Stage& stage, int l, int n) {
  const auto known = stage.best_caps.find(key(l, n));
  if (known != stage.best_caps.end()) return known->second;
  struct Range {  // of caps, first and last, and the total under the last ones
    std::size_t t1, t2, h1, h2;
    Total last;
  };
  const auto& t = stage.transients;
  const auto& h = stage.shareds;
  std::pair<Bytes, Bytes> best{t.back(), h.back()};
  Bytes least = kInfBytes;
  std::vector<Range> open{{0, t.size() - 1, 0, h.size() - 1, total(stage, t.back(), h.back())}};
  while (!open.empty()) {
    watch_.poll_rarely();
    const Range r = open.back();
    open.pop_back();
    if (r.last.need() < least) {
      least = r.last.need();
      best = {r.last.transient, r.last.shared};
    }
    if (r.last.kept >= kInfBytes || r.last.kept + t[r.t1] + h[r.h1] >= least) continue;
    // caps from the maxima reached under the last ones on need no less
    const Bytes wide = r.last.transient - t[r.t1], high = r.last.shared - h[r.h1];
    if (wide <= 0 && high <= 0) continue;
    const bool by_transient = wide >= high;
    const auto& values = by_transient ? t : h;
    const std::size_t first = by_transient ? r.t1 : r.h1;
    const Bytes top = by_transient ? r.last.transient : r.last.shared;
    const auto behind =
        std::lower_bound(values.begin() + static_cast<std::ptrdiff_t>(first), values.end(), top);
    const std::size_t middle =
        first + (static_cast<std::size_t>(behind - values.begin()) - 1 - first) / 2;
    Range above = r, below = r;
    (by_transient ? above.t1 : above.h1) = middle + 1;
    (by_transient ? below.t2 : below.h2) = middle;
    below.last = total(stage, t[below.t2], h[below.h2]);
    open.push_back(above);
    open.push_back(below);
  }
  stage.best_caps.emplace(key(l, n), best);
  return best;
}

bool LeastMemory::stage_fits(int j, int l, int n, Bytes budget) {
  Stage& here = stage(j);
  count(l, n);
  // between these the caps decide, which is rare
  const Total last = total(here, here.transients.back(), here.shareds.back());
  if (last.need() <= budget) return true;
  if (last.kept >= kInfBytes || last.kept + here.transients.front() + here.shareds.front() > budget)
    return false;
  const auto [transient, shared] = best_caps(here, l, n);
  return total(here, transient, shared).need() <= budget;
}

// Layers at which every stage can start. The last one that memory allows is not enough: it may
// force a large layer on a stage that holds many micro-batches.
std::vector<std::vector<std::uint8_t>> LeastMemory::starts(Bytes budget) {
  std::vector<std::vector<std::uint8_t>> all(at(stages_) + 1,
                                             std::vector<std::uint8_t>(at(layers_) + 1, 0));
  all[0][0] = 1;
  for (int j = 0; j < stages_; ++j) {
    auto& next = all[at(j) + 1];
    const int last = layers_ - (stages_ - 1 - j);  // leaves a layer for every later stage
    int end = 0;     // latest end of the stage: fewer layers never need more
    int marked = 0;  // end up to which `next` is marked
    for (int l = j; l < last; ++l) {
      if (!all[at(j)][at(l)]) continue;
      watch_.poll_rarely();
      if (!in_.t.division.empty()) {
        const int n = in_.t.division[at(j)];
        if (l + n <= last && stage_fits(j, l, n, budget)) next[at(l + n)] = 1;
        continue;
      }
      end = std::max(end, l);
      while (end < last && stage_fits(j, l, end + 1 - l, budget)) ++end;
      for (marked = std::max(marked, l); marked < end; ++marked) next[at(marked + 1)] = 1;
    }
  }
  return all;
}

Bytes LeastMemory::smallest_budget(Bytes limit, int& stage) {
  if (limit <= 0 || !fits(limit - 1)) return limit;
  Bytes low = 0, high = limit - 1;
  while (low < high) {
    const Bytes middle = low + (high - low) / 2;
    if (fits(middle))
      high = middle;
    else
      low = middle + 1;
  }
  // the first stage that needs the whole budget in some division, and that no division avoids
  const auto short_of = starts(high - 1);
  stage = stages_ - 1;
  for (int j = 0; j < stages_; ++j) {
    const auto& next = short_of[at(j) + 1];
    if (std::find(next.begin(), next.end(), 1) != next.end()) continue;
    stage = j;
    break;
  }
  return high;
}

std::vector<int> LeastMemory::division(Bytes budget) {
  const auto reached = starts(budget);
  if (reached[at(stages_)][at(layers_)] == 0) return {};
  // backwards from the last layer: of the sizes that fit, the one nearest to the mean
  std::vector<int> sizes(at(stages_), 0);
  for (int j = stages_ - 1, end = layers_; j >= 0; --j) {
    const auto from_mean = [&](int size) { return std::abs(size * (j + 1) - end); };
    int& size = sizes[at(j)];
    for (int l = j; l < end; ++l) {
      const int n = end - l;
      if (!reached[at(j)][at(l)] || (size > 0 && from_mean(n) >= from_mean(size))) continue;
      if (!in_.t.division.empty() && in_.t.division[at(j)] != n) continue;
      if (stage_fits(j, l, n, budget)) size = n;
    }
    end -= size;
  }
  return sizes;
}

std::vector<int> LeastMemory::strategies(const std::vector<int>& sizes) {
  std::vector<int> found;
  for (int j = 0, l = 0; j < stages_; l += sizes[at(j)], ++j) {
    count(l, sizes[at(j)]);
    const auto [transient, shared] = best_caps(stage(j), l, sizes[at(j)]);
    for (int i = l; i < l + sizes[at(j)]; ++i)
      found.push_back(pick(stage(j).options[at(in_.t.layer_type[i])], transient, shared)->strategy);
  }
  return found;
}

template <int D>
ItemPlan Subproblem<D>::plan_near(const std::vector<int>& sizes, const std::vector<int>& strategies,
                                  const Watch& watch) {
  known_ = ItemPlan{};
  watch_ = &watch;
  std::vector<StagePoint<D>> points(at(stages_));
  Path path;
  int l = 0;
  for (int j = 0; j < stages_; ++j) {
    StagePoint<D>& point = points[at(j)];
    point.cost = stage_[at(j)].base;
    path.steps.push_back({l, sizes[at(j)], nullptr});
    int before = -1;
    for (const int end = l + sizes[at(j)]; l < end; ++l) {
      const int type = in_.t.layer_type[l];
      const auto& options = stage_[at(j)].options[at(type)];
      const StageOption<D>& o = *std::find_if(
          options.begin(), options.end(),
          [&](const StageOption<D>& option) { return option.strategy == strategies[at(l)]; });
      if (before < 0) point.first_layout = o.layout;
      if (l == 0) point.cost = point.cost + entry_[at(o.layout)];
      if (l + 1 == layers_) point.cost = point.cost + exit_[at(o.layout)];
      if (before >= 0)
        point.cost =
            point.cost + move_[at(in_.t.layer_type[l - 1])][at(before * layouts_ + o.layout)];
      point.cost = point.cost + o.cost;
      point.strategies.push_back(o.strategy);
      before = point.exit_layout = o.layout;
    }
  }
  std::vector<const StagePoint<D>*> all;
  for (const auto& point : points) all.push_back(&point);
  step_of(all, sizes);
  known_.exact = false;
  try {
    ceiling_ = kForbidden;
    quick_step(path);
  } catch (const DeadlinePassed&) {  // the first plan is enough
  }
  return known_;
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
