#pragma once
// PredictCore: one Predict call without its transport: a session that lives for one request.
#include <functional>
#include <memory>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "rpc/codec.h"
#include "rpc/one_shot_core.h"
#include "rpc/serving.h"

namespace saccade {

class PredictCore : public OneShotCore<PredictCore> {
 public:
  // Called exactly once, from any thread, also from inside Start.
  using Done = std::function<void(const absl::StatusOr<v1::PredictResponse>&)>;

  PredictCore(std::shared_ptr<Serving> service, SessionLease lease, Done done);

  // A status when the bytes were no message. `call_deadline` is the call's own. `account`: of the
  // client's connection; the frames, of `pixels` together, are decoded on its share of time.
  // `memory` is what holds the request's bytes.
  void Start(absl::StatusOr<v1::PredictRequest> request, uint64_t pixels,
             const std::shared_ptr<FairExecutor::Account>& account, TimePoint received,
             TimePoint call_deadline, MemoryHold memory = {});
  // The transport is gone; Done is not called any more.
  void Detach();

 private:
  friend OneShotCore<PredictCore>;
  class Flight;
  absl::Status Submit(const v1::PredictRequest& request, TimePoint received,
                      TimePoint call_deadline);
  void Finish(const absl::StatusOr<v1::PredictResponse>& response);

  Done done_;  // under mu_
};

}  // namespace saccade
