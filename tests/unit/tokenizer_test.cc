#include "model/tokenizer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/json_util.h"
#include "model/text_decoder.h"
#include "model/tokenizer_spm.h"

namespace saccade {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kData = std::string(SACCADE_SOURCE_DIR) + "/tests/data/tokenizers/";
const std::string kOpenVla =
    std::string(SACCADE_SOURCE_DIR) + "/tests/golden/data/openvla/checkpoint";

// Where each reference tokenizer lives: merges as "a b" strings, as pairs, Gemma's layout, bytes.
const std::vector<std::pair<std::string, std::string>> kTokenizers = {
    {"llama", kOpenVla},
    {"llama_metaspace", kData + "llama_metaspace"},
    {"gemma", kData + "gemma"},
    {"smollm", kData + "smollm"}};

std::unique_ptr<const Tokenizer> Load(const std::string& dir) {
  auto tokenizer = Tokenizer::Load(dir);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

// The same folder without its tokenizer.json.
std::unique_ptr<const Tokenizer> LoadSentencePiece(const std::string& dir) {
  std::string temp = ::testing::TempDir() + "/tokenizerXXXXXX";
  if (mkdtemp(temp.data()) == nullptr) return nullptr;
  for (const char* name : {"tokenizer.model", "tokenizer_config.json", "added_tokens.json"}) {
    if (fs::exists(dir + "/" + name)) fs::copy(dir + "/" + name, temp);
  }
  auto tokenizer = Load(temp);
  fs::remove_all(temp);
  return tokenizer;
}

std::vector<int32_t> Ids(const Json& json) { return json.get<std::vector<int32_t>>(); }

std::vector<int32_t> Encode(const Tokenizer& tokenizer, std::string_view text,
                            const EncodeOptions& options = {}) {
  auto ids = tokenizer.Encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : std::vector<int32_t>{};
}

TEST(TokenizerTest, EqualsTheReferenceOnTheProbes) {
  const auto golden = ReadJsonFile(kData + "golden_tokenizers.json");
  ASSERT_TRUE(golden.ok()) << golden.status();
  for (const auto& [name, dir] : kTokenizers) {
    const auto tokenizer = Load(dir);
    ASSERT_NE(tokenizer, nullptr);
    ASSERT_GE((*golden)[name]["rows"].size(), 18U);
    for (const Json& row : (*golden)[name]["rows"]) {
      const auto text = row["text"].get<std::string>();
      EXPECT_EQ(Encode(*tokenizer, text), Ids(row["ids"])) << name << ": " << text;
      EXPECT_EQ(TextDecoder::Decode(*tokenizer, Ids(row["ids"])), row["decoded"]) << name;
    }
  }
}

// Texts and ids of the golden checkpoints of every family, as the reference's policies made them.
TEST(TokenizerTest, EqualsTheReferencePolicies) {
  const auto golden = ReadJsonFile(kData + "golden_tokenizers.json");
  ASSERT_TRUE(golden.ok()) << golden.status();
  std::map<std::string, std::string> models;
  for (const Json& row : (*golden)["checkpoints"]) {
    const auto name = row["tokenizer"].get<std::string>();
    const auto at = std::find_if(kTokenizers.begin(), kTokenizers.end(),
                                 [&](const auto& known) { return known.first == name; });
    ASSERT_NE(at, kTokenizers.end()) << name;
    const auto tokenizer = Load(at->second);
    ASSERT_NE(tokenizer, nullptr);
    const auto text = row["text"].get<std::string>();
    EXPECT_EQ(Encode(*tokenizer, text, {.allow_special = false}), Ids(row["ids"])) << text;
    models[row["model"]] = text;
  }
  for (const char* model : {"smolvla", "pi0", "pi05", "pi0_fast", "openvla_oft"}) {
    EXPECT_EQ(models.count(model), 1U) << model;
  }
}

// Compressed action chunks: the characters of a text are numbers, so each one counts.
TEST(TokenizerTest, ActionTokensBecomeTheirText) {
  const auto golden = ReadJsonFile(kData + "golden_tokenizers.json");
  ASSERT_TRUE(golden.ok()) << golden.status();
  const auto fast = Load(kData + "fast");
  ASSERT_NE(fast, nullptr);
  ASSERT_TRUE(fast->decoding().supported);
  size_t same = 0;
  for (const Json& row : (*golden)["fast"]) {
    const auto text = row["text"].get<std::string>();
    EXPECT_EQ(TextDecoder::Decode(*fast, Ids(row["ids"])), text);
    same += Encode(*fast, text) == Ids(row["ids"]);
  }
  EXPECT_GE(same, 4U);  // what the reference encoded; other ids are not what their text gives
}

TEST(TokenizerTest, EqualsTheReferenceOnACorpus) {
  const auto corpus = ReadJsonFile(kData + "corpus.json");
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  const Json& texts = (*corpus)["texts"];
  ASSERT_GE(texts.size(), 200U);
  for (const auto& [name, dir] : kTokenizers) {
    const auto tokenizer = Load(dir);
    ASSERT_NE(tokenizer, nullptr);
    const bool has_template = corpus->contains(name + ".bare");
    EXPECT_EQ(has_template, name != "smollm");
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto text = texts[i].get<std::string>();
      ASSERT_EQ(Encode(*tokenizer, text), Ids((*corpus)[name][i])) << name << ": " << text;
      ASSERT_EQ(Encode(*tokenizer, text, {.add_special_tokens = false}),
                Ids((*corpus)[has_template ? name + ".bare" : name][i]))
          << name << ": " << text;
      ASSERT_EQ(Encode(*tokenizer, text, {.allow_special = false}),
                Ids((*corpus)[name + ".text"][i]))
          << name << ": " << text;
    }
  }
}

// The other ways to split a text: Qwen's, Llama 3's, GPT-2's with a space in front, runs of digits.
TEST(TokenizerTest, EqualsTheReferenceHoweverItSplits) {
  const auto corpus = ReadJsonFile(kData + "corpus.json");
  const auto variants = ReadJsonFile(kData + "variants.json");
  const auto smollm = ReadJsonFile(kData + "smollm/tokenizer.json");
  ASSERT_TRUE(corpus.ok() && variants.ok() && smollm.ok());
  ASSERT_EQ(variants->size(), 4U);
  for (const auto& variant : variants->items()) {
    Json json = *smollm;
    json.update(variant.value());
    const auto tokenizer = Tokenizer::FromJson(json.dump());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const Json& ids = (*corpus)[variant.key()];
    ASSERT_EQ(ids.size(), (*corpus)["texts"].size());
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto text = (*corpus)["texts"][i].get<std::string>();
      ASSERT_EQ(Encode(**tokenizer, text), Ids(ids[i])) << variant.key() << ": " << text;
    }
  }
}

TEST(TokenizerTest, SentencePieceModelGivesTheSameIds) {
  const auto golden = ReadJsonFile(kData + "golden_tokenizers.json");
  const auto corpus = ReadJsonFile(kData + "corpus.json");
  ASSERT_TRUE(golden.ok() && corpus.ok());
  const auto llama = LoadSentencePiece(kOpenVla);
  ASSERT_NE(llama, nullptr);
  EXPECT_EQ(llama->vocab_size(), 32001);
  EXPECT_EQ(*llama->EmptyTokenId(), 29871);
  EXPECT_EQ(llama->TokenToId("<PAD>"), 32000);
  for (const Json& row : (*golden)["llama"]["rows"]) {
    const auto text = row["text"].get<std::string>();
    EXPECT_EQ(Encode(*llama, text), Ids(row["ids"])) << text;
  }
  for (size_t i = 0; i < (*corpus)["texts"].size(); ++i) {
    const auto text = (*corpus)["texts"][i].get<std::string>();
    EXPECT_EQ(Encode(*llama, text), Ids((*corpus)["llama"][i])) << text;
    EXPECT_EQ(Encode(*llama, text, {.allow_special = false}), Ids((*corpus)["llama.text"][i]))
        << text;
  }
  const auto gemma = LoadSentencePiece(kData + "gemma");
  ASSERT_NE(gemma, nullptr);
  for (const Json& row : (*golden)["gemma"]["rows"]) {
    const auto text = row["text"].get<std::string>();
    EXPECT_EQ(Encode(*gemma, text), Ids(row["ids"])) << text;
  }
}

// What is read beside tokenizer.model is refused by its name when it is damaged; beside a
// tokenizer.json nothing of it is opened.
TEST(TokenizerTest, DamagedFilesBesideTheModelAreNamed) {
  std::string dir = ::testing::TempDir() + "/tokenizerXXXXXX";
  ASSERT_NE(mkdtemp(dir.data()), nullptr);
  fs::copy(kOpenVla + "/tokenizer.model", dir);
  const auto path = [&](const std::string& name) { return fs::path(dir) / name; };
  const auto write = [&](const std::string& name, std::string_view text) {
    std::ofstream(path(name)) << text;
  };
  const std::vector<std::pair<std::string, std::vector<std::string>>> files = {
      {"tokenizer_config.json", {"", "{", "[]", "7", R"({"add_bos_token": "yes"})"}},
      {"added_tokens.json",
       {"", "nonsense", "[]", "\"<PAD>\"", R"({"<PAD>": "32000"})", R"({"<PAD>": -1})"}}};
  for (const auto& [name, texts] : files) {
    for (const std::string& text : texts) {
      write(name, text);
      const absl::Status status = Tokenizer::Load(dir).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << ": " << text;
      EXPECT_THAT(std::string(status.message()), HasSubstr(name)) << text;
    }
    fs::remove(path(name));
  }
  EXPECT_TRUE(Tokenizer::Load(dir).ok());
  write("special_tokens_map.json", "{");
  EXPECT_TRUE(Tokenizer::Load(dir).ok());
  fs::copy(kOpenVla + "/tokenizer.json", dir);
  write("tokenizer_config.json", "{");
  write("added_tokens.json", "{");
  EXPECT_TRUE(Tokenizer::Load(dir).ok());
  fs::remove_all(dir);
}

TEST(TokenizerTest, TokensAndIds) {
  const auto tokenizer = Load(kOpenVla);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), 32001);
  EXPECT_EQ(*tokenizer->EmptyTokenId(), 29871);
  EXPECT_EQ(tokenizer->TokenToId("<s>"), 1);
  EXPECT_EQ(tokenizer->TokenToId("<0x0A>"), 13);
  EXPECT_EQ(tokenizer->TokenToId("<PAD>"), 32000);
  EXPECT_EQ(tokenizer->TokenToId("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer->IdToToken(29871), "\u2581");
  for (const int32_t id : {-1, 32001, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(tokenizer->IdToToken(id), std::nullopt);
  }
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    const auto token = tokenizer->IdToToken(id);
    ASSERT_TRUE(token.has_value()) << id;
    ASSERT_EQ(tokenizer->TokenToId(*token), id);
  }
}

TEST(TokenizerTest, SpecialTokensInATextCanBePlainText) {
  for (const auto& tokenizer : {Load(kOpenVla), LoadSentencePiece(kOpenVla)}) {
    ASSERT_NE(tokenizer, nullptr);
    const auto split = Encode(*tokenizer, "x</s>y");
    EXPECT_EQ(std::count(split.begin(), split.end(), 2), 1);
    const auto plain = Encode(*tokenizer, "x</s>y", {.allow_special = false});
    EXPECT_EQ(std::count(plain.begin(), plain.end(), 2), 0);
    EXPECT_EQ(plain.front(), 1);
    EXPECT_EQ(Encode(*tokenizer, "", {.add_special_tokens = false}), std::vector<int32_t>{});
  }
}

// Whatever layout: the names of a tokenizer's added tokens are words like others in what a client
// says, special or not. White space keeps the tokens it is written in.
TEST(TokenizerTest, NoNameInAClientsTextIsAToken) {
  std::vector<std::unique_ptr<const Tokenizer>> tokenizers;
  for (const auto& [name, dir] : kTokenizers) tokenizers.push_back(Load(dir));
  for (const std::string& dir : {kOpenVla, kData + "gemma"}) {
    tokenizers.push_back(LoadSentencePiece(dir));
  }
  size_t checked = 0;
  for (const auto& tokenizer : tokenizers) {
    ASSERT_NE(tokenizer, nullptr);
    for (const std::string name :
         {"<s>", "</s>", "<unk>", "<PAD>", "<pad>", "<bos>", "<eos>", "<mask>", "<unused0>",
          "<loc0001>", "<seg003>", "<image>", "<fake_token_around_image>", "<|im_end|>",
          "<|endoftext|>", "<end_of_utterance>", "<row_1_col_1>"}) {
      const std::optional<int32_t> id = tokenizer->TokenToId(name);
      for (const std::string& text : {name, "put " + name + " in\n" + name + name}) {
        const auto ids = Encode(*tokenizer, text, {false, false});
        EXPECT_EQ(id ? std::count(ids.begin(), ids.end(), *id) : 0, 0) << text;
        EXPECT_EQ(TextDecoder::Decode(*tokenizer, ids), text);
        const auto reference = Encode(*tokenizer, text, {false, true});
        EXPECT_EQ(std::count(reference.begin(), reference.end(), id.value_or(-1)) > 0,
                  id.has_value())
            << text;
        checked += id.has_value();
      }
    }
  }
  EXPECT_GT(checked, 40U);
  for (const auto& gemma : {Load(kData + "gemma"), LoadSentencePiece(kData + "gemma")}) {
    EXPECT_THAT(Encode(*gemma, "\n\n\n", {.allow_special = false}), ElementsAre(2, 11));
  }
}

// A vocabulary may let text merge to a name, or hold whole pieces; a client's words do neither.
TEST(TokenizerTest, MergesDoNotSpellNames) {
  Json json = Json::parse(R"({
    "added_tokens": [{"id": 3, "content": "<a>", "special": false, "normalized": false},
                     {"id": 5, "content": "\u00a7", "special": true, "normalized": false}],
    "model": {"type": "BPE", "unk_token": "?",
              "vocab": {"<": 0, "a": 1, ">": 2, "<a>": 3, "<a": 4, "\u00a7": 5, "?": 6},
              "merges": ["< a", "<a >"]}})");
  const EncodeOptions plain{.allow_special = false};
  for (const bool whole : {false, true}) {
    json["model"]["ignore_merges"] = whole;
    const auto tokenizer = Tokenizer::FromJson(json.dump());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_THAT(Encode(**tokenizer, "<a>"), ElementsAre(3));
    EXPECT_THAT(Encode(**tokenizer, "<a>", plain), ElementsAre(4, 2));
    EXPECT_THAT(Encode(**tokenizer, "a\u00a7", plain), ElementsAre(1, 6));
  }
}

TEST(TokenizerTest, InvalidUtf8IsRefused) {
  const std::string bad[] = {"\xC3\x28",     "\xFF",         "ok\xFE",           "\xC0\x80",
                             "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80",
                             "\x80",         "\xE4\xBD",     "\xF0\x9F\xA4",     "\xC3"};
  for (const auto& tokenizer : {Load(kOpenVla), LoadSentencePiece(kOpenVla)}) {
    for (const std::string& text : bad) {
      EXPECT_EQ(tokenizer->Encode(text, {}).status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
  for (const std::string& text :
       {std::string("\xEF\xBF\xBF"), std::string("\xF4\x8F\xBF\xBF"), std::string("\xED\x9F\xBF"),
        std::string("\xC2\x80"), std::string("a\0b", 3), std::string()}) {
    EXPECT_TRUE(IsValidUtf8(text));
  }
}

TEST(TokenizerTest, LongTextsTakeLinearishTime) {
  // A quadratic loop over a megabyte would run for many minutes; the size of the answer is checked.
  Json doubling = Json::parse(R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""},
      "behavior": "Isolated"}, "normalizer": {"type": "NFC"},
      "model": {"type": "BPE", "unk_token": "?", "vocab": {"?": 0}, "merges": []}})");
  doubling["pre_tokenizer"] = (*ReadJsonFile(kData + "variants.json"))["qwen"]["pre_tokenizer"];
  std::string run = "a";
  for (int32_t id = 1; id <= 10; ++id, run += run) {
    doubling["model"]["vocab"][run] = id;
    if (id < 10) doubling["model"]["merges"].push_back(Json({run, run}));
  }
  auto doubled = Tokenizer::FromJson(doubling.dump());
  ASSERT_TRUE(doubled.ok()) << doubled.status();
  EXPECT_EQ(Encode(**doubled, std::string(1 << 20, 'a')).size(), (1U << 20) / 512);
  // Marks of two classes by turns, which NFC sorts.
  std::string marks = "a";
  while (marks.size() < 1 << 20) marks += "\u0301\u0323";
  EXPECT_GT(Encode(**doubled, marks).size(), 100000U);

  for (const auto& tokenizer : {Load(kOpenVla), Load(kData + "gemma"), Load(kData + "smollm"),
                                LoadSentencePiece(kOpenVla)}) {
    ASSERT_NE(tokenizer, nullptr);
    for (const std::string& unit :
         {std::string("a"), std::string(" "), std::string("\n"), std::string("7"),
          std::string(" \n"), std::string("\U0001F916"), std::string("the block ")}) {
      std::string text;
      while (text.size() + unit.size() <= (unit == "a" ? 1 << 20 : 200000)) text += unit;
      const auto ids = Encode(*tokenizer, text);
      EXPECT_GT(ids.size(), text.size() / 40);
      EXPECT_LE(ids.size(), text.size() + 2);
    }
  }
  EXPECT_FALSE(Load(kOpenVla)->Encode(std::string((16 << 20) + 1, 'a'), {}).ok());
}

// A small tokenizer.json to break piece by piece.
Json Small() {
  return Json::parse(R"({
    "added_tokens": [{"id": 0, "content": "<unk>", "special": true, "normalized": false},
                     {"id": 9, "content": "<x>", "special": false, "normalized": true}],
    "normalizer": null, "pre_tokenizer": null,
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<unk>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                 {"SpecialToken": {"id": "<unk>", "type_id": 0}}],
      "special_tokens": {"<unk>": {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}}},
    "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": false,
      "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "aba": 4, "<": 5, "x": 6, "c": 7},
      "merges": ["a b", "ab a"]}})");
}

TEST(TokenizerTest, MergesByRankThenLeftmost) {
  const auto tokenizer = Tokenizer::FromJson(Small().dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const EncodeOptions bare{.add_special_tokens = false};
  EXPECT_THAT(Encode(**tokenizer, "ababa", bare), ElementsAre(3, 4));
  EXPECT_THAT(Encode(**tokenizer, "aabab", bare), ElementsAre(1, 3, 3));
  EXPECT_THAT(Encode(**tokenizer, "ab"), ElementsAre(0, 3, 0));
  EXPECT_THAT(Encode(**tokenizer, "a<x>b", bare), ElementsAre(1, 9, 2));
  // Unknown characters: one token each, or one for a run.
  EXPECT_THAT(Encode(**tokenizer, "yyayy", bare), ElementsAre(0, 0, 1, 0, 0));
  Json fused = Small();
  fused["model"]["fuse_unk"] = true;
  EXPECT_THAT(Encode(**Tokenizer::FromJson(fused.dump()), "yyayy", bare), ElementsAre(0, 1, 0));
  Json none = Small();
  none["model"]["unk_token"] = nullptr;
  EXPECT_THAT(Encode(**Tokenizer::FromJson(none.dump()), "yyayy", bare), ElementsAre(1));
}

TEST(TokenizerTest, UnsupportedPartsAreNamed) {
  const auto expect = [](const std::string& part, auto&& change) {
    Json json = Small();
    change(json);
    const absl::Status status = Tokenizer::FromJson(json.dump()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  };
  expect("normalizer.normalizers[0]: the normalizer NFKC", [](Json& j) {
    j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}};
  });
  expect("normalizer.pattern", [](Json& j) {
    j["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", ""}};
  });
  expect("pre_tokenizer.pretokenizers[0]: the pre-tokenizer UnicodeScripts", [](Json& j) {
    j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {{{"type", "UnicodeScripts"}}}}};
  });
  expect("pre_tokenizer.pattern: the regular expression (a+)+$", [](Json& j) {
    j["pre_tokenizer"] = {
        {"type", "Split"}, {"pattern", {{"Regex", "(a+)+$"}}}, {"behavior", "Isolated"}};
  });
  expect("pre_tokenizer: MergedWithNext", [](Json& j) {
    j["pre_tokenizer"] = (*ReadJsonFile(kData + "variants.json"))["qwen"]["pre_tokenizer"];
    j["pre_tokenizer"] = Json(j["pre_tokenizer"]["pretokenizers"][0]);
    j["pre_tokenizer"]["behavior"] = "MergedWithNext";
  });
  expect("post_processor: the post-processor BertProcessing", [](Json& j) {
    j["post_processor"] = {{"type", "BertProcessing"}};
  });
  expect("post_processor.processors[1]: a second template", [](Json& j) {
    j["post_processor"] = {{"type", "Sequence"},
                           {"processors", {j["post_processor"], j["post_processor"]}}};
  });
  expect("model: the model Unigram", [](Json& j) { j["model"]["type"] = "Unigram"; });
  expect("continuing_subword_prefix",
         [](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; });
  expect("dropout", [](Json& j) { j["model"]["dropout"] = 0.1; });
  expect("lstrip", [](Json& j) { j["added_tokens"][0]["lstrip"] = true; });
}

TEST(TokenizerTest, MalformedFilesAreRefused) {
  const auto expect = [](const std::string& part, auto&& change) {
    Json json = Small();
    change(json);
    const absl::Status status = Tokenizer::FromJson(json.dump()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  };
  expect("model: missing", [](Json& j) { j.erase("model"); });
  expect("model.vocab", [](Json& j) { j["model"]["vocab"] = {"a"}; });
  expect("model.vocab", [](Json& j) { j["model"]["vocab"]["z"] = -1; });
  expect("model.vocab", [](Json& j) { j["model"]["vocab"]["z"] = 1 << 30; });
  expect("belongs to both", [](Json& j) { j["model"]["vocab"]["z"] = 1; });
  expect("unk_token", [](Json& j) { j["model"]["unk_token"] = "?"; });
  for (const Json& merge : {Json("ab"), Json("a b c"), Json("a z"), Json("b a"), Json(7),
                            Json({"a"}), Json({"a", 1}), Json("")}) {
    expect("model.merges: element 2", [&](Json& j) { j["model"]["merges"].push_back(merge); });
  }
  expect("added_tokens[2]: \"a\" has id 5", [](Json& j) {
    j["added_tokens"].push_back({{"id", 5}, {"content", "a"}});
  });
  expect("added_tokens[2]: id 1 belongs to both \"a\" and \"new\"", [](Json& j) {
    j["added_tokens"].push_back({{"id", 1}, {"content", "new"}});
  });
  expect("added_tokens: expected an array", [](Json& j) { j["added_tokens"] = "none"; });
  expect("normalizer.type: expected a string", [](Json& j) { j["normalizer"] = {{"type", 7}}; });
  expect("pre_tokenizer.individual_digits: expected", [](Json& j) {
    j["pre_tokenizer"] = {{"type", "Digits"}, {"individual_digits", "yes"}};
  });
  expect("pre_tokenizer.behavior: missing", [](Json& j) {
    j["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"String", "a"}}}};
  });
  expect("pre_tokenizer: behavior: unknown value \"Cut\"", [](Json& j) {
    j["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Cut"}};
  });
  // Chains that would make a text exponentially longer, and patterns that would fill the memory.
  expect("normalizer.normalizers[4]: makes a text more than 100 times as long", [](Json& j) {
    const Json step = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
    j["normalizer"] = {{"type", "Sequence"},
                       {"normalizers", Json::array({step, step, step, step})}};
    j["normalizer"]["normalizers"].push_back(step);
    j["normalizer"]["normalizers"].push_back(step);
  });
  expect("pre_tokenizer.pretokenizers[3]: makes a text", [](Json& j) {
    const Json step = {{"type", "ByteLevel"}};
    j["pre_tokenizer"] = {{"type", "Sequence"},
                          {"pretokenizers", Json::array({step, step, step, step})}};
  });
  expect("pre_tokenizer.pretokenizers[16]: more than 16 steps", [](Json& j) {
    j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::array()}};
    for (int i = 0; i < 20; ++i) {
      j["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
    }
  });
  expect("too much text of added tokens", [](Json& j) {
    for (int i = 0; i < 600; ++i) {
      j["added_tokens"].push_back(
          {{"id", 100 + i}, {"content", std::to_string(i) + std::string(1000, 'x')}});
    }
  });
  expect("added_tokens[0].id", [](Json& j) { j["added_tokens"][0]["id"] = 1 << 30; });
  expect("content", [](Json& j) { j["added_tokens"][1]["content"] = std::string(2000, 'x'); });
  expect("post_processor.single", [](Json& j) { j["post_processor"]["single"] = Json::array(); });
  expect("ids", [](Json& j) { j["post_processor"]["special_tokens"]["<unk>"]["ids"] = {10}; });
  EXPECT_FALSE(Tokenizer::FromJson("").ok());
  EXPECT_FALSE(Tokenizer::FromJson(std::string(100000, '[')).ok());
  EXPECT_EQ(Tokenizer::Load("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

// A SentencePiece ModelProto, written field by field.
std::string Field(int number, const std::string& bytes) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(bytes.size())} + bytes;
}
std::string Piece(const std::string& text, float score, char type) {
  std::string score_bytes(4, '\0');
  std::memcpy(score_bytes.data(), &score, 4);
  return Field(1, Field(1, text) + "\x15" + score_bytes + "\x18" + type);
}
std::string Model() {
  return Piece("<unk>", 0, 2) + Piece("<s>", 0, 3) + Piece("</s>", 0, 3) + Piece("\u2581", -9, 1) +
         Piece("a", -8, 1) + Piece("b", -7, 1) + Piece("ab", -1, 1) + Piece("ba", -0.5F, 1) +
         Piece("\n\n", 0, 4) + Field(2, std::string("\x18\x02", 2)) +
         Field(3, std::string("\x20\x00", 2));
}

TEST(TokenizerTest, SentencePieceMergesByScore) {
  auto tokenizer = MakeSentencePieceTokenizer(Model(), {});
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // "ba" scores higher than "ab".
  EXPECT_THAT(Encode(**tokenizer, "abab"), ElementsAre(1, 3, 4, 7, 5));
  // A run of unknown characters is one token; a user-defined piece never merges.
  EXPECT_THAT(Encode(**tokenizer, "zz\n\na"), ElementsAre(1, 3, 0, 8, 4));
  EXPECT_THAT(Encode(**tokenizer, "a b"), ElementsAre(1, 3, 4, 3, 5));
  EXPECT_THAT(
      Encode(**MakeSentencePieceTokenizer(Model(), {.add_bos = false, .add_eos = true}), "b"),
      ElementsAre(3, 5, 2));
}

TEST(TokenizerTest, DamagedSentencePieceModelsAreRefused) {
  const std::string model = Model();
  for (size_t n = 0; n < model.size(); ++n) {
    EXPECT_FALSE(MakeSentencePieceTokenizer(model.substr(0, n), {}).ok()) << n;
  }
  for (size_t bit = 0; bit < model.size() * 8; ++bit) {
    std::string flipped = model;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    const auto tokenizer = MakeSentencePieceTokenizer(flipped, {});
    if (tokenizer.ok()) {
      EXPECT_TRUE((*tokenizer)->Encode("abab ba\n\n<s>", {}).ok());
    }
  }
  const auto status = [](const std::string& extra) {
    return MakeSentencePieceTokenizer(Model() + extra, {}).status();
  };
  EXPECT_THAT(std::string(status(Piece("a", 0, 1)).message()), HasSubstr("twice"));
  EXPECT_EQ(status(Piece("u", 0, 5)).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status(Field(2, std::string("\x18\x01", 2))).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status(Field(3, std::string("\x20\x01", 2))).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status(Field(3, Field(2, "map"))).code(), absl::StatusCode::kUnimplemented);
  EXPECT_FALSE(MakeSentencePieceTokenizer(Model(), {.added_tokens = {{"new", 4}}}).ok());
  EXPECT_EQ((*MakeSentencePieceTokenizer(Model(), {.added_tokens = {{"new", 12}}}))->vocab_size(),
            13);
}

}  // namespace
}  // namespace saccade
