#include "model/checkpoint.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace saccade {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kGolden = std::string(SACCADE_SOURCE_DIR) + "/tests/golden/data/";

void Write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary)
      .write(text.data(), static_cast<std::streamsize>(text.size()));
}

std::string Read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

struct NamedTensor {
  std::string name;
  std::vector<int64_t> dims;
};

// A file of F32 tensors counting up from 0.
std::string Safetensors(const std::vector<NamedTensor>& tensors) {
  Json header = Json::object();
  std::string data;
  for (const NamedTensor& t : tensors) {
    int64_t numel = 1;
    for (const int64_t d : t.dims) numel *= d;
    const size_t begin = data.size();
    for (int64_t i = 0; i < numel; ++i) {
      const auto value = static_cast<float>(i);
      data.append(reinterpret_cast<const char*>(&value), 4);
    }
    header[t.name] = {{"dtype", "F32"}, {"shape", t.dims}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  std::string out(8, '\0');
  const uint64_t size = text.size();
  std::memcpy(out.data(), &size, 8);
  return out + text + data;
}

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/checkpointXXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
    Write(dir_ / "config.json", R"({"text_config": {"hidden_size": "x"}, "big": 70000})");
  }
  void TearDown() override { fs::remove_all(dir_); }

  // Two shards: embed [4, 2] and layer [2, 3] in the first, head [4, 2] in the second.
  void WriteShards(bool with_head = true) {
    Json map = Json::object();
    const auto write = [&](const char* file, const std::vector<NamedTensor>& tensors) {
      for (const NamedTensor& t : tensors) map[t.name] = file;
      Write(dir_ / file, Safetensors(tensors));
    };
    write("a.safetensors", {{"embed", {4, 2}}, {"layer", {2, 3}}});
    if (with_head) {
      write("b.safetensors", {{"head", {4, 2}}, {"bias", {3}}});
    } else {
      write("b.safetensors", {{"bias", {3}}});
    }
    WriteIndex(map);
  }
  void WriteIndex(const Json& map) {
    Write(dir_ / "model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  }
  absl::StatusOr<Checkpoint> Open() const { return Checkpoint::Open(dir_.string()); }
  // Opening fails, soon, with a message that has both parts.
  void ExpectRefused(const std::string& part, const std::string& other) {
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = Open().status();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(part), HasSubstr(other)));
  }

  fs::path dir_;
};

TEST_F(CheckpointTest, ReadsShardsNamedByTheIndex) {
  WriteShards();
  Write(dir_ / "stray.safetensors", "not even a safetensors file");
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->names(), ::testing::ElementsAre("bias", "embed", "head", "layer"));
  EXPECT_TRUE(checkpoint->Has("head"));
  EXPECT_FALSE(checkpoint->Has("heads"));
  EXPECT_EQ(checkpoint->TotalBytes(), (8U + 6 + 8 + 3) * 4);
  const auto layer = checkpoint->TensorWithShape("layer", {2, 3});
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->As<float>()[5], 5.0F);
}

TEST_F(CheckpointTest, ShapeErrorsNameTensorAndBothShapes) {
  WriteShards();
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok());
  const absl::Status transposed = checkpoint->TensorWithShape("layer", {3, 2}).status();
  EXPECT_EQ(transposed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(transposed.message()),
              AllOf(HasSubstr("a.safetensors"), HasSubstr("layer"), HasSubstr("[3, 2]"),
                    HasSubstr("[2, 3]")));
  EXPECT_FALSE(checkpoint->TensorWithShape("layer", {6}).ok());
  EXPECT_FALSE(checkpoint->TensorWithShape("layer", {2, 3, 1}).ok());
  const absl::Status absent = checkpoint->TensorWithShape("layers.9.q", {2}).status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(absent.message()), HasSubstr("layers.9.q"));
}

TEST_F(CheckpointTest, AWeightOfAnotherTypeIsRefused) {
  std::string text = R"({"ids":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}} )";
  while (text.size() % 8 != 0) text += ' ';
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(text.size());
  Write(dir_ / "model.safetensors", bytes + text + std::string(8, '\0'));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->Tensor("ids").ok());
  EXPECT_THAT(std::string(checkpoint->TensorWithShape("ids", {2}).status().message()),
              AllOf(HasSubstr("ids"), HasSubstr("I32")));
}

TEST_F(CheckpointTest, RefusesAShortShard) {
  WriteShards();
  const std::string shard = Read(dir_ / "b.safetensors");
  Write(dir_ / "b.safetensors", shard.substr(0, shard.size() - 1));
  ExpectRefused("b.safetensors", "bias");
  Write(dir_ / "b.safetensors", shard + "x");
  ExpectRefused("b.safetensors", "bytes of data");
  Write(dir_ / "b.safetensors", "");
  ExpectRefused("b.safetensors", "too few");
}

TEST_F(CheckpointTest, RefusesAMissingShard) {
  WriteShards();
  fs::remove(dir_ / "b.safetensors");
  ExpectRefused("b.safetensors", "bias");
}

TEST_F(CheckpointTest, RefusesAnIndexThatNamesAnAbsentTensor) {
  WriteShards();
  WriteIndex({{"embed", "a.safetensors"}, {"ghost", "b.safetensors"}});
  ExpectRefused("b.safetensors", "ghost");
}

TEST_F(CheckpointTest, RefusesATensorInTwoShards) {
  WriteShards();
  Write(dir_ / "b.safetensors", Safetensors({{"head", {4, 2}}, {"bias", {3}}, {"embed", {4, 2}}}));
  ExpectRefused("b.safetensors", "embed");
}

TEST_F(CheckpointTest, RefusesAModelFileBesideAnIndex) {
  WriteShards();
  Write(dir_ / "model.safetensors", Safetensors({{"embed", {4, 2}}}));
  ExpectRefused("model.safetensors.index.json", "ambiguous");
}

TEST_F(CheckpointTest, ShardNamesCannotLeaveTheFolder) {
  for (const char* name : {"../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "",
                           ".hidden", "x\\y", "a..b"}) {
    WriteIndex({{"t", name}});
    ExpectRefused("weight_map", "not a plain file name");
  }
  WriteIndex(Json{{"t", std::string("a\0b", 3)}});
  ExpectRefused("weight_map", "not a plain file name");
  WriteIndex(Json{{"t", 7}});
  ExpectRefused("weight_map.t", "expected a string");
  WriteIndex(Json::object());
  ExpectRefused("weight_map", "names no tensor");
  Write(dir_ / "model.safetensors.index.json", "{}");
  ExpectRefused("model.safetensors.index.json", "weight_map: missing");
}

TEST_F(CheckpointTest, TheHeadIsTiedOnlyWhenTheConfigurationSaysSo) {
  WriteShards(/*with_head=*/false);
  const auto head = [this] { return Open()->TensorOrTied("head", "embed", {4, 2}); };
  EXPECT_EQ(head().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(head().status().message()),
              AllOf(HasSubstr("head"), HasSubstr("tie_word_embeddings")));
  Write(dir_ / "config.json", R"({"tie_word_embeddings": false})");
  EXPECT_FALSE(head().ok());
  Write(dir_ / "config.json", R"({"tie_word_embeddings": 1})");
  EXPECT_FALSE(head().ok());
  Write(dir_ / "config.json", R"({"tie_word_embeddings": true})");
  EXPECT_TRUE(head().ok()) << head().status();
  Write(dir_ / "config.json", R"({"text_config": {"tie_word_embeddings": true}})");
  EXPECT_TRUE(head().ok()) << head().status();
  EXPECT_FALSE(Open()->TensorOrTied("head", "embed", {2, 4}).ok());
}

TEST_F(CheckpointTest, MissingPiecesAreNamed) {
  ExpectRefused("model.safetensors", "neither");
  Write(dir_ / "pytorch_model.bin", "x");
  ExpectRefused("pickled", "safetensors");
  fs::remove(dir_ / "config.json");
  ExpectRefused("config.json", "no such file");
  EXPECT_EQ(Checkpoint::Open("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, ConfigurationIsBounded) {
  Write(dir_ / "model.safetensors", Safetensors({{"t", {1}}}));
  for (const std::string& bad :
       {std::string("{"), std::string("[]"), std::string("{\"a\": 1, \"a\": 2}"),
        std::string("{\"a\": \"\xff\"}"), std::string("{\"a\": 1e999}"), std::string(100000, '['),
        std::string("")}) {
    Write(dir_ / "config.json", bad);
    ExpectRefused("config.json", "");
  }
}

TEST_F(CheckpointTest, TypedGettersNameFileAndKey) {
  WriteShards();
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok());
  const JsonView config = checkpoint->config_view();
  const auto text = config.Get("text_config");
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(text->Int("hidden_size", 1, std::numeric_limits<int64_t>::max()).status().message(),
            "config.json: text_config.hidden_size: expected a positive integer, got \"x\"");
  EXPECT_EQ(config.Int("big", 1, 65536).status().message(),
            "config.json: big: expected an integer in [1, 65536], got 70000");
  EXPECT_EQ(config.Bool("big").status().message(),
            "config.json: big: expected true or false, got 70000");
  EXPECT_EQ(text->String("absent").status().message(), "config.json: text_config.absent: missing");
  EXPECT_EQ(*text->Int("absent", 0, 9, 7), 7);
  EXPECT_EQ(*config.Int("big", 0, 1 << 20, 7), 70000);
  EXPECT_FALSE(config.Get("big")->Get("x").ok());
}

TEST_F(CheckpointTest, FingerprintFollowsEveryByteOfASmallCheckpoint) {
  WriteShards();
  const Digest128 before = Open()->WeightsFingerprint();
  EXPECT_EQ(before, Open()->WeightsFingerprint());
  std::string shard = Read(dir_ / "a.safetensors");
  shard.back() = static_cast<char>(shard.back() ^ 1);
  Write(dir_ / "a.safetensors", shard);
  EXPECT_FALSE(before == Open()->WeightsFingerprint());
  WriteShards();
  EXPECT_EQ(before, Open()->WeightsFingerprint());
  Write(dir_ / "config.json", R"({"rope_theta": 1})");
  EXPECT_FALSE(before == Open()->WeightsFingerprint());
}

TEST_F(CheckpointTest, FingerprintOfALargeCheckpointSamplesEveryTensor) {
  // 72 MB of zeros (a sparse file) in two tensors.
  const std::string text =
      R"({"a":{"dtype":"U8","shape":[64000000],"data_offsets":[0,64000000]},"b":{"dtype":"U8","shape":[8000000],"data_offsets":[64000000,72000000]}})";
  std::string head(8, '\0');
  const uint64_t size = text.size();
  std::memcpy(head.data(), &size, 8);
  const fs::path path = dir_ / "model.safetensors";
  Write(path, head + text);
  fs::resize_file(path, head.size() + text.size() + 72000000);
  const Digest128 before = Open()->WeightsFingerprint();
  const auto with_byte_at = [&](uintmax_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(head.size() + text.size() + offset));
    file.put('x');
    file.close();
    const Digest128 digest = Open()->WeightsFingerprint();
    file.open(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(head.size() + text.size() + offset));
    file.put('\0');
    return digest;
  };
  for (const uintmax_t offset :
       {uintmax_t{0}, uintmax_t{63999999}, uintmax_t{64000000}, uintmax_t{71999999}}) {
    EXPECT_FALSE(before == with_byte_at(offset)) << offset;
  }
  EXPECT_EQ(before, Open()->WeightsFingerprint());
}

TEST(CheckpointGoldenTest, OpensTheGoldenFolders) {
  for (const char* name : {"openvla", "openvla_v01"}) {
    const auto checkpoint = Checkpoint::Open(kGolden + name + "/checkpoint");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const auto embed =
        checkpoint->TensorWithShape("language_model.model.embed_tokens.weight", {32064, 32});
    ASSERT_TRUE(embed.ok()) << embed.status();
    EXPECT_EQ(embed->dtype, DType::kBf16);
    const auto conv = checkpoint->Tensor("vision_backbone.featurizer.patch_embed.proj.weight");
    ASSERT_TRUE(conv.ok()) << conv.status();
    EXPECT_EQ(conv->rank, 4);
    EXPECT_EQ(checkpoint->Tensor("vision_backbone.featurizer.pos_embed")->rank, 3);
    EXPECT_FALSE(checkpoint
                     ->TensorOrTied("language_model.nothing",
                                    "language_model.model.embed_tokens.weight", {32064, 32})
                     .ok());
    const auto statistics = checkpoint->OptionalJson("dataset_statistics.json");
    ASSERT_TRUE(statistics.ok());
    EXPECT_TRUE(statistics->has_value());
    EXPECT_FALSE(checkpoint->OptionalJson("absent.json")->has_value());
    EXPECT_FALSE(checkpoint->OptionalJson("../golden.json").ok());
  }
}

}  // namespace
}  // namespace saccade
