// How long work of a closed form is given up from another thread.
#pragma once

#include <atomic>

namespace autopar::analytic {

// Asked between points by whatever takes long: what it returns then is not whole, and is left out.
class Halt {
 public:
  void ask() { asked_.store(true, std::memory_order_relaxed); }
  bool asked() const { return asked_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> asked_{false};
};

// For work that nobody gives up.
inline const Halt kGoOn;

}  // namespace autopar::analytic
