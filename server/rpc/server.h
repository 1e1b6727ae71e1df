#pragma once
// RpcServer: the port. Opens it before models are loaded (health says NOT_SERVING, calls
// UNAVAILABLE), serves an engine once there is one, tells clients when it drains.
//
// Order at the end of a process: BeginDrain, Engine::Drain, Shutdown, then destroy the RpcServer,
// then the engine.
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"

namespace saccade {

class MemoryBudget;
class Metrics;

class RpcServer {
 public:
  // Listens at config.server.listen; port 0 takes a free one. UNAVAILABLE naming the address when
  // it cannot be bound; INVALID_ARGUMENT naming key and file when certificates or tokens cannot be
  // used; RESOURCE_EXHAUSTED when `memory` has no room for the transport. `clock`, `metrics` and
  // `memory` (the last two may be null) outlive the server.
  // `on_drain` is called when a client asks for the end of the process (Admin.Drain): from any
  // thread, maybe more than once; it must return at once. It may be null.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const Config& config, const Clock& clock,
                                                          Metrics* metrics, std::string version,
                                                          std::function<void()> on_drain = nullptr,
                                                          MemoryBudget* memory = nullptr);
  ~RpcServer();  // Shutdown with no patience

  // From now on calls reach `engine`, which outlives the server. FAILED_PRECONDITION when the
  // configuration does not go together with the engine's models. At most once. `source` makes the
  // models that Admin calls load; null: they load none.
  using ModelSource = std::function<absl::StatusOr<ServedModel>(const ModelConfig&)>;
  absl::Status Serve(Engine& engine, ModelSource source = nullptr);
  int port() const;
  // Health turns NOT_SERVING, new streams and calls are refused, open streams get a notice.
  void BeginDrain();
  // Ends every stream as soon as its accepted requests are answered and sent, at `deadline` at the
  // latest; returns when no call is left.
  void Shutdown(TimePoint deadline);
  // A model is still being loaded: destruction would wait for it.
  bool busy() const;

 private:
  class Impl;
  explicit RpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace saccade
