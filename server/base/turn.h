#pragma once
// Turn: whoever holds it may touch what it guards; nobody ever waits for it. A thread that comes
// while it is held leaves a mark, and the holder learns of that when it gives the turn back: it
// then sees to it that what the other one left behind is looked at. So work that is put somewhere
// before TryTake is never forgotten, whoever wins.
#include <atomic>
#include <cstdint>

namespace saccade {

class Turn {
 public:
  // True: this thread holds the turn. False: another one does, and its Release returns true.
  bool TryTake() {
    State seen = state_.load(std::memory_order_relaxed);
    while (true) {
      const State next = seen == State::kFree ? State::kHeld : State::kWanted;
      if (state_.compare_exchange_weak(seen, next, std::memory_order_acq_rel,
                                       std::memory_order_relaxed)) {
        return next == State::kHeld;
      }
    }
  }

  // By the holder. True: somebody came meanwhile.
  bool Release() {
    return state_.exchange(State::kFree, std::memory_order_acq_rel) == State::kWanted;
  }

 private:
  enum class State : uint8_t { kFree, kHeld, kWanted };
  std::atomic<State> state_{State::kFree};
};

}  // namespace saccade
