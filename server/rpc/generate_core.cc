#include "rpc/generate_core.h"

#include <utility>
#include <vector>

#include "model/text_decoder.h"

namespace saccade {

// Called by the holder of the engine's turn.
class GenerateCore::Flight final : public ResponseSink {
 public:
  Flight(std::shared_ptr<GenerateCore> core, TextInfo info)
      : core_(std::move(core)),
        info_(std::move(info)),
        decoders_(info_.samples, TextDecoder(*info_.tokenizer)) {}

  void OnToken(RequestId, uint32_t sample, uint32_t index, int32_t token) override {
    if (sample >= decoders_.size()) return;
    v1::GenerateResponse response;
    v1::GeneratedToken& out = *response.mutable_token();
    out.set_sequence(sample);
    out.set_index(index);
    out.set_token_id(token);
    if (!info_.Stops(token)) out.set_text(decoders_[sample].Push(token));
    core_->Send(response);
  }
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    if (!result.ok()) {
      core_->Finish(result.status());
      return;
    }
    v1::GenerateResponse response;
    *response.mutable_result() = GenerateResultOf(info_, *result);
    core_->Send(response);
    core_->Finish(absl::OkStatus());
  }

 private:
  const std::shared_ptr<GenerateCore> core_;
  const TextInfo info_;
  std::vector<TextDecoder> decoders_;  // by sample
};

GenerateCore::GenerateCore(std::shared_ptr<Serving> service, SessionLease lease, GeneratePort* port)
    : OneShotCore(std::move(service), std::move(lease)), port_(port) {}

void GenerateCore::Start(absl::StatusOr<v1::GenerateRequest> request, uint64_t pixels,
                         const std::shared_ptr<FairExecutor::Account>& account, TimePoint received,
                         TimePoint call_deadline, MemoryHold memory) {
  Decode(std::move(request), pixels, account, std::move(memory),
         [this, received, call_deadline](const v1::GenerateRequest& complete) {
           return Submit(complete, received, call_deadline);
         });
}

absl::Status GenerateCore::Submit(const v1::GenerateRequest& request, TimePoint received,
                                  TimePoint call_deadline) {
  TextInfo info;
  ASSIGN_OR_RETURN(ActRequest act,
                   service_->PrepareText(id_, request, received, call_deadline, info));
  act.sink = std::make_shared<Flight>(shared_from_this(), std::move(info));
  return Hand(std::move(act));
}

void GenerateCore::Send(const v1::GenerateResponse& response) {
  std::string bytes = response.SerializeAsString();
  const std::lock_guard lock(mu_);
  if (port_ == nullptr || cancelled_ || finished_) return;
  outbox_.push_back(std::move(bytes));
  PumpLocked();
}

void GenerateCore::Finish(const absl::Status& status) {
  const std::lock_guard lock(mu_);
  lease_.Release();
  if (!finished_) finished_ = status;
  PumpLocked();
}

void GenerateCore::PumpLocked() {
  if (port_ == nullptr || writing_ || finish_sent_) return;
  if (!outbox_.empty() && !cancelled_) {
    writing_ = true;
    port_->Write(outbox_.front());
  } else if (finished_) {
    finish_sent_ = true;
    port_->Finish(*finished_);
  }
}

void GenerateCore::OnWriteDone(bool ok) {
  const std::lock_guard lock(mu_);
  writing_ = false;
  outbox_.pop_front();
  if (!ok) outbox_.clear();  // the call is over; OnCancelled tells the engine
  PumpLocked();
}

void GenerateCore::Detach() {
  const std::lock_guard lock(mu_);
  port_ = nullptr;
  lease_.Release();
}

}  // namespace saccade
