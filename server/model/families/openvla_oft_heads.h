#pragma once
// What OpenVLA-OFT's training leaves beside a merged checkpoint: files of torch.save,
// `action_head--STEP_checkpoint.pt` and `proprio_projector--STEP_checkpoint.pt`, whose names begin
// with "module." (DDP); or both in one heads.safetensors, converted. As in the reference any file
// whose name has the part's name and "checkpoint" in it is that part, and two of one part are
// refused.
// Source: github.com/moojink/openvla-oft, experiments/robot/openvla_utils.py at 213c5ff.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/status.h"
#include "model/checkpoint.h"
#include "model/tensor_file.h"
#include "model/tensor_source.h"

namespace saccade {

// File names, sorted; nothing is opened.
struct OftFiles {
  std::vector<std::string> action_head;
  std::vector<std::string> proprio_projector;
  std::vector<std::string> noisy_action_projector;  // of diffusion heads
  std::vector<std::string> vision_backbone;         // of FiLM
  bool converted = false;                           // heads.safetensors
  bool any() const {
    return converted || !action_head.empty() || !proprio_projector.empty() ||
           !noisy_action_projector.empty() || !vision_backbone.empty();
  }
};
OftFiles FindOftFiles(const std::string& dir);

// Tensors by their names in the reference's modules behind "action_head." and "proprio_projector.":
// "action_head.model.fc1.weight". Immutable.
class OftHeads final : public TensorSource {
 public:
  // INVALID_ARGUMENT: two files of one part, or a heads.safetensors that differs from the files it
  // was converted from. UNIMPLEMENTED: FiLM, a diffusion head. Errors name the file.
  static absl::StatusOr<OftHeads> Open(const std::string& dir);
  static OftHeads None() { return OftHeads(); }

  bool Has(std::string_view name) const override { return Find(name).first != nullptr; }
  absl::StatusOr<TensorView> Tensor(std::string_view name) const override;
  std::vector<std::string> names() const;  // sorted
  bool HasPart(std::string_view prefix) const;
  void AddIdentity(DigestBuilder& digest) const;

 private:
  // `prefix` in front of a name in the file is `part` here.
  struct File {
    std::string part;
    std::string prefix;
    std::unique_ptr<const TensorFile> tensors;
  };
  OftHeads() = default;
  absl::Status Add(const std::string& dir, const std::vector<std::string>& files,
                   std::string_view part);
  absl::Status AddConverted(const std::string& path);
  // The file and its name there; null: no such tensor.
  std::pair<const TensorFile*, std::string> Find(std::string_view name) const;
  static std::string NameOf(const File& file, std::string_view in_file);

  std::vector<File> files_;
};

}  // namespace saccade
