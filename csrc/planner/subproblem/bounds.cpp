// Construction of a sub-problem and its lower bounds.
#include "planner/subproblem/subproblem.hpp"

namespace autopar {
namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();
// First limit over the bound without memory, and next limit over one within which nothing was
// found.
constexpr double kFirstLimit = 1.125;
constexpr double kNextLimit = 1.5;
}  // namespace

template <int D>
Subproblem<D>::Subproblem(const Instance& instance, const Item& item, Ticks send_cap)
    : in_(instance),
      item_(item),
      table_(instance.t.candidate_table[item.candidate]),
      stages_(instance.stages(item)),
      layers_(instance.t.num_layers),
      microbatches_(instance.microbatches(item)),
      types_(instance.t.num_types),
      layouts_(instance.t.num_layouts),
      send_cap_(send_cap) {
  const Tables& t = in_.t;
  const std::size_t pairs = at(layouts_) * at(layouts_);
  move_.resize(at(types_));
  exit_allowed_.assign(at(types_) * at(layouts_), 1);
  least_send_ = kInfTicks;
  for (int k = 0; k < types_; ++k) {
    const std::size_t from = (at(table_) * at(types_) + at(k)) * pairs;
    for (std::size_t c = 0; c < pairs; ++c)
      move_[at(k)].push_back(cost(in_.move_forward[from + c], in_.move_backward[from + c], 0));
    for (int y = 0; y < layouts_; ++y) {
      const Ticks send = in_.send[(at(table_) * at(types_) + at(k)) * at(layouts_) + at(y)];
      if (send > send_cap_)
        exit_allowed_[at(k) * at(layouts_) + at(y)] = 0;
      else if ((item_.layouts >> y) & 1U)
        least_send_ = std::min(least_send_, send);
    }
  }
  // bounds charge no redistribution, so any layout is valid for kAnyVocab
  const int vocab_layout = t.vocab_layout[std::max(item_.vocab, 0)];
  for (int y = 0; y < layouts_; ++y) {
    entry_.push_back(move_[at(t.layer_type[0])][at(vocab_layout * layouts_ + y)]);
    exit_.push_back(move_[at(t.layer_type[layers_ - 1])][at(y * layouts_ + vocab_layout)]);
  }
  zero_.assign(at(layouts_), Cost<D>{});
  stage_.resize(at(stages_));
  row_starts_ = types_ == 1 ? 2 : at(layers_);  // see Instance::same_layers
  rows_.resize(at(stages_) * row_starts_);
  for (int j = 0; j < stages_ && feasible_; ++j) build_stage(j);
}

template <int D>
void Subproblem<D>::build_stage(int j) {
  const Tables& t = in_.t;
  Stage& stage = stage_[at(j)];
  const std::size_t once = microbatches_ == 1 ? 0 : 1;
  const Bytes in_flight = stages_ == 1 ? 1 : (t.gpipe ? microbatches_ : stages_ - j);
  const int kind = stages_ == 1 ? 0 : j == 0 ? 1 : j == stages_ - 1 ? 3 : 2;
  stage.base_bytes = t.stage_fixed_bytes[table_ * 4 + kind];
  if (stages_ > 1 && !t.gpipe) {
    stage.base = cost(transfers(send_cap_), 0, 0);
  }
  if (kind != 2) {
    const int position = kind == 0 ? 0 : kind == 1 ? 1 : 2;
    const VocabCost vocab = in_.vocab_cost(item_, position, once);
    stage.base = stage.base + cost(vocab.forward, vocab.backward, vocab.tail);
    stage.base_bytes += vocab.fixed + vocab.activation * in_flight;
    stage.base_transient = vocab.transient;
    stage.base_shared = vocab.shared;
  }
  stage.options.resize(at(types_));
  Bytes least_transient = kInfBytes, least_shared = kInfBytes;
  for (int k = 0; k < types_; ++k) {
    if (in_.count[at(k)] == 0) continue;
    for (int s = 0; s < t.num_strategies; ++s) {
      const std::size_t r = in_.row(table_, k, s);
      if (t.valid[r] == 0 || !in_.allowed(item_, j, s)) continue;
      StageOption<D> option;
      option.strategy = s;
      option.layout = t.strategy_layout[s];
      option.bytes = t.static_bytes[once * in_.num_rows() + r] + t.activation_bytes[r] * in_flight;
      option.transient = t.transient_bytes[once * in_.num_rows() + r];
      option.shared = t.shared_bytes[r];
      option.cost = cost(in_.forward[r], in_.backward[r], in_.tail[r]);
      least_transient = std::min(least_transient, option.transient);
      least_shared = std::min(least_shared, option.shared);
      stage.options[at(k)].push_back(option);
    }
  }
  if (least_transient == kInfBytes) {
    feasible_ = false;
    return;
  }
  stage.relaxed_budget = static_cast<double>(in_.budget - stage.base_bytes -
                                             std::max(stage.base_transient, least_transient) -
                                             std::max(stage.base_shared, least_shared));
  stage.tail_weight = stages_ > 1 ? 1.0 / stages_ : 0.0;
  relax(j);
}

template <int D>
StepBound<D> Subproblem<D>::weights_of(int j) const {
  StepBound<D> weights;
  weights.microbatches_less_1 = microbatches_ - 1.0;
  weights.tail_weight = stage_[at(j)].tail_weight;
  return weights;
}

// Convex hulls of the options of stage j for every entry of the bound.
template <int D>
void Subproblem<D>::relax(int j) {
  Stage& stage = stage_[at(j)];
  const StepBound<D> weights = weights_of(j);
  for (std::size_t d = 0; d < D + 3; ++d) {
    std::vector<std::vector<HullPoint>> hulls(at(types_));
    for (int k = 0; k < types_; ++k) {
      for (const auto& o : stage.options[at(k)])
        hulls[at(k)].push_back({static_cast<double>(o.bytes), weights.entry(o.cost, d)});
      lower_hull(hulls[at(k)]);
    }
    stage.relaxed[d].assign(hulls);
  }
}

// Relaxed problems of stage j under each pair of caps that some undominated option needs; none if
// there are many pairs.
template <int D>
void Subproblem<D>::make_caps(int j) {
  Stage& stage = stage_[at(j)];
  stage.capped = true;
  StageProblem<D> p;
  p.options = stage.options;
  p.base_transient = stage.base_transient;
  p.base_shared = stage.base_shared;
  OptionLists<D> lists(p, in_.count);
  const std::vector<Bytes> transients = lists.transients(), shareds = lists.shareds();
  if (transients.size() * shareds.size() > kFewCaps) return;
  const StepBound<D> weights = weights_of(j);
  for (const Bytes transient : transients)
    for (const Bytes shared : shareds) {
      const double budget = static_cast<double>(in_.budget - stage.base_bytes - transient - shared);
      if (budget < 0) continue;
      // if no option needs these caps, smaller ones leave more bytes
      bool transient_used = transient == stage.base_transient;
      bool shared_used = shared == stage.base_shared;
      for (const std::size_t k : lists.used()) {
        const auto& list = lists.under(k, transient, shared);
        transient_used |= list.transient == transient;
        shared_used |= list.shared == shared;
      }
      if (!transient_used || !shared_used) continue;
      Capped& capped = stage.under_caps.emplace_back();
      capped.budget = budget;
      for (std::size_t d = 0; d < D + 3; ++d) {
        std::vector<std::vector<HullPoint>> hulls(at(types_));
        for (const std::size_t k : lists.used()) {
          for (const std::int32_t o : lists.under(k, transient, shared).kept) {
            const StageOption<D>& option = stage.options[k][at(o)];
            hulls[k].push_back({static_cast<double>(option.bytes), weights.entry(option.cost, d)});
          }
          lower_hull(hulls[k]);
        }
        capped.relaxed[d].assign(hulls);
      }
    }
}

// Raises a cell's bounds to the least of its bounds under each pair of caps; true if any rose.
template <int D>
bool Subproblem<D>::relax_under_caps(Cell& cell, int j, int l, int n) {
  Stage& stage = stage_[at(j)];
  cell.known = Known::kCapped;
  if (!stage.capped) make_caps(j);
  if (stage.under_caps.empty()) return false;
  std::vector<int> counts(at(types_));
  for (int k = 0; k < types_; ++k)
    counts[at(k)] =
        in_.prefix[at(l + n) * at(types_) + at(k)] - in_.prefix[at(l) * at(types_) + at(k)];
  const StepBound<D> weights = weights_of(j);
  Bound least;
  least.fill(kInf);
  for (const Capped& capped : stage.under_caps)
    for (std::size_t d = 0; d < D + 3; ++d) {
      const double value = capped.relaxed[d].minimum(counts, capped.budget);
      if (value >= 0) least[d] = std::min(least[d], value + weights.entry(stage.base, d));
    }
  bool learnt = false;
  for (std::size_t d = 0; d < D + 3; ++d) {
    if (least[d] == kInf) cell.fit = Fit::kTooLarge;
    if (least[d] <= cell.bound[d]) continue;
    learnt = true;
    cell.bound[d] = least[d];
    if (d < D + 2) cell.least[d] = std::max(cell.least[d], floor_ticks(least[d]));
  }
  return learnt;
}

// Computes the bounds before every (stage, layer) and keeps those of sums if `keep`; false if no
// division fits within `limit`.
template <int D>
bool Subproblem<D>::compute_bounds(double limit, bool keep) {
  const std::size_t width = at(layers_) + 1;
  limited_ = false;
  Before unknown;
  unknown.largest.fill(kInf);
  thread_local std::vector<Before> here, next;
  here.assign(width, unknown);
  next.assign(width, unknown);
  if (keep) before_sum_.assign((at(stages_) + 1) * width, kInf);
  here[0] = Before{0.0, 0.0, {}};
  for (int j = 0; j < stages_; ++j) {
    const int last = layers_ - (stages_ - j);
    std::fill(next.begin() + j + 1, next.begin() + last + 2, unknown);
    const double sends = static_cast<double>(least_sends(j));
    for (int l = j; l <= last; ++l) {
      const Before& from = here[at(l)];
      if (from.sum == kInf) continue;
      if (keep) before_sum_[state(j, l)] = from.sum;
      watch_->poll_rarely();
      for_each_size(j, l, limit, [&](int n, const Bound& cell) {
        Before& to = next[at(l + n)];
        to.sum = std::min(to.sum, from.sum + sends + part_of_sum(cell));
        to.dual = std::min(to.dual, from.dual + sends + cell[D + 2]);
        Bound largest = from.largest;
        raise_to(largest, cell);
        for (std::size_t d = 0; d < D + 1; ++d) to.largest[d] = std::min(to.largest[d], largest[d]);
      });
    }
    std::swap(here, next);
  }
  whole_ = here[at(layers_)];
  if (keep) before_sum_[state(stages_, layers_)] = whole_.sum;
  return whole_.sum < kInf;
}

// Lower bound of T, infinite if nothing is within the limit. Stages that exceed a limit by
// themselves are skipped, so low limits are tried first. The bound under a low limit is no less
// than under a higher one, and is therefore a limit that is high enough.
template <int D>
double Subproblem<D>::least_bound(double limit) {
  double tried = std::min(limit, in_.simple_bound(item_) * kFirstLimit);
  for (;;) {
    const bool found = compute_bounds(tried, false);
    const double bound = found ? whole_bound() : kInf;
    if (bound <= tried || tried >= limit || !limited_) return bound;
    // one tick more, because a bound of 0 would give a limit of 0
    tried = std::min(limit, found ? bound * (1.0 + 4.0 * kBoundSlack) : tried * kNextLimit + 1.0);
  }
}

template <int D>
double Subproblem<D>::bound(double limit, const Watch& watch) {
  watch_ = &watch;
  watch.poll();
  return feasible_ ? least_bound(limit) : kInf;
}

template class Subproblem<1>;
template class Subproblem<2>;
template class Subproblem<3>;

}  // namespace autopar
