#include "cmd_inspect.h"

#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/strings.h"
#include "config/config.h"
#include "memory_plan.h"
#include "model/families/describe.h"

namespace saccade {
namespace {

using OrderedJson = nlohmann::ordered_json;

size_t KvBytesPerToken(const FolderDescription& d, DType compute) {
  KvGeometry kv = d.spec.kv;
  kv.dtype = compute;
  return kv.BytesPerToken();
}

// Tokens of blocks that a session with one short prompt and its actions holds: a segment starts a
// block of its own.
uint64_t SessionTokens(const FolderDescription& d) {
  const uint64_t block = d.spec.kv.block_tokens;
  const auto blocks = [&](uint64_t tokens) { return (tokens + block - 1) / block; };
  const uint64_t text = d.prompt_text_tokens;
  const uint64_t answer =
      d.spec.head.read_rows > 0 ? d.spec.head.read_rows : d.spec.max_action_tokens;
  return block * (blocks(1) + d.spec.cameras.size() * blocks(d.spec.vision_tokens) +
                  blocks(d.spec.state_width > 0 ? 1 : 0) + blocks(text > 1 ? text - 1 : 0) +
                  blocks(answer));
}

// What clients are told, where the configuration says nothing.
std::string_view Reference(const ModelSpec& spec) {
  if (!spec.relative_actions) return "unspecified";
  return *spec.relative_actions ? "relative" : "absolute";
}

OrderedJson ToJson(const FolderDescription& d) {
  OrderedJson out;
  out["family"] = d.family;
  out["servable"] = d.problems.empty();
  out["problems"] = d.problems;
  if (!d.known_sizes) return out;
  const ModelSpec& s = d.spec;
  out["parameters"] = s.parameters;
  for (const CameraSpec& camera : s.cameras) {
    out["cameras"].push_back({{"name", camera.name},
                              {"width", camera.width},
                              {"height", camera.height},
                              {"required", !camera.optional}});
  }
  for (const FolderDescription::Tower& t : d.towers) {
    out["towers"].push_back({{"name", t.name},
                             {"image_size", t.image_size},
                             {"patch_size", t.patch_size},
                             {"width", t.width},
                             {"heads", t.heads},
                             {"depth", t.depth}});
  }
  out["trunk"] = {{"layers", d.layers},         {"hidden", s.hidden},
                  {"heads", d.heads},           {"kv_heads", s.kv.kv_heads},
                  {"head_dim", s.kv.head_dim},  {"intermediate", d.intermediate},
                  {"vocabulary", s.vocab_size}, {"max_positions", s.max_positions}};
  out["prompt"] = {{"style", d.prompt_style},
                   {"vision_tokens", s.vision_tokens},
                   {"text_tokens", d.prompt_text_tokens}};
  out["action_bins"] = d.action_bins;
  if (s.state_dim > 0) out["state"] = {{"values", s.state_dim}};
  if (s.head.horizon > 0) {
    out["head"] = {{"description", d.head}, {"actions", s.head.horizon}, {"values", s.head.width}};
  }
  for (const StatisticsSpec& statistics : s.statistics) {
    out["statistics"].push_back({{"key", statistics.key}, {"actions", statistics.action_dim}});
  }
  if (s.head.actions() > 0) out["actions_reference"] = Reference(s);
  if (s.head.kind == HeadKind::kFlow) {
    out["flow"] = {{"steps", s.head.steps}, {"width", s.head.width}};
  }
  for (const FolderDescription::Memory& m : d.memory) {
    const size_t per_token = KvBytesPerToken(d, m.compute);
    out["memory"].push_back({{"dtype", DTypeName(m.compute)},
                             {"weight_bytes", m.weights},
                             {"workspace_bytes", m.workspace},
                             {"kv_bytes_per_token", per_token},
                             {"kv_bytes_per_session", per_token * SessionTokens(d)}});
  }
  out["workspace_limits"] = {
      {"frames", d.limits.frames}, {"rows", d.limits.rows}, {"logit_rows", d.limits.logit_rows}};
  return out;
}

void Row(std::string_view name, const std::string& value) {
  std::printf("%-14s %s\n", std::string(name).c_str(), value.c_str());
}

std::string Bytes(uint64_t bytes) {
  char text[64];
  if (bytes < 10 * 1024) {
    std::snprintf(text, sizeof(text), "%llu B", static_cast<unsigned long long>(bytes));
  } else if (bytes < 10ULL * 1024 * 1024) {
    std::snprintf(text, sizeof(text), "%.1f KiB", static_cast<double>(bytes) / 1024);
  } else {
    std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1024 * 1024));
  }
  return text;
}

void PrintTable(const FolderDescription& d, const std::string& dir) {
  Row("family", d.family.empty() ? "unknown" : d.family);
  if (d.known_sizes) {
    const ModelSpec& s = d.spec;
    Row("parameters", StrCat(s.parameters));
    for (const CameraSpec& camera : s.cameras) {
      Row("camera", StrCat(camera.name, ", ", camera.width, " x ", camera.height,
                           camera.optional ? ", may be missing" : ""));
    }
    for (const FolderDescription::Tower& t : d.towers) {
      Row("tower", StrCat(t.name, ": ", t.width, " wide, ", t.heads, " heads, ", t.depth,
                          t.blocks < t.depth ? " blocks (the last is not used), " : " blocks, ",
                          t.image_size, " px in patches of ", t.patch_size));
    }
    Row("trunk",
        StrCat(d.layers, " layers, ", s.hidden, " wide, ", d.heads, " heads on ", s.kv.kv_heads,
               " key/value heads of ", s.kv.head_dim, ", MLP ", d.intermediate));
    if (s.vocab_size > 0) {
      Row("vocabulary",
          StrCat(s.vocab_size, " ids",
                 d.action_bins > 0 ? StrCat(", ", d.action_bins, " of them actions") : ""));
    }
    if (!d.head.empty()) Row("head", d.head);
    if (s.head.actions() > 0 && !s.relative_actions) {
      Row("actions", "absolute or relative: the folder does not say, models[].action_space can");
    } else if (s.head.actions() > 0) {
      Row("actions", std::string(Reference(s)));
    }
    if (s.state_dim > 0) Row("state", StrCat(s.state_dim, " values"));
    Row("prompt", StrCat(d.prompt_style, ": ", s.vision_tokens, " vision tokens a frame and ",
                         d.prompt_text_tokens, " text tokens for a short instruction, at most ",
                         s.max_positions, " positions"));
    for (const StatisticsSpec& statistics : s.statistics) {
      Row("statistics", StrCat(statistics.key, ", ", statistics.action_dim, " action values"));
    }
    for (const FolderDescription::Memory& m : d.memory) {
      const size_t per_token = KvBytesPerToken(d, m.compute);
      Row(StrCat("memory ", DTypeName(m.compute)),
          StrCat("weights ", Bytes(m.weights), ", workspace ", Bytes(m.workspace), ", K/V ",
                 Bytes(per_token), " per token, ", Bytes(per_token * SessionTokens(d)),
                 " per session"));
    }
    ModelConfig config;
    config.path = dir;
    const Config defaults;
    for (const ComputeType compute : {ComputeType::kF32, ComputeType::kBf16}) {
      config.dtype = compute;
      const absl::StatusOr<ModelMemory> plan = PlanModel(defaults, config, 1);
      if (!plan.ok()) continue;
      Row(StrCat("budget ", Name(compute)),
          StrCat(Bytes(plan->total() - plan->loading), " to serve it with default settings, ",
                 Bytes(plan->loading), " more while it is loaded"));
    }
    Row("workspace of", StrCat(d.limits.frames, " frames, ", d.limits.rows, " rows, ",
                               d.limits.logit_rows, " logit rows"));
  }
  if (d.problems.empty()) {
    Row("servable", "yes");
    return;
  }
  Row("servable", "no:");
  for (const std::string& problem : d.problems) std::printf("  %s\n", problem.c_str());
}

}  // namespace

int RunInspect(const InspectOptions& options) {
  const absl::StatusOr<FolderDescription> description =
      DescribeFolder(options.model_dir, ModelOptions{}, [](const ModelSpec& spec) {
        return StepLimits(spec, ToDeviceOptions(Config{}, ModelConfig{}, /*num_blocks=*/1));
      });
  if (!description.ok()) {
    const std::string message(description.status().message());
    if (options.json) {
      const OrderedJson out = {{"family", ""}, {"servable", false}, {"problems", {message}}};
      std::printf("%s\n", out.dump(2, ' ', true, OrderedJson::error_handler_t::replace).c_str());
    } else {
      std::printf("servable       no:\n  %s\n", message.c_str());
    }
    return 1;
  }
  if (options.json) {
    std::printf(
        "%s\n",
        ToJson(*description).dump(2, ' ', true, OrderedJson::error_handler_t::replace).c_str());
  } else {
    PrintTable(*description, options.model_dir);
  }
  return description->problems.empty() ? 0 : 1;
}

}  // namespace saccade
