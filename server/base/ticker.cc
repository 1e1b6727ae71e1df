#include "base/ticker.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace saccade {

struct Ticker::State {
  struct Entry {
    Micros period{0};
    Call call;
    TimePoint due{};
  };
  std::mutex mu;
  std::condition_variable changed;
  std::map<uint64_t, Entry> entries;
  std::set<std::pair<TimePoint, uint64_t>> due;
  uint64_t next = 1;
  bool started = false;
  bool stopping = false;
};

Ticker::Ticker() : state_(std::make_shared<State>()) {}

Ticker::~Ticker() {
  {
    const std::lock_guard lock(state_->mu);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

uint64_t Ticker::Start(Micros period, Call call) {
  const std::lock_guard lock(state_->mu);
  const uint64_t id = state_->next++;
  const TimePoint due = std::chrono::steady_clock::now() + period;
  state_->entries.emplace(id, State::Entry{period, std::move(call), due});
  state_->due.emplace(due, id);
  if (!std::exchange(state_->started, true)) {
    thread_ = std::thread([state = state_] { Loop(state); });
  }
  state_->changed.notify_all();
  return id;
}

void Ticker::Stop(uint64_t id) {
  const std::lock_guard lock(state_->mu);
  const auto entry = state_->entries.find(id);
  if (entry == state_->entries.end()) return;
  state_->due.erase({entry->second.due, id});
  state_->entries.erase(entry);
}

void Ticker::Loop(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "saccade-ticker");
  std::unique_lock lock(state->mu);
  while (!state->stopping) {
    if (state->due.empty()) {
      state->changed.wait(lock);
      continue;
    }
    const auto [at, id] = *state->due.begin();
    if (std::chrono::steady_clock::now() < at) {
      state->changed.wait_until(lock, at);
      continue;
    }
    state->due.erase(state->due.begin());
    auto entry = state->entries.find(id);
    bool more = false;
    {
      const Call call = entry->second.call;  // Stop may destroy the entry's
      lock.unlock();
      more = call(at);
    }
    const TimePoint now = std::chrono::steady_clock::now();
    lock.lock();
    entry = state->entries.find(id);
    if (entry == state->entries.end()) continue;
    if (!more) {
      state->entries.erase(entry);
      continue;
    }
    const Micros period = entry->second.period;
    TimePoint next = at + period;
    if (next <= now) next += ((now - next) / period + 1) * period;
    entry->second.due = next;
    state->due.emplace(next, id);
  }
}

}  // namespace saccade
