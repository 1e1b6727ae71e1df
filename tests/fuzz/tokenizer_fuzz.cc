// The first byte chooses what the rest is: 0 a tokenizer.json, 1 a tokenizer.model, 2 a text for a
// small byte-fallback tokenizer, 3 ids for it, a byte each. Refused, or every id of every encoding
// is inside the vocabulary, and every piece of every decoding is whole characters.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/text_decoder.h"
#include "model/tokenizer.h"
#include "model/tokenizer_spm.h"

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

void Decode(const saccade::Tokenizer& tokenizer, std::span<const int32_t> ids) {
  saccade::TextDecoder decoder(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = decoder.Push(id);
    if (!saccade::IsValidUtf8(piece)) std::abort();
    text += piece;
  }
  if (saccade::TextDecoder::Decode(tokenizer, ids) != text + decoder.Finish()) std::abort();
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
  const auto tokenizer = data[0] == 0 ? saccade::Tokenizer::FromJson(rest)
                                      : saccade::MakeSentencePieceTokenizer(rest, {});
  if (!tokenizer.ok()) return 0;
  Encode(**tokenizer, "In: What action should abab take?\nOut: <s> \xf0\x9f\xa4\x96");
  return 0;
}
