#include "rpc/reactors.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "base/logging.h"
#include "base/out_of_memory.h"
#include "base/strings.h"
#include "engine/recorder.h"
#include "rpc/admin.h"
#include "rpc/generate_core.h"
#include "rpc/live_limits.h"
#include "rpc/model_admin.h"
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
  return {static_cast<grpc::StatusCode>(status.code()), StatusMessage(status),
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
  return CatchOutOfMemory([&]() -> absl::StatusOr<Message> {
    grpc::ByteBuffer copy(bytes);  // shares the slices
    grpc::ProtoBufferReader reader(&copy);
    Message message;
    if (!reader.status().ok() || !message.ParseFromZeroCopyStream(&reader)) {
      return InvalidField("message", "the bytes are no message of this call");
    }
    return message;
  });
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

// A call that may go on.
struct Entry {
  std::shared_ptr<Serving> service;
  SessionLease lease;
};

absl::StatusOr<Entry> Enter(Front& front, const grpc::CallbackServerContext& context,
                            std::string_view method, std::string_view peer) {
  RETURN_IF_ERROR(AuthorizeCall(front, context, method));
  absl::StatusOr<std::shared_ptr<Serving>> service = front.Enter();
  absl::StatusOr<SessionLease> lease =
      service.ok() ? (*service)->sessions().Admit(PeerAddress(peer)) : service.status();
  if (lease.ok()) return Entry{*std::move(service), *std::move(lease)};
  if (front.metrics() != nullptr) {
    front.metrics()->Refuse(static_cast<Reason>(ErrorDetailOf(lease.status()).reason()));
  }
  return lease.status();
}

class SessionReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                             public StreamPort {
 public:
  SessionReactor(std::shared_ptr<Front> front, grpc::CallbackServerContext* context)
      : front_(std::move(front)), context_(context) {}

  void Begin() {
    absl::StatusOr<Entry> call = Enter(*front_, *context_, method::kSession, context_->peer());
    if (!call.ok()) {
      ServerBidiReactor::Finish(ToGrpc(call.status()));
      return;
    }
    core_ = std::make_shared<SessionCore>(std::move(call->service), std::move(call->lease),
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
    absl::StatusOr<MemoryHold> memory = front_->AdmitMessage(incoming_.Length());
    if (!memory.ok()) {
      incoming_.Clear();
      core_->OnMessage(memory.status(), received);
      return;
    }
    absl::StatusOr<v1::SessionRequest> message = Parse<v1::SessionRequest>(incoming_);
    incoming_.Clear();  // gives the transport its memory back
    core_->OnMessage(std::move(message), received, *std::move(memory));
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

// Its message, with the pixels it brings taken from the address's rate.
template <class Request>
absl::StatusOr<Request> ReadOneShot(Front& front, const Entry& call, const grpc::ByteBuffer& bytes,
                                    std::string_view peer, TimePoint received, uint64_t& pixels,
                                    MemoryHold& memory) {
  ASSIGN_OR_RETURN(memory, front.AdmitMessage(bytes.Length()));
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
    absl::StatusOr<Entry> call = Enter(*front_, *context_, method::kPredict, peer);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    uint64_t pixels = 0;
    MemoryHold memory;
    absl::StatusOr<v1::PredictRequest> request =
        ReadOneShot<v1::PredictRequest>(*front_, *call, bytes, peer, received, pixels, memory);
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
                DeadlineOf(*context_, front_->clock()), std::move(memory));
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
    absl::StatusOr<Entry> call = Enter(*front_, *context_, method::kGenerate, peer);
    if (!call.ok()) {
      ServerWriteReactor::Finish(ToGrpc(call.status()));
      return;
    }
    uint64_t pixels = 0;
    MemoryHold memory;
    absl::StatusOr<v1::GenerateRequest> request =
        ReadOneShot<v1::GenerateRequest>(*front_, *call, bytes, peer, received, pixels, memory);
    core_ = std::make_shared<GenerateCore>(std::move(call->service), std::move(call->lease), this);
    // Own reference: once finished, the reactor may be gone before Start returns.
    const std::shared_ptr<GenerateCore> core = core_;
    core->Start(std::move(request), pixels, front_->AccountOf(peer), received,
                DeadlineOf(*context_, front_->clock()), std::move(memory));
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
      for (const auto& model : (*service)->models()) *response->add_models() = model->proto;
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
    const absl::StatusOr<std::shared_ptr<const OfferedModel>> model =
        (*service)->FindModel(request->name(), "name");
    if (model.ok()) *response->mutable_model() = (*model)->proto;
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

// An answer that comes later, from any thread. A caller that is gone gets nothing.
template <class Response>
class LateReply final : public grpc::ServerUnaryReactor {
 public:
  // `write` fills the response of a good answer.
  static std::pair<LateReply*, ModelAdmin::Done> Make(Response* response) {
    auto* reactor = new LateReply(response);  // deletes itself in OnDone
    return {reactor, [reactor](const absl::StatusOr<v1::Model>& model) {
              if constexpr (requires { reactor->response_->mutable_model(); }) {
                if (model.ok()) *reactor->response_->mutable_model() = *model;
              }
              reactor->Finish(ToGrpc(model.status()));
            }};
  }
  void OnDone() override { delete this; }

 private:
  explicit LateReply(Response* response) : response_(response) {}
  Response* const response_;
};

// GetRecent, GetTrace and GetCache wait for one turn of the engine.
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
  grpc::ServerUnaryReactor* LoadModel(grpc::CallbackServerContext* context,
                                      const v1::LoadModelRequest* request,
                                      v1::LoadModelResponse* response) override {
    return Later(
        *context, method::kLoadModel, response,
        [&](ModelAdmin& models, ModelAdmin::Done done) { models.Load(*request, std::move(done)); });
  }
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context,
                                        const v1::UnloadModelRequest* request,
                                        v1::UnloadModelResponse* response) override {
    return Later(*context, method::kUnloadModel, response,
                 [&](ModelAdmin& models, ModelAdmin::Done done) {
                   models.Unload(*request, std::move(done));
                 });
  }
  grpc::ServerUnaryReactor* ReloadModel(grpc::CallbackServerContext* context,
                                        const v1::ReloadModelRequest* request,
                                        v1::ReloadModelResponse* response) override {
    return Later(*context, method::kReloadModel, response,
                 [&](ModelAdmin& models, ModelAdmin::Done done) {
                   models.Reload(*request, std::move(done));
                 });
  }
  grpc::ServerUnaryReactor* GetLimits(grpc::CallbackServerContext* context,
                                      const v1::GetLimitsRequest*,
                                      v1::GetLimitsResponse* response) override {
    const auto get = [&]() -> absl::Status {
      RETURN_IF_ERROR(AuthorizeCall(*front_, *context, method::kGetLimits));
      ASSIGN_OR_RETURN(const std::shared_ptr<Serving> service, front_->Loaded());
      *response->mutable_limits() = LiveLimitsOf(service->settings()->config);
      return absl::OkStatus();
    };
    return Reply(context, get());
  }
  grpc::ServerUnaryReactor* SetLimits(grpc::CallbackServerContext* context,
                                      const v1::SetLimitsRequest* request,
                                      v1::SetLimitsResponse* response) override {
    const auto set = [&]() -> absl::Status {
      RETURN_IF_ERROR(AuthorizeCall(*front_, *context, method::kSetLimits));
      ASSIGN_OR_RETURN(*response->mutable_limits(), front_->SetLimits(request->limits()));
      LogInfo("limits changed",
              {{"peer", context->peer()}, {"changes", request->limits().ShortDebugString()}});
      return absl::OkStatus();
    };
    return Reply(context, set());
  }
  grpc::ServerUnaryReactor* GetMemory(grpc::CallbackServerContext* context,
                                      const v1::GetMemoryRequest*,
                                      v1::GetMemoryResponse* response) override {
    const absl::Status allowed = AuthorizeCall(*front_, *context, method::kGetMemory);
    if (allowed.ok() && front_->memory() != nullptr) *response = MemoryOf(*front_->memory());
    return Reply(context, allowed);
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
  template <class Response>
  grpc::ServerUnaryReactor* Later(
      grpc::CallbackServerContext& context, std::string_view method, Response* response,
      absl::FunctionRef<void(ModelAdmin&, ModelAdmin::Done)> ask) const {
    if (const absl::Status allowed = AuthorizeCall(*front_, context, method); !allowed.ok())
      return Reply(&context, allowed);
    if (const absl::Status entered = front_->Enter().status(); !entered.ok())
      return Reply(&context, entered);
    const std::shared_ptr<ModelAdmin> models = front_->model_admin();
    if (models == nullptr) {
      return Reply(&context, absl::UnimplementedError("this server cannot load models by itself"));
    }
    auto [reactor, done] = LateReply<Response>::Make(response);
    ask(*models, std::move(done));
    return reactor;
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
