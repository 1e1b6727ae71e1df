#include "model/text_decoder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "model/tokenizer_bytes.h"

namespace saccade {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

std::optional<char> ByteOf(std::string_view token) {
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  const int high = digit(token[3]);
  const int low = digit(token[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<char>(high * 16 + low);
}

// Whether `bytes`, not empty, can be continued to a character: no when they are one, or never will.
bool IsBeginning(std::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  const size_t size = lead < 0xC2 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 1;
  if (bytes.size() >= size) return false;
  // The second byte decides about overlong forms, surrogates and the end of Unicode, so with any
  // continuation behind it what is there now is valid or not.
  std::string whole(bytes);
  const bool low_second = lead != 0xE0 && lead != 0xF0;
  while (whole.size() < size) {
    whole.push_back(whole.size() == 1 && !low_second ? '\xBF' : '\x80');
  }
  return IsValidUtf8(whole);
}

}  // namespace

TextDecoder::TextDecoder(const Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      byte_level_(tokenizer.decoding().byte_level),
      strip_(tokenizer.decoding().strip) {}

void TextDecoder::Emit(std::string_view text, std::string& out) {
  while (strip_ > 0 && text.starts_with(' ')) {
    text.remove_prefix(1);
    --strip_;
  }
  if (!text.empty()) strip_ = 0;
  out.append(text);
}

void TextDecoder::DropBytes(std::string& out) {
  // Of byte-level tokens the beginning of a character is replaced as one, of byte fallback each
  // byte.
  const size_t marks = byte_level_ ? std::min<size_t>(bytes_.size(), 1) : bytes_.size();
  for (size_t i = 0; i < marks; ++i) Emit(kReplacement, out);
  bytes_.clear();
}

void TextDecoder::PushByte(char byte, std::string& out) {
  bytes_.push_back(byte);
  if (IsBeginning(bytes_)) return;
  if (!IsValidUtf8(bytes_)) {
    // What was there never becomes a character; the new byte may begin one.
    bytes_.pop_back();
    DropBytes(out);
    bytes_.push_back(byte);
    if (IsBeginning(bytes_)) return;
    if (!IsValidUtf8(bytes_)) return DropBytes(out);
  }
  Emit(bytes_, out);
  bytes_.clear();
}

std::string TextDecoder::Push(int32_t id) {
  std::string out;
  const std::optional<std::string_view> token = tokenizer_.IdToToken(id);
  if (!token || tokenizer_.IsControl(id)) return out;
  const Tokenizer::Decoding& decoding = tokenizer_.decoding();
  const bool first = std::exchange(first_, false);
  if (byte_level_) {
    for (const char c : AlphabetToBytes(*token)) PushByte(c, out);
    return out;
  }
  const std::optional<char> byte = decoding.bytes ? ByteOf(*token) : std::nullopt;
  if (byte) {
    PushByte(*byte, out);
    return out;
  }
  DropBytes(out);
  std::string text;
  std::string_view rest = *token;
  while (!rest.empty()) {
    const size_t at = decoding.mark.empty() ? std::string_view::npos : rest.find(decoding.mark);
    text.append(rest.substr(0, at));
    if (at == std::string_view::npos) break;
    if (!(first && decoding.bare_start)) text.append(decoding.space);
    rest.remove_prefix(at + decoding.mark.size());
  }
  Emit(text, out);
  return out;
}

std::string TextDecoder::Finish() {
  std::string out;
  DropBytes(out);
  return out;
}

std::string TextDecoder::Decode(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
  TextDecoder decoder(tokenizer);
  std::string text;
  for (const int32_t id : ids) text += decoder.Push(id);
  return text + decoder.Finish();
}

}  // namespace saccade
