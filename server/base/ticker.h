#pragma once
// Ticker: one thread that calls functions again and again, each at its own period. For turns that a
// server takes by itself; what is called must be brief.
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "base/clock.h"

namespace saccade {

class Ticker {
 public:
  // Gets the time the call was due; false: no more.
  using Call = std::function<bool(TimePoint due)>;

  Ticker();
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;
  // A call in progress is waited for, unless it is what destroys the ticker.
  ~Ticker();

  // Any thread. First after one period (> 0). Turns that have passed unheeded are left out: calls
  // never pile up. The thread is started by the first use.
  uint64_t Start(Micros period, Call call);
  // No call begins after that, but one may be in progress.
  void Stop(uint64_t id);

 private:
  struct State;  // shared with the thread
  static void Loop(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace saccade
