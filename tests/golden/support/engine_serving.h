#pragma once
// What tests through the engine share: an engine with one patient class, and a sink that keeps the
// answer.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"

namespace saccade {

class CollectSink final : public ResponseSink {
 public:
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override { ++tokens_; }
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    done_.set_value(std::move(result));
  }
  // Once; waits.
  absl::StatusOr<ActResult> Take() { return done_.get_future().get(); }
  uint32_t tokens() const { return tokens_; }  // streamed, by all samples

 private:
  std::atomic<uint32_t> tokens_{0};
  std::promise<absl::StatusOr<ActResult>> done_;
};

// One worker; every request is of class 0, runs late and is checked page by page. Null, and a
// failed test, when it does not start.
inline std::unique_ptr<Engine> StartPatientEngine(std::unique_ptr<Backend> backend,
                                                  std::vector<ServedModel> models,
                                                  const Clock& clock, Micros step_ceiling,
                                                  uint32_t max_new_tokens = 0) {
  LatencyClass klass;
  klass.name = "any";
  klass.on_late = OnLate::kRunLate;
  klass.max_queued = 1000;
  EngineOptions options;
  options.classes = {klass};
  options.step_ceiling = step_ceiling;
  options.max_new_tokens = max_new_tokens;
  options.check_pages = true;
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::move(backend));
  auto engine = Engine::Start(options, std::move(backends), std::move(models), clock, nullptr);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

}  // namespace saccade
