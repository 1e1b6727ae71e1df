#include "model/families/openvla_oft_config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {
namespace {

constexpr std::string_view kHead = "action_head.model.";
constexpr std::string_view kProprio = "proprio_projector.";
constexpr int64_t kMaxWidth = 1 << 20;  // of anything that multiplies another size
constexpr uint32_t kMaxChunk = 1024;
constexpr uint32_t kMaxCameras = 16;
constexpr uint32_t kMaxBlocks = 64;

// Constants of the reference; cameras by the names that its observations have, in the order in
// which it lines their frames up.
struct Platform {
  OftPlatform id;
  uint32_t chunk;
  uint32_t action_dim;
  uint32_t state_dim;
  bool min_max;  // else between q01 and q99
  std::array<std::string_view, 3> cameras;
};
constexpr std::array kPlatforms = {
    Platform{OftPlatform::kLibero, 8, 7, 8, false, {"full_image", "wrist_image", ""}},
    Platform{OftPlatform::kAloha,
             25,
             14,
             14,
             true,
             {"full_image", "left_wrist_image", "right_wrist_image"}},
    Platform{OftPlatform::kBridge, 5, 7, 7, false, {"full_image", "", ""}},
};

const Platform& Constants(OftPlatform id) {
  return *std::find_if(kPlatforms.begin(), kPlatforms.end(),
                       [id](const Platform& p) { return p.id == id; });
}

absl::StatusOr<TensorView> HeadTensor(const OftHeads& heads, const std::string& name, int rank) {
  absl::StatusOr<TensorView> view = heads.Tensor(name);
  if (!view.ok()) {
    return absl::InvalidArgumentError(StrCat(name, ": ", FromAbsl(view.status().message())));
  }
  if (view->rank != rank) {
    return absl::InvalidArgumentError(
        StrCat(name, ": is ", view->DebugString(), ", expected rank ", rank));
  }
  for (int i = 0; i < rank; ++i) {
    if (view->dim(i) < 1 || view->dim(i) > kMaxWidth) {
      return absl::InvalidArgumentError(
          StrCat(name, ": has an impossible size: ", view->DebugString()));
    }
  }
  return view;
}

// Sizes that only the shapes of the heads tell.
absl::Status ReadHeadShapes(const OftHeads& heads, OpenVlaOftConfig& out) {
  if (heads.HasPart(kProprio)) {
    ASSIGN_OR_RETURN(const TensorView fc1, HeadTensor(heads, StrCat(kProprio, "fc1.weight"), 2));
    out.state_dim = static_cast<uint32_t>(fc1.dim(1));
    if (out.state_dim > Normalizer::kMaxDim) {
      return absl::InvalidArgumentError(
          StrCat(kProprio, "fc1.weight: a state of ", out.state_dim, " values"));
    }
  }
  out.regression = heads.HasPart("action_head.");
  if (!out.regression) return absl::OkStatus();
  ASSIGN_OR_RETURN(const TensorView fc1, HeadTensor(heads, StrCat(kHead, "fc1.weight"), 2));
  ASSIGN_OR_RETURN(const TensorView fc2, HeadTensor(heads, StrCat(kHead, "fc2.weight"), 2));
  out.head_width = static_cast<uint32_t>(fc1.dim(0));
  out.action_dim = static_cast<uint32_t>(fc2.dim(0));
  // As many as there are from the first; one behind a gap is no part of the architecture.
  while (out.head_blocks < kMaxBlocks &&
         heads.Has(StrCat(kHead, "mlp_resnet_blocks.", out.head_blocks, ".ffn.1.weight"))) {
    ++out.head_blocks;
  }
  if (out.action_dim > Normalizer::kMaxDim) {
    return absl::InvalidArgumentError(
        StrCat(kHead, "fc2.weight: actions of ", out.action_dim, " values"));
  }
  if (fc1.dim(1) != int64_t{out.action_dim} * out.base.llama.hidden) {
    return absl::InvalidArgumentError(StrCat(
        kHead, "fc1.weight: reads ", fc1.dim(1), " values of an action, expected ", out.action_dim,
        " times ", out.base.llama.hidden, ", the actions of fc2 times the width of the trunk"));
  }
  return absl::OkStatus();
}

// The first platform that the shapes fit, as the reference guesses the first one. Without a head
// the actions are as wide as those of some set of the statistics.
absl::StatusOr<OftPlatform> GuessPlatform(const Checkpoint& checkpoint,
                                          const OpenVlaOftConfig& config) {
  std::set<size_t> dims = {config.action_dim};
  if (!config.regression) {
    dims.clear();
    RETURN_IF_ERROR(ForEachOpenVlaStatistics(
        checkpoint, [&](const std::string&, const JsonView& set) -> absl::Status {
          ASSIGN_OR_RETURN(const JsonView action, set.Get("action"));
          ASSIGN_OR_RETURN(const JsonView low, action.Get(action.Has("q01") ? "q01" : "min"));
          ASSIGN_OR_RETURN(const size_t size, low.ArraySize());
          dims.insert(size);
          return absl::OkStatus();
        }));
  }
  for (const Platform& platform : kPlatforms) {
    if (dims.count(platform.action_dim) > 0 &&
        (config.state_dim == 0 || config.state_dim == platform.state_dim)) {
      return platform.id;
    }
  }
  return absl::InvalidArgumentError(
      StrCat(checkpoint.dir(), ": actions of ", *dims.begin(), " and a state of ", config.state_dim,
             " values are those of no known platform: say which one's chunk, cameras and bounds "
             "it has (oft.platform: libero, aloha or bridge; oft.chunk, oft.cameras)"));
}

absl::Status Choose(const Checkpoint& checkpoint, const OftOptions& options,
                    OpenVlaOftConfig& out) {
  out.platform = options.platform;
  if (out.platform == OftPlatform::kAuto) {
    ASSIGN_OR_RETURN(out.platform, GuessPlatform(checkpoint, out));
  }
  const Platform& platform = Constants(out.platform);
  if (!out.regression) out.action_dim = platform.action_dim;
  out.chunk = options.chunk > 0 ? options.chunk : platform.chunk;
  if (out.chunk > kMaxChunk) {
    return absl::InvalidArgumentError(
        StrCat("oft.chunk: ", out.chunk, " actions, at most ", kMaxChunk));
  }
  out.cameras = options.cameras;
  if (out.cameras.empty()) {
    for (const std::string_view camera : platform.cameras) {
      if (!camera.empty()) out.cameras.emplace_back(camera);
    }
  }
  const std::set<std::string_view> distinct(out.cameras.begin(), out.cameras.end());
  if (distinct.size() != out.cameras.size() || out.cameras.size() > kMaxCameras ||
      distinct.count("") > 0) {
    return absl::InvalidArgumentError(
        StrCat("oft.cameras: expected 1 to ", kMaxCameras, " different names"));
  }
  // BOS, patches, state, the empty token, places and </s>.
  const uint64_t rows = out.cameras.size() * uint64_t{out.base.vision_tokens()} +
                        uint64_t{out.chunk} * out.action_dim + 4;
  if (rows > out.base.max_positions) {
    return checkpoint.config_view().Error(StrCat(
        "llm_max_length or max_position_embeddings: ", out.base.max_positions,
        " positions cannot hold ", out.cameras.size(), " frames of ", out.base.vision_tokens(),
        " tokens and ", out.chunk, " actions of ", out.action_dim));
  }
  return absl::OkStatus();
}

absl::StatusOr<Normalizer> ReadBounds(const JsonView& group, bool min_max) {
  ASSIGN_OR_RETURN(StatisticsRange range, min_max ? ReadStatisticsRange(group, "min", "max")
                                                  : ReadStatisticsRange(group, "q01", "q99"));
  return Normalizer::Range(std::move(range.low), std::move(range.high), std::move(range.mask),
                           kOftNorm);
}

// The set; or why it is none of this model's.
absl::StatusOr<std::optional<std::string>> ReadSet(const JsonView& set, bool min_max,
                                                   const OpenVlaOftConfig& config,
                                                   OftStatistics& out) {
  ASSIGN_OR_RETURN(const JsonView action, set.Get("action"));
  ASSIGN_OR_RETURN(out.action, ReadBounds(action, min_max));
  if (out.action.dim() != config.action_dim) {
    return StrCat("is of actions of ", out.action.dim(), " values, the model's have ",
                  config.action_dim);
  }
  if (config.state_dim == 0) return std::nullopt;
  if (!set.Has("proprio")) return std::string("has no proprio, which the model needs");
  ASSIGN_OR_RETURN(const JsonView proprio, set.Get("proprio"));
  ASSIGN_OR_RETURN(out.state, ReadBounds(proprio, min_max));
  if (out.state.dim() != config.state_dim) {
    return StrCat("is of states of ", out.state.dim(), " values, the model's have ",
                  config.state_dim);
  }
  return std::nullopt;
}

}  // namespace

bool IsOpenVlaOft(const Checkpoint& checkpoint, const ModelOptions& options) {
  return IsOpenVlaFolder(checkpoint) && (options.oft || FindOftFiles(checkpoint.dir()).any());
}

absl::StatusOr<OpenVlaOftConfig> ReadOpenVlaOftSizes(const Checkpoint& checkpoint,
                                                     const OftHeads& heads,
                                                     const Preprocessor& preprocessor,
                                                     const OftOptions& options) {
  OpenVlaOftConfig out;
  ASSIGN_OR_RETURN(out.base, ReadOpenVlaSizes(checkpoint, preprocessor));
  // Its place takes one of this family's.
  out.lm_head = std::exchange(out.base.llama.head, std::string());
  out.base.llama.ends_in_hidden = true;
  RETURN_IF_ERROR(ReadHeadShapes(heads, out));
  RETURN_IF_ERROR(Choose(checkpoint, options, out));
  return out;
}

absl::Status ReadOpenVlaOftStatistics(const Checkpoint& checkpoint, OpenVlaOftConfig& config) {
  const bool min_max = Constants(config.platform).min_max;
  RETURN_IF_ERROR(ForEachOpenVlaStatistics(
      checkpoint, [&](const std::string& key, const JsonView& set) -> absl::Status {
        OftStatistics statistics;
        statistics.key = key;
        ASSIGN_OR_RETURN(std::optional<std::string> unfit,
                         ReadSet(set, min_max, config, statistics));
        if (unfit) {
          config.unfit.emplace_back(key, *std::move(unfit));
        } else {
          config.statistics.push_back(std::move(statistics));
        }
        return absl::OkStatus();
      }));
  if (!config.statistics.empty()) return absl::OkStatus();
  const auto& [key, why] = config.unfit.front();
  return absl::InvalidArgumentError(
      StrCat(checkpoint.dir(), ": no dataset statistics fit the model: \"", key, "\" ", why));
}

std::vector<TensorSpec> OpenVlaOftConfig::HeadTensors() const {
  std::vector<TensorSpec> out;
  const auto linear = [&](const std::string& name, int64_t n, int64_t k) {
    out.push_back({StrCat(name, ".weight"), {n, k}, TensorUse::kMatrix});
    out.push_back({StrCat(name, ".bias"), {n}, TensorUse::kVector});
  };
  const auto norm = [&](const std::string& name, int64_t n) {
    out.push_back({StrCat(name, ".weight"), {n}, TensorUse::kVector});
    out.push_back({StrCat(name, ".bias"), {n}, TensorUse::kVector});
  };
  const int64_t hidden = base.llama.hidden;
  if (state_dim > 0) {
    linear(StrCat(kProprio, "fc1"), hidden, state_dim);
    linear(StrCat(kProprio, "fc2"), hidden, hidden);
  }
  if (!regression) return out;
  norm(StrCat(kHead, "layer_norm1"), action_dim * hidden);
  linear(StrCat(kHead, "fc1"), head_width, action_dim * hidden);
  for (uint32_t i = 0; i < head_blocks; ++i) {
    norm(StrCat(kHead, "mlp_resnet_blocks.", i, ".ffn.0"), head_width);
    linear(StrCat(kHead, "mlp_resnet_blocks.", i, ".ffn.1"), head_width, head_width);
  }
  norm(StrCat(kHead, "layer_norm2"), head_width);
  linear(StrCat(kHead, "fc2"), action_dim, head_width);
  return out;
}

std::vector<TensorSpec> OpenVlaOftConfig::TokenHeadTensors() const {
  if (regression) return {};
  return {{lm_head, {base.llama.vocab, base.llama.hidden}, TensorUse::kMatrix}};
}

size_t OpenVlaOftConfig::WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows,
                                        DType compute) const {
  const uint64_t hidden = base.llama.hidden;
  const uint64_t chunks = logit_rows / read_rows() + 1;
  size_t states = 0;
  size_t between = 0;  // the projector's middle, or the heads' scratch, beside the trunk's
  if (state_dim > 0) {
    states = ArenaBytes(chunks, hidden, DType::kF32);
    between = ArenaBytes(chunks, hidden, compute);
  }
  if (regression) {
    between = std::max(between, ArenaBytes(chunks * chunk, action_dim * hidden, compute) +
                                    ArenaBytes(chunks * chunk, head_width, DType::kF32) +
                                    ArenaBytes(chunks * chunk, head_width, compute));
  } else {
    between = std::max(between, ArenaBytes(read_rows(), base.llama.vocab, DType::kF32) +
                                    ArenaBytes(read_rows(), 1, DType::kI32));
  }
  const size_t trunk = base.llama.WorkspaceBytes(rows, logit_rows, compute);
  return std::max(base.EncodeWorkspaceBytes(frames, compute),
                  states + ArenaBytes(logit_rows, hidden, DType::kF32) + std::max(trunk, between));
}

std::vector<std::string> OftTensorProblems(const Checkpoint& checkpoint, const OftHeads& heads,
                                           const OpenVlaOftConfig& config) {
  std::vector<std::string> problems = TensorProblems(checkpoint, config.base);
  const auto add = [&](std::vector<std::string> more) {
    for (std::string& problem : more) problems.push_back(std::move(problem));
  };
  add(CheckTensors(checkpoint, config.TokenHeadTensors()));
  const std::vector<TensorSpec> expected = config.HeadTensors();
  add(CheckTensors(heads, expected));
  for (const std::string& name : heads.names()) {
    if (std::none_of(expected.begin(), expected.end(),
                     [&](const TensorSpec& spec) { return spec.name == name; })) {
      problems.push_back(StrCat(name, ": not part of this architecture"));
    }
  }
  return problems;
}

ModelSpec OpenVlaOftSpec(const Checkpoint& checkpoint, const OpenVlaOftConfig& config) {
  ModelSpec spec = OpenVlaSpec(checkpoint, config.base);
  spec.family = "openvla_oft";
  const CameraSpec shape = spec.cameras.front();
  spec.cameras.clear();
  for (const std::string& camera : config.cameras) {
    spec.cameras.push_back(shape);
    spec.cameras.back().name = camera;
  }
  for (const OftStatistics& s : config.statistics) {
    spec.statistics.push_back({s.key, static_cast<uint32_t>(s.action.dim())});
  }
  spec.state_dim = spec.state_width = config.state_dim;
  spec.head.kind = HeadKind::kOnePass;
  spec.head.horizon = config.chunk;
  spec.head.width = config.action_dim;
  spec.head.read_rows = config.read_rows();
  spec.head.read_before_end = 2;  // a place's row predicts the next one; </s> is behind them
  spec.max_group_rows = spec.max_positions;
  spec.max_action_tokens = 1;
  spec.stop_tokens.clear();
  const uint64_t hidden = config.base.llama.hidden;
  const uint64_t width = config.head_width;
  spec.trunk_layers.back() = {config.regression ? config.action_dim * hidden * width +
                                                      config.head_blocks * width * width +
                                                      width * config.action_dim
                                                : hidden * config.base.llama.vocab,
                              0};
  for (const TensorSpec& tensor : config.HeadTensors()) {
    spec.parameters += static_cast<uint64_t>(tensor.numel());
  }
  return spec;
}

}  // namespace saccade
