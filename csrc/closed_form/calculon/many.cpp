// Prices executions in any order, on several threads.
#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <vector>

#include "closed_form/calculon/calculon.hpp"

namespace autopar::analytic::calculon {
namespace {

// Everything that a block depends on except the shards of its optimizer; the rest of an execution
// is cheap to price.
struct Key {
  std::int32_t microbatch = -1, tensor = 0, net = 0;
  std::array<std::uint8_t, 12> kinds{};

  friend bool operator==(const Key&, const Key&) = default;

  std::size_t hash() const {
    std::uint64_t words[3];
    static_assert(sizeof(Key) == sizeof words);
    std::memcpy(words, this, sizeof(Key));
    std::uint64_t h = 0x9e3779b97f4a7c15ULL;
    for (const std::uint64_t word : words) h = (h ^ word) * 0xff51afd7ed558ccdULL;
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

Key key_of(const Execution& x) {
  Key key;
  key.microbatch = x.microbatch_size;
  key.tensor = x.tensor_par;
  key.net = x.tensor_par_net;
  key.kinds = {x.datatype,
               x.attention_type,
               x.activation_recompute,
               x.tensor_par_comm_type,
               x.tensor_par_overlap,
               x.structure_type,
               x.fused_activation,
               x.seq_par_ag_redo,
               x.training,
               0,
               0,
               0};
  return key;
}

// Cache of blocks by key; cleared when it is full.
class Blocks {
 public:
  struct Entry {
    Key key;
    double shards;
    Block block;
    Vocab vocab;
  };

  const Entry& find(const Model& model, const Execution& x, const Shape& shape) {
    const Key key = key_of(x);
    std::size_t slot = key.hash() % kSlots;
    for (; slots_[slot] != kFree; slot = (slot + 1) % kSlots) {
      Entry& entry = entries_[slots_[slot]];
      if (!(entry.key == key)) continue;
      if (entry.shards != shape.shards) {
        entry.shards = shape.shards;
        model.share_optimizer(x, shape, entry.block);
        entry.vocab = model.vocab(x, shape);
      }
      return entry;
    }
    if (entries_.size() == kMostEntries) {
      entries_.clear();
      slots_.assign(kSlots, kFree);
      slot = key.hash() % kSlots;
    }
    slots_[slot] = static_cast<std::uint16_t>(entries_.size());
    return entries_.emplace_back(key, shape.shards, model.block(x, shape), model.vocab(x, shape));
  }

 private:
  static constexpr std::size_t kSlots = 16384, kMostEntries = 8192;  // about 6 MB
  static constexpr std::uint16_t kFree = 0xffff;
  std::vector<Entry> entries_;
  std::vector<std::uint16_t> slots_ = std::vector<std::uint16_t>(kSlots, kFree);
};

Reason price(const Model& model, const Execution& x, Blocks& blocks, Outcome& out,
             double* statistics) {
  if (const Reason reason = model.check(x); reason != kOk) return reason;
  const Shape shape = model.shape(x);
  const Blocks::Entry& entry = blocks.find(model, x, shape);
  const Figures needed = model.memory(x, shape, entry.block, entry.vocab);
  out.tier1_bytes = needed.tier1_bytes;
  out.tier2_bytes = needed.tier2_bytes;
  if (const Reason reason = model.fits(needed); reason != kOk) return reason;
  const Figures figures = model.step(x, shape, entry.block, entry.vocab, statistics);
  out.total_time_s = figures.total_time_s;
  out.sample_rate_per_s = figures.sample_rate_per_s;
  return kOk;
}

}  // namespace

void evaluate_many(const Model& model, const Execution* executions, std::size_t count, int threads,
                   Outcome* outcomes, double* statistics, const Halt& halt) {
  const auto work = [&](std::size_t begin, std::size_t end) {
    Blocks blocks;
    for (std::size_t i = begin; i < end && !halt.asked(); ++i) {
      Outcome& out = outcomes[i];
      out = Outcome{};
      double* row = statistics ? statistics + i * kNumStatistics : nullptr;
      out.reason = price(model, executions[i], blocks, out, row);
      out.ok = out.reason == kOk;
      if (row && !out.ok) std::fill_n(row, kNumStatistics, 0.0);
    }
  };
  // fewer executions are priced faster than a thread is started
  constexpr std::size_t kLeast = 256, kMostThreads = 1024;
  const std::size_t parts = std::clamp<std::size_t>(
      count / kLeast, 1, static_cast<std::size_t>(std::clamp<int>(threads, 1, kMostThreads)));
  std::vector<std::future<void>> others;  // rethrow exceptions of their threads
  for (std::size_t part = 1; part < parts; ++part)
    others.push_back(
        std::async(std::launch::async, work, count * part / parts, count * (part + 1) / parts));
  work(0, count / parts);
  for (std::future<void>& other : others) other.get();
}

}  // namespace autopar::analytic::calculon
