// Cancellation of closed-form work from another thread.
#pragma once

#include <atomic>

namespace autopar::analytic {

// Polled between points by long work. After cancellation, its result is incomplete and is
// discarded.
class Halt {
 public:
  void ask() { asked_.store(true, std::memory_order_relaxed); }
  bool asked() const { return asked_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> asked_{false};
};

// For work that is never cancelled.
inline const Halt kGoOn;

}  // namespace autopar::analytic
