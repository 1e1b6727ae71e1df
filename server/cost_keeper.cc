#include "cost_keeper.h"

#include <pthread.h>

#include <chrono>
#include <utility>

#include "base/logging.h"
#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::chrono::seconds kSaveEvery{60};

}  // namespace

CostKeeper::CostKeeper(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  absl::StatusOr<CostTable> table = LoadCostFile(path_);
  if (table.ok()) {
    known_ = *std::move(table);
    LogInfo("step times of earlier runs read", {{"file", path_}, {"entries", known_.size()}});
  } else if (!absl::IsNotFound(table.status())) {
    LogWarn("step times of earlier runs are not used",
            {{"error", FromAbsl(table.status().message())}});
  }
}

void CostKeeper::Start(Engine& engine) {
  if (path_.empty()) return;
  engine_ = &engine;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "saccade-costs");
    std::unique_lock lock(mu_);
    do {
      lock.unlock();
      Save();
      lock.lock();
    } while (!stopped_.wait_for(lock, kSaveEvery, [this] { return stop_; }));
  });
}

void CostKeeper::Stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mu_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
  Save();
}

void CostKeeper::Save() {
  absl::StatusOr<CostTable> costs = engine_->Costs();
  if (!costs.ok()) return;  // the engine has ended
  // Entries of other models and settings stay, while there is room.
  if (known_.size() + costs->size() > kMaxCostEntries) known_.clear();
  for (const auto& [key, model] : *costs) known_.insert_or_assign(key, model);
  if (const absl::Status status = SaveCostFile(path_, known_); !status.ok()) {
    LogWarn("step times are not kept", {{"error", FromAbsl(status.message())}});
  }
}

}  // namespace saccade
