// Lower convex hull of (bytes, cost) and the linear-programming bound of a set of layers.
#pragma once

#include <algorithm>
#include <vector>

#include "planner/common.hpp"

namespace autopar {

struct HullPoint {
  double bytes = 0.0;
  double cost = 0.0;
};

// Corners of the decreasing lower hull, by increasing bytes. Sorts `points` in place.
inline void lower_hull(std::vector<HullPoint>& points) {
  std::sort(points.begin(), points.end(), [](const HullPoint& a, const HullPoint& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.cost < b.cost;
  });
  std::size_t size = 0;
  for (const HullPoint& p : points) {
    if (size > 0 && p.cost >= points[size - 1].cost) continue;  // larger and not cheaper
    while (size >= 2) {
      const HullPoint& a = points[size - 2];
      const HullPoint& b = points[size - 1];
      // keep b only if it lies below the line from a to p
      if ((b.cost - a.cost) * (p.bytes - a.bytes) < (p.cost - a.cost) * (b.bytes - a.bytes)) break;
      --size;
    }
    points[size++] = p;
  }
  points.resize(size);
}

// Minimum of the summed costs of `count[k]` layers of each type k within a budget, relaxed to
// fractions of layers: hull segments of all types taken in order of slope.
class RelaxedLayers {
 public:
  void assign(const std::vector<std::vector<HullPoint>>& hulls) {
    std::vector<const std::vector<HullPoint>*> all;
    for (const auto& hull : hulls) all.push_back(&hull);
    assign(all);
  }
  // Null and empty: the type has no option.
  void assign(const std::vector<const std::vector<HullPoint>*>& hulls) {
    segments_.clear();
    first_.clear();
    for (std::size_t k = 0; k < hulls.size(); ++k) {
      if (hulls[k] == nullptr || hulls[k]->empty()) {
        first_.push_back({-1.0, 0.0});
        continue;
      }
      const std::vector<HullPoint>& hull = *hulls[k];
      first_.push_back(hull.front());
      for (std::size_t i = 1; i < hull.size(); ++i) {
        const double bytes = hull[i].bytes - hull[i - 1].bytes;
        const double cost = hull[i].cost - hull[i - 1].cost;
        segments_.push_back({static_cast<int>(k), bytes, cost, cost / bytes});
      }
    }
    std::sort(segments_.begin(), segments_.end(), [](const Segment& a, const Segment& b) {
      return a.slope != b.slope ? a.slope < b.slope : a.type < b.type;
    });
  }

  // Fills the breakpoints (bytes, cost) of the relaxed minimum for these counts; returns false if a
  // needed type has no option.
  template <class Counts>
  bool breakpoints(const Counts& count, std::vector<HullPoint>& out) const {
    out.clear();
    HullPoint p{0.0, 0.0};
    for (std::size_t k = 0; k < first_.size(); ++k) {
      if (count[k] == 0) continue;
      if (first_[k].bytes < 0) return false;
      p.bytes += first_[k].bytes * static_cast<double>(count[k]);
      p.cost += first_[k].cost * static_cast<double>(count[k]);
    }
    out.push_back(p);
    for (const Segment& s : segments_) {
      const double c = static_cast<double>(count[static_cast<std::size_t>(s.type)]);
      if (c == 0) continue;
      p.bytes += s.bytes * c;
      p.cost = std::max(0.0, p.cost + s.cost * c);  // cancellation must not look infeasible
      out.push_back(p);
    }
    return true;
  }

  // The relaxed minimum within `budget`, or a negative number when nothing fits.
  template <class Counts>
  double minimum(const Counts& count, double budget) const {
    double bytes = 0.0;
    double cost = 0.0;
    for (std::size_t k = 0; k < first_.size(); ++k) {
      if (count[k] == 0) continue;
      if (first_[k].bytes < 0) return -1.0;
      bytes += first_[k].bytes * static_cast<double>(count[k]);
      cost += first_[k].cost * static_cast<double>(count[k]);
    }
    if (bytes > budget) return -1.0;
    for (const Segment& s : segments_) {
      const double c = static_cast<double>(count[static_cast<std::size_t>(s.type)]);
      if (c == 0) continue;
      const double step = s.bytes * c;
      if (bytes + step > budget) return std::max(0.0, cost + s.slope * (budget - bytes));
      bytes += step;
      cost = std::max(0.0, cost + s.cost * c);
    }
    return cost;
  }

 private:
  struct Segment {
    int type;
    double bytes;
    double cost;
    double slope;
  };
  std::vector<Segment> segments_;
  std::vector<HullPoint> first_;
};

// Value of a decreasing piecewise linear function at `bytes`; negative left of its domain.
inline double value_at(const std::vector<HullPoint>& f, double bytes) {
  if (bytes < f.front().bytes) return -1.0;
  if (bytes >= f.back().bytes) return f.back().cost;
  const auto it = std::upper_bound(f.begin(), f.end(), bytes,
                                   [](double b, const HullPoint& p) { return b < p.bytes; });
  const HullPoint& hi = *it;
  const HullPoint& lo = *(it - 1);
  return lo.cost + (hi.cost - lo.cost) * (bytes - lo.bytes) / (hi.bytes - lo.bytes);
}

}  // namespace autopar
