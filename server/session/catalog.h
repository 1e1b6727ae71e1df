#pragma once
// Catalog: what sessions may name: models, their cameras and statistics, latency classes.
// Immutable, read by any thread; another one takes its place when models come and go. Every lookup
// that fails lists what would have been right.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kv/timeline.h"
#include "model/model.h"

namespace saccade {

// Open sessions of the models of one name.
struct ModelPlaces {
  std::atomic<uint32_t> open{0};
};

struct SessionModel {
  ModelId id;
  std::string name;
  const Model* model = nullptr;  // host side only; outlives this
  ClassId default_class;
  uint32_t action_steps = 1;  // of a chunk; divides the action_dim of every set of statistics
  uint32_t max_sessions = 0;  // 0: no limit of its own
  std::shared_ptr<ModelPlaces> places = std::make_shared<ModelPlaces>();
  std::function<TimelineBuilder()> new_timeline;
};

class Catalog {
 public:
  using ModelRef = std::shared_ptr<const SessionModel>;
  Catalog(std::vector<ModelRef> models, std::vector<std::string> classes)
      : models_(std::move(models)), classes_(std::move(classes)) {}

  const std::vector<ModelRef>& models() const { return models_; }
  const std::vector<std::string>& classes() const { return classes_; }  // by ClassId

  // Empty: the only model; INVALID_ARGUMENT when there are several. Unknown: NOT_FOUND. `field` is
  // what errors name.
  absl::StatusOr<ModelRef> FindModel(std::string_view name, std::string_view field) const;
  // Empty: `fallback`. Unknown: INVALID_ARGUMENT.
  absl::StatusOr<ClassId> FindClass(std::string_view name, ClassId fallback,
                                    std::string_view field) const;

 private:
  std::vector<ModelRef> models_;
  std::vector<std::string> classes_;
};

// Empty: the only set; INVALID_ARGUMENT when there are several. Unknown: INVALID_ARGUMENT.
absl::StatusOr<const StatisticsSpec*> FindStatistics(const ModelSpec& spec, std::string_view key,
                                                     std::string_view field);
// Index of the camera; empty: the only one. INVALID_ARGUMENT lists the names.
absl::StatusOr<uint32_t> FindCamera(const ModelSpec& spec, std::string_view name,
                                    std::string_view field);
// Which of spec.cameras are named. Empty: all. INVALID_ARGUMENT for an unknown or repeated name,
// and for a missing one: every camera of a model is required.
absl::StatusOr<std::vector<bool>> FindCameras(const ModelSpec& spec,
                                              const std::vector<std::string>& names,
                                              std::string_view field);

}  // namespace saccade
