#include "model/families/openvla_oft_heads.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "base/strings.h"
#include "model/safetensors.h"
#include "model/torch_file.h"

namespace saccade {
namespace {

constexpr std::string_view kConverted = "heads.safetensors";
constexpr std::string_view kActionHead = "action_head.";
constexpr std::string_view kProprio = "proprio_projector.";
constexpr std::string_view kModule = "module.";

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

absl::Status Unsupported(std::string_view file, std::string_view what) {
  return absl::UnimplementedError(StrCat(file, ": ", what));
}

// The same dtype, shape and bytes; a name of `b` is one of `a` with another prefix.
bool Same(const TensorFile& a, const std::string& a_name, const TensorFile& b,
          const std::string& b_name) {
  const TensorFile::Entry& left = a.entries().find(a_name)->second;
  const TensorFile::Entry& right = b.entries().find(b_name)->second;
  if (left.dtype != right.dtype || left.dims != right.dims) return false;
  const auto left_bytes = a.Bytes(a_name);
  const auto right_bytes = b.Bytes(b_name);
  return left_bytes.ok() && right_bytes.ok() &&
         std::equal(left_bytes->begin(), left_bytes->end(), right_bytes->begin(),
                    right_bytes->end());
}

}  // namespace

OftFiles FindOftFiles(const std::string& dir) {
  OftFiles out;
  std::error_code error;
  for (std::filesystem::directory_iterator it(dir, error), end; !error && it != end;
       it.increment(error)) {
    std::string name = it->path().filename().string();
    out.converted = out.converted || name == kConverted;
    if (!Contains(name, "checkpoint")) continue;
    for (const auto& [part, files] :
         {std::pair{"noisy_action_projector", &out.noisy_action_projector},
          {"vision_backbone", &out.vision_backbone},
          {"proprio_projector", &out.proprio_projector},
          {"action_head", &out.action_head}}) {
      if (!Contains(name, part)) continue;
      files->push_back(std::move(name));
      break;
    }
  }
  for (auto* files : {&out.noisy_action_projector, &out.vision_backbone, &out.proprio_projector,
                      &out.action_head}) {
    std::sort(files->begin(), files->end());
  }
  return out;
}

std::string OftHeads::NameOf(const File& file, std::string_view in_file) {
  return StrCat(file.part, in_file.substr(file.prefix.size()));
}

absl::Status OftHeads::Add(const std::string& dir, const std::vector<std::string>& files,
                           std::string_view part) {
  if (files.empty()) return absl::OkStatus();
  if (files.size() > 1) {
    return absl::InvalidArgumentError(StrCat(dir, ": holds both ", files[0], " and ", files[1],
                                             ": which of them belongs to the model?"));
  }
  ASSIGN_OR_RETURN(TorchFile opened, TorchFile::Open(StrCat(dir, "/", files.front())));
  auto tensors = std::make_unique<const TorchFile>(std::move(opened));
  // Of one process, without DDP, nothing is in front.
  const bool module =
      std::all_of(tensors->entries().begin(), tensors->entries().end(),
                  [](const auto& entry) { return StartsWith(entry.first, kModule); });
  files_.push_back({std::string(part), std::string(module ? kModule : ""), std::move(tensors)});
  return absl::OkStatus();
}

absl::Status OftHeads::AddConverted(const std::string& path) {
  ASSIGN_OR_RETURN(SafetensorsFile opened, SafetensorsFile::Open(path));
  auto tensors = std::make_unique<const SafetensorsFile>(std::move(opened));
  for (const auto& [name, entry] : tensors->entries()) {
    if (!StartsWith(name, kActionHead) && !StartsWith(name, kProprio)) {
      return absl::InvalidArgumentError(
          StrCat(path, ": tensor ", name, " is neither of ", kActionHead, " nor of ", kProprio));
    }
  }
  for (const std::string_view part : {kActionHead, kProprio}) {
    size_t held = 0;
    for (const auto& [name, entry] : tensors->entries()) held += StartsWith(name, part) ? 1 : 0;
    const auto original = std::find_if(files_.begin(), files_.end(),
                                       [&](const File& file) { return file.part == part; });
    if (original == files_.end()) continue;
    if (held != original->tensors->entries().size()) {
      return absl::InvalidArgumentError(StrCat(path, ": has ", held, " tensors of ", part,
                                               " where ", original->tensors->path(), " has ",
                                               original->tensors->entries().size()));
    }
    for (const auto& [in_file, entry] : original->tensors->entries()) {
      const std::string name = NameOf(*original, in_file);
      if (!tensors->Has(name) || !Same(*original->tensors, in_file, *tensors, name)) {
        return absl::InvalidArgumentError(
            StrCat(path, ": tensor ", name, " is not what ", original->tensors->path(), " has"));
      }
    }
  }
  // Equal where both are: the rest of the parts is what it adds.
  files_.push_back({"", "", std::move(tensors)});
  return absl::OkStatus();
}

absl::StatusOr<OftHeads> OftHeads::Open(const std::string& dir) {
  const OftFiles files = FindOftFiles(dir);
  if (!files.vision_backbone.empty()) {
    return Unsupported(files.vision_backbone.front(), "FiLM is not supported");
  }
  if (!files.noisy_action_projector.empty()) {
    return Unsupported(files.noisy_action_projector.front(), "diffusion heads are not supported");
  }
  OftHeads heads;
  RETURN_IF_ERROR(heads.Add(dir, files.action_head, kActionHead));
  RETURN_IF_ERROR(heads.Add(dir, files.proprio_projector, kProprio));
  if (files.converted) RETURN_IF_ERROR(heads.AddConverted(StrCat(dir, "/", kConverted)));
  for (const std::string& name : heads.names()) {
    if (StartsWith(name, "action_head.noise_predictor.")) {
      return Unsupported(name, "diffusion heads are not supported");
    }
  }
  return heads;
}

std::pair<const TensorFile*, std::string> OftHeads::Find(std::string_view name) const {
  for (const File& file : files_) {
    if (!StartsWith(name, file.part)) continue;
    std::string in_file = StrCat(file.prefix, name.substr(file.part.size()));
    if (file.tensors->Has(in_file)) return {file.tensors.get(), std::move(in_file)};
  }
  return {nullptr, ""};
}

absl::StatusOr<TensorView> OftHeads::Tensor(std::string_view name) const {
  const auto [file, in_file] = Find(name);
  if (file == nullptr) return absl::NotFoundError(StrCat(name, ": no such tensor"));
  return file->Tensor(in_file);
}

std::vector<std::string> OftHeads::names() const {
  std::set<std::string> out;
  for (const File& file : files_) {
    for (const auto& [name, entry] : file.tensors->entries()) out.insert(NameOf(file, name));
  }
  return {out.begin(), out.end()};
}

bool OftHeads::HasPart(std::string_view prefix) const {
  const std::vector<std::string> all = names();
  return std::any_of(all.begin(), all.end(),
                     [&](const std::string& name) { return StartsWith(name, prefix); });
}

void OftHeads::AddIdentity(DigestBuilder& digest) const {
  for (const std::string& name : names()) {
    const auto [file, in_file] = Find(name);
    const auto bytes = file->Bytes(in_file);
    digest.Field(name);
    if (bytes.ok()) digest.Field(DigestBytes("oft.head.v1", *bytes));
  }
}

}  // namespace saccade
