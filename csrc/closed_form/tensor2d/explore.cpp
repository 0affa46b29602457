// Exhaustive search over the candidates of a number of GPUs; tests/oracles/tensor2d/space.py lists
// the same candidates.
#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "closed_form/tensor2d/tensor2d.hpp"

namespace autopar::analytic::tensor2d {
namespace {

constexpr std::int64_t kSmallestShard = 128;  // fewest rows or columns of a GPU
constexpr std::int64_t kSmallestPanel = 512;

// Most numbers in the lists of all parts, about 16 bytes each; every placement is one number.
constexpr std::uint64_t kMostListed = 30'000'000;

using Numbers = std::vector<std::int64_t>;

Numbers divisors(std::int64_t number) {
  Numbers small, large;
  for (std::int64_t d = 1; d * d <= number; ++d) {
    if (number % d) continue;
    small.push_back(d);
    if (d != number / d) large.push_back(number / d);
  }
  small.insert(small.end(), large.rbegin(), large.rend());
  return small;
}

std::int32_t narrow(std::int64_t number) { return static_cast<std::int32_t>(number); }

// Ranks of columns and of rows in one domain, and the ranks of the domain that remain.
struct Corner {
  std::int64_t columns, rows, left;
};

struct Stage {
  std::int64_t pipeline, data;
  std::vector<Numbers> data_in_domain;  // for each corner
  std::uint64_t placements = 0;
};

// One division of tensors, with its placements, stages and panels.
struct Part {
  std::int64_t columns, rows;
  std::vector<Corner> corners;
  std::vector<Stage> stages;
  Numbers panels;
};

Numbers panels_of(const Model& m, std::int64_t columns, std::int64_t rows) {
  const std::int64_t smallest = std::max(columns, rows);
  if (m.hidden < kSmallestPanel * smallest) return {smallest};
  Numbers found;
  for (std::int64_t panels = smallest; m.hidden / panels >= kSmallestPanel; panels *= 2)
    if (m.hidden % panels == 0) found.push_back(panels);
  return found;
}

std::vector<Corner> corners_of(const Engine& engine, std::int64_t columns, std::int64_t rows) {
  const std::int64_t domain = engine.system().domain;
  std::vector<Corner> found;
  if (engine.num_gpus() <= domain) return {{columns, rows, 0}};
  for (const std::int64_t near : divisors(domain)) {
    if (columns % near) continue;
    for (const std::int64_t also : divisors(domain / near))
      if (rows % also == 0) found.push_back({near, also, domain / near / also});
  }
  return found;
}

Part part_of(const Engine& engine, std::int64_t columns, std::int64_t rows, std::uint64_t& listed,
             const Halt& halt) {
  Part part{columns, rows, corners_of(engine, columns, rows), {}, {1}};
  const Model& m = engine.model();
  const std::int64_t ranks = engine.num_gpus() / (columns * rows), batch = engine.batch();
  for (const std::int64_t pipeline : divisors(std::min(ranks, m.depth))) {
    if (ranks % pipeline || m.depth % pipeline) continue;
    Stage stage{pipeline, ranks / pipeline, {}};
    if (stage.data > batch || batch % stage.data) continue;
    if (listed > kMostListed || halt.asked()) break;
    for (const Corner& corner : part.corners) {
      Numbers inside;
      if (corner.left == 0) {
        inside = {stage.data};
      } else {
        for (const std::int64_t near : divisors(corner.left))
          if (stage.data % near == 0 && pipeline % (corner.left / near) == 0)
            inside.push_back(near);
      }
      stage.placements += inside.size();
      listed += inside.size() + 3;  // an empty list takes three pointers
      stage.data_in_domain.push_back(std::move(inside));
    }
    part.stages.push_back(std::move(stage));
  }
  if (engine.strategy() == k2d && engine.panels_matter(columns, rows))
    part.panels = panels_of(m, columns, rows);
  return part;
}

// Adds the sizes of the lists to `listed`; ends early if they are too large.
std::vector<Part> parts_of(const Engine& engine, std::uint64_t& listed, const Halt& halt) {
  const Model& m = engine.model();
  const std::int64_t n = engine.num_gpus();
  std::vector<Part> parts;
  for (const std::int64_t columns : divisors(n)) {
    if (m.heads % columns || m.hidden % columns) continue;
    if (engine.strategy() == k1d) {
      if (3 * m.hidden / columns >= kSmallestShard)
        parts.push_back(part_of(engine, columns, 1, listed, halt));
      continue;
    }
    if (m.hidden / columns < kSmallestShard) continue;
    for (const std::int64_t rows : divisors(n / columns))
      if (m.seq / rows >= kSmallestShard && (engine.strategy() != k2d || m.hidden % rows == 0))
        parts.push_back(part_of(engine, columns, rows, listed, halt));
  }
  return parts;
}

// Number of candidates of all parts, none of them priced; counts until there are more than `most`.
std::uint64_t count_of(const Engine& engine, const std::vector<Part>& parts,
                       const Numbers& microbatches, std::uint64_t most, const Halt& halt) {
  std::uint64_t count = 0;
  for (const Part& part : parts)
    for (const std::int64_t microbatch : microbatches) {
      if (count > most || halt.asked()) return count;
      if (!engine.tokens_divide(microbatch, part.columns, part.rows)) continue;
      for (const Stage& stage : part.stages)
        if (engine.batch() / stage.data % microbatch == 0)
          count += stage.placements * part.panels.size();
    }
  return count;
}

// Best of the offered points, exactly: the order is total, and no candidate comes twice.
class Best {
 public:
  Best(std::size_t room, Objective objective) : room_(room), objective_(objective) {}

  bool before(const Found& a, const Found& b) const {
    const bool time = objective_ == kTime;
    const double a1 = time ? a.time_s : a.memory_gb, b1 = time ? b.time_s : b.memory_gb;
    if (a1 != b1) return a1 < b1;
    const double a2 = time ? a.memory_gb : a.time_s, b2 = time ? b.memory_gb : b.time_s;
    if (a2 != b2) return a2 < b2;
    return a.candidate < b.candidate;
  }

  // No point above this value can be among the best any more.
  double limit() const {
    if (found_.size() < room_) return std::numeric_limits<double>::infinity();
    if (room_ == 0) return -1.0;
    return objective_ == kTime ? found_.front().time_s : found_.front().memory_gb;
  }

  void offer(const Found& found) {
    const auto order = [this](const Found& a, const Found& b) { return before(a, b); };
    if (found_.size() < room_) {
      found_.push_back(found);
      std::push_heap(found_.begin(), found_.end(), order);
    } else if (room_ && before(found, found_.front())) {
      std::pop_heap(found_.begin(), found_.end(), order);
      found_.back() = found;
      std::push_heap(found_.begin(), found_.end(), order);
    }
  }

  std::vector<Found> sorted() const {
    std::vector<Found> result = found_;
    std::sort(result.begin(), result.end(),
              [this](const Found& a, const Found& b) { return before(a, b); });
    return result;
  }

  const std::vector<Found>& found() const { return found_; }

 private:
  std::size_t room_;
  Objective objective_;
  std::vector<Found> found_;  // a heap, the worst first
};

class Search {
 public:
  Search(const Engine& engine, std::size_t top, Objective objective, bool all, const Halt& halt)
      : engine_(engine), objective_(objective), all_(all), halt_(halt), best(top, objective) {}

  void search(const Part& part, const Numbers& microbatches) {
    const Reason reason = engine_.check_tensors(part.columns, part.rows);
    for (const std::int64_t microbatch : microbatches)
      if (!halt_.asked() && engine_.tokens_divide(microbatch, part.columns, part.rows))
        search(part, microbatch, reason);
  }

 private:
  void search(const Part& part, std::int64_t microbatch, Reason reason) {
    Candidate c{1, narrow(part.columns), narrow(part.rows), 1, narrow(microbatch), 1, 1, 1, 1, 1};
    std::vector<const Stage*> fitting;
    Work sizes;
    bool sized = false;
    for (const Stage& stage : part.stages) {
      if (engine_.batch() / stage.data % microbatch) continue;
      const std::uint64_t count = stage.placements * part.panels.size();
      result.candidates += count;
      if (count == 0) continue;
      if (reason == kOk && !sized) {
        sizes = engine_.work(c, Group{}, Group{}, false);  // panels do not change memory
        sized = true;
      }
      if (reason != kOk || !fits(c, stage, sizes)) {
        result.rejected[reason == kOk ? kMemoryFull : reason] += count;
        continue;
      }
      result.feasible += count;
      fitting.push_back(&stage);
    }
    if (fitting.empty()) return;
    for (const std::int64_t panels : part.panels) {
      c.nb = narrow(panels);
      search(part, c, fitting);
    }
  }

  bool fits(Candidate& c, const Stage& stage, const Work& sizes) const {
    c.pp = narrow(stage.pipeline);
    c.dp = narrow(stage.data);
    return engine_.memory_gb(c, sizes) <= engine_.system().hbm_capacity;
  }

  void search(const Part& part, Candidate c, const std::vector<const Stage*>& fitting) {
    const Work bound = engine_.work(c, Group{}, Group{}, false);
    std::vector<const Stage*> alive;
    for (const Stage* stage : fitting) {
      c.pp = narrow(stage->pipeline);
      c.dp = narrow(stage->data);
      const double least =
          objective_ == kTime ? engine_.least_s(c, bound) : engine_.memory_gb(c, bound);
      if (!all_ && least > best.limit()) {
        result.bounded += stage->placements;
      } else {
        alive.push_back(stage);
      }
    }
    for (std::size_t i = 0; i < part.corners.size() && !alive.empty() && !halt_.asked(); ++i) {
      const Corner& corner = part.corners[i];
      c.nv_tp1 = narrow(corner.columns);
      c.nv_tp2 = narrow(corner.rows);
      const Work work = engine_.work(c, engine_.group(part.columns, corner.columns),
                                     engine_.group(part.rows, corner.rows));
      for (const Stage* stage : alive) {
        c.pp = narrow(stage->pipeline);
        c.dp = narrow(stage->data);
        for (const std::int64_t near : stage->data_in_domain[i]) {
          c.nv_dp = narrow(near);
          c.nv_pp = corner.left ? narrow(corner.left / near) : c.pp;
          const Figures figures = engine_.step(c, work);
          const Found found{c, figures.time_s, figures.memory_gb};
          best.offer(found);
          if (all_) result.all.push_back(found);
        }
      }
    }
  }

  const Engine& engine_;
  Objective objective_;
  bool all_;
  const Halt& halt_;

 public:
  Best best;
  Exploration result;
};

}  // namespace

Exploration explore(const Engine& engine, std::size_t top, Objective objective, bool all,
                    int threads, std::uint64_t most, const Halt& halt) {
  Exploration total;
  std::uint64_t listed = 0;
  const std::vector<Part> parts = parts_of(engine, listed, halt);
  const Numbers microbatches = divisors(engine.batch());
  const std::uint64_t count = count_of(engine, parts, microbatches, most, halt);
  if (count > most || listed > kMostListed) {
    total.candidates = count;
    total.too_many = true;
    return total;
  }
  std::atomic<std::size_t> next{0};
  Best best(top, objective);
  std::mutex mutex;
  const auto work = [&] {
    Search search(engine, top, objective, all, halt);
    for (std::size_t i = next++; i < parts.size(); i = next++)
      search.search(parts[i], microbatches);
    const std::lock_guard lock(mutex);
    for (const Found& found : search.best.found()) best.offer(found);
    const Exploration& mine = search.result;
    total.candidates += mine.candidates;
    total.feasible += mine.feasible;
    total.bounded += mine.bounded;
    for (std::size_t i = 0; i < kNumReasons; ++i) total.rejected[i] += mine.rejected[i];
    total.all.insert(total.all.end(), mine.all.begin(), mine.all.end());
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  total.best = best.sorted();
  std::sort(total.all.begin(), total.all.end(),
            [](const Found& a, const Found& b) { return a.candidate < b.candidate; });
  return total;
}

}  // namespace autopar::analytic::tensor2d
