#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/json_util.h"
#include "model/tokenizer.h"
#include "verify_pass.h"

namespace saccade {
namespace {

constexpr double kActions = 1e-6;
constexpr double kBf16Factor = 3;
constexpr std::string_view kBf16 = "bf16.";
constexpr std::string_view kBf16Logits = "bf16.logits.prefill_last";
constexpr std::string_view kPrefillLogits = "lm.logits.prefill_last";

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// Models that answer token by token (OpenVLA).
class TokensPass final : public VerifyPass {
 public:
  TokensPass(const Golden& golden, const VerifyOutput& output, bool bf16)
      : VerifyPass(golden, output), bf16_(bf16) {}

  // Distances that the BF16 tolerances rest on, and where the ids part from the recorded ones.
  absl::Status Prepare();
  // The ids and the prompt that golden.json repeats, where it does. `tokenizer` is the
  // checkpoint's.
  void RunInfo(const Tokenizer& tokenizer, Report& report) const;

 private:
  std::string Skipped(const std::string& name) const override;
  absl::StatusOr<Computed> Compute(const std::string& name,
                                   const Recorded& reference) const override;
  double StageTolerance(const Recorded& reference) const override;
  absl::StatusOr<Computed> Logits(const std::string& name, const Recorded& reference) const;
  absl::StatusOr<Computed> Actions(const std::string& key, const Recorded& reference) const;
  // Per generated token: ids, margins, bins, normalised values.
  absl::StatusOr<Computed> PerToken(const std::string& name, const Recorded& reference) const;
  static std::string Diverged(size_t token);
  // Largest distance of a recorded bf16 tensor from the recorded f32 one.
  absl::StatusOr<double> Bf16Distance(const std::string& exact, const std::string& narrow) const;

  bool bf16_;
  double bf16_logits_ = 0;        // d
  std::vector<double> margins_;   // of the pass's own logits; BF16 only
  double bf16_relative_ = 0;      // d / max|logits|
  std::optional<size_t> parted_;  // first token that may and does differ
};

// The longest answer first: its request is tapped, and every shorter one is a prefix of it.
absl::StatusOr<std::vector<std::string>> StatisticsKeys(const Golden& golden) {
  std::vector<std::pair<size_t, std::string>> keys;
  for (const std::string& name : golden.names()) {
    constexpr std::string_view kPrefix = "actions.";
    if (!StartsWith(name, kPrefix)) continue;
    ASSIGN_OR_RETURN(const Recorded actions, golden.Get(name));
    keys.emplace_back(actions.values.size(), name.substr(kPrefix.size()));
  }
  if (keys.empty()) return absl::InvalidArgumentError("no actions.<statistics key> is recorded");
  std::sort(keys.begin(), keys.end(), std::greater<>());
  std::vector<std::string> out;
  for (auto& [length, key] : keys) out.push_back(std::move(key));
  return out;
}

// Of each row, the largest value less the second largest.
absl::StatusOr<std::vector<double>> Margins(const RecordingTap::Stage& stage) {
  if (stage.columns < 2) return absl::InternalError("one logit has no margin");
  std::vector<double> out;
  for (int64_t r = 0; r < stage.rows; ++r) {
    std::vector<float> row(stage.values.begin() + r * stage.columns,
                           stage.values.begin() + (r + 1) * stage.columns);
    std::nth_element(row.begin(), row.begin() + 1, row.end(), std::greater<>());
    out.push_back(static_cast<double>(row[0]) - static_cast<double>(row[1]));
  }
  return out;
}

absl::Status TokensPass::Prepare() {
  if (!bf16_) return absl::OkStatus();
  const std::string narrow(kBf16Logits);
  ASSIGN_OR_RETURN(const Recorded exact, golden_.Get(kPrefillLogits));
  ASSIGN_OR_RETURN(bf16_logits_, Bf16Distance(std::string(kPrefillLogits), narrow));
  bf16_relative_ = bf16_logits_ / std::max(MaxAbs(exact.values), 1e-30);
  ASSIGN_OR_RETURN(const RecordingTap::Stage logits, output_.tap->Rows("lm.logits"));
  ASSIGN_OR_RETURN(margins_, Margins(logits));
  ASSIGN_OR_RETURN(const Recorded ids, golden_.Get("generated_ids"));
  ASSIGN_OR_RETURN(const Recorded margins, golden_.Get("logit_margin"));
  const std::vector<int32_t>& tokens = output_.tapped().tokens;
  for (size_t i = 0; i < std::min(tokens.size(), ids.values.size()); ++i) {
    if (tokens[i] == static_cast<int32_t>(ids.values[i])) continue;
    if (i < margins.values.size() && margins.values[i] < bf16_logits_) parted_ = i;
    break;
  }
  return absl::OkStatus();
}

std::string TokensPass::Diverged(size_t token) {
  return StrCat("token ", token, " differs at a near-tie; only what comes before it is compared");
}

absl::StatusOr<double> TokensPass::Bf16Distance(const std::string& exact,
                                                const std::string& narrow) const {
  ASSIGN_OR_RETURN(const Recorded a, golden_.Get(exact));
  ASSIGN_OR_RETURN(const Recorded b, golden_.Get(narrow));
  if (a.values.size() != b.values.size()) {
    return absl::InvalidArgumentError(StrCat(narrow, " is not as long as ", exact));
  }
  // The recorded distance is the tolerance, so it must itself be believable: a damaged record would
  // let anything pass. An id that differs at a near-tie can move an action across its range;
  // nothing else moves that far.
  const double distance = MaxDifference(a.values, b.values, a.values.size());
  const double most = (StartsWith(exact, "actions.") ? 2.0 : 0.25) * MaxAbs(a.values);
  if (!(distance <= most)) {
    return absl::InvalidArgumentError(
        StrCat(narrow, " is ", distance, " from ", exact, ": no rounding to bf16 does that"));
  }
  return distance;
}

double TokensPass::StageTolerance(const Recorded& reference) const {
  const double size = MaxAbs(reference.values);
  if (bf16_) return kBf16Factor * bf16_relative_ * size;
  return ExactStageTolerance(size);
}

absl::StatusOr<Computed> TokensPass::Logits(const std::string& name,
                                            const Recorded& reference) const {
  ASSIGN_OR_RETURN(const RecordingTap::Stage stage, output_.tap->Rows("lm.logits"));
  const int64_t columns = reference.columns();
  const int64_t rows = reference.rows();
  if (columns > stage.columns || rows > stage.rows) {
    return absl::InvalidArgumentError(
        StrCat("there are ", stage.rows, " x ", stage.columns, " logits"));
  }
  if (name != "lm.logits.action_range" && columns != stage.columns) {
    return absl::InvalidArgumentError(StrCat("the vocabulary has ", stage.columns, " ids"));
  }
  Computed out;
  out.tolerance = bf16_ ? kBf16Factor * bf16_logits_ : StageTolerance(reference);
  for (int64_t r = 0; r < rows; ++r) {
    const auto* end = stage.values.data() + (r + 1) * stage.columns;
    out.values.insert(out.values.end(), end - columns, end);
  }
  // The logits that chose the parted token still have the recorded history.
  if (parted_.has_value() && *parted_ + 1 < static_cast<size_t>(rows)) {
    out.count = (*parted_ + 1) * static_cast<size_t>(columns);
    out.note = Diverged(*parted_);
  }
  return out;
}

absl::StatusOr<Computed> TokensPass::PerToken(const std::string& name,
                                              const Recorded& reference) const {
  const ActionChunk& chunk = output_.tapped();
  Computed out;
  if (name == "generated_ids") {
    out.values.assign(chunk.tokens.begin(), chunk.tokens.end());
  } else if (name == "normalized_actions") {
    out.values.assign(chunk.normalized.begin(), chunk.normalized.end());
    out.tolerance = kActions;
  } else if (name == "bin_index") {
    for (const float value : chunk.normalized) {
      const auto nearest = std::min_element(
          output_.bin_centres.begin(), output_.bin_centres.end(),
          [&](double a, double b) { return std::abs(a - value) < std::abs(b - value); });
      out.values.push_back(static_cast<double>(nearest - output_.bin_centres.begin()));
    }
  } else {  // logit_margin
    ASSIGN_OR_RETURN(const RecordingTap::Stage stage, output_.tap->Rows("lm.logits"));
    ASSIGN_OR_RETURN(out.values, Margins(stage));
    double largest = 0;
    for (const float value : stage.values) largest = std::max(largest, std::abs(double{value}));
    // A difference of two logits, each within its tolerance.
    out.tolerance = 2 * (bf16_ ? kBf16Factor * bf16_logits_ : ExactStageTolerance(largest));
  }
  if (out.values.size() < reference.values.size()) {
    return absl::InvalidArgumentError(StrCat(out.values.size(), " tokens were generated"));
  }
  out.values.resize(reference.values.size());  // the tapped request may have gone on
  if (parted_.has_value()) {
    out.count = *parted_;
    out.note = Diverged(*parted_);
  }
  return out;
}

absl::StatusOr<Computed> TokensPass::Actions(const std::string& key,
                                             const Recorded& reference) const {
  const auto it = output_.chunks.find(key);
  if (it == output_.chunks.end()) {
    return absl::NotFoundError(StrCat("no request was made for \"", key, "\""));
  }
  Computed out;
  out.values = it->second.values;
  out.tolerance = kActions;
  if (!bf16_) return out;
  const std::string exact = StrCat("actions.", key);
  if (golden_.Has(exact) && golden_.Has(StrCat(kBf16, exact))) {
    ASSIGN_OR_RETURN(const double distance, Bf16Distance(exact, StrCat(kBf16, exact)));
    out.tolerance = std::max(kActions, kBf16Factor * distance);
  }
  std::optional<size_t> parted = parted_;
  // Past the recorded ids there is no recorded margin: the pass's own tells a near-tie.
  ASSIGN_OR_RETURN(const Recorded ids, golden_.Get("generated_ids"));
  const size_t both = std::min(out.values.size(), reference.values.size());
  for (size_t i = ids.values.size(); i < std::min(both, margins_.size()) && !parted; ++i) {
    if (std::abs(out.values[i] - reference.values[i]) <= out.tolerance) continue;
    if (margins_[i] < bf16_logits_) parted = i;
    break;
  }
  if (parted.has_value()) {
    out.count = *parted;
    out.note = Diverged(*parted);
  }
  return out;
}

absl::StatusOr<Computed> TokensPass::Compute(const std::string& name,
                                             const Recorded& reference) const {
  constexpr std::string_view kActionsPrefix = "actions.";
  if (name == "input_ids") return PromptIds(output_.prompt_ids.size());
  if (name == "input_ids_raw") return PromptIds(reference.values.size());
  if (name == "pixel_values") return Pixels(reference);
  if (StartsWith(name, "prefill.k.") || StartsWith(name, "prefill.v.")) {
    return Cache(name, reference);
  }
  if (name == kPrefillLogits || name == "lm.logits.action_range") return Logits(name, reference);
  if (name == "bin_centers") {
    Computed out;
    // The two lowest ids share the last centre.
    out.values = output_.bin_centres;
    if (!out.values.empty()) out.values.pop_back();
    out.tolerance = kActions;
    return out;
  }
  if (name == "generated_ids" || name == "logit_margin" || name == "bin_index" ||
      name == "normalized_actions") {
    return PerToken(name, reference);
  }
  if (StartsWith(name, kActionsPrefix)) {
    return Actions(name.substr(kActionsPrefix.size()), reference);
  }
  if (name == kBf16Logits) return Logits(name, reference);
  if (StartsWith(name, kBf16)) {
    const std::string exact = name.substr(kBf16.size());
    ASSIGN_OR_RETURN(Computed out, Compute(exact, reference));
    if (golden_.Has(exact) && !StartsWith(exact, kActionsPrefix)) {
      ASSIGN_OR_RETURN(const double distance, Bf16Distance(exact, name));
      out.tolerance = kBf16Factor * distance;
    }
    return out;
  }
  return Stage(name, reference);
}

std::string TokensPass::Skipped(const std::string& name) const {
  if (!bf16_ && StartsWith(name, kBf16)) return "belongs to the bf16 pass";
  return VerifyPass::Skipped(name);
}

void TokensPass::RunInfo(const Tokenizer& tokenizer, Report& report) const {
  const JsonView info = golden_.info();
  const auto recorded = [](const std::vector<int64_t>& ids) {
    Recorded out;
    out.values.assign(ids.begin(), ids.end());
    out.dims = {static_cast<int64_t>(ids.size())};
    return out;
  };
  if (info.Has("generated_ids")) {
    const auto read = [&]() -> absl::StatusOr<Recorded> {
      ASSIGN_OR_RETURN(const JsonView list, info.Get("generated_ids"));
      ASSIGN_OR_RETURN(const std::vector<int64_t> ids, list.AsInts(0, 1 << 24));
      if (ids.empty()) return list.Error("is empty");
      if (golden_.Has("generated_ids")) {
        ASSIGN_OR_RETURN(const Recorded tensor, golden_.Get("generated_ids"));
        if (tensor.values.size() != ids.size()) {
          return list.Error(
              StrCat("has ", ids.size(), " ids, the tensor has ", tensor.values.size()));
        }
      }
      return recorded(ids);
    };
    const absl::StatusOr<Recorded> ids = read();
    Compare("json.generated_ids", ids, ids.ok() ? PerToken("generated_ids", *ids) : ids.status(),
            report);
  }
  if (info.Has("prompt")) {
    const auto read = [&]() -> absl::StatusOr<Recorded> {
      ASSIGN_OR_RETURN(const std::string prompt, info.String("prompt"));
      ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                       tokenizer.Encode(prompt, {.allow_special = false}));
      return recorded({ids.begin(), ids.end()});
    };
    const absl::StatusOr<Recorded> ids = read();
    Compare("json.prompt", ids, ids.ok() ? PromptIds(ids->values.size()) : ids.status(), report);
  }
}

}  // namespace

std::string VerifyTokensWithoutBf16(const Golden& golden) {
  if (golden.Has(kBf16Logits)) return "";
  return StrCat(kBf16Logits, " is not recorded: bf16 has no tolerance");
}

absl::StatusOr<bool> VerifyTokens(const VerifyContext& context, bool bf16) {
  const Golden& golden = context.golden;
  VerifyInput input;
  input.options.compute = bf16 ? DType::kBf16 : DType::kF32;
  input.frame_of = [&](uint32_t camera, std::string_view name) {
    return golden.Frame(camera, name);
  };
  ASSIGN_OR_RETURN(input.instruction, golden.Instruction());
  ASSIGN_OR_RETURN(input.statistics_keys, StatisticsKeys(golden));
  for (const std::string& name : golden.names()) input.stages.insert(name);
  input.stages.insert({"lm.logits", "pixel_values.0", "pixel_values.1"});
  ASSIGN_OR_RETURN(const VerifyOutput output,
                   RunVerifyInput(context.checkpoint, context.options.backend, input));
  TokensPass pass(golden, output, bf16);
  RETURN_IF_ERROR(pass.Prepare());
  Report report;
  report.Begin(bf16 ? "bf16" : "f32");
  pass.RunAll(report);
  ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> tokenizer,
                   Tokenizer::Load(context.checkpoint.dir()));
  pass.RunInfo(*tokenizer, report);
  return report.ok();
}

}  // namespace saccade
