#include "cmd_verify.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/json_util.h"
#include "model/safetensors.h"
#include "model/tokenizer.h"
#include "verify_run.h"

namespace saccade {
namespace {

constexpr double kStageFloor = 2e-5;
constexpr double kStageRelative = 4e-6;
constexpr double kPixels = 1.5e-5;
constexpr double kActions = 1e-6;
constexpr double kBf16Factor = 3;
constexpr std::string_view kBf16 = "bf16.";
constexpr std::string_view kBf16Logits = "bf16.logits.prefill_last";
constexpr std::string_view kPrefillLogits = "lm.logits.prefill_last";

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// A recorded tensor as numbers, with its last dimension as columns.
struct Recorded {
  std::vector<double> values;
  std::vector<int64_t> dims;
  int64_t columns() const { return dims.empty() ? 1 : dims.back(); }
  int64_t rows() const {
    return static_cast<int64_t>(values.size()) / std::max<int64_t>(1, columns());
  }
};

template <class T>
void Widen(const TensorView& view, std::vector<double>& out) {
  const auto* from = view.As<const T>();
  out.assign(from, from + view.numel());
}

class Golden {
 public:
  static absl::StatusOr<Golden> Load(const std::string& path);

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& [name, entry] : file_.entries()) out.push_back(name);
    return out;
  }
  bool Has(std::string_view name) const { return file_.Has(name); }
  absl::StatusOr<Recorded> Get(std::string_view name) const;
  absl::StatusOr<Rgb8Image> Image() const;
  absl::StatusOr<std::string> Instruction() const { return info().String("instruction"); }
  JsonView info() const { return JsonView(info_, "golden.json"); }

 private:
  Golden(Json info, SafetensorsFile file) : info_(std::move(info)), file_(std::move(file)) {}
  Json info_;
  SafetensorsFile file_;
};

absl::StatusOr<Golden> Golden::Load(const std::string& path) {
  const size_t dot = path.rfind('.');
  const std::string extension = dot == std::string::npos ? "" : path.substr(dot);
  if (extension != ".safetensors" && extension != ".json") {
    return absl::InvalidArgumentError(StrCat(path, ": expected a .safetensors or .json file"));
  }
  const std::string stem = path.substr(0, dot);
  ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(stem + ".safetensors"));
  ASSIGN_OR_RETURN(Json info, ReadJsonFile(stem + ".json"));
  if (file.entries().empty()) {
    return absl::InvalidArgumentError(StrCat(stem, ".safetensors: holds no tensor"));
  }
  // The list in the .json is the writer's own: a tensor it names that the file lacks was lost.
  const JsonView root(info, stem + ".json");
  if (root.Has("tensors")) {
    ASSIGN_OR_RETURN(const JsonView listed, root.Get("tensors"));
    if (!listed.json().is_object()) return listed.Error("expected an object");
    for (const auto& item : listed.json().items()) {
      if (!file.Has(item.key())) {
        return listed.Error(StrCat("\"", item.key(), "\" is not in ", stem, ".safetensors"));
      }
    }
  }
  return Golden(std::move(info), std::move(file));
}

absl::StatusOr<Recorded> Golden::Get(std::string_view name) const {
  ASSIGN_OR_RETURN(const TensorView view, file_.Tensor(name));
  Recorded out;
  out.dims.assign(view.dims.begin(), view.dims.begin() + view.rank);
  switch (view.dtype) {
    case DType::kF32:
      Widen<float>(view, out.values);
      break;
    case DType::kF64:
      Widen<double>(view, out.values);
      break;
    case DType::kI64:
      Widen<int64_t>(view, out.values);
      break;
    case DType::kI32:
      Widen<int32_t>(view, out.values);
      break;
    case DType::kU8:
      Widen<uint8_t>(view, out.values);
      break;
    default:
      return absl::UnimplementedError(
          StrCat(name, ": cannot compare ", DTypeName(view.dtype), " values"));
  }
  if (out.values.empty()) return absl::InvalidArgumentError(StrCat(name, ": is empty"));
  return out;
}

absl::StatusOr<Rgb8Image> Golden::Image() const {
  ASSIGN_OR_RETURN(const TensorView view, file_.Tensor("image_u8"));
  if (view.dtype != DType::kU8 || view.rank != 3 || view.dim(2) != 3 || view.numel() == 0) {
    return absl::InvalidArgumentError(
        StrCat("image_u8: expected u8[height, width, 3], got ", view.DebugString()));
  }
  Rgb8Image image;
  image.height = static_cast<uint32_t>(view.dim(0));
  image.width = static_cast<uint32_t>(view.dim(1));
  const auto* bytes = view.As<const uint8_t>();
  image.rgb.assign(bytes, bytes + view.numel());
  return image;
}

double MaxAbs(const std::vector<double>& values) {
  double out = 0;
  for (const double value : values) out = std::max(out, std::abs(value));
  return out;
}

// NaN on either side is the largest difference there is.
double MaxDifference(const std::vector<double>& a, const std::vector<double>& b, size_t count) {
  double out = 0;
  for (size_t i = 0; i < count; ++i) {
    const double difference = std::abs(a[i] - b[i]);
    out = std::isnan(difference) ? HUGE_VAL : std::max(out, difference);
  }
  return out;
}

// One line per tensor, and whether all of them were good.
class Report {
 public:
  void Compared(const std::string& name, double difference, double tolerance,
                const std::string& note) {
    const bool good = difference <= tolerance;
    Line(name, difference, tolerance, good ? "ok" : "MISS", note);
    ok_ = ok_ && good;
  }
  void NotCompared(const std::string& name, std::string_view why) {
    std::printf("  %-28s %10s %10s  %s\n", name.c_str(), "-", "-",
                StrCat("NOT COMPARED: ", why).c_str());
    ok_ = false;
  }
  void Noted(const std::string& name, const std::string& note) {
    std::printf("  %-28s %10s %10s  %s\n", name.c_str(), "-", "-", note.c_str());
  }
  bool ok() const { return ok_; }

 private:
  static void Line(const std::string& name, double difference, double tolerance,
                   std::string_view verdict, const std::string& note) {
    std::printf("  %-28s %10.3g %10.3g  %s%s%s\n", name.c_str(), difference, tolerance,
                std::string(verdict).c_str(), note.empty() ? "" : "  ", note.c_str());
  }
  bool ok_ = true;
};

// What the pass computed for one recorded tensor, in the recorded order.
struct Computed {
  std::vector<double> values;
  double tolerance = 0;
  size_t count = 0;  // leading values that can be compared; 0: all
  std::string note;
};

// One precision: its outputs against the golden.
class Pass {
 public:
  Pass(const Golden& golden, const VerifyOutput& output, bool bf16)
      : golden_(golden), output_(output), bf16_(bf16) {}

  // Distances that the BF16 tolerances rest on, and where the ids part from the recorded ones.
  absl::Status Prepare();
  void Run(const std::string& name, Report& report) const;
  // The ids and the prompt that golden.json repeats, where it does. `tokenizer` is the
  // checkpoint's.
  void RunInfo(const Tokenizer& tokenizer, Report& report) const;

 private:
  void Compare(const std::string& name, const absl::StatusOr<Recorded>& reference,
               const absl::StatusOr<Computed>& computed, Report& report) const;
  absl::StatusOr<Computed> Compute(const std::string& name, const Recorded& reference) const;
  // Ids of the prompt; as the tokenizer gives them, before the empty token that every prompt ends
  // with, when one less is recorded.
  absl::StatusOr<Computed> PromptIds(size_t recorded) const;
  absl::StatusOr<Computed> Pixels(const Recorded& reference) const;
  absl::StatusOr<Computed> Cache(const std::string& name, const Recorded& reference) const;
  absl::StatusOr<Computed> Logits(const std::string& name, const Recorded& reference) const;
  absl::StatusOr<Computed> Actions(const std::string& key, const Recorded& reference) const;
  absl::StatusOr<Computed> Stage(const std::string& name, const Recorded& reference) const;
  // Per generated token: ids, margins, bins, normalised values.
  absl::StatusOr<Computed> PerToken(const std::string& name, const Recorded& reference) const;
  double StageTolerance(const Recorded& reference) const;
  const ActionChunk& tapped() const { return output_.chunks.at(tapped_key_); }
  static std::string Diverged(size_t token);
  // Largest distance of a recorded bf16 tensor from the recorded f32 one.
  absl::StatusOr<double> Bf16Distance(const std::string& exact, const std::string& narrow) const;

  const Golden& golden_;
  const VerifyOutput& output_;
  bool bf16_;
  std::string tapped_key_;
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

absl::Status Pass::Prepare() {
  ASSIGN_OR_RETURN(const std::vector<std::string> keys, StatisticsKeys(golden_));
  tapped_key_ = keys.front();
  if (!bf16_) return absl::OkStatus();
  const std::string narrow(kBf16Logits);
  ASSIGN_OR_RETURN(const Recorded exact, golden_.Get(kPrefillLogits));
  ASSIGN_OR_RETURN(bf16_logits_, Bf16Distance(std::string(kPrefillLogits), narrow));
  bf16_relative_ = bf16_logits_ / std::max(MaxAbs(exact.values), 1e-30);
  ASSIGN_OR_RETURN(const RecordingTap::Stage logits, output_.tap->Rows("lm.logits"));
  ASSIGN_OR_RETURN(margins_, Margins(logits));
  ASSIGN_OR_RETURN(const Recorded ids, golden_.Get("generated_ids"));
  ASSIGN_OR_RETURN(const Recorded margins, golden_.Get("logit_margin"));
  const std::vector<int32_t>& tokens = tapped().tokens;
  for (size_t i = 0; i < std::min(tokens.size(), ids.values.size()); ++i) {
    if (tokens[i] == static_cast<int32_t>(ids.values[i])) continue;
    if (i < margins.values.size() && margins.values[i] < bf16_logits_) parted_ = i;
    break;
  }
  return absl::OkStatus();
}

std::string Pass::Diverged(size_t token) {
  return StrCat("token ", token, " differs at a near-tie; only what comes before it is compared");
}

absl::StatusOr<double> Pass::Bf16Distance(const std::string& exact,
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

double Pass::StageTolerance(const Recorded& reference) const {
  const double size = MaxAbs(reference.values);
  if (bf16_) return kBf16Factor * bf16_relative_ * size;
  return std::max(kStageFloor, kStageRelative * size);
}

absl::StatusOr<Computed> Pass::PromptIds(size_t recorded) const {
  Computed out;
  out.values.assign(output_.prompt_ids.begin(), output_.prompt_ids.end());
  if (recorded + 1 == out.values.size()) out.values.pop_back();
  return out;
}

absl::StatusOr<Computed> Pass::Pixels(const Recorded& reference) const {
  if (reference.dims.size() != 4 || reference.dims[0] != 1 || reference.dims[1] % 3 != 0) {
    return absl::UnimplementedError("expected the shape [1, 3 * towers, height, width]");
  }
  Computed out;
  out.tolerance = kPixels;
  out.values.resize(reference.values.size());
  const int64_t height = reference.dims[2];
  const int64_t width = reference.dims[3];
  for (int64_t tower = 0; tower < reference.dims[1] / 3; ++tower) {
    ASSIGN_OR_RETURN(const RecordingTap::Stage stage,
                     output_.tap->Rows(StrCat("pixel_values.", tower)));
    const int64_t size = std::llround(std::sqrt(static_cast<double>(stage.columns) / 3));
    if (3 * size * size != stage.columns || stage.rows * stage.columns != 3 * height * width ||
        width % size != 0) {
      return absl::InternalError("patches and pixels do not fit");
    }
    for (int64_t row = 0; row < stage.rows; ++row) {
      const int64_t top = row / (width / size) * size;
      const int64_t left = row % (width / size) * size;
      for (int64_t i = 0; i < stage.columns; ++i) {
        const int64_t channel = 3 * tower + i / (size * size);
        const int64_t y = top + i / size % size;
        const int64_t x = left + i % size;
        out.values[static_cast<size_t>((channel * height + y) * width + x)] =
            stage.values[static_cast<size_t>(row * stage.columns + i)];
      }
    }
  }
  return out;
}

// Recorded as [1, heads, tokens, head_dim]; the cache is read as [tokens, heads * head_dim].
absl::StatusOr<Computed> Pass::Cache(const std::string& name, const Recorded& reference) const {
  if (reference.dims.size() != 4 || reference.dims[0] != 1) {
    return absl::UnimplementedError("expected the shape [1, heads, tokens, head_dim]");
  }
  const int64_t heads = reference.dims[1];
  const int64_t tokens = reference.dims[2];
  const int64_t dim = reference.dims[3];
  ASSIGN_OR_RETURN(const RecordingTap::Stage stage, output_.tap->FirstWithRows(name, tokens));
  if (stage.columns != heads * dim) {
    return absl::InvalidArgumentError(
        StrCat("the cache is ", stage.columns, " wide, recorded ", heads, " x ", dim));
  }
  Computed out;
  out.tolerance = StageTolerance(reference);
  out.values.resize(reference.values.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t d = 0; d < dim; ++d) {
        out.values[static_cast<size_t>((h * tokens + t) * dim + d)] =
            stage.values[static_cast<size_t>((t * heads + h) * dim + d)];
      }
    }
  }
  return out;
}

absl::StatusOr<Computed> Pass::Logits(const std::string& name, const Recorded& reference) const {
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

absl::StatusOr<Computed> Pass::PerToken(const std::string& name, const Recorded& reference) const {
  const ActionChunk& chunk = tapped();
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
    out.tolerance =
        2 * (bf16_ ? kBf16Factor * bf16_logits_ : std::max(kStageFloor, kStageRelative * largest));
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

absl::StatusOr<Computed> Pass::Actions(const std::string& key, const Recorded& reference) const {
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

absl::StatusOr<Computed> Pass::Stage(const std::string& name, const Recorded& reference) const {
  ASSIGN_OR_RETURN(const RecordingTap::Stage stage, output_.tap->Rows(name));
  const int64_t rows = reference.rows();
  if (stage.columns != reference.columns() || stage.rows < rows) {
    return absl::InvalidArgumentError(StrCat("the stage is ", stage.rows, " x ", stage.columns));
  }
  Computed out;
  out.tolerance = StageTolerance(reference);
  // Rows of later steps (decoded tokens) come behind those of the prompt.
  out.values.assign(stage.values.begin(), stage.values.begin() + rows * stage.columns);
  return out;
}

absl::StatusOr<Computed> Pass::Compute(const std::string& name, const Recorded& reference) const {
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

void Pass::Run(const std::string& name, Report& report) const {
  if (name == "image_u8") {
    report.Noted(name, "the input");
    return;
  }
  if (!bf16_ && StartsWith(name, kBf16)) {
    report.Noted(name, "belongs to the bf16 pass");
    return;
  }
  const absl::StatusOr<Recorded> reference = golden_.Get(name);
  Compare(name, reference, reference.ok() ? Compute(name, *reference) : reference.status(), report);
}

void Pass::RunInfo(const Tokenizer& tokenizer, Report& report) const {
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

void Pass::Compare(const std::string& name, const absl::StatusOr<Recorded>& reference,
                   const absl::StatusOr<Computed>& computed, Report& report) const {
  if (!reference.ok()) {
    report.NotCompared(name, FromAbsl(reference.status().message()));
    return;
  }
  if (!std::all_of(reference->values.begin(), reference->values.end(),
                   [](double v) { return std::isfinite(v); })) {
    report.NotCompared(name, "the record holds NaN or Inf");
    return;
  }
  if (!computed.ok()) {
    report.NotCompared(name, FromAbsl(computed.status().message()));
    return;
  }
  if (computed->values.size() != reference->values.size()) {
    report.NotCompared(name, StrCat("computed ", computed->values.size(), " values, recorded ",
                                    reference->values.size()));
    return;
  }
  const bool all = computed->note.empty();
  const size_t count =
      all ? reference->values.size() : std::min(computed->count, reference->values.size());
  report.Compared(name, MaxDifference(computed->values, reference->values, count),
                  computed->tolerance, computed->note);
}

absl::StatusOr<bool> VerifyOne(const VerifyOptions& options, const Checkpoint& checkpoint,
                               const Golden& golden, bool bf16) {
  VerifyInput input;
  ASSIGN_OR_RETURN(input.image, golden.Image());
  ASSIGN_OR_RETURN(input.instruction, golden.Instruction());
  ASSIGN_OR_RETURN(input.statistics_keys, StatisticsKeys(golden));
  for (const std::string& name : golden.names()) input.stages.insert(name);
  input.stages.insert({"lm.logits", "pixel_values.0", "pixel_values.1"});
  ASSIGN_OR_RETURN(
      const VerifyOutput output,
      RunVerifyInput(checkpoint, options.backend, bf16 ? DType::kBf16 : DType::kF32, input));
  Pass pass(golden, output, bf16);
  RETURN_IF_ERROR(pass.Prepare());
  std::printf("%s\n  %-28s %10s %10s  %s\n", bf16 ? "bf16" : "f32", "tensor", "max |diff|",
              "tolerance", "verdict");
  Report report;
  for (const std::string& name : golden.names()) pass.Run(name, report);
  ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> tokenizer,
                   Tokenizer::Load(checkpoint.dir()));
  pass.RunInfo(*tokenizer, report);
  return report.ok();
}

absl::StatusOr<bool> VerifyAll(const VerifyOptions& options) {
  ASSIGN_OR_RETURN(const Golden golden, Golden::Load(options.golden_path));
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(options.model_dir));
  if (!options.f32 && !options.bf16) return absl::InvalidArgumentError("no precision to verify");
  bool good = true;
  for (const bool bf16 : {false, true}) {
    if (!(bf16 ? options.bf16 : options.f32)) continue;
    if (bf16 && !golden.Has(kBf16Logits)) {
      const std::string why = StrCat(kBf16Logits, " is not recorded: bf16 has no tolerance");
      if (!options.f32) return absl::NotFoundError(why);
      std::printf("bf16 pass left out: %s\n", why.c_str());
      continue;
    }
    ASSIGN_OR_RETURN(const bool ok, VerifyOne(options, checkpoint, golden, bf16));
    good = good && ok;
  }
  return good;
}

}  // namespace

int RunVerify(const VerifyOptions& options) {
  const absl::StatusOr<bool> good = VerifyAll(options);
  std::fflush(stdout);
  if (!good.ok()) {
    std::fprintf(stderr, "verify: %s\n", std::string(good.status().message()).c_str());
    return 1;
  }
  std::printf("%s\n", *good ? "everything recorded is within its tolerance"
                            : "FAILED: see the lines marked MISS or NOT COMPARED");
  std::fflush(stdout);
  return *good ? 0 : 1;
}

}  // namespace saccade
