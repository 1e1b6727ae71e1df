#pragma once
// What the readers of a tokenizer.json's parts share.
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

}  // namespace saccade
