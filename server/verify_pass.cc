#include "verify_pass.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr double kStageFloor = 2e-5;
constexpr double kStageRelative = 4e-6;
constexpr double kPixels = 1.5e-5;

}  // namespace

double ExactStageTolerance(double largest) {
  return std::max(kStageFloor, kStageRelative * largest);
}

std::string VerifyPass::Skipped(const std::string& name) const {
  return Golden::IsFrame(name) ? "the input" : "";
}

void VerifyPass::RunAll(Report& report) const {
  for (const std::string& name : golden_.names()) {
    if (const std::string why = Skipped(name); !why.empty()) {
      report.Noted(name, why);
      continue;
    }
    const absl::StatusOr<Recorded> reference = golden_.Get(name);
    Compare(name, reference, reference.ok() ? Compute(name, *reference) : reference.status(),
            report);
  }
}

absl::StatusOr<Computed> VerifyPass::PromptIds(size_t recorded, size_t added) const {
  Computed out;
  out.values.assign(output_.prompt_ids.begin(), output_.prompt_ids.end());
  if (recorded + added == out.values.size()) out.values.resize(recorded);
  return out;
}

absl::StatusOr<Computed> VerifyPass::Pixels(const Recorded& reference) const {
  std::vector<RecordingTap::Stage> towers;
  for (;;) {
    absl::StatusOr<RecordingTap::Stage> stage =
        output_.tap->Rows(StrCat("pixel_values.", towers.size()));
    if (!stage.ok()) break;
    towers.push_back(*std::move(stage));
  }
  const auto num_towers = static_cast<int64_t>(towers.size());
  if (num_towers == 0 || reference.dims.size() != 4 || reference.dims[0] != 1 ||
      reference.dims[1] % (3 * num_towers) != 0) {
    return absl::UnimplementedError("expected the shape [1, 3 * towers * frames, height, width]");
  }
  Computed out;
  out.tolerance = kPixels;
  out.values.resize(reference.values.size());
  const int64_t frames = reference.dims[1] / (3 * num_towers);
  const int64_t height = reference.dims[2];
  const int64_t width = reference.dims[3];
  for (int64_t tower = 0; tower < num_towers; ++tower) {
    const RecordingTap::Stage& stage = towers[static_cast<size_t>(tower)];
    const int64_t size = std::llround(std::sqrt(static_cast<double>(stage.columns) / 3));
    if (3 * size * size != stage.columns ||
        stage.rows * stage.columns != frames * 3 * height * width || width % size != 0) {
      return absl::InternalError("patches and pixels do not fit");
    }
    const int64_t patches = stage.rows / frames;
    for (int64_t row = 0; row < stage.rows; ++row) {
      const int64_t first = 3 * (row / patches * num_towers + tower);
      const int64_t patch = row % patches;
      const int64_t top = patch / (width / size) * size;
      const int64_t left = patch % (width / size) * size;
      for (int64_t i = 0; i < stage.columns; ++i) {
        const int64_t channel = first + i / (size * size);
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
absl::StatusOr<Computed> VerifyPass::Cache(const std::string& name,
                                           const Recorded& reference) const {
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

absl::StatusOr<Computed> VerifyPass::Stage(const std::string& name,
                                           const Recorded& reference) const {
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

void VerifyPass::Compare(const std::string& name, const absl::StatusOr<Recorded>& reference,
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

}  // namespace saccade
