#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/strings.h"
#include "verify_pass.h"

namespace saccade {
namespace {

constexpr double kActions = 2e-6;
constexpr double kActionsRelative = 3e-6;  // to the largest normalised action
// Of the largest value of a stage, in BF16, and of normalised actions, which are in [-1, 1]: of 30
// folders ours are up to 1.84e-2 and 2.26e-2 from F32, NumPy's own further in the latter.
constexpr double kBf16Relative = 2e-2;
constexpr double kBf16Actions = 3e-2;
constexpr double kBf16Factor = 3;  // of the recorded distance, where there is one
constexpr std::string_view kBf16 = "bf16.";
constexpr std::string_view kNormalized = "normalized_actions";
constexpr std::string_view kDiscrete = "actions.discrete_no_proprio";

// Models that answer with a chunk out of one pass (OpenVLA-OFT).
class OnePassPass final : public VerifyPass {
 public:
  // `discrete`: the run of the same checkpoint without its heads; null: none is recorded.
  OnePassPass(const Golden& golden, const VerifyOutput& output, const VerifyOutput* discrete,
              bool bf16)
      : VerifyPass(golden, output), discrete_(discrete), bf16_(bf16) {}

 private:
  absl::StatusOr<Computed> Compute(const std::string& name,
                                   const Recorded& reference) const override;
  double StageTolerance(const Recorded& reference) const override {
    const double largest = MaxAbs(reference.values);
    return bf16_ ? kBf16Relative * largest : ExactStageTolerance(largest);
  }
  std::string Skipped(const std::string& name) const override {
    if (name == "proprio_raw") return "the input";
    if (!bf16_ && name.rfind(kBf16, 0) == 0) return "belongs to the bf16 pass";
    return VerifyPass::Skipped(name);
  }
  // Of normalised actions.
  absl::StatusOr<double> NormalizedTolerance() const;
  // Of actions in the robot's units, by how much larger these are.
  absl::StatusOr<double> ActionTolerance(const Recorded& actions) const;

  const VerifyOutput* discrete_;
  bool bf16_;
};

absl::StatusOr<double> OnePassPass::NormalizedTolerance() const {
  const std::string narrow = StrCat(kBf16, kNormalized);
  if (bf16_ && !golden_.Has(narrow)) return kBf16Actions;
  ASSIGN_OR_RETURN(const Recorded a, golden_.Get(kNormalized));
  if (!bf16_) return std::max(kActions, kActionsRelative * MaxAbs(a.values));
  ASSIGN_OR_RETURN(const Recorded b, golden_.Get(narrow));
  if (a.values.size() != b.values.size()) {
    return absl::InvalidArgumentError(StrCat(narrow, " is not as long as ", kNormalized));
  }
  const double distance = MaxDifference(a.values, b.values, a.values.size());
  // A damaged record must not let anything pass.
  if (!(distance <= 0.25 * MaxAbs(a.values))) {
    return absl::InvalidArgumentError(
        StrCat(narrow, " is ", distance, " from ", kNormalized, ": no rounding to bf16 does that"));
  }
  return std::max(kActions, kBf16Factor * distance);
}

absl::StatusOr<double> OnePassPass::ActionTolerance(const Recorded& actions) const {
  ASSIGN_OR_RETURN(const double tolerance, NormalizedTolerance());
  ASSIGN_OR_RETURN(const Recorded normalized, golden_.Get(kNormalized));
  return tolerance * std::max(1.0, MaxAbs(actions.values) / MaxAbs(normalized.values));
}

absl::StatusOr<Computed> OnePassPass::Compute(const std::string& name,
                                              const Recorded& reference) const {
  Computed out;
  if (name == "input_ids_raw") return PromptIds(reference.values.size(), 2);
  if (name == "pixel_values") return Pixels(reference);
  if (name == "proprio_normalized") {
    out.values.assign(output_.normalized_state.begin(), output_.normalized_state.end());
    out.tolerance = kActions;
  } else if (name == "generated_ids") {
    out.values.assign(output_.tapped().tokens.begin(), output_.tapped().tokens.end());
  } else if (name == kNormalized || name == StrCat(kBf16, kNormalized)) {
    out.values.assign(output_.tapped().normalized.begin(), output_.tapped().normalized.end());
    ASSIGN_OR_RETURN(out.tolerance, NormalizedTolerance());
  } else if (name == "actions") {
    out.values = output_.tapped().values;
    ASSIGN_OR_RETURN(out.tolerance, ActionTolerance(reference));
  } else if (name == kDiscrete) {
    if (discrete_ == nullptr) return absl::InternalError("was not run");
    out.values = discrete_->tapped().values;
    ASSIGN_OR_RETURN(out.tolerance, ActionTolerance(reference));
  } else {
    return Stage(name, reference);
  }
  return out;
}

// The record of the reference holds the prompt alone.
absl::StatusOr<std::string> InstructionOf(const Golden& golden) {
  constexpr std::string_view kBegin = "In: What action should the robot take to ";
  constexpr std::string_view kEnd = "?\nOut:";
  if (golden.info().Has("instruction")) return golden.Instruction();
  ASSIGN_OR_RETURN(const std::string prompt, golden.info().String("prompt"));
  if (prompt.size() < kBegin.size() + kEnd.size() ||
      prompt.compare(0, kBegin.size(), kBegin) != 0 ||
      prompt.compare(prompt.size() - kEnd.size(), kEnd.size(), kEnd) != 0) {
    return golden.info().Error("prompt: no instruction can be read from it");
  }
  return prompt.substr(kBegin.size(), prompt.size() - kBegin.size() - kEnd.size());
}

}  // namespace

absl::StatusOr<bool> VerifyOnePass(const VerifyContext& context, bool bf16) {
  const Golden& golden = context.golden;
  VerifyInput input;
  input.options.compute = bf16 ? DType::kBf16 : DType::kF32;
  // What the folder does not say, the record does.
  OftOptions& oft = input.options.oft.emplace();
  const JsonView info = golden.info();
  if (info.Has("chunk")) {
    ASSIGN_OR_RETURN(const int64_t chunk, info.Int("chunk", 1, 1024));
    oft.chunk = static_cast<uint32_t>(chunk);
  }
  if (info.Has("num_images")) {
    ASSIGN_OR_RETURN(const int64_t images, info.Int("num_images", 1, 16));
    for (int64_t i = 0; i < images; ++i) oft.cameras.push_back(StrCat("image", i));
  }
  if (info.Has("platform")) {
    ASSIGN_OR_RETURN(const std::string name, info.String("platform"));
    const auto* known = std::find(kOftPlatformNames.begin(), kOftPlatformNames.end(), name);
    if (known == kOftPlatformNames.end()) return info.Error(StrCat("platform: unknown ", name));
    oft.platform = static_cast<OftPlatform>(known - kOftPlatformNames.begin());
  }
  input.frame_of = [&](uint32_t camera, std::string_view name) {
    return golden.Frame(camera, name);
  };
  ASSIGN_OR_RETURN(input.instruction, InstructionOf(golden));
  ASSIGN_OR_RETURN(input.state, golden.Floats("proprio_raw"));
  if (info.Has("statistics_key")) {
    ASSIGN_OR_RETURN(input.statistics_keys.emplace_back(), info.String("statistics_key"));
  }
  for (const std::string& name : golden.names()) input.stages.insert(name);
  input.stages.insert({"pixel_values.0", "pixel_values.1"});
  ASSIGN_OR_RETURN(const VerifyOutput output,
                   RunVerifyInput(context.checkpoint, context.options.backend, input));
  std::optional<VerifyOutput> discrete;
  if (golden.Has(kDiscrete)) {
    oft.use_heads = false;
    input.state.clear();
    input.stages.clear();
    input.statistics_keys = {output.tapped_key};
    ASSIGN_OR_RETURN(discrete, RunVerifyInput(context.checkpoint, context.options.backend, input));
  }
  const OnePassPass pass(golden, output, discrete ? &*discrete : nullptr, bf16);
  Report report;
  report.Begin(bf16 ? "bf16" : "f32");
  pass.RunAll(report);
  return report.ok();
}

}  // namespace saccade
