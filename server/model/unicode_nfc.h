#pragma once
// Unicode normalization form C, as the normalizer NFC of `tokenizers` has it: of Unicode 9.
#include <string>
#include <string_view>

namespace saccade {

// `text` is valid UTF-8. O(n log n).
std::string ComposeNfc(std::string_view text);

}  // namespace saccade
