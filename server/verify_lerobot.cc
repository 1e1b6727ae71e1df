#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/families/lerobot_policy.h"
#include "model/families/pi.h"
#include "model/families/smolvla.h"
#include "model/fast_tokens.h"
#include "model/tokenizer.h"
#include "verify_pass.h"

namespace saccade {
namespace {

constexpr double kActions = 2e-6;  // of actions over 1 relative to the largest
constexpr double kInputs = 1e-6;   // of state and pixels; of values over 1 relative to them
constexpr double kTimes = 1e-7;    // of an embedded flow time, a rounding to F32
// Of the largest value of a stage, in BF16: of vision, what the first layer reads, and logits; of
// what the layers of trunk and expert make; of velocities. In 400 folders of all widths the
// references' own BF16 runs are up to 2e-2 and 3.2e-2 from their F32 runs in the latter two.
constexpr double kBf16Relative = 1e-2;
constexpr double kBf16Layers = 2e-2;
constexpr double kBf16Velocity = 3e-2;
constexpr double kBf16Factor = 3;     // of the recorded distance
constexpr double kBelievable = 0.25;  // of the largest action: the most that counts of it
constexpr double kNoFrame = -1;       // pixels of the frame in place of a missing one
constexpr std::string_view kBf16Actions = "bf16.actions";
constexpr std::string_view kSpecial = "image_special.";
constexpr std::string_view kLongest = "longest.";

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// "step12.v_t" with prefix "step": 12 and ".v_t".
struct Numbered {
  size_t number = 0;
  std::string_view rest;
};
std::optional<Numbered> ParseNumbered(std::string_view name, std::string_view prefix) {
  if (!StartsWith(name, prefix)) return std::nullopt;
  Numbered out;
  size_t at = prefix.size();
  for (; at < name.size() && at < prefix.size() + 6 && name[at] >= '0' && name[at] <= '9'; ++at) {
    out.number = 10 * out.number + static_cast<size_t>(name[at] - '0');
  }
  if (at == prefix.size()) return std::nullopt;
  out.rest = name.substr(at);
  return out;
}

absl::StatusOr<PolicyConfig> ReadPolicy(const Checkpoint& checkpoint) {
  return IsSmolVla(checkpoint) ? ReadSmolVla(checkpoint) : ReadPi(checkpoint);
}

// Of each of the reference's prompt rows, which of ours it is; -1: it is masked, so that it is none
// of the sequence. The reference has frames in place of missing cameras behind the others, and pads
// the text, and SmolVLA's whole prompt up to its prefix_length.
struct PromptRows {
  std::vector<int64_t> ours;
  size_t frames = 0;  // of the reference
  size_t text = 0;    // tokens that are not padding
};

absl::StatusOr<PromptRows> RowsOf(const PolicyConfig& config, size_t prefix_length,
                                  const Timeline& timeline, size_t text_rows, size_t all_rows) {
  size_t present = 0;
  size_t ids = 0;
  for (const Segment& segment : timeline.segments()) {
    present += segment.modality == Modality::kVision ? 1 : 0;
    if (segment.modality == Modality::kText) ids += segment.end - segment.begin;
  }
  const size_t before = config.before_frame.size();
  const size_t after = config.after_frame.size();
  const size_t bos = config.second_bos ? 1 : 0;
  const size_t tail = bos + (config.state_in_prompt() ? 1 : 0);
  const size_t frame_rows = before + config.vision_tokens() + after;
  size_t rows = all_rows;
  if (rows == prefix_length) {
    // Of a padded prompt the rows do not tell the frames; a SmolVLA fills all places it may.
    rows = std::min(rows, (present + config.empty_cameras) * frame_rows + text_rows + tail);
  }
  PromptRows out;
  out.frames = rows < text_rows + tail ? 0 : (rows - text_rows - tail) / frame_rows;
  const size_t beside_text = out.frames * (before + after) + bos;
  if (out.frames < present || out.frames * frame_rows + text_rows + tail != rows ||
      ids < beside_text || ids - beside_text > text_rows) {
    return absl::InvalidArgumentError(StrCat(rows, " rows, ", text_rows, " of them of text, are no",
                                             " prompt of ", present, " frames and ", ids, " ids"));
  }
  out.text = ids - beside_text;
  int64_t next = 0;
  const auto add = [&](size_t count, bool kept) {
    for (size_t i = 0; i < count; ++i) out.ours.push_back(kept ? next++ : -1);
  };
  for (size_t frame = 0; frame < out.frames; ++frame) {
    add(before, true);
    add(config.vision_tokens(), frame < present);
    add(after, true);
  }
  add(out.text, true);
  add(text_rows - out.text, false);
  add(tail, true);
  add(all_rows - rows, false);
  if (next != timeline.num_tokens()) {
    return absl::InvalidArgumentError(
        StrCat(rows, " rows hold ", next, " tokens, the prompt has ", timeline.num_tokens()));
  }
  return out;
}

// Rows of which only some are of our sequence; the others are filled with the reference's.
class PartialRows {
 public:
  explicit PartialRows(const Recorded& reference, size_t rows)
      : out_{reference.values, 0, reference.values.size(), {}},
        rows_(rows),
        columns_(reference.values.size() / std::max<size_t>(1, rows)) {}
  size_t columns() const { return columns_; }
  // `values` has columns() of them.
  template <class Values>
  void Set(size_t row, const Values& values) {
    std::copy_n(values, columns_,
                out_.values.begin() + static_cast<std::ptrdiff_t>(row * columns_));
    largest_ = std::max(largest_, MaxAbs({values, values + columns_}));
    ++set_;
  }
  double largest() const { return largest_; }
  Computed Finish(double tolerance) && {
    out_.tolerance = tolerance;
    if (set_ < rows_) out_.note = StrCat(set_, " of ", rows_, " rows, the others are masked");
    return std::move(out_);
  }

 private:
  Computed out_;
  size_t rows_;
  size_t columns_;
  size_t set_ = 0;
  double largest_ = 0;
};

// What other runs of the same inputs gave.
struct Variants {
  std::optional<RecordingTap::Stage> final_norm;  // of a trunk that runs to its end
  // With special tokens around the frames.
  std::optional<PolicyConfig> special;
  std::shared_ptr<const Timeline> special_timeline;
  RecordingTap::Stage special_embeds;
  std::vector<double> special_actions;
};

class LerobotPass final : public VerifyPass {
 public:
  LerobotPass(const Golden& golden, const VerifyOutput& output, const PolicyConfig& config,
              size_t prefix_length, const Variants& variants, bool bf16)
      : VerifyPass(golden, output),
        config_(config),
        prefix_length_(prefix_length),
        variants_(variants),
        bf16_(bf16) {}

  // What several tensors rest on.
  absl::Status Prepare();
  // What golden.json repeats, and what is of no tensor.
  void RunInfo(Report& report) const;

 private:
  std::string Skipped(const std::string& name) const override;
  absl::StatusOr<Computed> Compute(const std::string& name,
                                   const Recorded& reference) const override;
  double StageTolerance(const Recorded& reference) const override {
    return ToleranceOf(MaxAbs(reference.values));
  }
  double ToleranceOf(double largest, double bf16_relative = kBf16Relative) const {
    return bf16_ ? bf16_relative * largest : ExactStageTolerance(largest);
  }
  absl::StatusOr<double> Bf16Distance() const;

  absl::StatusOr<Computed> Tokens(const Recorded& reference) const;
  absl::StatusOr<Computed> Frame(size_t number, const Recorded& reference) const;
  absl::StatusOr<Computed> VisionStage(const std::string& stage, size_t number, double scale,
                                       const Recorded& reference) const;
  absl::StatusOr<Computed> Prefix(std::string_view part, const Recorded& reference) const;
  absl::StatusOr<Computed> PrefixRows(const PromptRows& rows, const RecordingTap::Stage& stage,
                                      const Recorded& reference, double bf16_relative) const;
  absl::StatusOr<Computed> PrefixCache(std::string_view part, const Recorded& reference) const;
  absl::StatusOr<Computed> Suffix(std::string_view part, const Recorded& reference) const;
  absl::StatusOr<Computed> Step(size_t number, std::string_view part,
                                const Recorded& reference) const;
  absl::StatusOr<Computed> Answer(const std::string& name, const Recorded& reference) const;
  absl::StatusOr<Computed> Written(const std::string& name, const Recorded& reference) const;
  absl::StatusOr<Computed> Fast(size_t number, std::string_view part) const;

  const Model& model() const { return *output_.engine->models().front()->instances.front(); }
  const Timeline& timeline() const { return *output_.timeline; }
  std::string Parted() const {
    return StrCat("token ", *parted_, " differs at a near-tie; only what is before is compared");
  }

  const PolicyConfig& config_;
  size_t prefix_length_;  // rows; 0: nothing is padded
  const Variants& variants_;
  bool bf16_;
  size_t text_rows_ = 0;
  absl::StatusOr<PromptRows> rows_ = absl::NotFoundError("the rows of the prompt are not recorded");
  std::optional<double> bf16_distance_;
  std::optional<FastTokens> fast_;
  std::optional<FastFraming> framing_;
  std::vector<double> margins_;  // of the pass's own logits
  double largest_logit_ = 0;
  std::optional<size_t> parted_;  // the first token that may and does differ; BF16 only
};

absl::Status LerobotPass::Prepare() {
  ASSIGN_OR_RETURN(const Recorded mask, golden_.Get("tokens_mask"));
  text_rows_ = mask.values.size();
  if (golden_.Has("prefix.embs")) {
    ASSIGN_OR_RETURN(const Recorded embeds, golden_.Get("prefix.embs"));
    rows_ =
        RowsOf(config_, prefix_length_, timeline(), text_rows_, static_cast<size_t>(embeds.rows()));
  }
  if (golden_.Has(kBf16Actions)) {
    ASSIGN_OR_RETURN(bf16_distance_, Bf16Distance());
  }
  if (!config_.fast) return absl::OkStatus();
  ASSIGN_OR_RETURN(FastTokens fast,
                   FastTokens::Load(config_.fast->dir, config_.horizon, config_.action_dim()));
  ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> text,
                   Tokenizer::Load(config_.tokenizer_dir));
  ASSIGN_OR_RETURN(
      FastFraming framing,
      FastFraming::Make(*text, config_.fast->vocabulary, config_.fast->skipped, fast.vocabulary()));
  fast_ = std::move(fast);
  framing_ = std::move(framing);
  ASSIGN_OR_RETURN(const RecordingTap::Stage logits, output_.tap->Rows("lm.logits"));
  if (logits.columns < 2) return absl::InternalError("one logit has no margin");
  const auto written = static_cast<int64_t>(output_.tapped().tokens.size());
  if (logits.rows < written) return absl::InternalError("there are fewer logits than tokens");
  for (int64_t r = 0; r < written; ++r) {
    std::vector<float> row(logits.values.begin() + r * logits.columns,
                           logits.values.begin() + (r + 1) * logits.columns);
    std::nth_element(row.begin(), row.begin() + 1, row.end(), std::greater<>());
    margins_.push_back(double{row[0]} - double{row[1]});
    largest_logit_ = std::max(largest_logit_, std::abs(double{row[0]}));
  }
  if (!bf16_ || !golden_.Has("generated_ids") || !golden_.Has("logit_margin")) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const Recorded ids, golden_.Get("generated_ids"));
  ASSIGN_OR_RETURN(const Recorded margins, golden_.Get("logit_margin"));
  const std::vector<int32_t>& tokens = output_.tapped().tokens;
  const size_t both = std::min({tokens.size(), ids.values.size(), margins.values.size()});
  for (size_t i = 0; i < both; ++i) {
    if (tokens[i] == static_cast<int32_t>(ids.values[i])) continue;
    // Two logits, each within its tolerance, changed places.
    if (margins.values[i] < 2 * ToleranceOf(largest_logit_)) parted_ = i;
    break;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> LerobotPass::Bf16Distance() const {
  ASSIGN_OR_RETURN(const Recorded narrow, golden_.Get(kBf16Actions));
  ASSIGN_OR_RETURN(const Recorded exact, golden_.Get("actions"));
  if (narrow.values.size() != exact.values.size()) {
    return absl::InvalidArgumentError(StrCat(kBf16Actions, " is not as long as actions"));
  }
  return MaxDifference(narrow.values, exact.values, exact.values.size());
}

std::string LerobotPass::Skipped(const std::string& name) const {
  if (name == "state_raw" || name == "noise") return "the input";
  const auto fast = ParseNumbered(name, "fast");
  if (fast && fast->rest == ".sequence") return "the input of its decoding";
  if (!bf16_ && name == kBf16Actions) return "belongs to the bf16 pass";
  return VerifyPass::Skipped(name);
}

// Ids of the prompt's text, before those of padding.
absl::StatusOr<Computed> LerobotPass::Tokens(const Recorded& reference) const {
  RETURN_IF_ERROR(rows_.status());
  const size_t behind = config_.second_bos ? 1 : 0;
  if (output_.prompt_ids.size() < rows_->text + behind || reference.values.size() < rows_->text) {
    return absl::InvalidArgumentError(StrCat("the text has ", rows_->text, " tokens"));
  }
  const auto end = output_.prompt_ids.end() - static_cast<std::ptrdiff_t>(behind);
  PartialRows out(reference, reference.values.size());
  for (size_t i = 0; i < rows_->text; ++i) {
    const double id = *(end - static_cast<std::ptrdiff_t>(rows_->text - i));
    out.Set(i, &id);
  }
  return std::move(out).Finish(0);
}

// [1, 3, height, width]; of a camera without a frame the reference makes up one of a colour.
absl::StatusOr<Computed> LerobotPass::Frame(size_t number, const Recorded& reference) const {
  Computed out;
  out.tolerance = kInputs;
  size_t found = 0;
  for (const Segment& segment : timeline().segments()) {
    if (segment.modality != Modality::kVision || found++ != number) continue;
    const Content& content = *segment.content;
    const size_t plane = size_t{content.width} * content.height;
    if (content.rgb.size() != 3 * plane * sizeof(float)) {
      return absl::InternalError("the frame is not of F32 pixels");
    }
    out.values.resize(3 * plane);
    for (size_t i = 0; i < 3 * plane; ++i) {
      float value = 0;
      std::memcpy(&value, content.rgb.data() + i * sizeof(value), sizeof(value));
      out.values[i % 3 * plane + i / 3] = value;
    }
    return out;
  }
  RETURN_IF_ERROR(rows_.status());
  if (number >= rows_->frames) {
    return absl::NotFoundError(StrCat("the prompt has ", rows_->frames, " frames"));
  }
  out.values.assign(reference.values.size(), kNoFrame);
  out.count = out.values.size();
  out.note = "stands for a missing camera, masked";
  return out;
}

// Rows of one frame of a stage that has all frames.
absl::StatusOr<Computed> LerobotPass::VisionStage(const std::string& stage, size_t number,
                                                  double scale, const Recorded& reference) const {
  ASSIGN_OR_RETURN(const RecordingTap::Stage all, output_.tap->Rows(stage));
  const size_t size = reference.values.size();
  if (all.columns != reference.columns() || (number + 1) * size > all.values.size()) {
    return absl::InvalidArgumentError(StrCat("the stage is ", all.rows, " x ", all.columns));
  }
  Computed out;
  out.tolerance = StageTolerance(reference);
  for (size_t i = 0; i < size; ++i) {
    out.values.push_back(double{all.values[number * size + i]} * scale);
  }
  return out;
}

absl::StatusOr<Computed> LerobotPass::PrefixRows(const PromptRows& rows,
                                                 const RecordingTap::Stage& stage,
                                                 const Recorded& reference,
                                                 double bf16_relative) const {
  const size_t count = rows.ours.size();
  const auto columns = static_cast<size_t>(stage.columns);
  if (reference.values.size() != count * columns || stage.rows < timeline().num_tokens()) {
    return absl::InvalidArgumentError(StrCat("the stage is ", stage.rows, " x ", stage.columns));
  }
  PartialRows out(reference, count);
  double largest = 0;  // of the reference's rows that count
  for (size_t row = 0; row < count; ++row) {
    if (rows.ours[row] < 0) continue;
    const auto* values = reference.values.data() + row * columns;
    largest = std::max(largest, MaxAbs({values, values + columns}));
    const auto* got = stage.values.data() + static_cast<size_t>(rows.ours[row]) * columns;
    out.Set(row, got);
  }
  return std::move(out).Finish(ToleranceOf(largest, bf16_relative));
}

// [1, heads, rows, head_dim] or [1, rows, heads, head_dim]; the cache is read as
// [tokens, heads * head_dim].
absl::StatusOr<Computed> LerobotPass::PrefixCache(std::string_view part,
                                                  const Recorded& reference) const {
  ASSIGN_OR_RETURN(const RecordingTap::Stage stage,
                   output_.tap->FirstWithRows(StrCat("prefill.", part), timeline().num_tokens()));
  const auto heads = static_cast<int64_t>(config_.trunk.kv_heads);
  const auto dim = static_cast<int64_t>(config_.trunk.head_dim);
  const auto rows = static_cast<int64_t>(rows_->ours.size());
  const bool heads_first = reference.dims == std::vector<int64_t>{1, heads, rows, dim};
  if (!heads_first && reference.dims != std::vector<int64_t>{1, rows, heads, dim}) {
    return absl::UnimplementedError(
        StrCat("expected [1, ", heads, ", ", rows, ", ", dim, "], or heads behind rows"));
  }
  if (!heads_first) return PrefixRows(*rows_, stage, reference, kBf16Layers);
  Recorded by_row = reference;
  const auto at = [&](int64_t h, int64_t r, int64_t d) {
    return static_cast<size_t>((h * rows + r) * dim + d);
  };
  const auto by_row_at = [&](int64_t h, int64_t r, int64_t d) {
    return static_cast<size_t>((r * heads + h) * dim + d);
  };
  const auto each = [&](auto&& move) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < dim; ++d) move(at(h, r, d), by_row_at(h, r, d));
      }
    }
  };
  each([&](size_t from, size_t to) { by_row.values[to] = reference.values[from]; });
  ASSIGN_OR_RETURN(Computed out, PrefixRows(*rows_, stage, by_row, kBf16Layers));
  const std::vector<double> computed = out.values;
  each([&](size_t to, size_t from) { out.values[to] = computed[from]; });
  return out;
}

absl::StatusOr<Computed> LerobotPass::Prefix(std::string_view part,
                                             const Recorded& reference) const {
  RETURN_IF_ERROR(rows_.status());
  const std::vector<int64_t>& ours = rows_->ours;
  const size_t rows = ours.size();
  if (part == "embs") {
    ASSIGN_OR_RETURN(const RecordingTap::Stage stage, output_.tap->Rows("lm.embeds"));
    return PrefixRows(*rows_, stage, reference, kBf16Relative);
  }
  if (part == "final_norm_out") {
    if (!variants_.final_norm) return absl::InternalError("the trunk did not run to its end");
    return PrefixRows(*rows_, *variants_.final_norm, reference, kBf16Layers);
  }
  if (StartsWith(part, "k.") || StartsWith(part, "v.")) return PrefixCache(part, reference);
  if (part == "pad_masks") {
    Computed out;
    for (const int64_t row : ours) out.values.push_back(row < 0 ? 0 : 1);
    return out;
  }
  const bool square = part == "attention_2d";
  if (!square && part != "att_masks" && part != "position_ids") {
    return absl::UnimplementedError("nothing is known of it");
  }
  if (reference.values.size() != (square ? rows * rows : rows)) {
    return absl::InvalidArgumentError(StrCat("the prompt has ", rows, " rows"));
  }
  PartialRows out(reference, rows);
  for (size_t row = 0; row < rows; ++row) {
    if (ours[row] < 0) continue;
    const auto t = static_cast<uint32_t>(ours[row]);
    std::vector<double> values;
    if (square) {
      for (const int64_t column : ours) {
        values.push_back(column >= 0 && column <= timeline().Sees(t) ? 1 : 0);
      }
    } else if (part == "position_ids") {
      values.push_back(t);
    } else {  // 1: begins what the rows before do not see
      values.push_back(t < timeline().group_tokens() ? 0 : 1);
    }
    out.Set(row, values.data());
  }
  return std::move(out).Finish(0);
}

// Rows of a denoise step, behind the prompt.
absl::StatusOr<Computed> LerobotPass::Suffix(std::string_view part,
                                             const Recorded& /*reference*/) const {
  RETURN_IF_ERROR(rows_.status());
  const ActionHeadSpec& head = model().spec().head;
  Computed out;
  for (uint32_t row = 0; row < head.suffix_rows(); ++row) {
    if (part == "position_ids") {
      out.values.push_back(timeline().num_tokens() + row);
      continue;
    }
    if (part != "attention_2d") return absl::UnimplementedError("nothing is known of it");
    for (const int64_t column : rows_->ours) out.values.push_back(column < 0 ? 0 : 1);
    const bool own =
        head.mask == SuffixMask::kCausal || (head.mask == SuffixMask::kStateFirst && row == 0);
    for (uint32_t column = 0; column < head.suffix_rows(); ++column) {
      out.values.push_back(!own || column <= row ? 1 : 0);
    }
  }
  return out;
}

absl::StatusOr<Computed> LerobotPass::Step(size_t number, std::string_view part,
                                           const Recorded& reference) const {
  const ActionHeadSpec& head = model().spec().head;
  if (number >= head.steps) {
    return absl::NotFoundError(StrCat("a chunk is made in ", head.steps, " steps"));
  }
  const std::string stage_name = part == ".time" ? "step.time_emb" : StrCat("step", part);
  ASSIGN_OR_RETURN(const RecordingTap::Stage all, output_.tap->Rows(stage_name));
  const size_t size = all.values.size() / head.steps;
  if (size * head.steps != all.values.size()) {
    return absl::InternalError(StrCat(all.rows, " rows are not of ", head.steps, " steps"));
  }
  const float* values = all.values.data() + number * size;
  Computed out;
  if (part == ".time") {
    // The device has the embedding alone: the time is ours when it embeds to that.
    const auto t = static_cast<float>(1.0 + static_cast<double>(number) * (-1.0 / head.steps));
    std::vector<float> embedded(head.time_width);
    model().EmbedTime(t, embedded);
    if (!std::equal(embedded.begin(), embedded.end(), values, values + size)) {
      return absl::InternalError(StrCat("the step did not run at time ", t));
    }
    out.values = {t};
    return out;
  }
  out.tolerance = part == ".time_emb" ? kTimes : StageTolerance(reference);
  // What is integrated drifts by what the velocities are off.
  if (part == ".v_t" || part == ".x_t") {
    out.tolerance = ToleranceOf(MaxAbs(reference.values), kBf16Velocity);
  }
  if (part == ".suffix_out") out.tolerance = ToleranceOf(MaxAbs(reference.values), kBf16Layers);
  // A state's row goes nowhere, so that its end is not computed.
  const size_t total = reference.values.size();
  if (part == ".suffix_out" && head.state_row && total > size) {
    out.values.assign(reference.values.begin(),
                      reference.values.end() - static_cast<std::ptrdiff_t>(size));
    out.count = total;
    out.note = "but for the row of the state, which nothing reads";
  }
  out.values.insert(out.values.end(), values, values + size);
  return out;
}

absl::StatusOr<Computed> LerobotPass::Answer(const std::string& name,
                                             const Recorded& reference) const {
  Computed out;
  if (name == StrCat(kSpecial, "actions")) {
    out.values = variants_.special_actions;
  } else if (name == "actions_normalized") {
    const std::vector<float>& values = output_.tapped().normalized;
    out.values.assign(values.begin(), values.end());
  } else {
    out.values = output_.tapped().values;
  }
  const size_t served = out.values.size();
  if (config_.served_actions < config_.horizon && served < reference.values.size()) {
    out.values.insert(out.values.end(),
                      reference.values.begin() + static_cast<std::ptrdiff_t>(served),
                      reference.values.end());
    out.count = served;
    out.note = StrCat("the first ", config_.served_actions, " actions, which are served");
  }
  out.tolerance = kActions * std::max(1.0, MaxAbs(reference.values));
  if (bf16_ && config_.expert) {
    if (!bf16_distance_) {
      return absl::NotFoundError(StrCat(kBf16Actions, " is not recorded: there is no tolerance"));
    }
    // The record sets its own tolerance: a damaged one must not let anything pass.
    ASSIGN_OR_RETURN(const Recorded exact, golden_.Get("actions"));
    out.tolerance = kBf16Factor * std::min(*bf16_distance_, kBelievable * MaxAbs(exact.values));
  }
  if (parted_) {
    out.count = 0;
    out.note = Parted();
  }
  return out;
}

// Per token of an answer.
absl::StatusOr<Computed> LerobotPass::Written(const std::string& name,
                                              const Recorded& reference) const {
  Computed out;
  size_t columns = 1;
  if (name == "generated_ids") {
    const std::vector<int32_t>& tokens = output_.tapped().tokens;
    out.values.assign(tokens.begin(), tokens.end());
    // The reference's answer is as long as one may be, with zeros behind its end.
    const bool ended = !tokens.empty() && tokens.back() == framing_->stop();
    if (ended && reference.values.size() == config_.fast->max_tokens) {
      out.values.resize(reference.values.size());
    }
  } else if (name == "logit_margin") {
    out.values = margins_;
    out.tolerance = 2 * ToleranceOf(largest_logit_);
  } else {
    ASSIGN_OR_RETURN(const RecordingTap::Stage stage, output_.tap->Rows("lm.logits"));
    columns = static_cast<size_t>(stage.columns);
    // A step that was under way when the answer ended has written more rows.
    out.values.assign(stage.values.begin(), stage.values.begin() + static_cast<std::ptrdiff_t>(
                                                                       margins_.size() * columns));
    out.tolerance = StageTolerance(reference);
  }
  if (parted_) {
    // The logits that chose the token still have the recorded history.
    out.count = (*parted_ + (name == "generated_ids" ? 0 : 1)) * columns;
    out.note = Parted();
    out.values.resize(reference.values.size());  // one of the two may have ended first
  }
  return out;
}

// FAST tokens without a model: an answer of which the ids and the actions are known.
absl::StatusOr<Computed> LerobotPass::Fast(size_t number, std::string_view part) const {
  if (!fast_) return absl::NotFoundError("the model writes no FAST tokens");
  ASSIGN_OR_RETURN(const Recorded sequence, golden_.Get(StrCat("fast", number, ".sequence")));
  const std::vector<int32_t> answer(sequence.values.begin(), sequence.values.end());
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, framing_->FastIds(answer, FastPolicy::kStrict));
  Computed out;
  if (part == ".fast_ids") {
    out.values.assign(ids.begin(), ids.end());
    return out;
  }
  ASSIGN_OR_RETURN(out.values, fast_->Decode(ids, FastPolicy::kStrict));
  if (part == ".decoded") {
    out.tolerance = kInputs;
  } else if (part == ".chunk") {
    // What was encoded: each coefficient over time was rounded.
    out.tolerance = 0.5 * fast_->coefficient() * std::sqrt(static_cast<double>(fast_->steps()));
  } else {
    return absl::UnimplementedError("nothing is known of it");
  }
  return out;
}

absl::StatusOr<Computed> LerobotPass::Compute(const std::string& name,
                                              const Recorded& reference) const {
  constexpr std::string_view kPrefix = "prefix.";
  constexpr std::string_view kSuffix = "suffix.";
  Computed out;
  if (name == "tokens" || name == StrCat(kLongest, "tokens")) return Tokens(reference);
  if (name == "tokens_mask") {
    RETURN_IF_ERROR(rows_.status());
    out.values.assign(text_rows_, 0);
    std::fill_n(out.values.begin(), rows_->text, 1);
    return out;
  }
  if (name == "state_normalized") {
    // Padding is no part of it. What a tiny deviation divides is as exact as F32 has it.
    if (output_.normalized_state.size() < reference.values.size()) {
      return absl::InvalidArgumentError("the state is shorter");
    }
    for (size_t i = 0; i < reference.values.size(); ++i) {
      const double want = reference.values[i];
      out.values.push_back(want +
                           (output_.normalized_state[i] - want) / std::max(1.0, std::abs(want)));
    }
    out.tolerance = kInputs;
    return out;
  }
  if (const auto n = ParseNumbered(name, "pixels."); n && n->rest.empty()) {
    return Frame(n->number, reference);
  }
  if (const auto n = ParseNumbered(name, "pixels_mask."); n && n->rest.empty()) {
    RETURN_IF_ERROR(rows_.status());
    if (n->number >= rows_->frames) {
      return absl::NotFoundError(StrCat("the prompt has ", rows_->frames, " frames"));
    }
    const auto present =
        std::count_if(timeline().segments().begin(), timeline().segments().end(),
                      [](const Segment& segment) { return segment.modality == Modality::kVision; });
    out.values = {n->number < static_cast<size_t>(present) ? 1.0 : 0.0};
    return out;
  }
  if (const auto n = ParseNumbered(name, "vision.features."); n && n->rest.empty()) {
    return VisionStage("vision.features", n->number, 1, reference);
  }
  if (const auto n = ParseNumbered(name, "vision.projected."); n && n->rest.empty()) {
    return VisionStage("vision.projected", n->number, 1, reference);
  }
  if (const auto n = ParseNumbered(name, "vision.connector."); n && n->rest.empty()) {
    // Before the scale of embeddings.
    return VisionStage("vision.projected", n->number, 1 / double{config_.vision_scale}, reference);
  }
  if (StartsWith(name, kPrefix)) return Prefix(name.substr(kPrefix.size()), reference);
  if (StartsWith(name, kSuffix)) return Suffix(name.substr(kSuffix.size()), reference);
  if (const auto n = ParseNumbered(name, "step")) return Step(n->number, n->rest, reference);
  if (const auto n = ParseNumbered(name, "fast")) return Fast(n->number, n->rest);
  if (name == StrCat(kSpecial, "prefix_embs")) {
    if (!variants_.special) return absl::InternalError("special tokens were not run");
    ASSIGN_OR_RETURN(const PromptRows rows,
                     RowsOf(*variants_.special, prefix_length_, *variants_.special_timeline,
                            text_rows_, static_cast<size_t>(reference.rows())));
    return PrefixRows(rows, variants_.special_embeds, reference, kBf16Relative);
  }
  if (name == "actions" || name == "actions_normalized" || name == kBf16Actions ||
      name == StrCat(kLongest, "actions") || name == StrCat(kSpecial, "actions")) {
    return Answer(name, reference);
  }
  if (config_.fast && (name == "generated_ids" || name == "logits" || name == "logit_margin")) {
    return Written(name, reference);
  }
  return absl::UnimplementedError("nothing is known of it");
}

void LerobotPass::RunInfo(Report& report) const {
  const JsonView info = golden_.info();
  const auto number = [](const absl::StatusOr<double>& value) -> absl::StatusOr<Recorded> {
    RETURN_IF_ERROR(value.status());
    return Recorded{{*value}, {1}};
  };
  if (info.Has("bf16_vs_fp32_max_abs")) {
    // Of the recorded tensors: the tolerance of the bf16 pass.
    const absl::StatusOr<double> distance =
        bf16_distance_
            ? *bf16_distance_
            : absl::StatusOr<double>(absl::NotFoundError(StrCat(kBf16Actions, " is not recorded")));
    const auto computed = [&]() -> absl::StatusOr<Computed> {
      RETURN_IF_ERROR(distance.status());
      return Computed{{*distance}, kInputs, 1, {}};
    };
    Compare("json.bf16_vs_fp32_max_abs", number(info.Double("bf16_vs_fp32_max_abs")), computed(),
            report);
  }
  if (info.Has("generated")) {
    const auto read = [&]() -> absl::StatusOr<Recorded> {
      ASSIGN_OR_RETURN(const JsonView list, info.Get("generated"));
      ASSIGN_OR_RETURN(const std::vector<int64_t> ids, list.AsInts(0, 1 << 24));
      return Recorded{{ids.begin(), ids.end()}, {static_cast<int64_t>(ids.size())}};
    };
    const absl::StatusOr<Recorded> ids = read();
    Compare("json.generated", ids, ids.ok() ? Written("generated_ids", *ids) : ids.status(),
            report);
  }
  if (!config_.fast) return;
  // Served answers are not cut or filled up as the reference does unless asked for.
  const absl::StatusOr<ActionChunk> strict =
      model().DecodeActions(output_.tapped().tokens, output_.tapped_key, InvalidTokenPolicy::kFail);
  if (!strict.ok()) {
    report.Noted("strict decoding", StrCat("refuses it: ", FromAbsl(strict.status().message())));
    return;
  }
  Computed computed;
  computed.values = strict->values;
  Compare("strict decoding", Recorded{output_.tapped().values, {}}, computed, report);
}

// Of each camera the tensor with its frame; empty: it has none. A tensor is a camera's that its
// name is the name of, or, of those left over, the first camera that has the words of its name in
// it: "wrist" is "left_wrist_0_rgb".
absl::StatusOr<std::vector<std::string>> BindFrames(const Golden& golden,
                                                    const std::vector<CameraSpec>& cameras) {
  constexpr std::string_view kBegin = "image.";
  constexpr std::string_view kEnd = "_u8";
  std::vector<std::string> bound(cameras.size());
  std::vector<std::string> left;
  for (const std::string& name : golden.names()) {
    if (!Golden::IsFrame(name)) continue;
    if (!StartsWith(name, kBegin)) {
      return absl::InvalidArgumentError(StrCat(name, ": does not name its camera"));
    }
    const std::string camera =
        name.substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size());
    const auto is = std::find_if(cameras.begin(), cameras.end(),
                                 [&](const CameraSpec& spec) { return spec.name == camera; });
    if (is == cameras.end()) {
      left.push_back(camera);
    } else {
      bound[static_cast<size_t>(is - cameras.begin())] = name;
    }
  }
  for (const std::string& camera : left) {
    size_t i = 0;
    while (i < cameras.size() &&
           (!bound[i].empty() || StrCat("_", cameras[i].name, "_").find(StrCat("_", camera, "_")) ==
                                     std::string::npos)) {
      ++i;
    }
    if (i == cameras.size()) {
      return absl::InvalidArgumentError(
          StrCat(kBegin, camera, kEnd, ": the model has no such camera"));
    }
    bound[i] = StrCat(kBegin, camera, kEnd);
  }
  return bound;
}

// Which end of a text the reference's tokenizer cuts.
absl::StatusOr<bool> TruncatesLeft(const std::string& tokenizer_dir) {
  const absl::StatusOr<Json> file = ReadJsonFile(tokenizer_dir + "/tokenizer_config.json");
  if (absl::IsNotFound(file.status())) return false;
  RETURN_IF_ERROR(file.status());
  ASSIGN_OR_RETURN(const std::string side,
                   JsonView(*file, "tokenizer_config.json").String("truncation_side", "right"));
  return side == "left";
}

// Ids of the instruction as the reference has them, where a request would not do: the words of a
// client are no special tokens, and a text that is too long is refused instead of cut. nullopt: it
// is the same.
absl::StatusOr<std::optional<std::vector<int32_t>>> ReferenceText(const PolicyConfig& config,
                                                                  const VerifyInput& input) {
  ASSIGN_OR_RETURN(const std::vector<float> state,
                   config.adapters.front().state.Normalize(input.state, config.state_width));
  ASSIGN_OR_RETURN(const std::string text, PolicyText(config, input.instruction, state));
  ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> tokenizer,
                   Tokenizer::Load(config.tokenizer_dir));
  ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer->Encode(text, {}));
  ASSIGN_OR_RETURN(const std::vector<int32_t> served,
                   tokenizer->Encode(text, {.allow_special = false}));
  if (ids == served && ids.size() <= config.max_text) return std::nullopt;
  if (ids.size() > config.max_text) {
    const auto surplus = static_cast<std::ptrdiff_t>(ids.size() - config.max_text);
    ASSIGN_OR_RETURN(const bool left, TruncatesLeft(config.tokenizer_dir));
    ids.erase(left ? ids.begin() : ids.end() - surplus, left ? ids.begin() + surplus : ids.end());
  }
  return ids;
}

absl::StatusOr<VerifyOutput> RunVariant(const VerifyContext& context, VerifyInput input,
                                        const PolicyConfig& config, std::string_view stage) {
  input.stages = {std::string(stage)};
  input.load = [&](Backend& backend) {
    return LoadLerobotPolicy(context.checkpoint, backend, input.options, config);
  };
  return RunVerifyInput(context.checkpoint, context.options.backend, input);
}

absl::StatusOr<Variants> RunVariants(const VerifyContext& context, const PolicyConfig& config,
                                     const VerifyInput& input) {
  Variants out;
  if (context.golden.Has("prefix.final_norm_out")) {
    // No answer depends on the end of the trunk: served, it is not even loaded.
    PolicyConfig whole = config;
    whole.trunk.ends_in_hidden = true;
    ASSIGN_OR_RETURN(const VerifyOutput run, RunVariant(context, input, whole, "lm.final_norm"));
    ASSIGN_OR_RETURN(out.final_norm, run.tap->Rows("lm.final_norm"));
  }
  const std::vector<std::string> names = context.golden.names();
  if (std::any_of(names.begin(), names.end(),
                  [](const std::string& name) { return StartsWith(name, kSpecial); })) {
    out.special = config;
    RETURN_IF_ERROR(AddImageTokens(*out.special));
    ASSIGN_OR_RETURN(const VerifyOutput run, RunVariant(context, input, *out.special, "lm.embeds"));
    ASSIGN_OR_RETURN(out.special_embeds, run.tap->Rows("lm.embeds"));
    out.special_actions = run.tapped().values;
    out.special_timeline = run.timeline;
  }
  return out;
}

}  // namespace

absl::StatusOr<bool> VerifyLerobot(const VerifyContext& context, bool bf16) {
  const Golden& golden = context.golden;
  ASSIGN_OR_RETURN(const PolicyConfig config, ReadPolicy(context.checkpoint));
  ASSIGN_OR_RETURN(const std::vector<std::string> frames, BindFrames(golden, config.cameras));
  VerifyInput input;
  input.options.compute = bf16 ? DType::kBf16 : DType::kF32;
  input.frame_of = [&](uint32_t camera, std::string_view name) -> absl::StatusOr<Rgb8Image> {
    if (frames[camera].empty()) {
      return absl::NotFoundError(StrCat("no frame of camera \"", name, "\" is recorded"));
    }
    return golden.Image(frames[camera]);
  };
  ASSIGN_OR_RETURN(input.instruction, golden.Instruction());
  ASSIGN_OR_RETURN(input.state, golden.Floats("state_raw"));
  ASSIGN_OR_RETURN(input.noise, golden.Floats("noise"));
  if (config.expert && input.noise.empty()) {
    return absl::InvalidArgumentError("no noise is recorded");
  }
  ASSIGN_OR_RETURN(input.text_ids, ReferenceText(config, input));
  ASSIGN_OR_RETURN(const Variants variants, RunVariants(context, config, input));
  input.stages = {"vision.features", "vision.projected", "lm.embeds",     "lm.logits",
                  "step.x_t",        "step.v_t",         "step.time_emb", "step.suffix_embs",
                  "step.suffix_out", "step.adarms_cond"};
  for (uint32_t layer = 0; layer < config.trunk.cache_layers(); ++layer) {
    input.stages.insert({StrCat("prefill.k.", layer), StrCat("prefill.v.", layer)});
  }
  ASSIGN_OR_RETURN(const VerifyOutput output,
                   RunVerifyInput(context.checkpoint, context.options.backend, input));
  ASSIGN_OR_RETURN(const int64_t prefix_length,
                   context.checkpoint.config_view().Int("prefix_length", INT32_MIN, INT32_MAX, 0));
  LerobotPass pass(golden, output, config, static_cast<size_t>(std::max<int64_t>(0, prefix_length)),
                   variants, bf16);
  RETURN_IF_ERROR(pass.Prepare());
  Report report;
  report.Begin(bf16 ? "bf16" : "f32");
  if (input.text_ids) {
    report.Noted("task", "sent as the reference's ids: as words it is too long, or spells tokens");
  }
  pass.RunAll(report);
  pass.RunInfo(report);
  return report.ok();
}

}  // namespace saccade
