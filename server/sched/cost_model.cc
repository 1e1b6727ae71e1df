#include "sched/cost_model.h"

#include <algorithm>
#include <cmath>

namespace saccade {
namespace {

constexpr double kForget = 0.98;     // per observation of a kind: about 50 steps of memory
constexpr double kMaxMicros = 1e12;  // predictions stay far inside int64
constexpr uint64_t kTrustAfter = 4;  // steps of a kind before its times are checked
constexpr double kClampLow = 0.25;   // of the prediction
constexpr double kClampHigh = 8;     // of the prediction
constexpr double kSurprise = 2;      // times the prediction, or a part of it
constexpr int kSurprises = 5;        // that many in a row are a change, not a hiccup
constexpr double kForgetFast = 0.1;  // then, of what was before
// Ridge, relative to the feature's own weight: what one shape alone cannot tell apart goes to the
// unit for frames and prefill rows, so that a chunk never looks free, and to the base of the trunk
// for decode rows, whose cost is that of reading the weights once. A slice costs little more than
// its layers unless steps of other lengths say otherwise.
constexpr std::array<double, 6> kRidge = {1e-2, 1e-3, 3e-3, 1e-3, 3e-2, 1};
// Buckets of took / predicted: 2^-2 .. 2^3, 24 per octave (3 % wide).
constexpr double kLowestOctave = -2;
constexpr double kPerOctave = 24;
constexpr uint64_t kQuantilesAfter = 8;
constexpr double kMaxMemory = 400;  // ratios remembered, at most

Micros ToMicrosClamped(double us) { return Micros(std::llrint(std::clamp(us, 0.0, kMaxMicros))); }

// Solves m x = v over the features in `active` by Cholesky; m is positive definite there.
template <size_t N>
std::array<double, N> Solve(const std::array<std::array<double, N>, N>& m,
                            const std::array<double, N>& v, const std::array<bool, N>& active) {
  std::array<std::array<double, N>, N> l{};
  std::array<double, N> x{};
  for (size_t i = 0; i < N; ++i) {
    if (!active[i]) continue;
    for (size_t j = 0; j <= i; ++j) {
      if (!active[j]) continue;
      double sum = m[i][j];
      for (size_t k = 0; k < j; ++k) sum -= l[i][k] * l[j][k];
      l[i][j] = i == j ? std::sqrt(std::max(sum, m[i][i] * 1e-12)) : sum / l[j][j];
    }
  }
  for (size_t i = 0; i < N; ++i) {
    if (!active[i]) continue;
    double sum = v[i];
    for (size_t k = 0; k < i; ++k) sum -= l[i][k] * x[k];
    x[i] = sum / l[i][i];
  }
  for (size_t i = N; i-- > 0;) {
    if (!active[i]) continue;
    double sum = x[i];
    for (size_t k = i + 1; k < N; ++k) sum -= l[k][i] * x[k];
    x[i] = sum / l[i][i];
  }
  return x;
}

}  // namespace

CostModel::Features CostModel::FeaturesOf(const StepShape& shape) {
  const bool trunk = shape.prefill_rows > 0 || shape.decode_rows > 0;
  return {shape.frames > 0 ? 1.0 : 0.0,
          static_cast<double>(shape.frames),
          trunk ? 1.0 : 0.0,
          static_cast<double>(shape.prefill_rows),
          static_cast<double>(shape.decode_rows),
          0.0};
}

CostModel::Features CostModel::FeaturesOf(const StepShape& shape, const LayerShare& part) {
  Features x = FeaturesOf(shape);
  x[0] *= part.base;
  x[1] *= part.rows;
  x[2] *= part.base;
  x[3] *= part.rows;
  x[4] *= part.base;
  x[5] = 1;
  return x;
}

size_t CostModel::KindOf(const Features& x) {
  return (x[1] > 0 ? 1u : 0u) | (x[3] > 0 ? 2u : 0u) | (x[4] > 0 ? 4u : 0u) | (x[5] > 0 ? 8u : 0u);
}

double CostModel::Mean(const Features& x) const {
  double us = 0;
  for (size_t i = 0; i < kFeatures; ++i) us += price_[i] * x[i];
  return us;
}

CostPrediction CostModel::PredictOf(const Features& x) const {
  const double us = Mean(x);
  return {ToMicrosClamped(us * p50_factor_), ToMicrosClamped(us * p99_factor_)};
}

CostPrediction CostModel::Predict(const StepShape& shape) const {
  return PredictOf(FeaturesOf(shape));
}

CostPrediction CostModel::Predict(const StepShape& shape, const LayerShare& part) const {
  return PredictOf(FeaturesOf(shape, part));
}

void CostModel::Observe(const StepShape& shape, Micros took) { ObserveOf(FeaturesOf(shape), took); }

void CostModel::Observe(const StepShape& shape, const LayerShare& part, Micros took) {
  ObserveOf(FeaturesOf(shape, part), took);
}

void CostModel::ObserveOf(const Features& x, Micros took) {
  const size_t kind = KindOf(x);
  if (kind == 0) return;  // an empty step teaches nothing
  Sums& sums = sums_[kind];
  const double mean = Mean(x);
  double us = std::clamp(static_cast<double>(took.count()), 1.0, kMaxMicros);
  double forget = kForget;
  if (sums.count >= kTrustAfter && mean >= 1) {
    const double ratio = us / mean;
    TrackRatio(ratio);
    us = std::clamp(us, mean * kClampLow, mean * kClampHigh);
    const int direction = ratio > kSurprise ? 1 : ratio < 1 / kSurprise ? -1 : 0;
    sums.surprises = direction * sums.surprises > 0 ? sums.surprises + direction : direction;
    if (std::abs(sums.surprises) >= kSurprises) forget = kForgetFast;
  }
  // Relative errors: a 1 ms decode counts as much as a 100 ms prefill, and a hiccup, being long,
  // counts little.
  const double scale = std::max(us, mean);
  const double weight = 1 / (scale * scale);
  for (size_t i = 0; i < kFeatures; ++i) {
    for (size_t j = 0; j < kFeatures; ++j) {
      sums.xx[i][j] = forget * sums.xx[i][j] + weight * x[i] * x[j];
    }
    sums.xy[i] = forget * sums.xy[i] + weight * x[i] * us;
  }
  ++sums.count;
  ++observations_;
  Fit();
}

void CostModel::Fit() {
  std::array<Features, kFeatures> xx{};
  Features xy{};
  for (const Sums& sums : sums_) {
    for (size_t i = 0; i < kFeatures; ++i) {
      for (size_t j = 0; j < kFeatures; ++j) xx[i][j] += sums.xx[i][j];
      xy[i] += sums.xy[i];
    }
  }
  std::array<bool, kFeatures> active{};
  const double fade = std::max(0.01, 10 / (10 + static_cast<double>(observations_)));
  for (size_t i = 0; i < kFeatures; ++i) {
    active[i] = xx[i][i] > 0;
    xx[i][i] *= 1 + kRidge[i] * fade;
  }
  // The most negative price leaves until none is negative: at most kFeatures rounds.
  for (;;) {
    price_ = Solve(xx, xy, active);
    const auto lowest = std::min_element(price_.begin(), price_.end());
    if (*lowest >= 0) return;
    active[static_cast<size_t>(lowest - price_.begin())] = false;
  }
}

void CostModel::TrackRatio(double ratio) {
  // Early ratios come from a model that is still learning: the memory grows with the count.
  ++ratio_count_;
  const double memory = std::min(kMaxMemory, 2 + static_cast<double>(ratio_count_) / 2);
  const double position = (std::log2(ratio) - kLowestOctave) * kPerOctave;
  const auto bucket =
      static_cast<size_t>(std::clamp(position, 0.0, static_cast<double>(kBuckets - 1)));
  double total = 0;
  for (double& weight : ratios_) total += weight *= 1 - 1 / memory;
  ratios_[bucket] += 1;
  total += 1;
  if (ratio_count_ < kQuantilesAfter) return;
  const auto upper_edge = [&](double quantile) {
    double sum = 0;
    size_t i = 0;
    while (i + 1 < kBuckets && (sum += ratios_[i]) < quantile * total) ++i;
    return std::exp2(kLowestOctave + static_cast<double>(i + 1) / kPerOctave);
  };
  const double half_bucket = std::exp2(-0.5 / kPerOctave);
  p50_factor_ = std::clamp(upper_edge(0.5) * half_bucket, 0.5, 2.0);
  p99_factor_ = std::max(upper_edge(0.99), p50_factor_);
}

std::vector<double> CostModel::Save() const {
  std::vector<double> out = {static_cast<double>(observations_), static_cast<double>(ratio_count_),
                             p50_factor_, p99_factor_};
  out.insert(out.end(), ratios_.begin(), ratios_.end());
  for (const Sums& sums : sums_) {
    out.push_back(static_cast<double>(sums.count));
    out.push_back(sums.surprises);
    for (size_t i = 0; i < kFeatures; ++i) {
      out.insert(out.end(), sums.xx[i].begin(), sums.xx[i].begin() + static_cast<int64_t>(i) + 1);
    }
    out.insert(out.end(), sums.xy.begin(), sums.xy.end());
  }
  return out;
}

absl::StatusOr<CostModel> CostModel::Restore(std::span<const double> numbers) {
  const absl::Status refused = absl::InvalidArgumentError("no cost model has such numbers");
  if (numbers.size() != kSavedNumbers) return refused;
  bool good = true;
  const auto next = [&](double min, double max) {
    const double value = numbers.front();
    numbers = numbers.subspan(1);
    good = good && value >= min && value <= max;  // false for NaN
    return good ? value : 0;
  };
  const auto next_integer = [&](double min, double max) {
    const double value = next(min, max);
    good = good && value == std::trunc(value);
    return value;
  };
  constexpr double kMaxCount = 1e15;  // a double holds it exactly
  // A weight is at most 1, a count below 2^32, and a sum forgets 2 % each time.
  constexpr double kMaxSum = 1e22;
  constexpr double kMinSum = 1e-40;  // or zero: what is smaller divides badly
  CostModel model;
  model.observations_ = static_cast<uint64_t>(next_integer(0, kMaxCount));
  model.ratio_count_ = static_cast<uint64_t>(next_integer(0, kMaxCount));
  model.p50_factor_ = next(0.5, 2);
  model.p99_factor_ = next(model.p50_factor_, 8);
  for (double& weight : model.ratios_) weight = next(0, kMaxMemory + 1);
  for (Sums& sums : model.sums_) {
    sums.count = static_cast<uint64_t>(next_integer(0, kMaxCount));
    sums.surprises = static_cast<int>(next_integer(-1e9, 1e9));
    for (size_t i = 0; i < kFeatures; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        const double value = next(0, kMaxSum);
        good = good && (value == 0 || value >= kMinSum);
        sums.xx[i][j] = sums.xx[j][i] = value;
      }
    }
    for (double& value : sums.xy) value = next(0, kMaxSum);
  }
  if (!good) return refused;
  model.Fit();
  for (const double price : model.price_) {
    if (!(price >= 0 && price <= kMaxMicros)) return refused;
  }
  return model;
}

}  // namespace saccade
