#include "rpc/predict_core.h"

#include <utility>

namespace saccade {

class PredictCore::Flight final : public ResponseSink {
 public:
  Flight(std::shared_ptr<PredictCore> core, ActInfo info)
      : core_(std::move(core)), info_(std::move(info)) {}
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override {}
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    if (!result.ok()) {
      core_->Finish(result.status());
      return;
    }
    v1::PredictResponse response;
    *response.mutable_chunk() = ActionChunkOf(info_, *result);
    core_->Finish(std::move(response));
  }

 private:
  const std::shared_ptr<PredictCore> core_;
  const ActInfo info_;
};

PredictCore::PredictCore(std::shared_ptr<Serving> service, SessionLease lease, Done done)
    : OneShotCore(std::move(service), std::move(lease)), done_(std::move(done)) {}

void PredictCore::Start(absl::StatusOr<v1::PredictRequest> request, uint64_t pixels,
                        const std::shared_ptr<FairExecutor::Account>& account, TimePoint received,
                        TimePoint call_deadline, MemoryHold memory) {
  Decode(std::move(request), pixels, account, std::move(memory),
         [this, received, call_deadline](const v1::PredictRequest& complete) {
           return Submit(complete, received, call_deadline);
         });
}

absl::Status PredictCore::Submit(const v1::PredictRequest& request, TimePoint received,
                                 TimePoint call_deadline) {
  ASSIGN_OR_RETURN(const Serving::Target target,
                   service_->Resolve(request.model(), request.statistics_key(),
                                     request.act().latency_class(), ""));
  const std::unique_ptr<Session> session = service_->NewSession(id_, target, received);
  RETURN_IF_ERROR(service_->SetText(*session, request.text()));
  // Its pixels were taken from the address's rate.
  RETURN_IF_ERROR(Serving::EachFrame(
      target.model->model->spec(), request.frames(),
      [&](uint32_t, const v1::VisionFrame& frame, const std::string& prefix) {
        return service_->PublishFrame(*session, frame, 0, received, prefix).status();
      }));
  if (request.has_state()) RETURN_IF_ERROR(service_->SetState(*session, request.state()));
  ActInfo info;
  ASSIGN_OR_RETURN(ActRequest act, service_->PrepareAct(*session, target, request.act(), received,
                                                        call_deadline, "act", info));
  info.act_id = 0;
  act.sink = std::make_shared<Flight>(shared_from_this(), std::move(info));
  return Hand(std::move(act));
}

void PredictCore::Finish(const absl::StatusOr<v1::PredictResponse>& response) {
  Done done;
  {
    const std::lock_guard lock(mu_);
    done = std::exchange(done_, nullptr);
    lease_.Release();
  }
  if (done) done(response);
}

void PredictCore::Detach() {
  const std::lock_guard lock(mu_);
  done_ = nullptr;
  lease_.Release();
}

}  // namespace saccade
