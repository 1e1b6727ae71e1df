// TensorView, Arena and Upload.
#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "tensor/arena.h"
#include "tests/kernels/op_harness.h"

namespace saccade::optest {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;

TEST(TensorView, SlicesKeepTheirPlace) {
  std::vector<float> data(24);
  const TensorView view = TensorView::Dense(data.data(), kF32, MemKind::kHost, {4, 6});
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.bytes(), 96u);
  EXPECT_TRUE(view.dense());
  const TensorView rows = view.Rows(1, 3);
  EXPECT_EQ(rows.As<float>(), data.data() + 6);
  EXPECT_EQ(rows.dim(0), 2);
  EXPECT_TRUE(rows.dense());
  const TensorView columns = rows.Columns(2, 5);
  EXPECT_EQ(columns.As<float>(), data.data() + 8);
  EXPECT_EQ(columns.dim(1), 3);
  EXPECT_EQ(columns.strides[0], 6);
  EXPECT_FALSE(columns.dense());
  EXPECT_EQ(view.Reshape({2, 12}).strides[0], 12);
  EXPECT_EQ(columns.DebugString(), "f32[2, 3] host");
}

TEST(TensorView, DTypes) {
  for (DType dtype :
       {kF32, kBf16, DType::kF16, DType::kI64, DType::kI32, DType::kU8, DType::kF64}) {
    EXPECT_GT(DTypeSize(dtype), 0u);
    EXPECT_NE(DTypeName(dtype), "?");
  }
}

TEST(Arena, AllocatesAlignedReusesAndRunsOut) {
  const auto backend = Must(MakeRefBackend({}));
  const auto buffer = Must(backend->Allocate(1024, MemKind::kDevice));
  Arena arena(*buffer);
  const TensorView first = Must(arena.New(DType::kU8, {3}));
  EXPECT_EQ(first.data, buffer->data());
  EXPECT_EQ(first.mem, MemKind::kDevice);
  const size_t mark = arena.Mark();
  const TensorView second = Must(arena.New(kF32, {4, 5}));
  EXPECT_EQ(second.data, buffer->data() + 64);
  EXPECT_EQ(arena.used(), 64u + 80u);
  arena.Release(mark);
  EXPECT_EQ(Must(arena.New(kF32, {4, 5})).data, second.data);
  EXPECT_EQ(arena.New(kF32, {1000}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena.used(), 64u + 80u) << "a failure takes nothing";
  arena.Reset();
  EXPECT_TRUE(arena.New(DType::kU8, {1024}).ok());
  EXPECT_EQ(arena.New(DType::kU8, {1}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(arena.New(DType::kU8, {0}).ok());
}

TEST(Arena, RefusesNonsense) {
  const auto backend = Must(MakeRefBackend({}));
  const auto buffer = Must(backend->Allocate(1024, MemKind::kDevice));
  Arena arena(*buffer);
  EXPECT_EQ(arena.New(kF32, {-1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arena.New(kF32, {1, 1, 1, 1, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arena.New(kF32, {int64_t{1} << 40, int64_t{1} << 40}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

class UploadTest : public testing::TestWithParam<bool> {
 protected:
  UploadTest() {
    RefOptions options;
    options.guarded = GetParam();
    backend_ = Must(MakeRefBackend(options));
    stream_ = Must(backend_->NewStream());
  }
  std::vector<double> Download(const Buffer& buffer, DType dtype, int64_t count) {
    EXPECT_EQ(buffer.kind(), MemKind::kDevice);
    EXPECT_EQ(buffer.size(), static_cast<size_t>(count) * DTypeSize(dtype));
    const auto host = Must(backend_->Allocate(buffer.size(), MemKind::kPinned));
    Must(stream_->Copy(host->View(dtype, {count}), buffer.View(dtype, {count})));
    Must(stream_->Synchronize());
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(Decode(dtype, host->data() + static_cast<size_t>(i) * DTypeSize(dtype)));
    }
    return values;
  }
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(UploadTest, ConvertsAndFollowsStrides) {
  // Rows 1 and 2, columns 1 to 3 of a [4, 5] matrix.
  std::vector<float> data(20);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i) + 0x1p-10f;
  const TensorView part =
      TensorView::Dense(data.data(), kF32, MemKind::kHost, {4, 5}).Rows(1, 3).Columns(1, 4);
  const std::vector<size_t> taken = {6, 7, 8, 11, 12, 13};
  const auto wide = Must(Upload(*backend_, *stream_, part, kF32));
  const auto narrow = Must(Upload(*backend_, *stream_, part, kBf16));
  const std::vector<double> wide_values = Download(*wide, kF32, 6);
  const std::vector<double> narrow_values = Download(*narrow, kBf16, 6);
  for (size_t i = 0; i < taken.size(); ++i) {
    EXPECT_EQ(wide_values[i], static_cast<double>(data[taken[i]]));
    EXPECT_EQ(narrow_values[i], RoundTo(kBf16, static_cast<double>(data[taken[i]])));
  }
}

TEST_P(UploadTest, ReadsEveryFloatFormatUnaligned) {
  alignas(8) std::byte bytes[64];
  const auto view = [&](DType dtype, int64_t count) {
    return TensorView::Dense(bytes + 1, dtype, MemKind::kHost, {count});
  };
  const std::vector<uint16_t> halves = {0x3c00, 0xc000, 0x0001, 0x83ff,
                                        0x7bff, 0x7c00, 0x0000, 0x3555};
  const std::vector<double> half_values = {1,     -2,       0x1p-24, -0x3ffp-24,
                                           65504, INFINITY, 0,       0x1.554p-2};
  std::memcpy(bytes + 1, halves.data(), 16);
  EXPECT_EQ(Download(*Must(Upload(*backend_, *stream_, view(DType::kF16, 8), kF32)), kF32, 8),
            half_values);
  const std::vector<double> doubles = {1.5, -2.25, 1e-3};
  std::memcpy(bytes + 1, doubles.data(), 24);
  EXPECT_EQ(Download(*Must(Upload(*backend_, *stream_, view(DType::kF64, 3), kF32)), kF32, 3),
            (std::vector<double>{1.5, -2.25, static_cast<double>(1e-3f)}));
  const std::vector<int64_t> integers = {7, -1};
  std::memcpy(bytes + 1, integers.data(), 16);
  EXPECT_EQ(Download(*Must(Upload(*backend_, *stream_, view(DType::kI64, 2), DType::kI64)),
                     DType::kI64, 2),
            (std::vector<double>{7, -1}));
}

TEST_P(UploadTest, GoesThroughBoundedStaging) {
  const int64_t rows =
      1100;  // 17.6 MB: more than one staging buffer, and a row across the boundary
  const int64_t width = 4001;
  std::vector<float> data(static_cast<size_t>(rows * width));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i % 16777213);
  const auto device =
      Must(Upload(*backend_, *stream_,
                  TensorView::Dense(data.data(), kF32, MemKind::kHost, {rows, width}), kF32));
  const auto host = Must(backend_->Allocate(data.size() * 4, MemKind::kPinned));
  Must(stream_->Copy(host->View(kF32, {rows, width}), device->View(kF32, {rows, width})));
  Must(stream_->Synchronize());
  EXPECT_EQ(std::memcmp(host->data(), data.data(), data.size() * 4), 0);
}

TEST_P(UploadTest, RefusesWhatItCannotDo) {
  std::vector<float> data(4);
  const auto refused = [&](TensorView view, DType dtype) {
    return Upload(*backend_, *stream_, view, dtype).status().code() ==
           absl::StatusCode::kInvalidArgument;
  };
  const TensorView view = TensorView::Dense(data.data(), kF32, MemKind::kHost, {4});
  EXPECT_TRUE(refused(view, DType::kI32));
  EXPECT_TRUE(refused(view, DType::kF16));
  EXPECT_TRUE(refused(TensorView::Dense(data.data(), DType::kI32, MemKind::kHost, {4}), kF32));
  EXPECT_TRUE(refused(TensorView::Dense(data.data(), kF32, MemKind::kHost, {0}), kF32));
  EXPECT_TRUE(refused(TensorView::Dense(data.data(), kF32, MemKind::kHost, {}), kF32));
  const auto device = Must(backend_->Allocate(16, MemKind::kDevice));
  EXPECT_TRUE(refused(device->View(kF32, {4}), kF32));
}

INSTANTIATE_TEST_SUITE_P(Modes, UploadTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "guarded" : "plain"; });

}  // namespace
}  // namespace saccade::optest
