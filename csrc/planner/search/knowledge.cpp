#include "planner/search/knowledge.hpp"

#include <algorithm>
#include <stdexcept>

namespace autopar {

void Knowledge::open(const Instance& in) {
  // not the whole tables, only what differs between problems that a caller could confuse
  std::vector<std::int64_t> tables{in.t.num_layers, in.t.num_types,      in.t.num_strategies,
                                   in.t.num_vocab,  in.t.num_candidates, in.t.num_stage_rules,
                                   in.t.gpipe};
  tables.insert(tables.end(), in.forward.begin(), in.forward.end());
  tables.insert(tables.end(), in.t.division.begin(), in.t.division.end());
  const std::lock_guard<std::mutex> lock(mutex_);
  if (tables_.empty())
    tables_ = std::move(tables);
  else if (tables_ != tables)
    throw std::invalid_argument("what is known is about other tables");
}

void Knowledge::learn_bound(const Item& item, Bytes budget, double bound, bool relaxed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  prove(item, {budget, bound, relaxed, 0});
}

void Knowledge::learn_exact(const Item& item, Bytes budget, double bound, Bytes needs,
                            const ItemPlan& plan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  prove(item, {budget, bound, true, plan.step});
  keep(item, needs, plan);
}

void Knowledge::learn_plan(const Item& item, Bytes needs, const ItemPlan& plan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keep(item, needs, plan);
}

void Knowledge::prove(const Item& item, Proof proof) {
  std::vector<Proof>& proofs = items_[key(item)].proofs;
  const auto at = std::find_if(proofs.begin(), proofs.end(),
                               [&](const Proof& p) { return p.budget <= proof.budget; });
  // a proof at a larger budget holds here, too
  if (at != proofs.begin() && std::prev(at)->bound >= proof.bound) return;
  if (at != proofs.end() && at->budget == proof.budget) {
    proof.relaxed = proof.relaxed || at->relaxed;
    proof.bound = std::max(proof.bound, at->bound);
    proof.step = std::max(proof.step, at->step);
  }
  const auto behind =
      std::find_if(at, proofs.end(), [&](const Proof& p) { return p.bound > proof.bound; });
  proofs.insert(proofs.erase(at, behind), proof);
  if (proofs.size() > kMostKept) proofs.erase(proofs.begin());
}

void Knowledge::keep(const Item& item, Bytes needs, const ItemPlan& plan) {
  std::vector<KnownPlan>& plans = items_[key(item)].plans;
  for (const KnownPlan& p : plans)
    if (p.needs <= needs && p.plan.step <= plan.step) return;
  std::erase_if(plans,
                [&](const KnownPlan& p) { return p.needs >= needs && p.plan.step >= plan.step; });
  const auto at =
      std::find_if(plans.begin(), plans.end(), [&](const KnownPlan& p) { return p.needs < needs; });
  plans.insert(at, {needs, plan});
  if (plans.size() > kMostKept) plans.erase(plans.begin());
}

void Knowledge::learn_divided(const Item& item) {
  const std::lock_guard<std::mutex> lock(mutex_);
  items_[key(item)].divided = true;
}

bool Knowledge::divided(const Item& item) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = items_.find(key(item));
  return found != items_.end() && found->second.divided;
}

const Knowledge::KnownPlan* Knowledge::fastest(const About& about, Bytes budget) {
  for (const KnownPlan& p : about.plans)
    if (p.needs <= budget) return &p;
  return nullptr;
}

Knowledge::Answer Knowledge::about(const Item& item, Bytes budget) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Answer answer;
  const auto found = items_.find(key(item));
  if (found == items_.end()) return answer;
  Ticks step = 0;
  for (const Proof& proof : found->second.proofs) {
    if (proof.budget < budget) break;
    answer.bound = proof.bound;
    answer.relaxed = proof.relaxed && proof.budget == budget;
    step = std::max(step, proof.step);
  }
  if (const KnownPlan* known = fastest(found->second, budget)) {
    answer.plan = known->plan;
    answer.exact = known->plan.step <= step;
  }
  return answer;
}

std::vector<std::pair<Item, ItemPlan>> Knowledge::plans(Bytes budget) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<Item, ItemPlan>> all;
  for (const auto& [at, about] : items_) {
    const KnownPlan* known = fastest(about, budget);
    if (known == nullptr) continue;
    const auto& [candidate, vocab, only] = at;
    all.emplace_back(Item{candidate, vocab, ~std::uint64_t{0}, only}, known->plan);
  }
  return all;
}

}  // namespace autopar
