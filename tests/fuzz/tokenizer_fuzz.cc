// The first byte chooses what the rest is: 0 a tokenizer.json, 1 a tokenizer.model, 2 a text for a
// small byte-fallback tokenizer, 3 ids for it, a byte each, 4 to 7 a text for a byte-level one that
// splits as GPT-2, Llama 3, Qwen or by digits, 8 ids for it. Refused, or every id of every encoding
// is inside the vocabulary, no name comes of a client's text, every piece of every decoding is
// whole characters, and byte-level tokens are the whole text.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/json_util.h"
#include "model/text_decoder.h"
#include "model/tokenizer.h"
#include "model/tokenizer_bytes.h"
#include "model/tokenizer_spm.h"
#include "model/unicode_nfc.h"

namespace {

constexpr std::string_view kSmall = R"({
  "added_tokens": [{"id": 0, "content": "<unk>", "special": true, "normalized": false},
                   {"id": 1, "content": "<s>", "special": true, "normalized": false}],
  "normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
  "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true,
            "vocab": {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "▁": 5, "▁a": 6, "abab": 7,
                      "<0x80>": 8, "<0xBF>": 9, "<0xC2>": 10, "<0xE0>": 11, "<0xED>": 12,
                      "<0xF0>": 13, "<0xF4>": 14, "<0xFF>": 15, "<0x20>": 16, "<0x9F>": 17},
            "merges": ["a b", "▁ a", "ab ab"]},
  "decoder": {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
    {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}})";

// Every byte, some merges over bytes and characters, two names.
std::unique_ptr<const saccade::Tokenizer> ByteLevel(std::string_view steps) {
  std::string vocab;
  int32_t id = 0;
  const auto add = [&](std::string_view token) {
    if (id > 0) vocab += ", ";
    vocab += saccade::Json(token).dump() + ": " + std::to_string(id++);
  };
  for (int b = 0; b < 256; ++b) add(saccade::BytesToAlphabet(std::string(1, static_cast<char>(b))));
  for (const std::string_view text : {"ab", "abab", " a", "\r\n", "12", "é", "\n\n"}) {
    add(saccade::BytesToAlphabet(text));
  }
  auto tokenizer = saccade::Tokenizer::FromJson(
      R"({"added_tokens": [{"id": 300, "content": "<image>", "special": true},
                           {"id": 301, "content": "<loc1>", "special": false},
                           {"id": 302, "content": "\n\n\n", "special": false}],
          "model": {"type": "BPE", "merges": ["a b", "ab ab", "Ġ a", "č Ċ", "1 2", "Ã ©", "Ċ Ċ"],
                    "vocab": {)" +
      vocab + R"(}}, "decoder": {"type": "ByteLevel"},)" + std::string(steps) + "}");
  if (!tokenizer.ok()) std::abort();
  return std::move(*tokenizer);
}

constexpr std::string_view kGpt2 =
    R"("pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false})";
constexpr std::string_view kLlama3 = R"("pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Removed", "invert": true, "pattern": {"Regex":
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})";
constexpr std::string_view kQwen = R"("normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Isolated", "pattern": {"Regex":
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})";
constexpr std::string_view kDigits = R"("pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Contiguous", "pattern": {"String": "a"}},
    {"type": "Digits", "individual_digits": true},
    {"type": "ByteLevel", "add_prefix_space": false}]})";

std::string Decode(const saccade::Tokenizer& tokenizer, std::span<const int32_t> ids) {
  saccade::TextDecoder decoder(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = decoder.Push(id);
    if (!saccade::IsValidUtf8(piece)) std::abort();
    text += piece;
  }
  text += decoder.Finish();
  if (saccade::TextDecoder::Decode(tokenizer, ids) != text) std::abort();
  return text;
}

void Encode(const saccade::Tokenizer& tokenizer, std::string_view text) {
  for (const bool allow_special : {false, true}) {
    const auto ids = tokenizer.Encode(text, {.allow_special = allow_special});
    if (!ids.ok()) {
      if (saccade::IsValidUtf8(text)) std::abort();  // the only thing to refuse in a text
      continue;
    }
    for (const int32_t id : *ids) {
      if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
    }
    Decode(tokenizer, *ids);
  }
}

// What a client says comes back whole, and no name is in it. Normalised text is a fixed point.
void EncodeBytes(const saccade::Tokenizer& tokenizer, std::string_view text, bool normalizes) {
  Encode(tokenizer, text);
  const auto ids = tokenizer.Encode(text, {.allow_special = false});
  if (!ids.ok()) return;
  for (const int32_t id : *ids) {
    if (id == 300 || id == 301) std::abort();
  }
  const std::string again = Decode(tokenizer, *ids);
  if (!normalizes && again != text) std::abort();
  if (normalizes && saccade::ComposeNfc(again) != again) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] == 2 || data[0] == 3) {
    static const auto small = saccade::Tokenizer::FromJson(kSmall);
    if (!small.ok()) std::abort();
    if (data[0] == 2) {
      Encode(**small, rest);
    } else {
      Decode(**small, std::vector<int32_t>(data + 1, data + size));
    }
    return 0;
  }
  if (data[0] >= 4 && data[0] <= 8) {
    static const std::array kByteLevel = {ByteLevel(kGpt2), ByteLevel(kLlama3), ByteLevel(kQwen),
                                          ByteLevel(kDigits)};
    if (data[0] < 8) {
      EncodeBytes(*kByteLevel[data[0] - 4U], rest, data[0] == 6);
    } else {
      std::vector<int32_t> ids(data + 1, data + size);
      for (int32_t& id : ids) id += id > 250 ? 51 : 0;  // the names as well
      Decode(*kByteLevel[0], ids);
    }
    return 0;
  }
  const auto tokenizer = data[0] == 0 ? saccade::Tokenizer::FromJson(rest)
                                      : saccade::MakeSentencePieceTokenizer(rest, {});
  if (!tokenizer.ok()) return 0;
  Encode(**tokenizer, "In: What action should abab take?\nOut: <s> \xf0\x9f\xa4\x96");
  return 0;
}
