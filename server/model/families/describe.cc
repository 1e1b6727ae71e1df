#include "model/families/describe.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/lerobot_policy.h"
#include "model/families/openvla_config.h"
#include "model/families/openvla_oft_config.h"
#include "model/families/openvla_oft_heads.h"
#include "model/families/openvla_prompt.h"
#include "model/families/pi.h"
#include "model/families/smolvla.h"
#include "model/preprocess.h"

namespace saccade {
namespace {

constexpr std::string_view kShortInstruction = "pick up the red block";

using LimitsOf = std::function<DescribeLimits(const ModelSpec&)>;

// Notes a problem; true when there is one.
bool Failed(const absl::Status& status, FolderDescription& out) {
  if (status.ok()) return false;
  out.problems.emplace_back(FromAbsl(status.message()));
  return true;
}

void Add(std::vector<std::string> problems, FolderDescription& out) {
  for (std::string& problem : problems) out.problems.push_back(std::move(problem));
}

// What the families of OpenVLA have in common; `spec` is the family's.
void DescribeParts(const Checkpoint& checkpoint, const OpenVlaConfig& config, ModelSpec spec,
                   const LimitsOf& limits_of, FolderDescription& out) {
  const absl::StatusOr<OpenVlaPrompt> prompt = OpenVlaPrompt::Load(checkpoint, config);
  if (!Failed(prompt.status(), out)) {
    const absl::StatusOr<std::vector<int32_t>> ids = prompt->Encode(kShortInstruction);
    if (!Failed(ids.status(), out)) out.prompt_text_tokens = static_cast<uint32_t>(ids->size());
  }
  out.known_sizes = true;
  out.spec = std::move(spec);
  out.limits = limits_of(out.spec);
  for (const VitSpec& tower : config.towers) {
    out.towers.push_back({tower.tap, tower.image_size, tower.patch_size, tower.width, tower.heads,
                          tower.depth, tower.blocks});
  }
  out.layers = config.llama.layers;
  out.heads = config.llama.heads;
  out.intermediate = config.llama.intermediate;
  out.prompt_style = config.vicuna_prompt ? "vicuna chat" : "in / out";
}

void DescribeOpenVla(const Checkpoint& checkpoint, const LimitsOf& limits_of,
                     FolderDescription& out) {
  const absl::StatusOr<Preprocessor> preprocessor = Preprocessor::Load(checkpoint);
  if (Failed(preprocessor.status(), out)) return;
  absl::StatusOr<OpenVlaConfig> config = ReadOpenVlaSizes(checkpoint, *preprocessor);
  if (Failed(config.status(), out)) return;
  Failed(ReadOpenVlaStatistics(checkpoint, *config), out);
  Add(TensorProblems(checkpoint, *config), out);
  DescribeParts(checkpoint, *config, OpenVlaSpec(checkpoint, *config), limits_of, out);
  out.action_bins = config->bins.ids;
  const DescribeLimits& limits = out.limits;
  for (const DType compute : {DType::kF32, DType::kBf16}) {
    FolderDescription::Memory memory;
    memory.compute = compute;
    memory.weights = TensorBytes(checkpoint, config->Tensors(), compute);
    if (config->llama.tied_head()) {  // packed a second time, as the head
      memory.weights += size_t{config->llama.vocab} * config->llama.hidden * DTypeSize(compute);
    }
    memory.workspace =
        config->WorkspaceBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    memory.parking = config->ParkingBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    out.memory.push_back(memory);
  }
}

void DescribeOpenVlaOft(const Checkpoint& checkpoint, const ModelOptions& options,
                        const LimitsOf& limits_of, FolderDescription& out) {
  const absl::StatusOr<Preprocessor> preprocessor = Preprocessor::Load(checkpoint);
  if (Failed(preprocessor.status(), out)) return;
  const absl::StatusOr<OftHeads> heads = OftHeads::Open(checkpoint.dir());
  if (Failed(heads.status(), out)) return;
  absl::StatusOr<OpenVlaOftConfig> config =
      ReadOpenVlaOftSizes(checkpoint, *heads, *preprocessor, options.oft.value_or(OftOptions{}));
  if (Failed(config.status(), out)) return;
  Failed(ReadOpenVlaOftStatistics(checkpoint, *config), out);
  Add(OftTensorProblems(checkpoint, *heads, *config), out);
  DescribeParts(checkpoint, config->base, OpenVlaOftSpec(checkpoint, *config), limits_of, out);
  out.head = StrCat(config->chunk, " actions of ", config->action_dim, " in one pass, by ",
                    config->regression ? StrCat("regression (", config->head_blocks, " blocks of ",
                                                config->head_width, ")")
                                       : std::string("tokens"),
                    "; constants of ", kOftPlatformNames[static_cast<size_t>(config->platform)]);
  if (!config->regression) out.action_bins = config->base.bins.ids;
  const DescribeLimits& limits = out.limits;
  for (const DType compute : {DType::kF32, DType::kBf16}) {
    FolderDescription::Memory memory;
    memory.compute = compute;
    memory.weights = TensorBytes(checkpoint, config->base.Tensors(), compute) +
                     TensorBytes(checkpoint, config->TokenHeadTensors(), compute) +
                     TensorBytes(*heads, config->HeadTensors(), compute);
    memory.workspace =
        config->WorkspaceBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    memory.parking = config->ParkingBytes(limits.frames, limits.rows, limits.logit_rows, compute);
    out.memory.push_back(memory);
  }
}

void DescribeFlow(const Checkpoint& checkpoint, absl::StatusOr<PolicyConfig> read,
                  const LimitsOf& limits_of, FolderDescription& out) {
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
  out.limits = limits_of(out.spec);
  const DescribeLimits& limits = out.limits;
  const VitSpec& tower = config.tower;
  out.towers.push_back({tower.tap, tower.image_size, tower.patch_size, tower.width, tower.heads,
                        tower.depth, tower.blocks});
  out.layers = config.trunk.layers;
  out.heads = config.trunk.heads;
  out.intermediate = config.trunk.intermediate;
  out.prompt_style = config.prompt == PromptStyle::kLine ? "line" : "task and state";
  const ActionHeadSpec& head = out.spec.head;
  out.head = config.expert ? StrCat("flow, ", head.actions(), " actions in ", head.steps, " steps")
                           : StrCat("FAST, ", head.actions(), " actions in at most ",
                                    out.spec.max_action_tokens, " tokens");
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
  return DescribeFolder(dir, ModelOptions{}, [&](const ModelSpec&) { return limits; });
}

absl::StatusOr<FolderDescription> DescribeFolder(const std::string& dir,
                                                 const ModelOptions& options,
                                                 const LimitsOf& limits_of) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(dir));
  FolderDescription out;
  const absl::StatusOr<const Family*> family = FindFamily(checkpoint, options);
  if (Failed(family.status(), out)) return out;
  out.family = (*family)->name;
  if (out.family == "openvla_oft") {
    DescribeOpenVlaOft(checkpoint, options, limits_of, out);
  } else if (out.family == "smolvla") {
    DescribeFlow(checkpoint, ReadSmolVla(checkpoint), limits_of, out);
  } else if (out.family == "pi0" || out.family == "pi05" || out.family == "pi0_fast") {
    DescribeFlow(checkpoint, ReadPi(checkpoint), limits_of, out);
  } else {
    DescribeOpenVla(checkpoint, limits_of, out);
  }
  return out;
}

}  // namespace saccade
