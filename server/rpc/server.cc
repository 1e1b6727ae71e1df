#include "rpc/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/server_interceptor.h>

#include <malloc.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/cores.h"
#include "base/fair_executor.h"
#include "base/logging.h"
#include "base/process.h"
#include "base/strings.h"
#include "config/memory.h"
#include "metrics/metrics.h"
#include "rpc/auth.h"
#include "rpc/front.h"
#include "rpc/model_admin.h"
#include "rpc/reactors.h"
#include "rpc/tls.h"

namespace saccade {
namespace {

constexpr std::chrono::milliseconds kTick{50};
// Health answers for these and for "", the server as a whole.
constexpr std::array<const char*, 3> kServiceNames = {"saccade.v1.Inference", "saccade.v1.Models",
                                                      "saccade.v1.Server"};
// How much of a stream's data the client may send ahead of our reading: a few JPEG frames. What is
// read is bounded by the message limit, this only saves round trips for window updates.
constexpr int kLookaheadBytes = 1 << 20;

// A connection that is not established by then is closed.
constexpr int kHandshakeTimeoutMs = 10'000;
constexpr std::chrono::seconds kTlsRefresh{1};
constexpr std::chrono::milliseconds kTrimInterval{200};

int ToMs(double seconds) { return static_cast<int>(seconds * 1000); }

// Cuts off a call that its handler does not check: reflection, and whatever service is added one
// day without a thought of this. Its handler runs on a call that is over, so nothing leaves the
// server.
class Cut final : public grpc::experimental::Interceptor {
 public:
  Cut(grpc::ServerContextBase& context, absl::Status why)
      : context_(context), why_(std::move(why)) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      grpc_call_cancel_with_status(context_.c_call(), static_cast<grpc_status_code>(why_.code()),
                                   std::string(FromAbsl(why_.message())).c_str(), nullptr);
    }
    methods->Proceed();
  }

 private:
  grpc::ServerContextBase& context_;
  const absl::Status why_;
};

class Guard final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Guard(std::shared_ptr<Front> front) : front_(std::move(front)) {}
  // Null: the call goes its way without any interceptor.
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    if (ChecksItself(info->method())) return nullptr;
    absl::Status allowed = AuthorizeCall(*front_, *info->server_context(), info->method());
    if (allowed.ok()) return nullptr;
    return new Cut(*info->server_context(), std::move(allowed));  // gRPC's from here on
  }

 private:
  const std::shared_ptr<Front> front_;
};

}  // namespace

class RpcServer::Impl {
 public:
  Impl(const Config& config, std::unique_ptr<FairExecutor> decoding, std::unique_ptr<ServerTls> tls,
       std::unique_ptr<Authenticator> authenticator, const Clock& clock, Metrics* metrics,
       MemoryBudget* memory, std::string version)
      : decoding_(std::move(decoding)),
        tls_(std::move(tls)),
        front_(std::make_shared<Front>(config, std::move(authenticator), clock, metrics, memory,
                                       std::move(version))),
        services_(MakeServices(front_)) {}

  ~Impl() {
    if (server_ != nullptr) Shutdown(front_->clock().Now());
    front_->SetModelAdmin(nullptr);  // it holds the front
  }

  void SetOnDrain(std::function<void()> on_drain) { front_->SetOnDrain(std::move(on_drain)); }
  absl::Status Start() {
    const ServerConfig& config = front_->config().server;
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.AddListeningPort(
        config.listen, tls_ == nullptr ? grpc::InsecureServerCredentials() : tls_->Credentials(),
        &port_);
    if (front_->asks_for_tokens()) {
      std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> guards;
      guards.push_back(std::make_unique<Guard>(front_));
      builder.experimental().SetInterceptorCreators(std::move(guards));
    }
    for (const std::unique_ptr<grpc::Service>& service : services_)
      builder.RegisterService(service.get());
    // Reflection alone is synchronous.
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
    // Pixels do not compress; an expanding message must not exist.
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
    if (front_->memory() != nullptr) {
      const uint64_t bytes = TransportBytes(front_->config(), front_->memory()->limit());
      ASSIGN_OR_RETURN(transport_memory_, front_->memory()->Hold(MemoryKind::kTransport, bytes));
      grpc::ResourceQuota quota("saccade");
      quota.Resize(bytes);
      builder.SetResourceQuota(quota);
    }
    builder.SetMaxReceiveMessageSize(static_cast<int>(
        std::min<uint64_t>(config.max_message_bytes, std::numeric_limits<int>::max())));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                               static_cast<int>(config.max_streams_per_connection));
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, ToMs(config.keepalive_s));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ToMs(config.keepalive_timeout_s));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               ToMs(config.min_ping_interval_s));
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT,
                               0);  // a second server on the port is an error, not a share
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      return absl::UnavailableError(StrCat("server.listen: cannot listen on ", config.listen));
    }
    PublishHealth();
    if (!IsLoopback(config.listen) && (tls_ == nullptr || config.tokens_file.empty())) {
      LogWarn("listening beyond loopback without protection (server.allow_insecure)",
              {{"listen", config.listen},
               {"encrypted", tls_ != nullptr},
               {"tokens", !config.tokens_file.empty()}});
    }
    housekeeping_ = std::thread([this] { Housekeeping(); });
    return absl::OkStatus();
  }

  absl::Status Serve(Engine& engine, ModelSource source) {
    ASSIGN_OR_RETURN(std::shared_ptr<Serving> service,
                     Serving::Create(front_->config(), engine, *decoding_, front_->clock(),
                                     front_->metrics(), front_->memory()));
    if (source)
      front_->SetModelAdmin(std::make_shared<ModelAdmin>(front_, service, std::move(source)));
    front_->SetService(std::move(service));
    PublishHealth();
    return absl::OkStatus();
  }

  void BeginDrain() {
    front_->SetDraining();
    PublishHealth();
    if (const std::shared_ptr<ModelAdmin> models = front_->model_admin()) models->Stop();
    for (const std::shared_ptr<SessionCore>& stream : front_->Streams()) stream->NotifyDraining();
  }

  void Shutdown(TimePoint deadline) {
    if (!front_->draining()) BeginDrain();
    ErrorInfo info;
    info.reason = Reason::kDraining;
    const absl::Status status =
        MakeError(absl::StatusCode::kUnavailable, "the server is shutting down", info);
    for (const std::shared_ptr<SessionCore>& stream : front_->Streams())
      stream->CloseWhenIdle(status);
    const auto patience =
        std::max(std::chrono::steady_clock::duration::zero(), deadline - front_->clock().Now());
    server_->Shutdown(std::chrono::system_clock::now() +
                      std::chrono::duration_cast<std::chrono::system_clock::duration>(patience));
    server_->Wait();
    {
      const std::lock_guard lock(mu_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (housekeeping_.joinable()) housekeeping_.join();
    server_ = nullptr;
  }

  bool busy() const {
    const std::shared_ptr<ModelAdmin> models = front_->model_admin();
    return models != nullptr && models->busy();
  }
  bool running() const { return server_ != nullptr; }
  int port() const { return port_; }

 private:
  void Housekeeping() {
    std::unique_lock lock(mu_);
    while (!wake_.wait_for(lock, kTick, [this] { return stopping_; })) {
      lock.unlock();
      PublishHealth();
      const TimePoint now = front_->clock().Now();
      if (tls_ != nullptr && now - tls_refreshed_ >= kTlsRefresh) {
        tls_refreshed_ = now;
        tls_->Refresh();
      }
      for (const std::shared_ptr<SessionCore>& stream : front_->Streams()) stream->Tick(now);
      TrimHeap(now);
      lock.lock();
    }
  }

  // What was freed may stay with the allocator; beyond what the budget allows for that, it goes
  // back to the system.
  void TrimHeap(TimePoint now) {
    if (front_->memory() == nullptr || now - trimmed_ < kTrimInterval) return;
    trimmed_ = now;
    if (AnonymousBytes() > front_->memory()->held()) malloc_trim(0);
  }

  // Watchers are told on change only.
  void PublishHealth() {
    const std::lock_guard lock(health_mu_);
    const bool ready = front_->Ready();
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    PublishModels(*health);
    if (published_ && *published_ == ready) return;
    published_ = ready;
    health->SetServingStatus(ready);
    for (const char* name : kServiceNames) health->SetServingStatus(name, ready);
    if (front_->metrics() != nullptr) front_->metrics()->ready->Set(ready ? 1 : 0);
    LogInfo("readiness changed", {{"ready", ready}});
  }

  // A model has a health of its own, also when it is gone: names are few.
  void PublishModels(grpc::HealthCheckServiceInterface& health) {
    std::map<std::string, bool> ready;
    if (const std::shared_ptr<Serving> service = front_->service()) {
      for (const auto& model : service->models()) {
        ready[model->name] = !front_->draining() && service->engine().Ready(*model->served);
      }
    }
    for (const auto& [name, was] : models_published_) ready.try_emplace(name, false);
    for (const auto& [name, is] : ready) {
      const auto [it, added] = models_published_.try_emplace(name, is);
      if (!added && it->second == is) continue;
      it->second = is;
      health.SetServingStatus(StrCat(kServiceNames[0], "/", name), is);
    }
  }

  // Outlives what its jobs and calls hold.
  const std::unique_ptr<FairExecutor> decoding_;
  const std::unique_ptr<ServerTls> tls_;  // null: no encryption
  const std::shared_ptr<Front> front_;
  const std::vector<std::unique_ptr<grpc::Service>> services_;
  int port_ = 0;
  MemoryHold transport_memory_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex health_mu_;
  std::optional<bool> published_;
  std::map<std::string, bool> models_published_;
  std::mutex mu_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread housekeeping_;
  TimePoint tls_refreshed_{};  // housekeeping's own, as the next one
  TimePoint trimmed_{};
};

RpcServer::RpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RpcServer::~RpcServer() = default;

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Config& config,
                                                            const Clock& clock, Metrics* metrics,
                                                            std::string version,
                                                            std::function<void()> on_drain,
                                                            MemoryBudget* memory) {
  const int threads = config.server.decode_threads > 0
                          ? static_cast<int>(config.server.decode_threads)
                          : std::clamp(UsableCores(), 1, FairExecutor::kMaxThreads);
  ASSIGN_OR_RETURN(std::unique_ptr<FairExecutor> decoding, FairExecutor::Create(threads));
  std::unique_ptr<ServerTls> tls;
  if (config.server.tls) {
    ASSIGN_OR_RETURN(tls, ServerTls::Create(*config.server.tls));
  }
  std::unique_ptr<Authenticator> authenticator;
  if (!config.server.tokens_file.empty()) {
    ASSIGN_OR_RETURN(authenticator, Authenticator::Load(config.server.tokens_file));
  }
  auto impl =
      std::make_unique<Impl>(config, std::move(decoding), std::move(tls), std::move(authenticator),
                             clock, metrics, memory, std::move(version));
  impl->SetOnDrain(std::move(on_drain));
  RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<RpcServer>(new RpcServer(std::move(impl)));
}

absl::Status RpcServer::Serve(Engine& engine, ModelSource source) {
  return impl_->Serve(engine, std::move(source));
}
bool RpcServer::busy() const { return impl_->busy(); }
int RpcServer::port() const { return impl_->port(); }
void RpcServer::BeginDrain() { impl_->BeginDrain(); }
void RpcServer::Shutdown(TimePoint deadline) {
  if (impl_->running()) impl_->Shutdown(deadline);
}

}  // namespace saccade
