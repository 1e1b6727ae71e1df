#include "rpc/predict_core.h"

#include <utility>
#include <vector>

#include "base/out_of_memory.h"
#include "base/strings.h"

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
    : service_(std::move(service)),
      id_(lease.id()),
      lease_(std::move(lease)),
      done_(std::move(done)) {}

void PredictCore::Start(absl::StatusOr<v1::PredictRequest> request, uint64_t pixels,
                        const std::shared_ptr<FairExecutor::Account>& account, TimePoint received,
                        TimePoint call_deadline, MemoryHold memory) {
  if (!request.ok()) {
    service_->CountRefused(request.status());
    Finish(request.status());
    return;
  }
  service_->decoding().Run(
      account, Serving::DecodeSize(pixels),
      [self = shared_from_this(), request = *std::move(request), received, call_deadline,
       memory = std::make_shared<MemoryHold>(std::move(memory))] {
        if (self->cancelled()) {  // it went away while it waited
          self->Finish(absl::CancelledError("the call was cancelled"));
          return;
        }
        const absl::Status status =
            CatchOutOfMemory([&] { return self->Submit(request, received, call_deadline); });
        if (status.ok()) return;
        self->service_->CountRefused(status);
        self->Finish(status);
      });
}

bool PredictCore::cancelled() {
  const std::lock_guard lock(mu_);
  return cancelled_;
}

absl::Status PredictCore::Submit(const v1::PredictRequest& request, TimePoint received,
                                 TimePoint call_deadline) {
  ASSIGN_OR_RETURN(const Serving::Target target,
                   service_->Resolve(request.model(), request.statistics_key(),
                                     request.act().latency_class(), ""));
  const std::unique_ptr<Session> session = service_->NewSession(id_, target, received);
  RETURN_IF_ERROR(service_->SetText(*session, request.text()));
  const size_t cameras = target.model->model->spec().cameras.size();
  if (static_cast<size_t>(request.frames_size()) > cameras) {
    return InvalidField("frames", StrCat("has ", request.frames_size(), " frames, the model has ",
                                         cameras, " cameras"));
  }
  std::vector<bool> seen(cameras, false);
  for (int i = 0; i < request.frames_size(); ++i) {
    const std::string prefix = StrCat("frames[", i, "]");
    const std::string field = StrCat(prefix, ".camera");
    ASSIGN_OR_RETURN(const uint32_t camera, session->FindCamera(request.frames(i).camera(), field));
    if (seen[camera]) return InvalidField(field, StrCat("a second frame of camera ", camera));
    seen[camera] = true;
    // Its pixels were taken from the address's rate.
    RETURN_IF_ERROR(
        service_->PublishFrame(*session, request.frames(i), 0, received, prefix).status());
  }
  if (request.has_state()) RETURN_IF_ERROR(service_->SetState(*session, request.state()));
  ActInfo info;
  ASSIGN_OR_RETURN(ActRequest act, service_->PrepareAct(*session, target, request.act(), received,
                                                        call_deadline, "act", info));
  info.act_id = 0;
  act.sink = std::make_shared<Flight>(shared_from_this(), std::move(info));
  ASSIGN_OR_RETURN(const RequestId id, service_->engine().Submit(std::move(act)));
  const std::lock_guard lock(mu_);
  if (cancelled_) service_->engine().Cancel(id);
  return absl::OkStatus();
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

void PredictCore::OnCancelled() {
  {
    const std::lock_guard lock(mu_);
    cancelled_ = true;
  }
  service_->engine().CancelSession(id_);
}

void PredictCore::Detach() {
  const std::lock_guard lock(mu_);
  done_ = nullptr;
  lease_.Release();
}

}  // namespace saccade
