#pragma once
// The normalizer of a tokenizer.json: Prepend, Replace of a String, NFC and sequences of them.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/json_util.h"
#include "model/tokenizer_parse.h"

namespace saccade {

class TextNormalizer {
 public:
  // INVALID_ARGUMENT: malformed. UNIMPLEMENTED: a part is not supported.
  static absl::StatusOr<TextNormalizer> Parse(const JsonView& view);

  // `text` is valid UTF-8, and so is what comes out.
  std::string Normalize(std::string_view text) const;

 private:
  struct Step {
    enum class Kind : uint8_t { kPrepend, kReplace, kNfc } kind = Kind::kPrepend;
    std::string from;
    std::string to;
  };
  absl::Status Add(const JsonView& view);

  std::vector<Step> steps_;
  StepBudget budget_;
};

}  // namespace saccade
