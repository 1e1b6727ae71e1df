#include "model/torch_file.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/safetensors.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;
using namespace std::string_literals;  // NOLINT(google-build-using-namespace)

const std::string kData = std::string(SACCADE_SOURCE_DIR) + "/tests/data/torch/";

std::span<const uint8_t> Span(const std::string& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

std::string Read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::string Le(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += i < 8 ? static_cast<char>(value >> (8 * i)) : '\0';
  return out;
}

struct ZipFile {
  std::string name;
  std::string bytes;
  uint16_t method = 0;
  uint16_t flags = 0;
};

std::string Zip(const std::vector<ZipFile>& files) {
  std::string out;
  std::string directory;
  for (const ZipFile& f : files) {
    const std::string both = Le(f.flags, 2) + Le(f.method, 2) + Le(0, 8) + Le(f.bytes.size(), 4) +
                             Le(f.bytes.size(), 4) + Le(f.name.size(), 2);
    directory += "PK\1\2"s + Le(0, 4) + both + Le(0, 12) + Le(out.size(), 4) + f.name;
    out += "PK\3\4"s + Le(0, 2) + both + Le(0, 2) + f.name + f.bytes;
  }
  return out + directory + "PK\5\6"s + Le(0, 4) + Le(files.size(), 2) + Le(files.size(), 2) +
         Le(directory.size(), 4) + Le(out.size(), 4) + Le(0, 2);
}

std::string Text(const std::string& text) { return "X"s + Le(text.size(), 4) + text; }
std::string Int(uint32_t value) { return "J"s + Le(value, 4); }
std::string Tuple(const std::vector<uint32_t>& values) {
  std::string out = "(";
  for (const uint32_t v : values) out += Int(v);
  return out + "t";
}

const std::string kOrderedDict = "ccollections\nOrderedDict\n)R";

struct Tensor {
  std::string storage = "FloatStorage";
  std::string record = "0";
  uint32_t elements = 6;
  uint32_t offset = 0;
  std::vector<uint32_t> dims = {2, 3};
  std::vector<uint32_t> strides = {3, 1};
};

std::string Pickled(const Tensor& t) {
  return "ctorch._utils\n_rebuild_tensor_v2\n(("s + Text("storage") + "ctorch\n"s + t.storage +
         "\n" + Text(t.record) + Text("cpu") + Int(t.elements) + "tQ"s + Int(t.offset) +
         Tuple(t.dims) + Tuple(t.strides) + "\x89"s + kOrderedDict + "tR";
}

std::string Dict(const std::string& items) { return "\x80\x02}("s + items + "u."; }

// Values 0, 1, ... as F32.
std::string Counting(int count) {
  std::string out;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<float>(i);
    out.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return out;
}

std::string File(const std::string& pickle) {
  return Zip({{"model/data.pkl", pickle},
              {"model/byteorder", "little"},
              {"model/data/0", Counting(6)},
              {"model/version", "3\n"}});
}

absl::Status Parse(const std::string& bytes) { return TorchFile::Parse(Span(bytes), "f").status(); }

TEST(TorchFileTest, EqualsWhatTorchReads) {
  const auto expected = SafetensorsFile::Open(kData + "heads.safetensors");
  ASSERT_TRUE(expected.ok()) << expected.status();
  size_t compared = 0;
  for (const auto& [file_name, prefix] :
       {std::pair<std::string, std::string>{"action_head--1_checkpoint.pt", "action_head."},
        {"proprio_projector--1_checkpoint.pt", "proprio_projector."}}) {
    const auto file = TorchFile::Open(kData + file_name);
    ASSERT_TRUE(file.ok()) << file.status();
    const TensorFile& tensors = *file;  // as code that loads weights sees either
    for (const auto& [name, entry] : tensors.entries()) {
      ASSERT_TRUE(name.starts_with("module."));
      const auto got = tensors.Tensor(name);
      const auto want = expected->Tensor(prefix + name.substr(7));
      ASSERT_TRUE(got.ok() && want.ok()) << name << got.status() << want.status();
      EXPECT_EQ(got->DebugString(), want->DebugString()) << name;
      EXPECT_EQ(std::memcmp(got->data, want->data, want->bytes()), 0) << name;
      ++compared;
    }
  }
  EXPECT_EQ(compared, expected->entries().size());
}

// As a module's state_dict() is pickled: an OrderedDict with versions as an attribute, tensors that
// are parts of one storage, and memos.
TEST(TorchFileTest, ReadsStateDictsThatShareStorages) {
  Tensor part;
  part.offset = 2;
  part.dims = {4};
  part.strides = {1};
  Tensor scalar;
  scalar.offset = 5;
  scalar.dims = {};
  scalar.strides = {};
  Tensor empty;
  empty.dims = {0, 7};
  empty.strides = {9, 9};
  Tensor row;
  row.dims = {1, 3};
  row.strides = {77, 1};  // of a dimension of one, any
  const std::string pickle =
      "\x80\x02"s + kOrderedDict + "q"s + Le(0, 1) + "("s + Text("whole") + Pickled({}) + "r" +
      Le(1, 4) + Text("part") + Pickled(part) + Text("again") + "h"s + Le(1, 1) + Text("scalar") +
      Pickled(scalar) + Text("empty") + Pickled(empty) + Text("row") + Pickled(row) + "u}" +
      Text("_metadata") + kOrderedDict + Text("") + "}"s + Text("version") + "K\1ss"s + "sb.";
  const std::string bytes = File(pickle);
  const auto file = TorchFile::Parse(Span(bytes), "f");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries().size(), 6U);
  const auto values = [&](const char* name) {
    const TensorView view = file->Tensor(name).value();
    return std::vector<float>(view.As<const float>(), view.As<const float>() + view.numel());
  };
  EXPECT_EQ(values("whole"), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(values("again"), values("whole"));
  EXPECT_EQ(values("part"), (std::vector<float>{2, 3, 4, 5}));
  EXPECT_EQ(values("scalar"), (std::vector<float>{5}));
  EXPECT_EQ(values("row"), (std::vector<float>{0, 1, 2}));
  EXPECT_EQ(file->entries().at("empty").bytes, 0U);
  EXPECT_EQ(file->Tensor("whole")->dim(1), 3);
  EXPECT_EQ(file->Tensor("none").status().code(), absl::StatusCode::kNotFound);
}

TEST(TorchFileTest, KeepsTypesTheServerHasNot) {
  Tensor bytes;
  bytes.storage = "CharStorage";
  bytes.elements = 24;
  bytes.dims = {24};
  bytes.strides = {1};
  const std::string data = File(Dict(Text("t") + Pickled(bytes)));
  const auto file = TorchFile::Parse(Span(data), "f");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries().at("t").dtype, "I8");
  EXPECT_EQ(file->Bytes("t")->size(), 24U);
  EXPECT_EQ(file->Tensor("t").status().code(), absl::StatusCode::kUnimplemented);
}

TEST(TorchFileTest, RunsNothing) {
  // What a harmful pickle looks like, and what an innocent one of other things does.
  for (const auto& [pickle, message] : std::vector<std::pair<std::string, std::string>>{
           {"\x80\x02"
            "cos\nsystem\n" +
                Text("true") + "\x85R.",
            "os.system"},
           {"\x80\x02"
            "cbuiltins\neval\n" +
                Text("1") + "\x85R.",
            "builtins.eval"},
           {"\x80\x02"
            "ctorch\nsave\n.",
            "torch.save"},
           {"\x80\x02"
            "ctorch._utils\n_rebuild_parameter\n.",
            "_rebuild_parameter"},
           {"\x80\x02"
            "c\xff\n\xff\n.",
            "?.?"},
           {"\x80\x02"
            "i.",
            "operation 105"},
           {"\x80\x04}.", "protocol 2"},
           {"\x80\x02}"s + Text("_x") + "b.", "attributes"},
       }) {
    const absl::Status status = Parse(File(pickle));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST(TorchFileTest, RefusesDamagedPickles) {
  const std::string text = Text("t");
  const auto with = [&](auto change) {
    Tensor tensor;
    change(tensor);
    return Dict(text + Pickled(tensor));
  };
  for (const auto& [pickle, message] : std::vector<std::pair<std::string, std::string>>{
           {"", "too early"},
           {"\x80\x02}", "too early"},
           {"\x80\x02.", "the stack is empty"},
           {"\x80\x02}}.", "more than one value"},
           {"\x80\x02}.x", "more than one value"},
           {"\x80\x02).", "not a dict"},
           {"\x80\x02t.", "there is no mark"},
           {"\x80\x02(\x85.", "the stack is empty"},
           {"\x80\x02h\x07.", "never put"},
           {"\x80\x02}q\x07.", "out of order"},
           {"\x80\x02}("s + text + "u.", "without its value"},
           {"\x80\x02)("s + text + text + "u.", "not a dict"},
           {"\x80\x02X\xff\xff\xff\x7f", "too long"},
           {"\x80\x02"
            "X\2\0\0"s +
                Le(0, 1) + "\xc3\x28.",
            "not UTF-8"},
           {"\x80\x02\x8a\x09"s + Le(0, 9) + ".", "more than 64 bits"},
           {Dict(Int(1) + Pickled({})), "no text"},
           {Dict(text + text), "t: not a tensor"},
           {Dict(text + Pickled({}) + text + Pickled({})), "t: is there twice"},
           {"\x80\x02"s + text + "Q.", "not a storage"},
           {"\x80\x02"s + Text("f") + ")R.", "no function"},
           {"\x80\x02"
            "ctorch._utils\n_rebuild_tensor_v2\n)R.",
            "not a plain tensor"},
           {with([](Tensor& t) { t.record = "1"; }), "there is no data/1"},
           {with([](Tensor& t) { t.record = "../version"; }), "there is no data/../version"},
           {with([](Tensor& t) { t.elements = 7; }), "has 24 bytes, expected 7"},
           {with([](Tensor& t) { t.storage = "DoubleStorage"; }), "expected 6 values of F64"},
           {with([](Tensor& t) { t.offset = 1; }), "does not fit data/0"},
           {with([](Tensor& t) { t.offset = 0x7fffffff; }), "does not fit data/0"},
           {with([](Tensor& t) { t.offset = 0x80000000; }), "not a plain tensor"},
           {with([](Tensor& t) {
              t.dims = {3, 3};
            }),
            "does not fit data/0"},
           {with([](Tensor& t) {
              t.dims = {0xffffffff, 3};
            }),
            "not a shape"},
           {with([](Tensor& t) { t.dims = {3}; }), "other strides"},
           {with([](Tensor& t) {
              t.strides = {1, 2};
            }),
            "not contiguous"},
           {with([](Tensor& t) { t.dims = {std::vector<uint32_t>(65, 1)}; }), "not a shape"},
       }) {
    const absl::Status status = Parse(File(pickle));
    EXPECT_FALSE(status.ok()) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  // Values are bounded whatever the pickle's size.
  EXPECT_THAT(
      std::string(Parse(File("\x80\x02"s + std::string(TorchFile::kMaxValues + 2, '}'))).message()),
      HasSubstr("too many values"));
}

TEST(TorchFileTest, RefusesDamagedZips) {
  const ZipFile pickle = {"m/data.pkl", "\x80\x02}."};
  ASSERT_TRUE(Parse(Zip({pickle})).ok());
  using Files = std::vector<ZipFile>;
  for (const auto& [files, message] : std::vector<std::pair<Files, std::string>>{
           {{}, "there is no data.pkl"},
           {{{"m/other", ""}}, "there is no data.pkl"},
           {{{"data.pkl", ""}}, "is in no folder"},
           {{pickle, {"n/version", ""}}, "is not in m/"},
           {{pickle, pickle}, "is there twice"},
           {{pickle, {"m/../x", ""}}, "no plain name"},
           {{pickle, {"/etc/x", ""}}, "no plain name"},
           {{pickle, {"m//x", ""}}, "no plain name"},
           {{pickle, {"m\\x", ""}}, "no plain name"},
           {{pickle, {std::string("m/\0x", 4), ""}}, "no plain name"},
           {{pickle, {"m/"s + std::string(2000, 'a'), ""}}, "no plain name"},
           {{pickle, {"m/x", "", 8}}, "m/x: compressed"},
           {{pickle, {"m/x", "", 0, 1}}, "m/x: encrypted"},
           {{pickle, {"m/byteorder", "big"}}, "byteorder"},
       }) {
    const absl::Status status = Parse(Zip(files));
    EXPECT_FALSE(status.ok()) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  EXPECT_THAT(std::string(Parse("").message()), HasSubstr("not a zip"));
  EXPECT_THAT(std::string(Parse("PK").message()), HasSubstr("not a zip"));

  // Both entries name the same place.
  std::string same = Zip({pickle, {"m/data.pkx", "\x80\x02}."}});
  const size_t second = same.rfind("PK\1\2");
  same.replace(second + 42, 4, Le(0, 4));
  EXPECT_THAT(std::string(Parse(same).message()), HasSubstr("otherwise in its own header"));
  same[second + 46 + 9] = 'l';
  EXPECT_FALSE(Parse(same).ok());
}

TEST(TorchFileTest, NoDamagedByteBreaksIt) {
  const std::string whole = Read(kData + "proprio_projector--1_checkpoint.pt");
  ASSERT_TRUE(Parse(whole).ok());
  for (size_t n = 0; n < whole.size(); n += 7) EXPECT_FALSE(Parse(whole.substr(0, n)).ok()) << n;
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    const auto file = TorchFile::Parse(Span(flipped), "f");
    if (!file.ok()) continue;
    for (const auto& [name, entry] : file->entries()) {
      EXPECT_TRUE(file->Bytes(name).ok());
      EXPECT_LE(entry.offset + entry.bytes, flipped.size());
    }
  }
}

TEST(TorchFileTest, OpensFilesOnly) {
  EXPECT_EQ(TorchFile::Open("/nonexistent/x").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(TorchFile::Open("/").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TorchFile::Open(kData + "heads.safetensors").status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace saccade
