// Prices one candidate with all its figures, or many in any order on several threads.
#include <algorithm>
#include <bit>
#include <thread>
#include <vector>

#include "closed_form/tensor2d/tensor2d.hpp"

namespace autopar::analytic::tensor2d {
namespace {

// Cache of the latest sums, by everything they depend on.
class Works {
 public:
  explicit Works(std::size_t candidates)
      : entries_(std::bit_ceil(std::clamp<std::size_t>(2 * candidates, 16, kMost))) {}

  const Work& find(const Engine& engine, const Candidate& c) {
    const std::array<std::int32_t, 6> key{c.tp1, c.tp2, c.mbs, c.nb, c.nv_tp1, c.nv_tp2};
    std::uint64_t h = 0x9e3779b97f4a7c15ULL;
    for (const std::int32_t part : key)
      h = (h ^ static_cast<std::uint64_t>(part)) * 0xff51afd7ed558ccdULL;
    Entry& entry = entries_[(h ^ (h >> 32)) & (entries_.size() - 1)];
    if (entry.key != key) {
      entry.key = key;
      entry.work = engine.work(c, engine.group(c.tp1, c.nv_tp1), engine.group(c.tp2, c.nv_tp2));
    }
    return entry.work;
  }

 private:
  struct Entry {
    std::array<std::int32_t, 6> key{};  // zero in no candidate
    Work work;
  };
  static constexpr std::size_t kMost = 16384;
  std::vector<Entry> entries_;
};

}  // namespace

Answer evaluate(const Engine& engine, const Candidate& candidate, const Way& way, bool rows) {
  Answer answer;
  answer.reason = engine.check(candidate, way);
  if (answer.reason != kOk) return answer;
  const Work work = engine.work(candidate, way, rows ? &answer.rows : nullptr);
  engine.step(candidate, work, answer.statistics.data());
  return answer;
}

void evaluate_many(const Engine& engine, const Candidate* candidates, std::size_t count,
                   int threads, Outcome* outcomes, double* statistics, const Halt& halt) {
  const auto work = [&](std::size_t begin, std::size_t end) {
    Works works(end - begin);
    for (std::size_t i = begin; i < end && !halt.asked(); ++i) {
      const Candidate& c = candidates[i];
      Outcome& out = outcomes[i];
      out = Outcome{};
      double* row = statistics ? statistics + i * kNumStatistics : nullptr;
      if (row) std::fill_n(row, kNumStatistics, 0.0);
      out.reason = engine.check(c);
      if (out.reason != kOk) continue;
      const Figures figures = engine.step(c, works.find(engine, c), row);
      out.time_s = figures.time_s;
      out.memory_gb = figures.memory_gb;
      if (figures.memory_gb > engine.system().hbm_capacity) out.reason = kMemoryFull;
      out.ok = out.reason == kOk;
    }
  };
  const std::size_t parts = std::max<std::size_t>(1, static_cast<std::size_t>(threads));
  std::vector<std::thread> others;
  for (std::size_t part = 1; part < parts; ++part)
    others.emplace_back(work, count * part / parts, count * (part + 1) / parts);
  work(0, count / parts);
  for (std::thread& other : others) other.join();
}

}  // namespace autopar::analytic::tensor2d
