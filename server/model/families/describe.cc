#include "model/families/describe.h"

#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/lerobot_policy.h"
#include "model/families/openvla_config.h"
#include "model/families/openvla_prompt.h"
#include "model/families/pi.h"
#include "model/families/smolvla.h"
#include "model/preprocess.h"

namespace saccade {
namespace {

constexpr std::string_view kShortInstruction = "pick up the red block";

void DescribeOpenVla(const Checkpoint& checkpoint, const DescribeLimits& limits,
                     FolderDescription& out) {
  const auto failed = [&](const absl::Status& status) {
    if (status.ok()) return false;
    out.problems.emplace_back(FromAbsl(status.message()));
    return true;
  };
  const absl::StatusOr<Preprocessor> preprocessor = Preprocessor::Load(checkpoint);
  if (failed(preprocessor.status())) return;
  absl::StatusOr<OpenVlaConfig> config = ReadOpenVlaSizes(checkpoint, *preprocessor);
  if (failed(config.status())) return;
  failed(ReadOpenVlaStatistics(checkpoint, *config));
  for (std::string& problem : TensorProblems(checkpoint, *config)) {
    out.problems.push_back(std::move(problem));
  }
  const absl::StatusOr<OpenVlaPrompt> prompt = OpenVlaPrompt::Load(checkpoint, *config);
  if (!failed(prompt.status())) {
    const absl::StatusOr<std::vector<int32_t>> ids = prompt->Encode(kShortInstruction);
    if (!failed(ids.status())) out.prompt_text_tokens = static_cast<uint32_t>(ids->size());
  }

  out.known_sizes = true;
  out.spec = OpenVlaSpec(checkpoint, *config);
  for (const VitSpec& tower : config->towers) {
    out.towers.push_back({tower.tap, tower.image_size, tower.patch_size, tower.width, tower.heads,
                          tower.depth, tower.blocks});
  }
  out.layers = config->llama.layers;
  out.heads = config->llama.heads;
  out.intermediate = config->llama.intermediate;
  out.action_bins = config->action_bins;
  out.prompt_style = config->vicuna_prompt ? "vicuna chat" : "in / out";
  for (const DType compute : {DType::kF32, DType::kBf16}) {
    const std::vector<TensorSpec> tensors = config->Tensors();
    FolderDescription::Memory memory;
    memory.compute = compute;
    memory.weights = TensorBytes(checkpoint, tensors, compute);
    if (config->llama.tied_head()) {  // packed a second time, as the head
      memory.weights += size_t{config->llama.vocab} * config->llama.hidden * DTypeSize(compute);
    }
    memory.workspace =
        config->WorkspaceBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    memory.parking = config->ParkingBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    out.memory.push_back(memory);
  }
}

void DescribeFlow(const Checkpoint& checkpoint, absl::StatusOr<PolicyConfig> read,
                  const DescribeLimits& limits, FolderDescription& out) {
  if (!read.ok()) {
    out.problems.emplace_back(FromAbsl(read.status().message()));
    return;
  }
  const PolicyConfig& config = *read;
  for (std::string& problem : PolicyTensorProblems(checkpoint, config)) {
    out.problems.push_back(std::move(problem));
  }
  const absl::StatusOr<uint32_t> text = PolicyTextTokens(config, kShortInstruction);
  if (text.ok()) {
    out.prompt_text_tokens = *text;
  } else {
    out.problems.emplace_back(FromAbsl(text.status().message()));
  }
  out.known_sizes = true;
  out.spec = PolicySpec(checkpoint, config);
  const VitSpec& tower = config.tower;
  out.towers.push_back({tower.tap, tower.image_size, tower.patch_size, tower.width, tower.heads,
                        tower.depth, tower.blocks});
  out.layers = config.trunk.layers;
  out.heads = config.trunk.heads;
  out.intermediate = config.trunk.intermediate;
  out.prompt_style = config.prompt == PromptStyle::kLine ? "line" : "task and state";
  for (const DType compute : {DType::kF32, DType::kBf16}) {
    FolderDescription::Memory memory;
    memory.compute = compute;
    memory.weights = TensorBytes(checkpoint, config.Tensors(), compute);
    if (config.trunk.tied_head()) {  // packed a second time, as the head
      memory.weights += size_t{config.trunk.vocab} * config.trunk.hidden * DTypeSize(compute);
    }
    memory.workspace =
        config.WorkspaceBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    memory.parking = config.ParkingBytes(limits.frames, limits.rows, limits.logit_rows);
    memory.denoise_workspace = config.DenoiseBytes(limits.items, compute);
    memory.denoise_parking = config.DenoiseParkingBytes(limits.items);
    out.memory.push_back(memory);
  }
}

}  // namespace

absl::StatusOr<FolderDescription> DescribeFolder(const std::string& dir,
                                                 const DescribeLimits& limits) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(dir));
  FolderDescription out;
  std::string known;
  for (const Family& family : Families()) {
    StrAppend(&known, known.empty() ? "" : ", ", family.name);
    if (family.matches(checkpoint)) out.family = family.name;
  }
  if (out.family == "openvla") {
    DescribeOpenVla(checkpoint, limits, out);
  } else if (out.family == "smolvla") {
    DescribeFlow(checkpoint, ReadSmolVla(checkpoint), limits, out);
  } else if (out.family == "pi0" || out.family == "pi05" || out.family == "pi0_fast") {
    DescribeFlow(checkpoint, ReadPi(checkpoint), limits, out);
  } else {
    const std::string type = checkpoint.config_view().String("model_type", "").value_or("");
    out.problems.push_back(StrCat("no known family serves this folder",
                                  type.empty() ? "" : StrCat(" (model_type \"", type, "\")"),
                                  "; known: ", known, " (without an OpenVLA-OFT action head)"));
  }
  return out;
}

}  // namespace saccade
