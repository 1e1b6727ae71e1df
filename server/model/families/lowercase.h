#pragma once
// Lower case as the reference's prompt builder makes it (Python's str.lower()).
#include <string>
#include <string_view>

#include "base/status.h"

namespace saccade {

// Full Unicode 14 lower-casing, independent of locale: the one-to-one mappings, U+0130 to "i" and
// U+0307, and U+03A3 to the final sigma U+03C2 at the end of a word. INVALID_ARGUMENT: `text` is
// not UTF-8.
absl::StatusOr<std::string> LowerCase(std::string_view text);

}  // namespace saccade
