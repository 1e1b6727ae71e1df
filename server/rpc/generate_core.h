#pragma once
// GenerateCore: one Generate call without its transport. Tokens go out as they are decoded, one
// write outstanding; what waits is bounded by the tokens the request may ask for.
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "rpc/one_shot_core.h"
#include "rpc/serving.h"

namespace saccade {

// The transport of one call. Both return at once; OnWriteDone follows a Write from another stack
// frame.
class GeneratePort {
 public:
  virtual ~GeneratePort() = default;
  virtual void Write(const std::string& bytes) = 0;
  virtual void Finish(const absl::Status& status) = 0;  // once, with no write outstanding
};

class GenerateCore : public OneShotCore<GenerateCore> {
 public:
  GenerateCore(std::shared_ptr<Serving> service, SessionLease lease, GeneratePort* port);

  // As PredictCore::Start.
  void Start(absl::StatusOr<v1::GenerateRequest> request, uint64_t pixels,
             const std::shared_ptr<FairExecutor::Account>& account, TimePoint received,
             TimePoint call_deadline, MemoryHold memory = {});
  void OnWriteDone(bool ok);
  // The transport is gone; nothing is sent any more.
  void Detach();

 private:
  friend OneShotCore<GenerateCore>;
  class Flight;
  absl::Status Submit(const v1::GenerateRequest& request, TimePoint received,
                      TimePoint call_deadline);
  void Send(const v1::GenerateResponse& response);
  void Finish(const absl::Status& status);
  void PumpLocked();

  // Under mu_.
  GeneratePort* port_;              // null once detached
  std::deque<std::string> outbox_;  // the front is the write in progress while writing_
  bool writing_ = false;
  bool finish_sent_ = false;
  std::optional<absl::Status> finished_;
};

}  // namespace saccade
