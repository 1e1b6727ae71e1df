#include "model/safetensors.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace saccade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Pack(const std::string& header, const std::string& data) {
  std::string out(8, '\0');
  const uint64_t size = header.size();
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(size >> (8 * i));
  return out + header + data;
}

std::span<const uint8_t> Span(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

absl::Status StatusOf(const std::string& header, const std::string& data) {
  const std::string bytes = Pack(header, data);
  return SafetensorsFile::Parse(Span(bytes), "f").status();
}

TEST(SafetensorsTest, ReadsTensorsOfEveryKind) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("e":{"dtype":"F16","shape":[0,4],"data_offsets":[20,20]},)"
      R"("flag":{"dtype":"BOOL","shape":[1],"data_offsets":[20,21]},)"
      R"("s":{"dtype":"I8","shape":[],"data_offsets":[21,22]},)"
      R"("v":{"dtype":"U8","shape":[1,1,1,1,2],"data_offsets":[22,24]}}  )";
  std::string data(24, '\0');
  const float values[2] = {1.5F, -2.0F};
  std::memcpy(data.data(), values, 8);
  const std::string bytes = Pack(header, data);
  const auto file = SafetensorsFile::Parse(Span(bytes), "f");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries().size(), 6U);
  EXPECT_EQ(file->metadata().at("format"), "pt");

  const auto a = file->Tensor("a");
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_EQ(a->dtype, DType::kF32);
  EXPECT_EQ(a->mem, MemKind::kHost);
  EXPECT_EQ(a->rank, 1);
  EXPECT_EQ(a->As<float>()[0], 1.5F);
  EXPECT_EQ(a->As<float>()[1], -2.0F);
  const auto b = file->Tensor("b");
  ASSERT_TRUE(b.ok());
  EXPECT_TRUE(b->dense());
  EXPECT_EQ(b->dim(0), 2);
  EXPECT_EQ(b->dim(1), 3);
  EXPECT_EQ(b->strides[0], 3);
  EXPECT_EQ(file->Tensor("flag")->dtype, DType::kU8);
  EXPECT_EQ(file->Tensor("e")->numel(), 0);

  EXPECT_EQ(file->Tensor("s").status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(file->Tensor("v").status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(file->Bytes("v")->size(), 2U);
  EXPECT_EQ(file->Tensor("zz").status().code(), absl::StatusCode::kNotFound);
}

TEST(SafetensorsTest, MisalignedTensorsAreReadable) {
  // A byte in front, and a header whose length is odd: neither F64 nor F32 lands on its alignment.
  const std::string header = R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("d":{"dtype":"F64","shape":[1],"data_offsets":[1,9]},)"
                             R"("f":{"dtype":"F32","shape":[2],"data_offsets":[9,17]}})";
  std::string data(17, '\1');
  const double d = 3.25;
  const float f[2] = {0.5F, 7.0F};
  std::memcpy(data.data() + 1, &d, 8);
  std::memcpy(data.data() + 9, f, 8);
  for (const char* pad : {"", " ", "  ", "   "}) {
    const std::string bytes = Pack(header + pad, data);
    const auto file = SafetensorsFile::Parse(Span(bytes), "f");
    ASSERT_TRUE(file.ok()) << file.status();
    const auto view = file->Tensor("d");
    ASSERT_EQ(reinterpret_cast<uintptr_t>(view->data) % 8, 0U);
    EXPECT_EQ(*view->As<double>(), d);
    EXPECT_EQ(file->Tensor("f")->As<float>()[1], 7.0F);
  }
}

TEST(SafetensorsTest, RefusesInconsistentHeaders) {
  const std::string four(4, '\0');
  const auto tensor = [](const char* dtype, const char* shape, const char* offsets) {
    return std::string(R"({"t":{"dtype":")") + dtype + R"(","shape":)" + shape +
           R"(,"data_offsets":)" + offsets + "}}";
  };
  EXPECT_TRUE(StatusOf(tensor("F32", "[1]", "[0,4]"), four).ok());
  const std::string bad[] = {
      tensor("F99", "[1]", "[0,4]"),
      tensor("F32", "[2]", "[0,4]"),
      tensor("F32", "[-1]", "[0,4]"),
      tensor("F32", "[1.5]", "[0,4]"),
      tensor("F32", "1", "[0,4]"),
      tensor("F32", "[1]", "[4,0]"),
      tensor("F32", "[1]", "[0]"),
      tensor("F32", "[1]", "[0,4,8]"),
      tensor("F32", "[1]", "[-4,0]"),
      tensor("F32", "[1]", "[0,5]"),
      tensor("F32", "[2]", "[0,8]"),                                 // beyond the file
      tensor("F32", "[4611686018427387905]", "[0,4]"),               // numel * 4 wraps to 4
      tensor("F32", "[4294967296,4294967296,4294967296]", "[0,0]"),  // wraps to 0
      tensor("U8", "[9223372036854775807,3]", "[0,4]"),
      tensor("F32", "[18446744073709551615]", "[0,4]"),
      R"({"t":{"dtype":"F32","shape":[1]}})",
      R"({"t":{"dtype":"F32","data_offsets":[0,4]}})",
      R"({"t":{"shape":[1],"data_offsets":[0,4]}})",
      R"({"t":[1]})",
      R"({"t":null})",
      R"([])",
      R"("x")",
      R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})",  // not closed
      R"({"__metadata__":{"a":1},"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      // Twice the same name.
      R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"t":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
      // Overlap, gap in front, between and behind.
      R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"u":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
      R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})",
      R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"u":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
      R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})",
      R"({})",
  };
  for (const std::string& header : bad) {
    const absl::Status status = StatusOf(header, four);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << header;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("f: ")) << header;
  }
  EXPECT_TRUE(StatusOf("{}", "").ok());
  // Depth and size of the header are bounded before anything is allocated for it.
  EXPECT_FALSE(StatusOf(std::string(1 << 20, '['), "").ok());
  std::string huge(16, '\xff');
  EXPECT_FALSE(SafetensorsFile::Parse(Span(huge), "f").ok());
  huge = Pack("{}", "");
  huge[0] = 3;
  EXPECT_FALSE(SafetensorsFile::Parse(Span(huge), "f").ok());
  for (size_t n = 0; n < 8; ++n) {
    EXPECT_FALSE(SafetensorsFile::Parse(Span(huge).first(n), "f").ok());
  }
}

TEST(SafetensorsTest, ErrorNamesFileAndTensor) {
  const std::string bytes =
      Pack(R"({"layer.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234567");
  const absl::Status status = SafetensorsFile::Parse(Span(bytes), "shard-2").status();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("shard-2"), HasSubstr("layer.weight"), HasSubstr("truncated")));
}

TEST(SafetensorsTest, OpensOnlyRegularFiles) {
  EXPECT_EQ(SafetensorsFile::Open("/nonexistent/x").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open("/").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open("/dev/null").status().code(), absl::StatusCode::kInvalidArgument);
  std::string path = ::testing::TempDir() + "/empty.safetensors";
  std::ofstream(path).close();
  EXPECT_EQ(SafetensorsFile::Open(path).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SafetensorsTest, EveryPrefixAndEveryBitFlipOfTheHeaderIsHandled) {
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})";
  const std::string whole = Pack(header, std::string(19, 'x'));
  ASSERT_TRUE(SafetensorsFile::Parse(Span(whole), "f").ok());
  for (size_t n = 0; n < whole.size(); ++n) {
    EXPECT_FALSE(SafetensorsFile::Parse(Span(whole).first(n), "f").ok()) << n;
  }
  for (size_t bit = 0; bit < (header.size() + 8) * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    const auto file = SafetensorsFile::Parse(Span(flipped), "f");
    if (!file.ok()) continue;
    for (const auto& [name, entry] : file->entries()) {
      ASSERT_LE(entry.offset + entry.bytes, 19U);
      const auto view = file->Tensor(name);
      if (view.ok()) {
        EXPECT_EQ(view->bytes(), entry.bytes);
      }
    }
  }
}

}  // namespace
}  // namespace saccade
