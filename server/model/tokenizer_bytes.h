#pragma once
// Byte-level tokens: every byte of a text is written as one visible character, GPT-2's alphabet, so
// that tokens are text whatever bytes they stand for.
#include <string>
#include <string_view>

namespace saccade {

std::string BytesToAlphabet(std::string_view bytes);
// The bytes that `token` stands for; as in the reference, a token with a character outside the
// alphabet stands for its own UTF-8 bytes.
std::string AlphabetToBytes(std::string_view token);

}  // namespace saccade
