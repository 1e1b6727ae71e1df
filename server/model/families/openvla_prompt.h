#pragma once
// Instruction text to the token ids of OpenVLA's prompt, equal to the reference for ordinary text.
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/checkpoint.h"
#include "model/families/openvla_config.h"
#include "model/tokenizer.h"

namespace saccade {

inline constexpr std::string_view kTokenIdsField = "token_ids";

// kNeverFits of a prompt, which came as `field`.
absl::Status PromptTooLong(std::string_view field, std::string_view message);

// Immutable; any thread may use it.
class OpenVlaPrompt {
 public:
  // Errors name the tokenizer's file or the folder.
  static absl::StatusOr<OpenVlaPrompt> Load(const Checkpoint& checkpoint,
                                            const OpenVlaConfig& config);

  // BOS, the prompt around the lower-cased instruction, and the empty token exactly once at the
  // end. The text of a control token ("</s>") in an instruction stays text. INVALID_ARGUMENT: not
  // UTF-8.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view instruction) const;
  // Ids of a whole prompt, from a client: INVALID_ARGUMENT names "token_ids" when the first one is
  // not BOS or one is outside of the vocabulary; kNeverFits: more than the model has positions.
  absl::Status CheckIds(std::span<const int32_t> ids) const;
  // Appends the empty token unless it is there.
  void Terminate(std::vector<int32_t>& ids) const;
  int32_t bos() const { return bos_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  OpenVlaPrompt() = default;
  std::unique_ptr<const Tokenizer> tokenizer_;
  bool vicuna_ = false;
  int32_t vocab_ = 0;
  uint32_t max_positions_ = 0;
  int32_t bos_ = 0;
  int32_t empty_ = 0;
};

}  // namespace saccade
