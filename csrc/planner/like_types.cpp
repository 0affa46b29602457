#include "planner/like_types.hpp"

#include <cstddef>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace autopar {
namespace {

std::size_t idx(int i) { return static_cast<std::size_t>(i); }

// Calls visit(view, blocks, width) for every array with an axis of types: (blocks, K, width).
template <class Visit>
void for_each_array(Tables& t, Visit visit) {
  const std::size_t N = idx(t.num_tables), S = idx(t.num_strategies), Y = idx(t.num_layouts);
  visit(t.valid, N, S);
  visit(t.forward_s, N, S);
  visit(t.backward_s, N, S);
  visit(t.tail_s, N, S);
  visit(t.static_bytes, 2 * N, S);
  visit(t.activation_bytes, N, S);
  visit(t.transient_bytes, 2 * N, S);
  visit(t.shared_bytes, N, S);
  visit(t.redistribute_forward_s, N, Y * Y);
  visit(t.redistribute_backward_s, N, Y * Y);
  visit(t.send_s, N, Y);
}

// Compared as bytes, because unused values may be anything.
bool alike(Tables& t, int a, int b) {
  bool same = true;
  for_each_array(t, [&](const auto* values, std::size_t blocks, std::size_t width) {
    for (std::size_t n = 0; same && width > 0 && n < blocks; ++n) {
      const auto* block = values + n * idx(t.num_types) * width;
      same =
          std::memcmp(block + idx(a) * width, block + idx(b) * width, width * sizeof(*values)) == 0;
    }
  });
  return same;
}

// Hash of all values of each type; equal types have equal hashes.
std::vector<std::uint64_t> hashes(Tables& t) {
  std::vector<std::uint64_t> hash(idx(t.num_types), 0);
  for_each_array(t, [&](const auto* values, std::size_t blocks, std::size_t width) {
    for (std::size_t n = 0; n < blocks; ++n)
      for (std::uint64_t& h : hash)
        for (std::size_t i = 0; i < width; ++i, ++values) {
          std::uint64_t bits = 0;
          std::memcpy(&bits, values, sizeof(*values));
          h = (h ^ bits) * 0x9E3779B97F4A7C15U;  // the golden ratio, as in Fibonacci hashing
          h ^= h >> 32U;
        }
  });
  return hash;
}

}  // namespace

struct LikeTypes::Arrays {
  std::vector<std::int32_t> layer_type;
  // every array keeps its place until all are copied
  std::vector<std::vector<double>> reals;
  std::vector<std::vector<std::int64_t>> wholes;
  std::vector<std::vector<std::uint8_t>> flags;

  std::vector<double>& next(const double*) { return reals.emplace_back(); }
  std::vector<std::int64_t>& next(const std::int64_t*) { return wholes.emplace_back(); }
  std::vector<std::uint8_t>& next(const std::uint8_t*) { return flags.emplace_back(); }
};

LikeTypes::LikeTypes(const Tables& given) : tables(given) {
  if (given.num_types < 2) return;
  std::vector<int> kept;              // first type of every kind
  std::vector<std::int32_t> kind_of;  // by given type
  std::unordered_multimap<std::uint64_t, std::int32_t> kinds;
  const std::vector<std::uint64_t> hash = hashes(tables);
  for (int k = 0; k < given.num_types; ++k) {
    std::int32_t kind = -1;
    const auto [first, last] = kinds.equal_range(hash[idx(k)]);
    for (auto it = first; it != last && kind < 0; ++it)
      if (alike(tables, kept[idx(it->second)], k)) kind = it->second;
    if (kind < 0) {
      kind = static_cast<std::int32_t>(kept.size());
      kinds.emplace(hash[idx(k)], kind);
      kept.push_back(k);
    }
    kind_of.push_back(kind);
  }
  if (kept.size() == kind_of.size()) return;
  own_ = std::make_unique<Arrays>();
  for (int l = 0; l < given.num_layers; ++l)
    own_->layer_type.push_back(kind_of[idx(given.layer_type[l])]);
  for_each_array(tables, [&](auto*& values, std::size_t blocks, std::size_t width) {
    auto& own = own_->next(values);
    own.reserve(blocks * kept.size() * width);
    for (std::size_t n = 0; n < blocks; ++n)
      for (const int k : kept) {
        const auto* row = values + (n * idx(given.num_types) + idx(k)) * width;
        own.insert(own.end(), row, row + width);
      }
    values = own.data();
  });
  tables.layer_type = own_->layer_type.data();
  tables.num_types = static_cast<int>(kept.size());
}

LikeTypes::~LikeTypes() = default;

}  // namespace autopar
