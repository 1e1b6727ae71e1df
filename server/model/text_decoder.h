#pragma once
// TextDecoder: token ids to text, one token at a time. What is returned is whole UTF-8 characters:
// a character that is spelled in bytes (byte fallback, byte-level tokens) comes with its last byte.
// All pieces together are the reference's decode(ids, skip_special_tokens=True), but for bytes of
// byte fallback that make no character: each of those becomes U+FFFD alone, where `tokenizers`
// replaces the whole run of bytes around it (it looks ahead, a stream cannot).
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "model/tokenizer.h"

namespace saccade {

class TextDecoder {
 public:
  // `tokenizer` outlives this; its decoding() is supported.
  explicit TextDecoder(const Tokenizer& tokenizer);

  // The text that `id` completes; often empty. Control tokens and ids without a token are none.
  std::string Push(int32_t id);
  // What is left of a character that never came; call once, at the end.
  std::string Finish();

  // The whole text of `ids`.
  static std::string Decode(const Tokenizer& tokenizer, std::span<const int32_t> ids);

 private:
  void PushByte(char byte, std::string& out);
  void DropBytes(std::string& out);
  void Emit(std::string_view text, std::string& out);

  const Tokenizer& tokenizer_;
  const bool byte_level_;
  uint32_t strip_;     // spaces that may still be dropped from the front
  bool first_ = true;  // no token with a text was seen yet
  std::string bytes_;  // the beginning of a character
};

}  // namespace saccade
