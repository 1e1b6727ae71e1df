#include "rpc/reactors.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "base/logging.h"
#include "base/strings.h"
#include "engine/recorder.h"
#include "rpc/admin.h"
#include "rpc/generate_core.h"
#include "rpc/predict_core.h"
#include "rpc/session_core.h"
#include "saccade/v1/admin.grpc.pb.h"
#include "saccade/v1/inference.grpc.pb.h"
#include "saccade/v1/models.grpc.pb.h"
#include "saccade/v1/server.grpc.pb.h"

namespace saccade {
namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message()),
          StatusDetails(status)};
}

// The call's deadline on our clock.
TimePoint DeadlineOf(const grpc::CallbackServerContext& context, const Clock& clock) {
  const std::chrono::system_clock::time_point deadline = context.deadline();
  const auto left = deadline - std::chrono::system_clock::now();
  if (left > std::chrono::hours(24 * 365)) return kNever;  // none was set
  return clock.Now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(left);
}

// The reading of bytes is ours, not gRPC's: a message that cannot be parsed is then an error of
// that message, where gRPC would end the stream.
template <class Message>
absl::StatusOr<Message> Parse(const grpc::ByteBuffer& bytes) {
  grpc::ByteBuffer copy(bytes);  // shares the slices
  grpc::ProtoBufferReader reader(&copy);
  Message message;
  if (!reader.status().ok() || !message.ParseFromZeroCopyStream(&reader)) {
    return InvalidField("message", "the bytes are no message of this call");
  }
  return message;
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

// For calls that are answered at once.
grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

class SessionReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                             public StreamPort {
 public:
  SessionReactor(std::shared_ptr<Front> front, grpc::CallbackServerContext* context)
      : front_(std::move(front)), context_(context) {}

  void Begin() {
    if (const absl::Status allowed = AuthorizeCall(*front_, *context_, method::kSession);
        !allowed.ok()) {
      ServerBidiReactor::Finish(ToGrpc(allowed));
      return;
    }
    absl::StatusOr<std::shared_ptr<Serving>> service = front_->Enter();
    absl::StatusOr<SessionLease> lease =
        service.ok() ? (*service)->sessions().Admit(PeerAddress(context_->peer()))
                     : service.status();
    if (!lease.ok()) {
      if (front_->metrics() != nullptr) {
        front_->metrics()->Refuse(static_cast<Reason>(ErrorDetailOf(lease.status()).reason()));
      }
      ServerBidiReactor::Finish(ToGrpc(lease.status()));
      return;
    }
    core_ = std::make_shared<SessionCore>(*std::move(service), *std::move(lease),
                                          DeadlineOf(*context_, front_->clock()));
    front_->Add(core_);
    core_->Start(this);
  }

  // StreamPort.
  void Read() override { StartRead(&incoming_); }
  void Write(const std::string& bytes) override {
    outgoing_ = ToBuffer(bytes);
    StartWrite(&outgoing_);
  }
  void Finish(const absl::Status& status) override { ServerBidiReactor::Finish(ToGrpc(status)); }
  void Abort() override { context_->TryCancel(); }

  // Reactions. None comes before Begin has made the core, except OnCancel and OnDone of a refused
  // stream.
  void OnReadDone(bool ok) override {
    if (!ok) {
      core_->OnReadsDone();
      return;
    }
    const TimePoint received = front_->clock().Now();
    core_->OnMessage(Parse<v1::SessionRequest>(incoming_), received);
  }
  void OnWriteDone(bool ok) override { core_->OnWriteDone(ok); }
  void OnCancel() override {
    if (core_ != nullptr) core_->OnCancelled();
  }
  void OnDone() override {
    if (core_ != nullptr) {
      front_->Remove(core_.get());
      core_->Detach();
    }
    delete this;
  }

 private:
  const std::shared_ptr<Front> front_;
  grpc::CallbackServerContext* const context_;
  std::shared_ptr<SessionCore> core_;
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
};

// A call without a session that may go on.
struct OneShot {
  std::shared_ptr<Serving> service;
  SessionLease lease;
};

absl::StatusOr<OneShot> Enter(Front& front, const grpc::CallbackServerContext& context,
                              std::string_view method, std::string_view peer) {
  RETURN_IF_ERROR(AuthorizeCall(front, context, method));
  absl::StatusOr<std::shared_ptr<Serving>> service = front.Enter();
  absl::StatusOr<SessionLease> lease =
      service.ok() ? (*service)->sessions().Admit(PeerAddress(peer)) : service.status();
  if (lease.ok()) return OneShot{*std::move(service), *std::move(lease)};
  if (front.metrics() != nullptr) {
    front.metrics()->Refuse(static_cast<Reason>(ErrorDetailOf(lease.status()).reason()));
  }
  return lease.status();
}

// Its message, with the pixels it brings taken from the address's rate.
template <class Request>
absl::StatusOr<Request> ReadOneShot(Front& front, const OneShot& call,
                                    const grpc::ByteBuffer& bytes, std::string_view peer,
                                    TimePoint received, uint64_t& pixels) {
  ASSIGN_OR_RETURN(Request request, Parse<Request>(bytes));
  pixels = call.service->PixelsToDecode(request);
  RETURN_IF_ERROR(front.TakeCallPixels(peer, pixels, received));
  return request;
}

class PredictReactor final : public grpc::ServerUnaryReactor {
 public:
  PredictReactor(std::shared_ptr<Front> front, grpc::CallbackServerContext* context,
                 grpc::ByteBuffer* response)
      : front_(std::move(front)), context_(context), response_(response) {}

  void Begin(const grpc::ByteBuffer& bytes) {
    const TimePoint received = front_->clock().Now();
    const std::string peer = context_->peer();
    absl::StatusOr<OneShot> call = Enter(*front_, *context_, method::kPredict, peer);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    uint64_t pixels = 0;
    absl::StatusOr<v1::PredictRequest> request =
        ReadOneShot<v1::PredictRequest>(*front_, *call, bytes, peer, received, pixels);
    core_ =
        std::make_shared<PredictCore>(std::move(call->service), std::move(call->lease),
                                      [this](const absl::StatusOr<v1::PredictResponse>& response) {
                                        if (response.ok())
                                          *response_ = ToBuffer(response->SerializeAsString());
                                        Finish(ToGrpc(response.status()));
                                      });
    // Own reference: once finished, the reactor may be gone before Start returns.
    const std::shared_ptr<PredictCore> core = core_;
    core->Start(std::move(request), pixels, front_->AccountOf(peer), received,
                DeadlineOf(*context_, front_->clock()));
  }

  void OnCancel() override {
    if (core_ != nullptr) core_->OnCancelled();
  }
  void OnDone() override {
    if (core_ != nullptr) core_->Detach();
    delete this;
  }

 private:
  const std::shared_ptr<Front> front_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_;
  std::shared_ptr<PredictCore> core_;
};

class GenerateReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                              public GeneratePort {
 public:
  GenerateReactor(std::shared_ptr<Front> front, grpc::CallbackServerContext* context)
      : front_(std::move(front)), context_(context) {}

  void Begin(const grpc::ByteBuffer& bytes) {
    const TimePoint received = front_->clock().Now();
    const std::string peer = context_->peer();
    absl::StatusOr<OneShot> call = Enter(*front_, *context_, method::kGenerate, peer);
    if (!call.ok()) {
      ServerWriteReactor::Finish(ToGrpc(call.status()));
      return;
    }
    uint64_t pixels = 0;
    absl::StatusOr<v1::GenerateRequest> request =
        ReadOneShot<v1::GenerateRequest>(*front_, *call, bytes, peer, received, pixels);
    core_ = std::make_shared<GenerateCore>(std::move(call->service), std::move(call->lease), this);
    // Own reference: once finished, the reactor may be gone before Start returns.
    const std::shared_ptr<GenerateCore> core = core_;
    core->Start(std::move(request), pixels, front_->AccountOf(peer), received,
                DeadlineOf(*context_, front_->clock()));
  }

  // GeneratePort.
  void Write(const std::string& bytes) override {
    outgoing_ = ToBuffer(bytes);
    StartWrite(&outgoing_);
  }
  void Finish(const absl::Status& status) override { ServerWriteReactor::Finish(ToGrpc(status)); }

  void OnWriteDone(bool ok) override { core_->OnWriteDone(ok); }
  void OnCancel() override {
    if (core_ != nullptr) core_->OnCancelled();
  }
  void OnDone() override {
    if (core_ != nullptr) core_->Detach();
    delete this;
  }

 private:
  const std::shared_ptr<Front> front_;
  grpc::CallbackServerContext* const context_;
  std::shared_ptr<GenerateCore> core_;
  grpc::ByteBuffer outgoing_;
};

// These calls carry raw bytes, see Parse.
using RawInference =
    v1::Inference::WithRawCallbackMethod_Session<v1::Inference::WithRawCallbackMethod_Predict<
        v1::Inference::WithRawCallbackMethod_Generate<v1::Inference::Service>>>;

class InferenceService final : public RawInference {
 public:
  explicit InferenceService(std::shared_ptr<Front> front) : front_(std::move(front)) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override {
    auto* reactor = new SessionReactor(front_, context);  // deletes itself in OnDone
    reactor->Begin();
    return reactor;
  }
  grpc::ServerUnaryReactor* Predict(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    auto* reactor = new PredictReactor(front_, context, response);  // deletes itself in OnDone
    reactor->Begin(*request);
    return reactor;
  }
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override {
    auto* reactor = new GenerateReactor(front_, context);  // deletes itself in OnDone
    reactor->Begin(*request);
    return reactor;
  }

 private:
  const std::shared_ptr<Front> front_;
};

class ModelsService final : public v1::Models::CallbackService {
 public:
  explicit ModelsService(std::shared_ptr<Front> front) : front_(std::move(front)) {}

  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context, const v1::ListRequest*,
                                 v1::ListResponse* response) override {
    if (const absl::Status allowed = AuthorizeCall(*front_, *context, method::kListModels);
        !allowed.ok()) {
      return Reply(context, allowed);
    }
    const absl::StatusOr<std::shared_ptr<Serving>> service = front_->Enter();
    if (service.ok()) {
      for (const v1::Model& model : (*service)->models()) *response->add_models() = model;
    }
    return Reply(context, service.status());
  }
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const v1::GetRequest* request,
                                v1::GetResponse* response) override {
    if (const absl::Status allowed = AuthorizeCall(*front_, *context, method::kGetModel);
        !allowed.ok()) {
      return Reply(context, allowed);
    }
    const absl::StatusOr<std::shared_ptr<Serving>> service = front_->Enter();
    if (!service.ok()) return Reply(context, service.status());
    const absl::StatusOr<const SessionModel*> model =
        (*service)->catalog().FindModel(request->name(), "name");
    if (model.ok())
      *response->mutable_model() = (*service)->models()[static_cast<size_t>((*model)->id.value())];
    return Reply(context, model.status());
  }

 private:
  const std::shared_ptr<Front> front_;
};

class StatusService final : public v1::Server::CallbackService {
 public:
  explicit StatusService(std::shared_ptr<Front> front) : front_(std::move(front)) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    const absl::Status allowed = AuthorizeCall(*front_, *context, method::kGetStatus);
    if (allowed.ok()) *response = front_->Status();
    return Reply(context, allowed);
  }

 private:
  const std::shared_ptr<Front> front_;
};

// Every call waits for one turn of the engine thread.
class AdminService final : public v1::Admin::CallbackService {
 public:
  explicit AdminService(std::shared_ptr<Front> front) : front_(std::move(front)) {}

  grpc::ServerUnaryReactor* GetRecent(grpc::CallbackServerContext* context,
                                      const v1::GetRecentRequest* request,
                                      v1::GetRecentResponse* response) override {
    return Reply(context, Ask(*context, method::kGetRecent, [&](Engine& engine) -> absl::Status {
                   ASSIGN_OR_RETURN(const RecentWork recent, engine.Recent());
                   *response =
                       RecentRequestsOf(recent, engine, front_->started(), request->max_requests());
                   return absl::OkStatus();
                 }));
  }
  grpc::ServerUnaryReactor* GetTrace(grpc::CallbackServerContext* context,
                                     const v1::GetTraceRequest*,
                                     v1::GetTraceResponse* response) override {
    return Reply(context, Ask(*context, method::kGetTrace, [&](Engine& engine) -> absl::Status {
                   ASSIGN_OR_RETURN(const RecentWork recent, engine.Recent());
                   response->set_json(ChromeTrace(recent, engine, front_->started()));
                   return absl::OkStatus();
                 }));
  }
  grpc::ServerUnaryReactor* GetCache(grpc::CallbackServerContext* context,
                                     const v1::GetCacheRequest* request,
                                     v1::GetCacheResponse* response) override {
    return Reply(
        context, Ask(*context, method::kGetCache, [&](Engine& engine) -> absl::Status {
          ASSIGN_OR_RETURN(const SchedulerStats stats, engine.Stats());
          *response = CachesOf(stats, engine);
          if (!request->check_invariants()) return absl::OkStatus();
          response->set_broken_invariant(std::string(FromAbsl(engine.CheckInvariants().message())));
          return absl::OkStatus();
        }));
  }
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest*,
                                  v1::DrainResponse*) override {
    const absl::Status allowed = AuthorizeCall(*front_, *context, method::kDrain);
    if (allowed.ok()) {
      LogInfo("a client asked for the end of the server", {{"peer", context->peer()}});
      front_->RequestDrain();
    }
    return Reply(context, allowed);
  }

 private:
  absl::Status Ask(const grpc::CallbackServerContext& context, std::string_view method,
                   absl::FunctionRef<absl::Status(Engine&)> ask) const {
    RETURN_IF_ERROR(AuthorizeCall(*front_, context, method));
    ASSIGN_OR_RETURN(const std::shared_ptr<Serving> service, front_->Loaded());
    return ask(service->engine());
  }
  const std::shared_ptr<Front> front_;
};

}  // namespace

absl::Status AuthorizeCall(Front& front, const grpc::ServerContextBase& context,
                           std::string_view method) {
  if (!front.asks_for_tokens()) return absl::OkStatus();
  std::vector<std::string_view> authorization;
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  for (auto it = begin; it != end; ++it)
    authorization.emplace_back(it->second.data(), it->second.size());
  return front.Authorize(method, authorization, context.peer());
}

std::vector<std::unique_ptr<grpc::Service>> MakeServices(std::shared_ptr<Front> front) {
  std::vector<std::unique_ptr<grpc::Service>> services;
  services.push_back(std::make_unique<InferenceService>(front));
  services.push_back(std::make_unique<ModelsService>(front));
  services.push_back(std::make_unique<StatusService>(front));
  services.push_back(std::make_unique<AdminService>(std::move(front)));
  return services;
}

}  // namespace saccade
