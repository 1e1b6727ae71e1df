#include "model/adapters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

absl::Status NonFinite(std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kNonFinite;
  return MakeError(absl::StatusCode::kInternal, message, info);
}

// --- ALOHA ---

constexpr std::array<size_t, 4> kAlohaFlipped = {1, 2, 8, 9};
constexpr std::array<size_t, 2> kAlohaGrippers = {6, 13};
// Of the follower's gripper: its stroke in metres, the lever that drives it, its joint in radians
// (Interbotix).
constexpr double kStrokeClosed = 0.01844;
constexpr double kStrokeOpen = 0.058;
constexpr double kArmLength = 0.036;
constexpr double kHornRadius = 0.022;
constexpr double kJointClosed = -0.6213;
constexpr double kJointOpen = 1.4910;

// Radians of a pi gripper at 0 and at 1, as the state has it; and what an action is scaled by
// before the first is added.
struct PiGripper {
  double closed;
  double open;
  double action_scale;
};
PiGripper GripperOf(AlohaVersion version) {
  if (version == AlohaVersion::kLerobot) return {0.4, 1.5, 1.5 - 0.4};
  return {0.5476, 1.6296, 1.0};
}

}  // namespace

std::string_view NormModeName(NormMode mode) {
  switch (mode) {
    case NormMode::kIdentity:
      return "identity";
    case NormMode::kMeanStd:
      return "mean_std";
    case NormMode::kRange:
      return "range";
  }
  return "unknown";
}

absl::StatusOr<Normalizer> Normalizer::Make(NormMode mode, std::vector<double> a,
                                            std::vector<double> b, std::vector<bool> mask,
                                            const NormConvention& convention) {
  const bool range = mode == NormMode::kRange;
  const auto [a_name, b_name] =
      range ? std::pair("the low bound", "the high bound") : std::pair("mean", "std");
  if (a.empty() || a.size() > kMaxDim) {
    return absl::InvalidArgumentError(
        StrCat(a_name, " has ", a.size(), " values, expected 1 to ", kMaxDim));
  }
  if (b.size() != a.size() || (!mask.empty() && mask.size() != a.size())) {
    return absl::InvalidArgumentError(StrCat(b.size() != a.size() ? b_name : "mask", " has ",
                                             b.size() != a.size() ? b.size() : mask.size(),
                                             " values, ", a_name, " has ", a.size()));
  }
  for (size_t i = 0; i < a.size(); ++i) {
    const auto error = [&](std::string_view message) {
      return absl::InvalidArgumentError(
          StrCat("dimension ", i, ": ", message, " (", a[i], ", ", b[i], ")"));
    };
    // In F32 what F64 holds may be infinite.
    const double most =
        convention.f32 ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
    const auto finite = [&](double v) { return std::abs(v) <= most; };  // false for NaN
    if (!finite(a[i]) || !finite(b[i]))
      return error(StrCat(a_name, " or ", b_name, " is not finite"));
    if (range && a[i] > b[i]) return error("the low bound is above the high one");
    if (range && !finite(b[i] - a[i])) return error("the bounds are too far apart");
    if (!range && b[i] < 0) return error("std is negative");
  }
  Normalizer out;
  out.mode_ = mode;
  out.convention_ = convention;
  out.dim_ = a.size();
  out.a_ = std::move(a);
  out.b_ = std::move(b);
  out.mask_ = mask.empty() ? std::vector<bool>(out.dim_, true) : std::move(mask);
  return out;
}

absl::StatusOr<Normalizer> Normalizer::Identity(size_t dim) {
  std::vector<double> zeros(std::min(dim, kMaxDim + 1));
  return Make(NormMode::kIdentity, zeros, zeros, {}, {});
}

absl::StatusOr<Normalizer> Normalizer::MeanStd(std::vector<double> mean, std::vector<double> std,
                                               const NormConvention& convention) {
  return Make(NormMode::kMeanStd, std::move(mean), std::move(std), {}, convention);
}

absl::StatusOr<Normalizer> Normalizer::Range(std::vector<double> low, std::vector<double> high,
                                             std::vector<bool> mask,
                                             const NormConvention& convention) {
  return Make(NormMode::kRange, std::move(low), std::move(high), std::move(mask), convention);
}

template <class T>
T Normalizer::Denominator(size_t i) const {
  const T d = static_cast<T>(b_[i]) - static_cast<T>(a_[i]);
  const T epsilon = static_cast<T>(convention_.epsilon);
  switch (convention_.range) {
    case NormConvention::Epsilon::kNever:
      return d;
    case NormConvention::Epsilon::kWhereZero:
      return d == 0 ? epsilon : d;
    case NormConvention::Epsilon::kAlways:
      return d + epsilon;
  }
  return d;
}

template <class T>
T Normalizer::Forward(T x, size_t i) const {
  T y = x;
  if (mode_ == NormMode::kMeanStd && mask_[i]) {
    y = (x - static_cast<T>(a_[i])) / (static_cast<T>(b_[i]) + static_cast<T>(convention_.epsilon));
  } else if (mode_ == NormMode::kRange && mask_[i]) {
    y = T{2} * (x - static_cast<T>(a_[i])) / Denominator<T>(i) - T{1};
  }
  return convention_.clip ? std::clamp(y, T{-1}, T{1}) : y;
}

template <class T>
T Normalizer::Inverse(T a, size_t i) const {
  if (!mask_[i]) return a;
  switch (mode_) {
    case NormMode::kIdentity:
      return a;
    case NormMode::kMeanStd: {
      const T epsilon = static_cast<T>(convention_.std_both_ways ? convention_.epsilon : 0);
      return a * (static_cast<T>(b_[i]) + epsilon) + static_cast<T>(a_[i]);
    }
    case NormMode::kRange:
      return (a + T{1}) * Denominator<T>(i) / T{2} + static_cast<T>(a_[i]);
  }
  return a;
}

absl::StatusOr<std::vector<float>> Normalizer::Normalize(std::span<const float> state,
                                                         size_t padded_dim) const {
  if (state.size() != dim_) {
    return InvalidField("state", StrCat("has ", state.size(), " values, expected ", dim_));
  }
  std::vector<float> out(std::max(dim_, padded_dim));
  for (size_t i = 0; i < dim_; ++i) {
    if (!std::isfinite(state[i])) return InvalidField("state", StrCat("[", i, "] is not finite"));
    out[i] = convention_.f32 ? Forward<float>(state[i], i)
                             : static_cast<float>(Forward<double>(state[i], i));
    if (!std::isfinite(out[i])) {
      return InvalidField(
          "state", StrCat("[", i, "] = ", state[i], " is too far outside of the statistics"));
    }
  }
  return out;
}

absl::StatusOr<std::vector<double>> Normalizer::Unnormalize(std::span<const double> actions,
                                                            size_t width) const {
  if (width < dim_ || width == 0 || actions.size() % width != 0) {
    return absl::InternalError(StrCat(actions.size(), " action values in rows of ", width,
                                      " do not hold actions of ", dim_));
  }
  std::vector<double> out;
  out.reserve(actions.size() / width * dim_);
  for (size_t row = 0; row < actions.size(); row += width) {
    for (size_t i = 0; i < dim_; ++i) {
      const double a = actions[row + i];
      const double value = convention_.f32
                               ? static_cast<double>(Inverse<float>(static_cast<float>(a), i))
                               : Inverse<double>(a, i);
      if (!std::isfinite(a) || !std::isfinite(value)) {
        return NonFinite(StrCat("action value ", i, " of step ", row / width, " is not finite"));
      }
      out.push_back(value);
    }
  }
  return out;
}

absl::Status AddState(const std::vector<bool>& mask, std::span<const float> state, size_t dim,
                      std::span<double> actions) {
  if (mask.size() > dim || dim == 0 || actions.size() % dim != 0) {
    return absl::InternalError(StrCat("a mask of ", mask.size(), " does not fit actions of ", dim));
  }
  for (size_t i = 0; i < mask.size(); ++i) {
    if (!mask[i]) continue;
    if (i >= state.size()) {
      return InvalidField("state", StrCat("has ", state.size(), " values; action dimension ", i,
                                          " is relative to one that it lacks"));
    }
    for (size_t at = i; at < actions.size(); at += dim) actions[at] += state[i];
  }
  return absl::OkStatus();
}

absl::Status AlohaStateToPi(AlohaVersion version, std::span<float> state) {
  if (state.size() < kAlohaDim) {
    return InvalidField("state", StrCat("has ", state.size(), " values, ALOHA has ", kAlohaDim));
  }
  const PiGripper pi = GripperOf(version);
  for (const size_t i : kAlohaFlipped) state[i] = -state[i];
  for (const size_t i : kAlohaGrippers) {
    const double stroke = state[i] * (kStrokeOpen - kStrokeClosed) + kStrokeClosed;
    // The lever's law of cosines. A stroke of zero has no angle: the limit is the lever's end stop.
    const double sine =
        stroke == 0 ? -1.0
                    : (kHornRadius * kHornRadius + stroke * stroke - kArmLength * kArmLength) /
                          (2 * kHornRadius * stroke);
    const double radians = std::asin(std::clamp(sine, -1.0, 1.0));
    state[i] = static_cast<float>((radians - pi.closed) / (pi.open - pi.closed));
  }
  return absl::OkStatus();
}

absl::Status AlohaActionsFromPi(AlohaVersion version, size_t dim, std::span<double> actions) {
  if (dim < kAlohaDim || actions.size() % dim != 0) {
    return absl::InternalError(StrCat("actions of ", dim, " values, ALOHA has ", kAlohaDim));
  }
  const PiGripper pi = GripperOf(version);
  for (size_t row = 0; row < actions.size(); row += dim) {
    for (const size_t i : kAlohaFlipped) actions[row + i] = -actions[row + i];
    for (const size_t i : kAlohaGrippers) {
      const double radians = actions[row + i] * pi.action_scale + pi.closed;
      actions[row + i] = (radians - kJointClosed) / (kJointOpen - kJointClosed);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StatisticsRange> ReadStatisticsRange(const JsonView& group, std::string_view low,
                                                    std::string_view high) {
  StatisticsRange out;
  ASSIGN_OR_RETURN(const JsonView low_view, group.Get(low));
  ASSIGN_OR_RETURN(const JsonView high_view, group.Get(high));
  for (const auto& [view, values] : {std::pair(&low_view, &out.low), {&high_view, &out.high}}) {
    ASSIGN_OR_RETURN(*values, view->AsDoubles());
    if (values->empty() || values->size() > Normalizer::kMaxDim) {
      return view->Error(StrCat("expected 1 to ", Normalizer::kMaxDim, " numbers"));
    }
  }
  if (out.high.size() != out.low.size()) {
    return high_view.Error(StrCat("expected ", out.low.size(), " numbers, as in ", low));
  }
  // Equal bounds are a dimension that never moves. Turned bounds would turn the motion.
  for (size_t i = 0; i < out.low.size(); ++i) {
    if (out.low[i] <= out.high[i] && std::isfinite(out.high[i] - out.low[i])) continue;
    ASSIGN_OR_RETURN(const JsonView low_value, low_view.At(i));
    ASSIGN_OR_RETURN(const JsonView high_value, high_view.At(i));
    return high_value.Error(StrCat(high_value.json().dump(),
                                   out.low[i] > out.high[i] ? " is below" : " is too far from", " ",
                                   low_value.path(), " = ", low_value.json().dump()));
  }
  out.mask.assign(out.low.size(), true);
  if (group.Has("mask")) {
    ASSIGN_OR_RETURN(const JsonView mask, group.Get("mask"));
    ASSIGN_OR_RETURN(out.mask, mask.AsBools());
    if (out.mask.size() != out.low.size()) {
      return mask.Error(StrCat("expected ", out.low.size(), " values, as in ", low));
    }
  }
  return out;
}

absl::StatusOr<const PolicyAdapters*> FindAdapters(const std::vector<PolicyAdapters>& sets,
                                                   std::string_view key) {
  if (!key.empty()) return FindSet(sets, key);
  if (sets.size() == 1) return &sets.front();
  return InvalidField("statistics_key", StrCat("is needed; known: ", KeysOf(sets)));
}

}  // namespace saccade
