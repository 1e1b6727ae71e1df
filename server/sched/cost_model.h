#pragma once
// CostModel: predicts the time of a step from its shape, learned online per (worker, model). Pure
// and deterministic.
//
// The time is additive and non-negative: a base and a price per unit for the vision tower
// (frames) and for the trunk (prefill rows, decode rows), so a prediction is never negative and
// never falls when a count grows. The prices are the non-negative least-squares fit of
// relative errors over recent steps, ridge-regularised so that steps of a single shape spread
// their time over the units rather than call it all base. A slice of a pass costs its share of
// these and a price per slice. Each kind of step (which counts are not
// zero) forgets by its own count only: an hour of decoding does not erase what a prefill costs.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "sched/step.h"

namespace saccade {

struct CostPrediction {
  Micros p50{0};
  Micros p99{0};
};

class CostModel {
 public:
  // Zero observations: predicts 0, so that nothing is refused for lack of data.
  CostPrediction Predict(const StepShape& shape) const;
  // Of a slice with that part of the layers of a pass.
  CostPrediction Predict(const StepShape& shape, const LayerShare& part) const;
  // A step of `shape` took that long. Times far outside the prediction are clamped first: one
  // hiccup moves nothing much, a lasting change is followed within a few steps.
  void Observe(const StepShape& shape, Micros took);
  void Observe(const StepShape& shape, const LayerShare& part, Micros took);
  uint64_t observations() const { return observations_; }

  // Everything it knows as kSavedNumbers finite numbers, and back: the copy predicts and learns as
  // the original. INVALID_ARGUMENT for numbers that no model could have reached.
  std::vector<double> Save() const;
  static absl::StatusOr<CostModel> Restore(std::span<const double> numbers);

 private:
  // vision base, frame, trunk base, prefill row, decode row, slice
  static constexpr size_t kFeatures = 6;
  // bit 0: frames, bit 1: prefill rows, bit 2: decode rows, bit 3: a slice
  static constexpr size_t kKinds = 16;
  static constexpr size_t kBuckets = 120;
  using Features = std::array<double, kFeatures>;

  static constexpr size_t kSumsNumbers = 2 + kFeatures * (kFeatures + 1) / 2 + kFeatures;

 public:
  static constexpr size_t kSavedNumbers = 4 + kBuckets + kKinds * kSumsNumbers;

 private:
  // Weighted normal equations of one kind.
  struct Sums {
    std::array<Features, kFeatures> xx{};
    Features xy{};
    uint64_t count = 0;
    int surprises = 0;  // steps in a row far above (> 0) or far below (< 0) the prediction
  };

  static Features FeaturesOf(const StepShape& shape);
  static Features FeaturesOf(const StepShape& shape, const LayerShare& part);
  static size_t KindOf(const Features& x);
  double Mean(const Features& x) const;  // microseconds, before the quantile factors
  CostPrediction PredictOf(const Features& x) const;
  void ObserveOf(const Features& x, Micros took);
  void Fit();
  void TrackRatio(double ratio);

  std::array<Sums, kKinds> sums_{};
  Features price_{};  // microseconds per unit, >= 0
  // Decayed histogram of took / predicted, in logarithmic buckets.
  std::array<double, kBuckets> ratios_{};
  uint64_t ratio_count_ = 0;
  double p50_factor_ = 1;
  double p99_factor_ = 1.25;
  uint64_t observations_ = 0;
};

}  // namespace saccade
