#include "verify_golden.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool EndsWith(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

template <class T>
void Widen(const TensorView& view, std::vector<double>& out) {
  const auto* from = view.As<const T>();
  out.assign(from, from + view.numel());
}

}  // namespace

int64_t Recorded::rows() const {
  return static_cast<int64_t>(values.size()) / std::max<int64_t>(1, columns());
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

std::vector<std::string> Golden::names() const {
  std::vector<std::string> out;
  for (const auto& [name, entry] : file_.entries()) out.push_back(name);
  return out;
}

bool Golden::IsFrame(std::string_view name) {
  return StartsWith(name, "image") && EndsWith(name, "_u8");
}

absl::StatusOr<Rgb8Image> Golden::Frame(uint32_t camera, std::string_view camera_name) const {
  const std::string_view last = camera_name.substr(camera_name.rfind('.') + 1);
  std::vector<std::string> candidates = {StrCat("image", camera, "_u8"),
                                         StrCat("image.", last, "_u8")};
  if (camera == 0) candidates.emplace_back("image_u8");
  const auto found = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const std::string& name) { return Has(name); });
  if (found == candidates.end()) {
    return absl::NotFoundError(StrCat("no frame of camera \"", camera_name, "\" is recorded"));
  }
  return Image(*found);
}

absl::StatusOr<Rgb8Image> Golden::Image(std::string_view name) const {
  ASSIGN_OR_RETURN(const TensorView view, file_.Tensor(name));
  if (view.dtype != DType::kU8 || view.rank != 3 || view.dim(2) != 3 || view.numel() == 0) {
    return absl::InvalidArgumentError(
        StrCat(name, ": expected u8[height, width, 3], got ", view.DebugString()));
  }
  Rgb8Image image;
  image.height = static_cast<uint32_t>(view.dim(0));
  image.width = static_cast<uint32_t>(view.dim(1));
  const auto* bytes = view.As<const uint8_t>();
  image.rgb.assign(bytes, bytes + view.numel());
  return image;
}

absl::StatusOr<std::string> Golden::Instruction() const {
  return info().String(info().Has("task") ? "task" : "instruction");
}

absl::StatusOr<std::vector<float>> Golden::Floats(std::string_view name) const {
  if (!Has(name)) return std::vector<float>{};
  ASSIGN_OR_RETURN(const Recorded recorded, Get(name));
  return std::vector<float>(recorded.values.begin(), recorded.values.end());
}

void Report::Begin(std::string_view precision) {
  std::printf("%s\n  %-28s %10s %10s  %s\n", std::string(precision).c_str(), "tensor", "max |diff|",
              "tolerance", "verdict");
}

void Report::Compared(const std::string& name, double difference, double tolerance,
                      const std::string& note) {
  const bool good = difference <= tolerance;
  std::printf("  %-28s %10.3g %10.3g  %s%s%s\n", name.c_str(), difference, tolerance,
              good ? "ok" : "MISS", note.empty() ? "" : "  ", note.c_str());
  ok_ = ok_ && good;
}

void Report::NotCompared(const std::string& name, std::string_view why) {
  std::printf("  %-28s %10s %10s  %s\n", name.c_str(), "-", "-",
              StrCat("NOT COMPARED: ", why).c_str());
  ok_ = false;
}

void Report::Noted(const std::string& name, const std::string& note) {
  std::printf("  %-28s %10s %10s  %s\n", name.c_str(), "-", "-", note.c_str());
}

}  // namespace saccade
