#pragma once
// From a robot's units to a model's and back: how a checkpoint normalises state and actions, with
// the reference's arithmetic. Immutable after construction; any thread.
//
//   mode       normalise (state)             unnormalise (actions)
//   identity   x                             a
//   mean_std   (x - mean) / (std + eps)      a * std + mean
//   range      2 (x - low) / d - 1           (a + 1) d / 2 + low      d = high - low, see below
//
// range serves min/max, q01/q99 and q10/q90. Nothing is clipped unless the convention says so. A
// dimension whose mask is false passes through.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/json_util.h"

namespace saccade {

enum class NormMode : uint8_t { kIdentity, kMeanStd, kRange };
std::string_view NormModeName(NormMode mode);

// Where implementations of one mode differ.
struct NormConvention {
  enum class Epsilon : uint8_t { kNever, kWhereZero, kAlways };
  bool f32 = false;  // torch computes in F32, numpy in F64
  double epsilon = 0;
  Epsilon range = Epsilon::kNever;  // in a range's d
  bool std_both_ways = false;       // mean_std adds epsilon when it unnormalises, too
  bool clip = false;                // normalised state to [-1, 1], masked dimensions as well
};
inline constexpr NormConvention kLerobotNorm{true, 1e-8, NormConvention::Epsilon::kWhereZero, false,
                                             false};
// Before its processor files.
inline constexpr NormConvention kLerobotBufferNorm{true, 1e-8, NormConvention::Epsilon::kAlways,
                                                   false, false};
inline constexpr NormConvention kOpenPiNorm{false, 1e-6, NormConvention::Epsilon::kAlways, true,
                                            false};
inline constexpr NormConvention kOpenVlaNorm{false, 0, NormConvention::Epsilon::kNever, false,
                                             false};
inline constexpr NormConvention kOftNorm{false, 1e-8, NormConvention::Epsilon::kAlways, false,
                                         true};

class Normalizer {
 public:
  static constexpr size_t kMaxDim = 4096;

  Normalizer() = default;  // identity of no dimensions
  // INVALID_ARGUMENT (the message says what of which dimension): other than 1 to kMaxDim
  // dimensions, lengths that differ, values that are not finite, a negative std, low above high.
  // Equal bounds are a dimension that never moves.
  static absl::StatusOr<Normalizer> Identity(size_t dim);
  static absl::StatusOr<Normalizer> MeanStd(std::vector<double> mean, std::vector<double> std,
                                            const NormConvention& convention);
  // An empty mask is true for all.
  static absl::StatusOr<Normalizer> Range(std::vector<double> low, std::vector<double> high,
                                          std::vector<bool> mask, const NormConvention& convention);

  NormMode mode() const { return mode_; }
  size_t dim() const { return dim_; }

  // [dim] to [padded_dim], zeros behind the state; 0 or too small pads nothing. INVALID_ARGUMENT
  // (field "state"): another length, a value that is not finite, or one so far outside of the
  // statistics that the result is not.
  absl::StatusOr<std::vector<float>> Normalize(std::span<const float> state,
                                               size_t padded_dim = 0) const;
  // Rows of `width` >= dim values, of which the first dim count, to rows of dim values. INTERNAL
  // (kNonFinite) names step and dimension.
  absl::StatusOr<std::vector<double>> Unnormalize(std::span<const double> actions,
                                                  size_t width) const;

 private:
  static absl::StatusOr<Normalizer> Make(NormMode mode, std::vector<double> a,
                                         std::vector<double> b, std::vector<bool> mask,
                                         const NormConvention& convention);
  template <class T>
  T Forward(T x, size_t i) const;
  template <class T>
  T Inverse(T a, size_t i) const;
  template <class T>
  T Denominator(size_t i) const;

  NormMode mode_ = NormMode::kIdentity;
  NormConvention convention_;
  size_t dim_ = 0;
  std::vector<double> a_;  // mean, or low
  std::vector<double> b_;  // std, or high
  std::vector<bool> mask_;
};

// Adds the state that the actions are relative to, in place: the whole chunk [steps, dim] is
// decoded once against the one state of its observation, in robot units. `mask`: one per leading
// dimension of an action, true where it is relative; none where the state has no such dimension.
absl::Status AddState(const std::vector<bool>& mask, std::span<const float> state, size_t dim,
                      std::span<double> actions);

// ALOHA's two arms as pi models know them: joints 1, 2, 8 and 9 turn the other way, grippers 6 and
// 13 are angles. The two published versions scale the grippers differently.
enum class AlohaVersion : uint8_t { kLerobot, kOpenPi };
inline constexpr size_t kAlohaDim = 14;
// [14] or more, in place. INVALID_ARGUMENT (field "state"): fewer.
absl::Status AlohaStateToPi(AlohaVersion version, std::span<float> state);
// Rows of dim >= 14 values, in place. INTERNAL: fewer.
absl::Status AlohaActionsFromPi(AlohaVersion version, size_t dim, std::span<double> actions);

// Low and high of one group of an OpenVLA statistics file ("action", "proprio"), named q01/q99 or
// min/max, and its mask. Errors name file, key and dimension.
struct StatisticsRange {
  std::vector<double> low;
  std::vector<double> high;
  std::vector<bool> mask;  // true where the file has none
};
absl::StatusOr<StatisticsRange> ReadStatisticsRange(const JsonView& group, std::string_view low,
                                                    std::string_view high);

// How a lerobot policy normalises.
struct PolicyAdapters {
  std::string key;   // of its statistics; "default" where the folder names none
  Normalizer state;  // no dimensions: the policy takes no state
  Normalizer action;
  std::vector<bool> relative;  // one per action dimension; empty: all are absolute
};

// The sets of statistics of a lerobot folder, sorted by key, from policy_preprocessor.json,
// policy_postprocessor.json and the files they name; or, in folders before those, from config.json
// and buffers among the weights ("normalize_inputs.buffer_observation_state.mean"; one set per
// variant in "normalize_inputs.so100_buffer_...").
// INVALID_ARGUMENT names file and key: a statistic that the mode needs and the files lack, two
// state features. UNIMPLEMENTED: a mode or a processing step that this server does not follow.
absl::StatusOr<std::vector<PolicyAdapters>> ReadPolicyAdapters(const Checkpoint& checkpoint);

template <class Set>
std::string KeysOf(const std::vector<Set>& sets) {
  std::string keys;
  for (const Set& set : sets) StrAppend(&keys, keys.empty() ? "" : ", ", set.key);
  return keys;
}
// Of sets of statistics, the one with that key. INVALID_ARGUMENT (field "statistics_key") lists
// them.
template <class Set>
absl::StatusOr<const Set*> FindSet(const std::vector<Set>& sets, std::string_view key) {
  for (const Set& set : sets) {
    if (set.key == key) return &set;
  }
  return InvalidField("statistics_key", StrCat("unknown \"", key, "\"; known: ", KeysOf(sets)));
}
// INVALID_ARGUMENT (field "statistics_key"): unknown, or empty where there are several; lists them.
absl::StatusOr<const PolicyAdapters*> FindAdapters(const std::vector<PolicyAdapters>& sets,
                                                   std::string_view key);

}  // namespace saccade
