// Ids to text: equal to the reference where both say something, whole characters always.
#include "model/text_decoder.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/json_util.h"
#include "model/tokenizer.h"
#include "model/tokenizer_spm.h"

namespace saccade {
namespace {

const std::string kData = std::string(SACCADE_SOURCE_DIR) + "/tests/data/tokenizers/";
const std::string kOpenVla =
    std::string(SACCADE_SOURCE_DIR) + "/tests/golden/data/openvla/checkpoint";

std::unique_ptr<const Tokenizer> Load(const std::string& dir) {
  auto tokenizer = Tokenizer::Load(dir);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

// A tokenizer of bytes, a few words and what `decoder` says.
std::unique_ptr<const Tokenizer> Small(const std::string& decoder) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  std::string vocab = R"("<unk>": 0, "</s>": 1, "▁a": 2, "b▁▁c": 3, "▁": 4, "é": 5, "▁▁": 6)";
  for (size_t b = 0; b < 256; ++b) {
    vocab += std::string(", \"<0x") + kHex[b >> 4] + kHex[b & 15] + ">\": " + std::to_string(7 + b);
  }
  auto tokenizer = Tokenizer::FromJson(
      R"({"added_tokens": [{"id": 0, "content": "<unk>", "special": true},
                           {"id": 1, "content": "</s>", "special": true},
                           {"id": 300, "content": "<go>", "special": false}],
          "model": {"type": "BPE", "byte_fallback": true, "vocab": {)" +
      vocab + R"(}, "merges": []}, "decoder": )" + decoder + "}");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

const std::string kLlama = R"({"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
    {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})";

int32_t Byte(int b) { return 7 + b; }

std::vector<int32_t> Bytes(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(Byte(static_cast<unsigned char>(c)));
  return ids;
}

// Also piece by piece: each whole characters, together the same.
std::string Decode(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  TextDecoder decoder(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = decoder.Push(id);
    EXPECT_TRUE(IsValidUtf8(piece)) << id;
    text += piece;
  }
  text += decoder.Finish();
  EXPECT_EQ(TextDecoder::Decode(tokenizer, ids), text);
  return text;
}

TEST(TextDecoder, WhatWasEncodedComesBack) {
  // Texts that the tokenizers keep as they are.
  for (const std::string& dir : {kOpenVla, kData + "llama_metaspace", kData + "gemma"}) {
    const auto tokenizer = Load(dir);
    ASSERT_NE(tokenizer, nullptr);
    ASSERT_TRUE(tokenizer->decoding().supported);
    for (const std::string text :
         {"In: What action should the robot take?\nOut:", "two  spaces", "naïve café",
          "日本語 🤖 x", "\t tabs", "<s> is text", "a"}) {
      const auto ids = tokenizer->Encode(text, {.allow_special = false});
      ASSERT_TRUE(ids.ok());
      EXPECT_EQ(Decode(*tokenizer, *ids), text) << dir;
    }
  }
}

TEST(TextDecoder, SpacesControlTokensAndAddedOnes) {
  const auto tokenizer = Small(kLlama);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(Decode(*tokenizer, {2, 2}), "a a");
  EXPECT_EQ(Decode(*tokenizer, {1, 2, 1, 3, 0, 300}), "ab  c<go>");
  EXPECT_EQ(Decode(*tokenizer, {4, 2}), " a");  // one space of the start is dropped
  EXPECT_EQ(Decode(*tokenizer, {6, 2}), "  a");
  EXPECT_EQ(Decode(*tokenizer, {5, 4, 5}), "é é");
  EXPECT_EQ(Decode(*tokenizer, {Byte(' '), 2}), " a");
  EXPECT_EQ(Decode(*tokenizer, {-1, 5, 301, 1 << 30, 264}), "é");  // ids without a token
  EXPECT_EQ(Decode(*tokenizer, {}), "");
}

TEST(TextDecoder, BytesWaitForTheirCharacter) {
  const auto tokenizer = Small(kLlama);
  TextDecoder decoder(*tokenizer);
  const std::string robot = "🤖";
  for (size_t i = 0; i < 4; ++i) {
    const std::string piece = decoder.Push(Byte(static_cast<unsigned char>(robot[i])));
    EXPECT_EQ(piece, i < 3 ? "" : robot);
  }
  EXPECT_EQ(decoder.Push(Byte(0xE3)), "");
  EXPECT_EQ(decoder.Push(1), "");  // a control token is not there
  EXPECT_EQ(decoder.Push(Byte(0x81)), "");
  EXPECT_EQ(decoder.Push(2), "\uFFFD\uFFFD a");
  EXPECT_EQ(decoder.Push(Byte(0xF0)), "");
  EXPECT_EQ(decoder.Finish(), "\uFFFD");
}

TEST(TextDecoder, BytesThatMakeNoCharacterAreReplacedAlone) {
  const auto tokenizer = Small(kLlama);
  const auto decode = [&](std::string_view bytes) { return Decode(*tokenizer, Bytes(bytes)); };
  EXPECT_EQ(decode("a\xFF"
                   "b"),
            "a\uFFFDb");
  EXPECT_EQ(decode("\x80\xC3\xA9"), "\uFFFDé");
  EXPECT_EQ(decode("\xC3\xC3\xA9"), "\uFFFDé");
  EXPECT_EQ(decode("\xE0\x80\x80"), "\uFFFD\uFFFD\uFFFD");            // overlong
  EXPECT_EQ(decode("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");            // a surrogate
  EXPECT_EQ(decode("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");  // past the end
  EXPECT_EQ(decode("\xF4\x8F\xBF\xBF"), "\U0010FFFF");
  EXPECT_EQ(decode("\xF0\x90\x80\x80"), "\U00010000");
  EXPECT_EQ(decode("\xED\x9F\xBF\xEE\x80\x80"), "\uD7FF\uE000");
  EXPECT_EQ(decode("\xE2\x82"), "\uFFFD\uFFFD");
}

TEST(TextDecoder, MetaspaceDropsTheMarksOfTheFirstToken) {
  const auto first =
      Small(R"({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true})");
  EXPECT_EQ(Decode(*first, {6, 2, 2}), " a a");
  EXPECT_EQ(Decode(*first, {2, 6, 2}), "a   a");
  const auto never = Small(
      R"({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true,
          "prepend_scheme": "never"})");
  EXPECT_EQ(Decode(*never, {2, 2}), " a a");
  EXPECT_EQ(Decode(*first, Bytes("a")), "<0x61>");  // no byte fallback there
}

// Byte-level tokens: a character across tokens is whole, what is none is replaced by parts as long
// as possible, a token with a character outside the alphabet stands for itself.
TEST(TextDecoder, ByteLevelTokensAreBytes) {
  const auto tokenizer = Tokenizer::FromJson(R"({
      "added_tokens": [{"id": 9, "content": "</s>", "special": true},
                       {"id": 10, "content": "<go>", "special": false}],
      "model": {"type": "BPE", "merges": [], "vocab": {
          "a": 0, "\u0120b": 1, "\u00c3": 2, "\u00a9": 3, "\u00e2\u0124": 4, "\u00ac": 5,
          "\u010a": 6, "\u2581x": 7, "\u00f0\u0141\u0131": 8}},
      "decoder": {"type": "ByteLevel"}})");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto decode = [&](const std::vector<int32_t>& ids) { return Decode(**tokenizer, ids); };
  EXPECT_EQ(decode({1, 0, 1, 6}), " ba b\n");  // nothing is stripped
  EXPECT_EQ(decode({2, 3}), "é");
  EXPECT_EQ(decode({4, 9, 5}), "€");  // a control token is not there
  EXPECT_EQ(decode({4, 0}), "\uFFFDa");
  EXPECT_EQ(decode({3, 5, 2}), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(decode({2, 2, 3}), "\uFFFDé");
  EXPECT_EQ(decode({7, 10}), "\u2581x<go>");
}

TEST(TextDecoder, OtherDecodersLeaveTheTokenizerWithoutOne) {
  EXPECT_FALSE(Small(R"({"type": "WordPiece", "prefix": "##"})")->decoding().supported);
  EXPECT_FALSE(Small(R"({"type": "Sequence", "decoders": [{"type": "ByteLevel"},
                        {"type": "ByteFallback"}]})")
                   ->decoding()
                   .supported);
  EXPECT_FALSE(Small("null")->decoding().supported);
  EXPECT_FALSE(
      Small(R"({"type": "Strip", "content": " ", "start": 0, "stop": 1})")->decoding().supported);
  EXPECT_FALSE(Small(R"({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"})")
                   ->decoding()
                   .supported);
  EXPECT_TRUE(Small(kLlama)->decoding().supported);
}

TEST(TextDecoder, SentencePieceWritesTheSameText) {
  const auto json = Load(kOpenVla);
  const auto model = ReadFile(kOpenVla + "/tokenizer.model", 128 << 20);
  ASSERT_TRUE(model.ok());
  const auto spm = MakeSentencePieceTokenizer(*model, {});
  ASSERT_TRUE(spm.ok()) << spm.status();
  std::mt19937 rng(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 30; ++i) {
      ids.push_back(static_cast<int32_t>(rng() % (rng() % 2 == 0 ? 260 : 32000)));
    }
    EXPECT_EQ(Decode(**spm, ids), Decode(*json, ids));
  }
}

// Whatever a model samples: the pieces are whole characters.
TEST(TextDecoder, AnyIdsGiveValidText) {
  const auto small = Small(kLlama);
  const auto llama = Load(kOpenVla);
  std::mt19937 rng(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> ids;
    for (uint32_t i = rng() % 12; i > 0; --i) {
      ids.push_back(rng() % 4 == 0 ? static_cast<int32_t>(rng() % 310)
                                   : Byte(static_cast<int>(128 + rng() % 128)));
    }
    Decode(*small, ids);
    for (int32_t& id : ids) id = static_cast<int32_t>(rng() % 300);
    Decode(*llama, ids);
  }
}

}  // namespace
}  // namespace saccade
