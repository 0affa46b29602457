#include "closed_form/calculon/explore.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <utility>

namespace autopar::analytic::calculon {
namespace {

std::vector<std::int32_t> divisors(std::int64_t number) {
  std::vector<std::int32_t> small, large;
  for (std::int64_t d = 1; d * d <= number; ++d) {
    if (number % d) continue;
    small.push_back(static_cast<std::int32_t>(d));
    if (d * d != number) large.push_back(static_cast<std::int32_t>(number / d));
  }
  small.insert(small.end(), large.rbegin(), large.rend());
  return small;
}

double seconds_per_sample(const Candidate& c) {
  return c.outcome.total_time_s / static_cast<double>(c.execution.batch_size);
}

int switches(const Execution& x) {
  return x.optimizer_sharding + x.seq_par_ag_redo + x.data_par_overlap + x.weight_offload +
         x.activations_offload + x.optimizer_offload + (x.tensor_par_overlap != kNoOverlap) +
         x.fused_activation;
}

// Sort key: simple executions first, then the order of their fields.
auto rank_of(const Execution& x) {
  return std::tuple(
      switches(x), x.tensor_par, x.pipeline_par, x.pipeline_interleaving, x.activation_recompute,
      x.tensor_par_comm_type, x.tensor_par_overlap, x.microbatch_size,
      std::tuple(x.optimizer_sharding, x.seq_par_ag_redo, x.data_par_overlap, x.weight_offload,
                 x.activations_offload, x.optimizer_offload, x.fused_activation, x.tensor_par_net,
                 x.pipeline_par_net, x.data_par_net));
}

std::array<double, 2> score(const Candidate& c, Objective objective) {
  switch (objective) {
    case kTime:
      return {c.outcome.total_time_s, c.outcome.tier1_bytes};
    case kLeastMemory:
      return {c.outcome.tier1_bytes, seconds_per_sample(c)};
    default:
      return {seconds_per_sample(c), c.outcome.tier1_bytes};
  }
}

bool better(const Candidate& a, const Candidate& b, Objective objective) {
  const auto sa = score(a, objective), sb = score(b, objective);
  if (sa != sb) return sa < sb;
  return rank_of(a.execution) < rank_of(b.execution);
}

// True if two executions have equal shape and figures: they differ in switches without effect.
bool same(const Candidate& a, const Candidate& b) {
  const auto key = [](const Candidate& c) {
    return std::tuple(c.outcome.total_time_s, c.outcome.tier1_bytes, c.outcome.tier2_bytes,
                      c.execution.tensor_par, c.execution.pipeline_par,
                      c.execution.pipeline_interleaving, c.execution.microbatch_size,
                      c.execution.activation_recompute, c.execution.batch_size);
  };
  return key(a) == key(b);
}

class Best {
 public:
  explicit Best(const Want& want) : want_(want), top_(Precedes{want.objective}) {}

  void offer(const Candidate& c) {
    if (full() && !better(c, *top_.rbegin(), want_.objective)) return;
    if (!want_.duplicates) {
      // candidates with equal figures are adjacent
      const Score figures = score(c, want_.objective);
      for (auto kept = top_.lower_bound(figures);
           kept != top_.end() && score(*kept, want_.objective) == figures; ++kept) {
        if (!same(*kept, c)) continue;
        if (!better(c, *kept, want_.objective)) return;
        top_.erase(kept);
        break;
      }
    }
    top_.insert(c);
    if (static_cast<int>(top_.size()) > want_.top) top_.erase(std::prev(top_.end()));
  }

  double worst() const {
    return full() ? score(*top_.rbegin(), want_.objective)[0]
                  : std::numeric_limits<double>::infinity();
  }
  std::vector<Candidate> take() const { return {top_.begin(), top_.end()}; }

 private:
  using Score = std::array<double, 2>;
  struct Precedes {
    using is_transparent = void;
    Objective objective;
    bool operator()(const Candidate& a, const Candidate& b) const {
      return better(a, b, objective);
    }
    bool operator()(const Candidate& a, const Score& b) const { return score(a, objective) < b; }
    bool operator()(const Score& a, const Candidate& b) const { return a < score(b, objective); }
  };

  bool full() const { return static_cast<int>(top_.size()) >= want_.top; }

  const Want& want_;
  std::set<Candidate, Precedes> top_;  // there may be thousands
};

// Pareto frontier of seconds per sample and bytes.
class Frontier {
 public:
  void offer(const Candidate& c) {
    const double time = seconds_per_sample(c), bytes = c.outcome.tier1_bytes;
    // points are in ascending time and therefore in descending bytes
    auto at = std::lower_bound(
        points_.begin(), points_.end(), time,
        [](const Candidate& kept, double t) { return seconds_per_sample(kept) < t; });
    if (at != points_.begin() && std::prev(at)->outcome.tier1_bytes <= bytes) return;
    if (at != points_.end() && seconds_per_sample(*at) == time) {
      const double kept = at->outcome.tier1_bytes;
      if (kept < bytes) return;
      if (kept == bytes && !(rank_of(c.execution) < rank_of(at->execution))) return;
    }
    auto end = at;
    while (end != points_.end() && end->outcome.tier1_bytes >= bytes) ++end;
    at = points_.erase(at, end);
    points_.insert(at, c);
  }
  std::vector<Candidate> take() { return std::move(points_); }

 private:
  std::vector<Candidate> points_;
};

// Search of one pair of tensor and pipeline degrees.
class Search {
 public:
  // `priced`: if false, points are only counted.
  Search(const Model& model, const Space& space, const Want& want, const Halt& halt, bool priced)
      : model_(model), space_(space), want_(want), halt_(halt), priced_(priced), best_(want) {}

  Found run(std::int32_t tensor, std::int32_t pipeline) {
    const std::int64_t model_procs = std::int64_t{tensor} * pipeline;
    x_ = Execution{};
    x_.num_procs = space_.num_procs;
    x_.tensor_par = tensor;
    x_.pipeline_par = pipeline;
    x_.data_par = static_cast<std::int32_t>(space_.num_procs / model_procs);
    x_.datatype = space_.datatype;
    x_.attention_type = space_.attention;
    x_.structure_type = space_.structure;
    x_.training = 1;
    const std::int32_t d = x_.data_par;
    if (d > space_.max_batch || (space_.fixed_batch && space_.max_batch % d)) return finish();
    x_.batch_size = space_.max_batch / d * d;
    const std::int64_t layers = model_.application().blocks;
    const std::int64_t blocks = (layers + pipeline - 1) / pipeline;
    chunks_ = pipeline == 1 ? std::vector<std::int32_t>{1} : divisors(blocks);
    for (const std::int32_t b : divisors(x_.batch_size / d))
      if (b * model_.application().seq % tensor == 0) microbatches_.push_back(b);
    list_networks();
    for (const bool sharding : flags(d > 1)) {
      x_.optimizer_sharding = sharding;
      for (const Recompute recompute : {kFull, kAttentionOnly, kNoRecompute}) {
        x_.activation_recompute = recompute;
        for (const Communication communication : {kAr, kP2pRsAg, kRsAg}) {
          x_.tensor_par_comm_type = communication;
          for (const bool redo : flags(communication == kRsAg && recompute != kFull)) {
            x_.seq_par_ag_redo = redo;
            overlaps();
          }
        }
      }
    }
    return finish();
  }

 private:
  static std::vector<bool> flags(bool both) {
    return both ? std::vector<bool>{true, false} : std::vector<bool>{false};
  }

  Found finish() {
    found_.top = best_.take();
    found_.frontier = frontier_.take();
    return std::move(found_);
  }

  struct Nets {
    std::int32_t tensor;
    std::vector<std::pair<std::int32_t, std::int32_t>> rest;  // legal (pipeline, data) tiers
  };

  void list_networks() {
    const auto tiers = static_cast<std::int32_t>(model_.system().tiers.size());
    const auto count = [&](std::int32_t degree) { return degree > 1 ? tiers : 1; };
    networks_per_point_ =
        std::int64_t{count(x_.tensor_par)} * count(x_.pipeline_par) * count(x_.data_par);
    for (std::int32_t nt = 0; nt < count(x_.tensor_par); ++nt) {
      Nets nets{nt, {}};
      for (std::int32_t np = 0; np < count(x_.pipeline_par); ++np)
        for (std::int32_t nd = 0; nd < count(x_.data_par); ++nd)
          if (legal_networks(nt, np, nd)) nets.rest.emplace_back(np, nd);
      legal_networks_ += static_cast<std::int64_t>(nets.rest.size());
      if (!nets.rest.empty()) networks_.push_back(std::move(nets));
    }
  }

  bool legal_networks(std::int32_t nt, std::int32_t np, std::int32_t nd) const {
    Execution probe = x_;
    probe.batch_size = probe.data_par;
    probe.microbatch_size = probe.pipeline_interleaving = 1;
    probe.tensor_par_net = nt;
    probe.pipeline_par_net = np;
    probe.data_par_net = nd;
    const Reason reason = model_.check(probe);
    return reason != kTierTooSmall && reason != kTierNotFull;
  }

  void overlaps() {
    const bool tiled = x_.tensor_par > 1 && space_.tensor_overlap;
    const int last = tiled ? kPipe : kNoOverlap;
    for (int overlap = kNoOverlap; overlap <= last; ++overlap) {
      x_.tensor_par_overlap = static_cast<std::uint8_t>(overlap);
      for (const bool fused : {true, false}) {
        if (!(fused ? space_.fused_on : space_.fused_off)) continue;
        x_.fused_activation = fused;
        for (const std::int32_t b : microbatches_) {
          if (halt_.asked()) return;
          x_.microbatch_size = b;
          point();
        }
      }
    }
  }

  // Everything below shares the block of (x_, tensor tier).
  void point() {
    const bool data_overlap = x_.data_par > 1 && space_.data_overlap;
    const bool offload = space_.offload && model_.system().second.bytes > 0;
    const std::int64_t per_offload = data_overlap ? 2 : 1;
    const std::int64_t offloads = offload ? (x_.activation_recompute == kFull ? 4 : 8) : 1;
    const std::int64_t ways = per_offload * offloads * static_cast<std::int64_t>(chunks_.size());
    found_.counts.considered += ways * networks_per_point_;
    found_.counts.network += ways * (networks_per_point_ - legal_networks_);
    if (!priced_) return;
    for (const Nets& nets : networks_) {
      x_.tensor_par_net = nets.tensor;
      x_.pipeline_par_net = nets.rest.front().first;
      x_.data_par_net = nets.rest.front().second;
      x_.weight_offload = x_.activations_offload = x_.optimizer_offload = x_.data_par_overlap = 0;
      x_.pipeline_interleaving = 1;
      const auto here = static_cast<std::int64_t>(nets.rest.size());
      if (model_.check(x_) != kOk) {
        found_.counts.layout += ways * here;
        continue;
      }
      const Shape whole = model_.shape(x_);
      const Block block = model_.block(x_, whole);
      const Vocab vocab = model_.vocab(x_, whole);
      for (const std::int32_t v : chunks_) {
        if (halt_.asked()) return;
        x_.pipeline_interleaving = v;
        Shape shape = whole;
        shape.chunks = v;
        shape.chunk_blocks = shape.blocks / v;
        for (const bool weights : flags(offload))
          for (const bool activations : flags(offload && x_.activation_recompute != kFull))
            for (const bool optimizer : flags(offload)) {
              x_.weight_offload = weights;
              x_.activations_offload = activations;
              x_.optimizer_offload = optimizer;
              placed(nets, shape, block, vocab, per_offload * here);
            }
      }
    }
  }

  void placed(const Nets& nets, const Shape& shape, const Block& block, const Vocab& vocab,
              std::int64_t ways) {
    if ((x_.weight_offload || x_.activations_offload || x_.optimizer_offload) &&
        shape.blocks <= 2) {
      found_.counts.layout += ways;
      return;
    }
    const Figures needed = model_.memory(x_, shape, block, vocab);
    const Reason reason = model_.fits(needed);
    if (reason != kOk) {
      (reason == kMemoryFirst ? found_.counts.memory_first : found_.counts.memory_second) += ways;
      return;
    }
    found_.counts.feasible += ways;
    if (!want_.all && !want_.frontier && hopeless(shape, block)) return;
    for (const bool overlap : flags(x_.data_par > 1 && space_.data_overlap)) {
      x_.data_par_overlap = overlap;
      for (const auto& [np, nd] : nets.rest) {
        x_.pipeline_par_net = np;
        x_.data_par_net = nd;
        const Figures figures = model_.step(x_, shape, block, vocab, nullptr);
        Candidate c{x_, {}};
        c.outcome = {1,
                     kOk,
                     figures.total_time_s,
                     figures.tier1_bytes,
                     figures.tier2_bytes,
                     figures.sample_rate_per_s};
        best_.offer(c);
        if (want_.frontier) frontier_.offer(c);
        if (want_.all) found_.all.push_back(c);
      }
    }
  }

  // True if processing alone takes longer than the worst of the best; all other terms only add to
  // it.
  bool hopeless(const Shape& s, const Block& b) const {
    if (want_.objective == kLeastMemory) return false;
    const double bound = std::min(want_.bound, best_.worst());
    const double steps = static_cast<double>(s.microbatches) * static_cast<double>(s.blocks);
    const double block_s = std::min(b.fw.time_s[0] + b.agrad.time_s[0] + b.wgrad.time_s[0],
                                    b.fw.time_s[1] + b.agrad.time_s[1] + b.wgrad.time_s[1]);
    double least = steps * block_s;
    if (want_.objective == kRate) least /= static_cast<double>(x_.batch_size);
    return least * (1.0 - 1e-12) > bound;
  }

  const Model& model_;
  const Space& space_;
  const Want& want_;
  const Halt& halt_;
  bool priced_;
  Execution x_{};
  std::vector<std::int32_t> chunks_, microbatches_;
  std::vector<Nets> networks_;
  std::int64_t networks_per_point_ = 0, legal_networks_ = 0;
  Best best_;
  Frontier frontier_;
  Found found_;
};

}  // namespace

std::vector<std::pair<std::int32_t, std::int32_t>> degree_pairs(const Model& model,
                                                                const Space& space) {
  const Application& a = model.application();
  std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
  for (const std::int32_t t : divisors(space.num_procs)) {
    if (a.hidden % t || a.heads % t) continue;
    for (const std::int32_t p : divisors(space.num_procs / t)) {
      if (p > a.blocks) continue;
      const std::int64_t blocks = (a.blocks + p - 1) / p;
      // the last stage must not be empty
      if (a.blocks % p && (!space.uneven || blocks * (p - 1) >= a.blocks)) continue;
      pairs.emplace_back(t, p);
    }
  }
  return pairs;
}

Found explore(const Model& model, const Space& space, std::int32_t tensor, std::int32_t pipeline,
              const Want& want, const Halt& halt) {
  return Search(model, space, want, halt, true).run(tensor, pipeline);
}

std::int64_t count_points(const Model& model, const Space& space, std::int32_t tensor,
                          std::int32_t pipeline) {
  const Want nothing;
  return Search(model, space, nothing, kGoOn, false).run(tensor, pipeline).counts.considered;
}

double bound_of(const Found& found, const Want& want) {
  if (static_cast<int>(found.top.size()) < want.top) return std::numeric_limits<double>::infinity();
  return score(found.top.back(), want.objective)[0];
}

void absorb(Found& found, const Found& part, const Want& want) {
  Best best(want);
  Frontier frontier;
  for (const Found* one : {&std::as_const(found), &part}) {
    for (const Candidate& c : one->top) best.offer(c);
    for (const Candidate& c : one->frontier) frontier.offer(c);
  }
  found.top = best.take();
  found.frontier = frontier.take();
  found.counts.considered += part.counts.considered;
  found.counts.network += part.counts.network;
  found.counts.layout += part.counts.layout;
  found.counts.memory_first += part.counts.memory_first;
  found.counts.memory_second += part.counts.memory_second;
  found.counts.feasible += part.counts.feasible;
}

}  // namespace autopar::analytic::calculon
