#pragma once
// CostKeeper: the file of learned step times while the server runs: read at start, written now and
// then and at the end. A file that cannot be read or written costs a warning and nothing else.
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "engine/cost_table.h"
#include "engine/engine.h"

namespace saccade {

class CostKeeper {
 public:
  // Reads the file; an empty path keeps nothing.
  explicit CostKeeper(std::string path);
  ~CostKeeper() { Stop(); }
  CostKeeper(const CostKeeper&) = delete;
  CostKeeper& operator=(const CostKeeper&) = delete;

  // What the file held.
  const CostTable& known() const { return known_; }
  // Writes once a minute from a thread of its own. The engine outlives Stop.
  void Start(Engine& engine);
  // Writes for the last time.
  void Stop();

 private:
  void Save();

  const std::string path_;
  CostTable known_;  // after Start: the thread's, until it is joined
  Engine* engine_ = nullptr;
  std::mutex mu_;
  std::condition_variable stopped_;
  bool stop_ = false;  // under mu_
  std::thread thread_;
};

}  // namespace saccade
