#include "session/catalog.h"

#include <algorithm>

#include "base/strings.h"

namespace saccade {
namespace {

// Long lists and long names are cut: an error is a line, not a dump.
constexpr size_t kMaxListed = 32;
constexpr size_t kMaxNameShown = 64;

template <class Range, class NameOf>
std::string List(const Range& range, NameOf name_of) {
  std::string text;
  size_t listed = 0;
  for (const auto& item : range) {
    if (listed == kMaxListed) {
      StrAppend(&text, ", ... (", range.size(), " in all)");
      break;
    }
    StrAppend(&text, listed++ == 0 ? "" : ", ", "\"", name_of(item), "\"");
  }
  return text;
}

std::string Shown(std::string_view name) {
  if (name.size() <= kMaxNameShown) return StrCat("\"", name, "\"");
  size_t cut = kMaxNameShown;
  while (cut > 0 && (static_cast<unsigned char>(name[cut]) & 0xC0) == 0x80)
    --cut;  // whole UTF-8 characters
  return StrCat("\"", name.substr(0, cut), "...\" (", name.size(), " bytes)");
}

const auto kName = [](const auto& item) -> std::string_view { return item.name; };
const auto kNameOf = [](const auto& item) -> std::string_view { return item->name; };
const auto kKey = [](const auto& item) -> std::string_view { return item.key; };
const auto kSelf = [](const std::string& item) -> std::string_view { return item; };

}  // namespace

absl::StatusOr<Catalog::ModelRef> Catalog::FindModel(std::string_view name,
                                                     std::string_view field) const {
  if (name.empty()) {
    if (models_.size() == 1) return models_.front();
    if (!models_.empty())
      return InvalidField(field, StrCat("name one of the models: ", List(models_, kNameOf)));
  }
  for (const ModelRef& model : models_) {
    if (model->name == name) return model;
  }
  ErrorInfo info;
  info.reason = Reason::kInvalidInput;
  info.field = std::string(field);
  return MakeError(
      absl::StatusCode::kNotFound,
      StrCat(field, ": no model ", Shown(name),
             models_.empty() ? "; none is loaded" : "; the models are ", List(models_, kNameOf)),
      info);
}

absl::StatusOr<ClassId> Catalog::FindClass(std::string_view name, ClassId fallback,
                                           std::string_view field) const {
  if (name.empty()) return fallback;
  const auto it = std::find(classes_.begin(), classes_.end(), name);
  if (it != classes_.end()) return ClassId(static_cast<int32_t>(it - classes_.begin()));
  return InvalidField(
      field, StrCat("no latency class ", Shown(name), "; the classes are ", List(classes_, kSelf)));
}

absl::StatusOr<const StatisticsSpec*> FindStatistics(const ModelSpec& spec, std::string_view key,
                                                     std::string_view field) {
  if (key.empty()) {
    if (spec.statistics.size() == 1) return &spec.statistics.front();
    return InvalidField(field, StrCat("the model has several sets of statistics, choose one of ",
                                      List(spec.statistics, kKey)));
  }
  for (const StatisticsSpec& statistics : spec.statistics) {
    if (statistics.key == key) return &statistics;
  }
  return InvalidField(
      field, StrCat("no statistics ", Shown(key), "; the keys are ", List(spec.statistics, kKey)));
}

absl::StatusOr<uint32_t> FindCamera(const ModelSpec& spec, std::string_view name,
                                    std::string_view field) {
  const std::vector<CameraSpec>& cameras = spec.cameras;
  if (name.empty() && cameras.size() == 1) return 0;
  for (size_t i = 0; i < cameras.size(); ++i) {
    if (cameras[i].name == name) return static_cast<uint32_t>(i);
  }
  // The list of names comes from the same place as for `open`.
  return FindCameras(spec, {std::string(name)}, field).status();
}

absl::StatusOr<std::vector<bool>> FindCameras(const ModelSpec& spec,
                                              const std::vector<std::string>& names,
                                              std::string_view field) {
  if (names.empty()) return std::vector<bool>(spec.cameras.size(), true);
  std::vector<bool> used(spec.cameras.size(), false);
  for (const std::string& name : names) {
    const auto it = std::find_if(spec.cameras.begin(), spec.cameras.end(),
                                 [&](const CameraSpec& camera) { return camera.name == name; });
    if (it == spec.cameras.end()) {
      return InvalidField(field, StrCat("no camera ", Shown(name), "; the cameras are ",
                                        List(spec.cameras, kName)));
    }
    const auto index = static_cast<size_t>(it - spec.cameras.begin());
    if (used[index]) return InvalidField(field, StrCat("camera ", Shown(name), " is named twice"));
    used[index] = true;
  }
  const auto missing = std::find(used.begin(), used.end(), false);
  if (missing != used.end()) {
    const CameraSpec& camera = spec.cameras[static_cast<size_t>(missing - used.begin())];
    return InvalidField(field, StrCat("the model needs camera ", Shown(camera.name)));
  }
  return used;
}

}  // namespace saccade
