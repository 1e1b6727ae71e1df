// What a lerobot folder says about normalisation (adapters.h).
#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/adapters.h"

namespace saccade {
namespace {

constexpr std::string_view kPreprocessor = "policy_preprocessor.json";
constexpr std::string_view kPostprocessor = "policy_postprocessor.json";
constexpr std::string_view kDefaultKey = "default";

// Steps that change neither state nor actions, or that families do themselves: prompts and devices.
// Renaming is the client's side: this server calls features by the policy's own names.
constexpr std::array<std::string_view, 9> kOtherSteps = {
    "rename_observations_processor",
    "to_batch_processor",
    "device_processor",
    "tokenizer_processor",
    "smolvla_new_line_processor",
    "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "pi0_fast_prepare_state_tokenizer_processor_step",
    "action_tokenizer_processor",
};
// Written by successive releases.
constexpr std::array<std::string_view, 2> kRelativeSteps = {"relative_actions_processor",
                                                            "delta_actions_processor"};

// Which statistics a mode of lerobot takes.
struct LerobotMode {
  std::string_view name;
  NormMode mode;
  std::string_view first;
  std::string_view second;
};
constexpr std::array<LerobotMode, 5> kModes = {{{"IDENTITY", NormMode::kIdentity, "", ""},
                                                {"MEAN_STD", NormMode::kMeanStd, "mean", "std"},
                                                {"MIN_MAX", NormMode::kRange, "min", "max"},
                                                {"QUANTILES", NormMode::kRange, "q01", "q99"},
                                                {"QUANTILE10", NormMode::kRange, "q10", "q90"}}};

// A STATE or ACTION feature of the policy, and how it is normalised.
struct Feature {
  std::string name;
  size_t dim = 0;
  const LerobotMode* mode = nullptr;
};

// The one feature of `type` in an object of features; nullopt: there is none.
absl::StatusOr<std::optional<Feature>> FindFeature(const JsonView& features,
                                                   std::string_view type) {
  if (!features.json().is_object()) return features.Error("expected an object");
  std::optional<Feature> found;
  for (const auto& item : features.json().items()) {
    ASSIGN_OR_RETURN(const JsonView entry, features.Get(item.key()));
    ASSIGN_OR_RETURN(const std::string kind, entry.String("type"));
    if (kind != type) continue;
    if (found) {
      return features.Error(
          StrCat("two features of type ", type, ": ", found->name, ", ", item.key()));
    }
    ASSIGN_OR_RETURN(const JsonView shape, entry.Get("shape"));
    ASSIGN_OR_RETURN(const std::vector<int64_t> dims,
                     shape.AsInts(1, static_cast<int64_t>(Normalizer::kMaxDim)));
    if (dims.size() != 1) return shape.Error("expected one dimension");
    found = Feature{item.key(), static_cast<size_t>(dims[0]), nullptr};
  }
  return found;
}

absl::StatusOr<const LerobotMode*> ModeOf(const JsonView& map, std::string_view type) {
  if (!map.json().is_object()) return map.Error("expected an object");
  if (!map.json().contains(type)) return &kModes[0];  // as the reference; null is no mode
  ASSIGN_OR_RETURN(const std::string name, map.String(type));
  const auto* mode = std::find_if(kModes.begin(), kModes.end(),
                                  [&](const LerobotMode& m) { return m.name == name; });
  if (mode != kModes.end()) return mode;
  return absl::UnimplementedError(StrCat(map.origin(), ": ", map.path(), ".", type,
                                         ": normalisation \"", name, "\" is not supported"));
}

absl::StatusOr<std::vector<double>> Values(const TensorView& view, std::string_view origin,
                                           std::string_view name) {
  std::vector<double> out(static_cast<size_t>(view.numel()));
  for (size_t i = 0; i < out.size(); ++i) {
    if (view.dtype == DType::kF32) {
      out[i] = static_cast<double>(view.As<const float>()[i]);
    } else if (view.dtype == DType::kF64) {
      out[i] = view.As<const double>()[i];
    } else {
      return absl::InvalidArgumentError(
          StrCat(origin, ": ", name, ": statistics are F32 or F64, not ", view.DebugString()));
    }
  }
  return out;
}

// Where the statistics of a feature are: the name of one, and the tensors.
struct Source {
  std::string_view origin;
  std::function<std::string(std::string_view statistic)> name;
  std::function<bool(std::string_view name)> has;
  std::function<absl::StatusOr<TensorView>(std::string_view name)> tensor;
  std::string known;  // names, for an error
};

absl::StatusOr<Normalizer> Build(const Feature& feature, const Source& source,
                                 const NormConvention& convention) {
  if (feature.mode->mode == NormMode::kIdentity) return Normalizer::Identity(feature.dim);
  std::array<std::vector<double>, 2> values;
  const std::array<std::string_view, 2> statistics = {feature.mode->first, feature.mode->second};
  for (size_t i = 0; i < 2; ++i) {
    const std::string name = source.name(statistics[i]);
    if (!source.has(name)) {
      return absl::InvalidArgumentError(
          StrCat(source.origin, ": ", feature.name, " is normalised by ", feature.mode->name,
                 ", but there is no ", name, "; there are: ", source.known));
    }
    ASSIGN_OR_RETURN(const TensorView view, source.tensor(name));
    if (view.numel() != static_cast<int64_t>(feature.dim)) {
      return absl::InvalidArgumentError(StrCat(source.origin, ": ", name, " is ",
                                               view.DebugString(), ", expected ", feature.dim,
                                               " values"));
    }
    ASSIGN_OR_RETURN(values[i], Values(view, source.origin, name));
  }
  absl::StatusOr<Normalizer> made =
      feature.mode->mode == NormMode::kMeanStd
          ? Normalizer::MeanStd(std::move(values[0]), std::move(values[1]), convention)
          : Normalizer::Range(std::move(values[0]), std::move(values[1]), {}, convention);
  if (made.ok()) return made;
  return absl::InvalidArgumentError(StrCat(source.origin, ": ", source.name(statistics[0]), ", ",
                                           source.name(statistics[1]), ": ",
                                           FromAbsl(made.status().message())));
}

// --- folders with processor files ---

struct Pipeline {
  std::optional<JsonView> normalizer;  // the whole step
  std::optional<JsonView> relative;    // its config, when enabled
};

absl::StatusOr<Pipeline> ReadPipeline(const JsonView& root, std::string_view normalizer,
                                      bool absolute) {
  Pipeline out;
  ASSIGN_OR_RETURN(const JsonView steps, root.Get("steps"));
  ASSIGN_OR_RETURN(const size_t count, steps.ArraySize());
  for (size_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const JsonView step, steps.At(i));
    ASSIGN_OR_RETURN(const std::string name, step.String("registry_name", ""));
    const auto is = [&](const auto& names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    if (name == normalizer) {
      if (out.normalizer) return step.Error(StrCat("a second ", normalizer));
      out.normalizer = step;
    } else if (absolute ? name == "absolute_actions_processor" : is(kRelativeSteps)) {
      ASSIGN_OR_RETURN(const JsonView config, step.Get("config"));
      ASSIGN_OR_RETURN(const bool enabled, config.Bool("enabled", false));
      if (enabled && out.relative) return step.Error("a second step of relative actions");
      if (enabled) out.relative = config;
    } else if (!is(kOtherSteps)) {
      return absl::UnimplementedError(
          StrCat(step.origin(), ": ", step.path(), ": step \"", name, "\" is not supported"));
    }
  }
  if (!out.normalizer) return root.Error(StrCat("there is no ", normalizer));
  return out;
}

// The feature of one type that a step normalises, by the statistics it names.
absl::StatusOr<std::optional<Normalizer>> FromStep(const Checkpoint& checkpoint,
                                                   const JsonView& step, std::string_view type) {
  ASSIGN_OR_RETURN(const JsonView config, step.Get("config"));
  ASSIGN_OR_RETURN(const JsonView features, config.Get("features"));
  ASSIGN_OR_RETURN(std::optional<Feature> feature, FindFeature(features, type));
  if (!feature) return std::nullopt;
  ASSIGN_OR_RETURN(const JsonView map, config.Get("norm_map"));
  ASSIGN_OR_RETURN(feature->mode, ModeOf(map, type));
  if (type != "ACTION" && config.Has("normalize_observation_keys")) {
    ASSIGN_OR_RETURN(const JsonView keys, config.Get("normalize_observation_keys"));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, keys.AsStrings());
    if (std::find(names.begin(), names.end(), feature->name) == names.end()) {
      feature->mode = &kModes[0];
    }
  }
  if (feature->mode->mode == NormMode::kIdentity) return Normalizer::Identity(feature->dim);
  NormConvention convention = kLerobotNorm;
  ASSIGN_OR_RETURN(convention.epsilon, config.Double("eps", convention.epsilon));
  if (!(convention.epsilon > 0 && convention.epsilon < 1)) {
    return config.Error("eps must be in (0, 1)");
  }
  ASSIGN_OR_RETURN(const std::string name, step.String("state_file"));
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos) {
    return step.Error(StrCat("state_file: \"", name, "\" is not a plain file name"));
  }
  ASSIGN_OR_RETURN(const SafetensorsFile file,
                   SafetensorsFile::Open(StrCat(checkpoint.dir(), "/", name)));
  Source source;
  source.origin = name;
  source.name = [&](std::string_view statistic) { return StrCat(feature->name, ".", statistic); };
  source.has = [&](std::string_view tensor) { return file.Has(tensor); };
  source.tensor = [&](std::string_view tensor) { return file.Tensor(tensor); };
  for (const auto& [tensor, entry] : file.entries()) {
    StrAppend(&source.known, source.known.empty() ? "" : ", ", tensor);
  }
  ASSIGN_OR_RETURN(Normalizer made, Build(*feature, source, convention));
  return made;
}

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// A dimension whose name holds an excluded word is absolute. Without names all are relative.
absl::StatusOr<std::vector<bool>> RelativeMask(const JsonView& config, size_t action_dim,
                                               size_t state_dim) {
  std::vector<bool> mask(action_dim, true);
  if (config.Has("exclude_joints") && config.Has("action_names")) {
    ASSIGN_OR_RETURN(const JsonView excluded_view, config.Get("exclude_joints"));
    ASSIGN_OR_RETURN(const std::vector<std::string> excluded, excluded_view.AsStrings());
    ASSIGN_OR_RETURN(const JsonView names_view, config.Get("action_names"));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, names_view.AsStrings());
    for (size_t i = 0; i < std::min(action_dim, names.size()); ++i) {
      for (const std::string& word : excluded) {
        if (!word.empty() && Lower(names[i]).find(Lower(word)) != std::string::npos) {
          mask[i] = false;
        }
      }
    }
  }
  for (size_t i = state_dim; i < action_dim; ++i) {
    if (mask[i]) {
      return config.Error(StrCat("action dimension ", i, " is relative, but the state has ",
                                 state_dim, " dimensions"));
    }
  }
  return mask;
}

absl::StatusOr<PolicyAdapters> FromProcessors(const Checkpoint& checkpoint, const Json& before,
                                              const Json& after) {
  const JsonView before_view(before, kPreprocessor);
  const JsonView after_view(after, kPostprocessor);
  ASSIGN_OR_RETURN(const Pipeline pre, ReadPipeline(before_view, "normalizer_processor", false));
  ASSIGN_OR_RETURN(const Pipeline post, ReadPipeline(after_view, "unnormalizer_processor", true));
  PolicyAdapters out;
  out.key = kDefaultKey;
  ASSIGN_OR_RETURN(std::optional<Normalizer> state, FromStep(checkpoint, *pre.normalizer, "STATE"));
  ASSIGN_OR_RETURN(std::optional<Normalizer> action,
                   FromStep(checkpoint, *post.normalizer, "ACTION"));
  if (!action) return post.normalizer->Error("there is no feature of type ACTION");
  if (state) out.state = *std::move(state);
  out.action = *std::move(action);
  if (pre.relative.has_value() != post.relative.has_value()) {
    return (pre.relative ? *pre.relative : *post.relative)
        .Error("actions are made relative on one side only");
  }
  if (pre.relative) {
    ASSIGN_OR_RETURN(out.relative, RelativeMask(*pre.relative, out.action.dim(), out.state.dim()));
  }
  return out;
}

// --- folders before those: buffers among the weights ---

constexpr std::string_view kInputs = "normalize_inputs.";
constexpr std::string_view kOutputs = "unnormalize_outputs.";

// "so100" of "normalize_inputs.so100_buffer_observation_state.mean"; nullopt: no such buffer.
std::optional<std::string> VariantOf(std::string_view name, std::string_view module) {
  if (name.substr(0, module.size()) != module) return std::nullopt;
  name.remove_prefix(module.size());
  const size_t at = name.find("buffer_");
  if (at == std::string_view::npos || name.find('.') < at) return std::nullopt;
  if (at == 0) return std::string();
  if (name[at - 1] != '_') return std::nullopt;
  return std::string(name.substr(0, at - 1));
}

absl::StatusOr<std::vector<PolicyAdapters>> FromBuffers(const Checkpoint& checkpoint) {
  const JsonView config = checkpoint.config_view();
  ASSIGN_OR_RETURN(const JsonView inputs, config.Get("input_features"));
  ASSIGN_OR_RETURN(const JsonView outputs, config.Get("output_features"));
  ASSIGN_OR_RETURN(const JsonView map, config.Get("normalization_mapping"));
  ASSIGN_OR_RETURN(std::optional<Feature> state, FindFeature(inputs, "STATE"));
  ASSIGN_OR_RETURN(std::optional<Feature> action, FindFeature(outputs, "ACTION"));
  if (!action) return outputs.Error("there is no feature of type ACTION");
  ASSIGN_OR_RETURN(action->mode, ModeOf(map, "ACTION"));
  if (state) {
    ASSIGN_OR_RETURN(state->mode, ModeOf(map, "STATE"));
  }

  std::map<std::string, std::string> variants;  // and the names of their buffers
  for (const std::string& name : checkpoint.names()) {
    for (const std::string_view module : {kInputs, kOutputs}) {
      const std::optional<std::string> variant = VariantOf(name, module);
      if (!variant) continue;
      std::string& known = variants[*variant];
      StrAppend(&known, known.empty() ? "" : ", ", name);
    }
  }
  if (variants.empty()) variants.emplace("", "none");
  std::vector<PolicyAdapters> out;
  for (const auto& [variant, known] : variants) {
    PolicyAdapters set;
    set.key = variant.empty() ? std::string(kDefaultKey) : variant;
    const auto build = [&, &variant = variant, &known = known](const Feature& feature,
                                                               std::string_view module) {
      Source source;
      source.origin = checkpoint.dir();
      source.name = [&](std::string_view statistic) {
        std::string buffer = feature.name;
        std::replace(buffer.begin(), buffer.end(), '.', '_');
        return StrCat(module, variant, variant.empty() ? "" : "_", "buffer_", buffer, ".",
                      statistic);
      };
      source.has = [&](std::string_view name) { return checkpoint.Has(name); };
      source.tensor = [&](std::string_view name) { return checkpoint.Tensor(name); };
      source.known = known;
      return Build(feature, source, kLerobotBufferNorm);
    };
    if (state) {
      ASSIGN_OR_RETURN(set.state, build(*state, kInputs));
    }
    ASSIGN_OR_RETURN(set.action, build(*action, kOutputs));
    out.push_back(std::move(set));
  }
  std::sort(out.begin(), out.end(),
            [](const PolicyAdapters& a, const PolicyAdapters& b) { return a.key < b.key; });
  const auto same = std::adjacent_find(
      out.begin(), out.end(),
      [](const PolicyAdapters& a, const PolicyAdapters& b) { return a.key == b.key; });
  if (same != out.end()) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": two sets of statistics are \"",
                                             same->key, "\": with and without a name"));
  }
  return out;
}

}  // namespace

absl::StatusOr<std::vector<PolicyAdapters>> ReadPolicyAdapters(const Checkpoint& checkpoint) {
  ASSIGN_OR_RETURN(const std::optional<Json> before, checkpoint.OptionalJson(kPreprocessor));
  ASSIGN_OR_RETURN(const std::optional<Json> after, checkpoint.OptionalJson(kPostprocessor));
  if (!before && !after) return FromBuffers(checkpoint);
  if (!before || !after) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": there is ",
                                             before ? kPreprocessor : kPostprocessor, ", but no ",
                                             before ? kPostprocessor : kPreprocessor));
  }
  std::vector<PolicyAdapters> out(1);
  ASSIGN_OR_RETURN(out.front(), FromProcessors(checkpoint, *before, *after));
  return out;
}

}  // namespace saccade
