#include "model/families/openvla_prompt.h"

#include <algorithm>
#include <string>

#include "base/strings.h"
#include "model/families/lowercase.h"

namespace saccade {
namespace {

constexpr std::string_view kBegin = "In: What action should the robot take to ";
constexpr std::string_view kEnd = "?\nOut:";
constexpr std::string_view kVicunaBegin =
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: What action should the "
    "robot take to ";
constexpr std::string_view kVicunaEnd = "? ASSISTANT:";

}  // namespace

absl::Status PromptTooLong(std::string_view field, std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kNeverFits;
  info.field = std::string(field);
  return MakeError(absl::StatusCode::kInvalidArgument, StrCat(field, ": too long: ", message),
                   info);
}

absl::StatusOr<OpenVlaPrompt> OpenVlaPrompt::Load(const Checkpoint& checkpoint,
                                                  const OpenVlaConfig& config) {
  OpenVlaPrompt prompt;
  prompt.vicuna_ = config.vicuna_prompt;
  prompt.vocab_ = static_cast<int32_t>(config.llama.vocab);
  prompt.max_positions_ = config.max_positions;
  ASSIGN_OR_RETURN(prompt.tokenizer_, Tokenizer::Load(checkpoint.dir()));
  const Tokenizer& tokenizer = *prompt.tokenizer_;
  // The patches go behind what the tokenizer puts in front of a text.
  ASSIGN_OR_RETURN(const std::vector<int32_t> plain,
                   tokenizer.Encode(kBegin, {.add_special_tokens = false}));
  ASSIGN_OR_RETURN(const std::vector<int32_t> framed, tokenizer.Encode(kBegin, {}));
  if (framed.size() != plain.size() + 1 ||
      !std::equal(plain.begin(), plain.end(), framed.begin() + 1)) {
    return absl::InvalidArgumentError(
        StrCat(checkpoint.dir(), ": the tokenizer must add exactly one token, BOS, in front"));
  }
  prompt.bos_ = framed.front();
  ASSIGN_OR_RETURN(prompt.empty_, tokenizer.EmptyTokenId());
  return prompt;
}

absl::StatusOr<std::vector<int32_t>> OpenVlaPrompt::Encode(std::string_view instruction) const {
  ASSIGN_OR_RETURN(const std::string lower, LowerCase(instruction));
  const std::string text =
      vicuna_ ? StrCat(kVicunaBegin, lower, kVicunaEnd) : StrCat(kBegin, lower, kEnd);
  ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer_->Encode(text, {.allow_special = false}));
  Terminate(ids);
  // Only a tokenizer of another model has ids that the embedding table lacks.
  const int32_t largest = *std::max_element(ids.begin(), ids.end());
  if (largest >= vocab_) {
    return absl::InvalidArgumentError(
        StrCat("the tokenizer gives id ", largest, ", but the vocabulary has ", vocab_, " ids"));
  }
  return ids;
}

absl::Status OpenVlaPrompt::CheckIds(std::span<const int32_t> ids) const {
  if (ids.empty() || ids.front() != bos_) {
    return InvalidField(kTokenIdsField, StrCat("the first id must be BOS, ", bos_));
  }
  if (ids.size() > max_positions_) {
    return PromptTooLong(kTokenIdsField, StrCat(ids.size(), " ids, more than the model's ",
                                                max_positions_, " positions"));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_) {
      return InvalidField(kTokenIdsField,
                          StrCat("id ", ids[i], " at index ", i, " is outside [0, ", vocab_, ")"));
    }
  }
  return absl::OkStatus();
}

void OpenVlaPrompt::Terminate(std::vector<int32_t>& ids) const {
  // Training prompts ended in a space, which is a token of its own (29871 in Llama 2).
  if (ids.empty() || ids.back() != empty_) ids.push_back(empty_);
}

}  // namespace saccade
