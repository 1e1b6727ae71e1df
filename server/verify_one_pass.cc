#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/strings.h"
#include "verify_pass.h"

namespace saccade {
namespace {

constexpr double kActions = 2e-6;
constexpr double kBf16Relative = 1e-2;  // of the largest value of a tensor
constexpr std::string_view kDiscrete = "actions.discrete_no_proprio";

// Models that answer with a chunk out of one pass (OpenVLA-OFT). Nothing is recorded in BF16: its
// distance from F32 is bounded instead.
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
    return Tolerance(reference, ExactStageTolerance(MaxAbs(reference.values)));
  }
  std::string Skipped(const std::string& name) const override {
    if (name == "proprio_raw") return "the input";
    return VerifyPass::Skipped(name);
  }
  double Tolerance(const Recorded& reference, double exact) const {
    return bf16_ ? kBf16Relative * MaxAbs(reference.values) : exact;
  }

  const VerifyOutput* discrete_;
  bool bf16_;
};

absl::StatusOr<Computed> OnePassPass::Compute(const std::string& name,
                                              const Recorded& reference) const {
  Computed out;
  if (name == "input_ids_raw") return PromptIds(reference.values.size(), 2);
  if (name == "pixel_values") return Pixels(reference);
  if (name == "proprio_normalized") {
    out.values.assign(output_.normalized_state.begin(), output_.normalized_state.end());
    out.tolerance = kActions;
  } else if (name == "normalized_actions") {
    out.values.assign(output_.tapped().normalized.begin(), output_.tapped().normalized.end());
    out.tolerance = Tolerance(reference, kActions);
  } else if (name == "actions") {
    out.values = output_.tapped().values;
    out.tolerance = Tolerance(reference, kActions);
  } else if (name == kDiscrete) {
    if (discrete_ == nullptr) return absl::InternalError("was not run");
    out.values = discrete_->tapped().values;
    out.tolerance = Tolerance(reference, kActions);
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
