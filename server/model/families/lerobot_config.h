#pragma once
// What the config.json files of lerobot's policies have in common. Unknown keys are ignored: newer
// releases add some. Errors name file and key.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/checkpoint.h"
#include "model/families/lerobot_policy.h"

namespace saccade {

// Bounds of what a config may say: of anything that multiplies another size, and of layers.
inline constexpr int64_t kMaxWidth = 1 << 16;
inline constexpr int64_t kMaxLayers = 4096;

// The values of keys that a config may leave out.
struct LerobotDefaults {
  std::string_view steps_key;
  int64_t max_text = 48;
};

// Whether config.json says `type`.
bool IsLerobotPolicy(const Checkpoint& checkpoint, std::string_view type);

// Fills what does not depend on the architecture: cameras (their names), adapters, horizon, widths,
// steps, periods, text length.
absl::Status ReadLerobotPolicy(const Checkpoint& checkpoint, const LerobotDefaults& defaults,
                               PolicyConfig& out);

// The square size at `key` that frames are resized to, pixels.
absl::StatusOr<uint32_t> ReadSquare(const JsonView& config, std::string_view key, int64_t fallback);

// A folder with a tokenizer: `name` inside of the checkpoint's, `fallback` inside of it, or itself.
// A published checkpoint names a hub id, whose files the user puts into `fallback`.
absl::StatusOr<std::string> FindTokenizer(const Checkpoint& checkpoint, std::string_view name,
                                          std::string_view fallback);

// "tokenizer_name" of policy_preprocessor.json; empty where there is none.
absl::StatusOr<std::string> TokenizerName(const Checkpoint& checkpoint);

// Blocks "<prefix>0.", "<prefix>1.", ... that the checkpoint has.
uint32_t CountBlocks(const Checkpoint& checkpoint, std::string_view prefix);

// Sizes of a tensor; `rank` dimensions of at most kMaxWidth (the first one may be a vocabulary).
absl::StatusOr<std::vector<uint32_t>> SizesOf(const Checkpoint& checkpoint, std::string_view name,
                                              size_t rank);

// A tower of transformers' SigLIP whose sizes are those of its tensors; `heads` as given. Frames of
// other than the table's positions are an error, or, with `any_size`, spread over the table.
absl::StatusOr<VitSpec> ReadSiglip(const Checkpoint& checkpoint, std::string_view prefix,
                                   uint32_t image_size, uint32_t heads, bool any_size);

}  // namespace saccade
