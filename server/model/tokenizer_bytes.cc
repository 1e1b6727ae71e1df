#include "model/tokenizer_bytes.h"

#include <array>
#include <cstdint>

#include "model/unicode_class.h"

namespace saccade {
namespace {

// Visible Latin-1 characters stand for themselves, the other bytes in turn for U+0100 and on.
struct Alphabet {
  std::array<char32_t, 256> characters{};
  std::array<int16_t, 0x144> bytes{};  // -1: not of the alphabet
  Alphabet() {
    bytes.fill(-1);
    char32_t next = 0x100;
    for (char32_t b = 0; b < 256; ++b) {
      const bool visible = (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
      characters[b] = visible ? b : next++;
      bytes[characters[b]] = static_cast<int16_t>(b);
    }
  }
};

const Alphabet& TheAlphabet() {
  static const Alphabet kAlphabet;
  return kAlphabet;
}

}  // namespace

std::string BytesToAlphabet(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() + bytes.size() / 4);
  for (const char b : bytes) {
    const char32_t c = TheAlphabet().characters[static_cast<unsigned char>(b)];
    if (c >= 0x80) out.push_back(static_cast<char>(0xC0 | c >> 6));
    out.push_back(static_cast<char>(c < 0x80 ? c : 0x80 | (c & 0x3F)));
  }
  return out;
}

std::string AlphabetToBytes(std::string_view token) {
  std::string out;
  for (size_t i = 0; i < token.size();) {
    const Character c = CharacterAt(token, i);
    if (c.code >= TheAlphabet().bytes.size() || TheAlphabet().bytes[c.code] < 0) {
      return std::string(token);
    }
    out.push_back(static_cast<char>(TheAlphabet().bytes[c.code]));
    i += c.size;
  }
  return out;
}

}  // namespace saccade
