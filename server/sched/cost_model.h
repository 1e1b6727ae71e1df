#pragma once
// CostModel: predicts the time of a step from its shape, learned online per (worker, model). Pure and deterministic.
#include <cstdint>

#include "base/clock.h"
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
  void Observe(const StepShape& shape, Micros took);
};

}  // namespace saccade
