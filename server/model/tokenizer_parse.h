#pragma once
// What the readers of a tokenizer.json's parts share.
#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model/json_util.h"

namespace saccade {

// UNIMPLEMENTED "<file>: <place>: <what> is not supported".
absl::Status UnsupportedPart(const JsonView& at, std::string_view what);

// The text of `step`'s {"pattern": {"String": text}}, not empty.
absl::StatusOr<std::string> StringPattern(const JsonView& step);

// `from` is not empty.
std::string ReplaceAll(std::string_view text, std::string_view from, std::string_view to);

// Bounds what a chain of steps makes of a text, however often a file repeats them: no more than a
// few steps, and no more than a hundred times the length.
class StepBudget {
 public:
  // One more step, which makes a byte `growth` bytes at most. INVALID_ARGUMENT: too much.
  absl::Status Add(const JsonView& step, size_t growth);

 private:
  size_t steps_ = 0;
  size_t growth_ = 1;
};

}  // namespace saccade
