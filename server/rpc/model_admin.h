#pragma once
// ModelAdmin: loads, unloads and reloads models while the server runs. One thread of its own does
// one job after another; engine, calls and other models go on meanwhile. Names are bounded in form
// and number, folders are plain names below one root: nothing a caller sends becomes another path
// or one more label.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"
#include "rpc/front.h"
#include "saccade/v1/admin.pb.h"

namespace saccade {

class ModelAdmin {
 public:
  static constexpr size_t kMaxNames = 128;  // ever
  static constexpr size_t kMaxWaiting = 8;
  // Makes a model of its configuration; minutes for a large one.
  using Source = std::function<absl::StatusOr<ServedModel>(const ModelConfig& config)>;
  // Called exactly once, from any thread. Of an unload the model is empty.
  using Done = std::function<void(const absl::StatusOr<v1::Model>&)>;

  // `service`'s engine outlives this.
  ModelAdmin(std::shared_ptr<Front> front, std::shared_ptr<Serving> service, Source source);
  ~ModelAdmin();  // Stop, then waits for the job under way

  // Any thread; return at once.
  void Load(v1::LoadModelRequest request, Done done);
  void Unload(v1::UnloadModelRequest request, Done done);
  void Reload(v1::ReloadModelRequest request, Done done);
  // Answers every caller: no job begins any more, and one under way gives up its waiting.
  void Stop();
  // A job is under way: destruction would wait for it.
  bool busy() const;

 private:
  struct Job {
    std::function<absl::StatusOr<v1::Model>()> run;
    Done done;
  };
  void Put(Job job);
  void Loop();
  bool stopping() const;

  // --- the thread's own ---
  absl::StatusOr<v1::Model> RunLoad(const v1::LoadModelRequest& request);
  absl::Status RunUnload(const v1::UnloadModelRequest& request);
  absl::StatusOr<v1::Model> RunReload(const v1::ReloadModelRequest& request);
  absl::StatusOr<ModelConfig> ConfigOf(const std::string& name, const std::string& folder,
                                       const std::string& like);
  absl::StatusOr<std::string> PathOf(const std::string& folder) const;
  absl::StatusOr<Micros> Grace(bool given, double grace_s) const;
  // Makes, loads and offers it.
  absl::StatusOr<v1::Model> Bring(const ModelConfig& config);
  // Ends the sessions of what is offered no more, and frees it.
  absl::Status Retire(const std::weak_ptr<const ServedModel>& model, ModelId id, TimePoint until,
                      const absl::Status& why);

  const std::shared_ptr<Front> front_;
  const std::shared_ptr<Serving> service_;
  const Source source_;
  std::map<std::string, ModelConfig> configs_;  // by every name ever; the thread's own

  mutable std::mutex mu_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  Done current_;  // of the job under way, until somebody answers
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace saccade
