#pragma once
// OneShotCore: what the cores of calls with one request have in common: the place among the
// sessions, the request read and decoded on the client's share of time, and the client that goes
// away. `Core` derives from it, and has Finish(absl::Status), which ends the call.
#include <memory>
#include <mutex>
#include <utility>

#include "base/fair_executor.h"
#include "base/out_of_memory.h"
#include "base/status.h"
#include "rpc/serving.h"

namespace saccade {

template <class Core>
class OneShotCore : public std::enable_shared_from_this<Core> {
 public:
  // The client is gone or the call's deadline passed.
  void OnCancelled() {
    {
      const std::lock_guard lock(mu_);
      cancelled_ = true;
    }
    service_->engine().CancelSession(id_);
  }

 protected:
  OneShotCore(std::shared_ptr<Serving> service, SessionLease lease)
      : service_(std::move(service)), id_(lease.id()), lease_(std::move(lease)) {}

  // Calls submit(request), at once or from a decode thread; an error of it, or of `request`, is
  // counted and ends the call. `memory` is what holds the request's bytes.
  template <class Request, class Submit>
  void Decode(absl::StatusOr<Request> request, uint64_t pixels,
              const std::shared_ptr<FairExecutor::Account>& account, MemoryHold memory,
              Submit submit) {
    if (!request.ok()) {
      Refuse(request.status());
      return;
    }
    service_->decoding().Run(account, Serving::DecodeSize(pixels),
                             [self = this->shared_from_this(), request = *std::move(request),
                              submit, memory = std::make_shared<MemoryHold>(std::move(memory))] {
                               if (self->cancelled()) {  // it went away while it waited
                                 self->Finish(absl::CancelledError("the call was cancelled"));
                                 return;
                               }
                               const absl::Status status =
                                   CatchOutOfMemory([&] { return submit(request); });
                               if (!status.ok()) self->Refuse(status);
                             });
  }

  // To the engine, unless the client went away meanwhile.
  absl::Status Hand(ActRequest act) {
    ASSIGN_OR_RETURN(const RequestId id, service_->engine().Submit(std::move(act)));
    const std::lock_guard lock(mu_);
    if (cancelled_) service_->engine().Cancel(id);
    return absl::OkStatus();
  }

  const std::shared_ptr<Serving> service_;
  const SessionId id_;
  std::mutex mu_;
  // Under mu_.
  SessionLease lease_;
  bool cancelled_ = false;

 private:
  bool cancelled() {
    const std::lock_guard lock(mu_);
    return cancelled_;
  }
  void Refuse(const absl::Status& status) {
    service_->CountRefused(status);
    static_cast<Core*>(this)->Finish(status);
  }
};

}  // namespace saccade
