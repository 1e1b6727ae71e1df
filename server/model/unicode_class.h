#pragma once
// What the pre-tokenizers of byte-level models ask of a character.
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace saccade {

enum class CharClass : uint8_t {
  kOther,
  kLetter,      // \p{L}
  kNumber,      // \p{N}
  kLateNumber,  // a number since Unicode 17: one to Digits, kOther to the regular expressions
  kSpace,       // \s: White_Space
};

struct Character {
  char32_t code = 0;
  size_t size = 0;  // bytes
};

// The character that begins at text[at]; `text` is valid UTF-8.
Character CharacterAt(std::string_view text, size_t at);

CharClass ClassOf(char32_t code);

}  // namespace saccade
