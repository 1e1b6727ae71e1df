// Ops of a flow head's residual stream, on every backend: AdaRmsNorm and AddGated, whose
// parameters each row takes from a group of its own.
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "tests/kernels/backends.h"

namespace saccade::optest {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;
constexpr DType kI32 = DType::kI32;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kEps = 1e-6f;
constexpr int64_t kGroups = 3;

bool Refused(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument;
}

// Group of each row: all of them in turn, none in order.
HostTensor GroupsOf(int64_t rows) {
  std::vector<int64_t> groups;
  for (int64_t row = 0; row < rows; ++row) groups.push_back((row * row + 2) % kGroups);
  return Ints(groups);
}

HostTensor RowsOf(const HostTensor& groups, int64_t begin, int64_t end) {
  return Ints({groups.values.begin() + begin, groups.values.begin() + end});
}

struct Shape {
  int64_t width;
  DType dtype;  // of the norm's output, of the gated branch
  Layout layout = kDense;
};

const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {
      {1, kF32},    {5, kF32, kStrided}, {36, kBf16}, {134, kBf16, kStrided}, {352, kF32},
      {720, kBf16}, {17, kF32},          {64, kBf16}, {1024, kF32, kStrided},
  };
  return shapes;
}

// [kGroups, 3 * width], as a modulation lies in memory: scale, shift, gate.
HostTensor Modulation(int64_t width) { return Random(kF32, {kGroups, 3 * width}, 5); }

HostTensor RunNorm(Rig& rig, const Shape& s, const HostTensor& x, const HostTensor& groups) {
  const DeviceTensor& y = rig.Out(s.dtype, x.dims, s.layout);
  const TensorView modulation = rig.In(Modulation(s.width), s.layout);
  Must(rig.ops().AdaRmsNorm(rig.stream(), rig.In(x, s.layout), modulation.Columns(0, s.width),
                            modulation.Columns(s.width, 2 * s.width), rig.In(groups), y, kEps));
  return rig.Read(y);
}

HostTensor RunGated(Rig& rig, const Shape& s, const HostTensor& x, const HostTensor& branch,
                    const HostTensor& groups, bool one_gate) {
  const DeviceTensor& to = rig.InOut(x, s.layout);
  const TensorView modulation = rig.In(Modulation(s.width), s.layout);
  const int64_t first = 2 * s.width;
  Must(rig.ops().AddGated(rig.stream(), rig.In(branch, s.layout),
                          modulation.Columns(first, first + (one_gate ? 1 : s.width)),
                          rig.In(groups), to));
  return rig.Read(to);
}

class AdaptiveTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(AdaptiveTest, TheNormMatchesTheOracle) {
  for (const Shape& s : Shapes()) {
    for (int64_t rows : {1, 3, 8, 51}) {
      SCOPED_TRACE(testing::Message() << rows << " x " << s.width << " " << DTypeName(s.dtype));
      const HostTensor x = Random(kF32, {rows, s.width}, 1, 2.0);
      const HostTensor groups = GroupsOf(rows);
      const HostTensor modulation = Modulation(s.width);
      Rig rig(GetParam());
      const HostTensor y = RunNorm(rig, s, x, groups);
      int failures = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const auto group = static_cast<int64_t>(groups.values[static_cast<size_t>(row)]);
        double squares = 0;
        for (int64_t i = 0; i < s.width; ++i) squares += x.at(row, i) * x.at(row, i);
        const double factor =
            1.0 / std::sqrt(squares / static_cast<double>(s.width) + static_cast<double>(kEps));
        for (int64_t i = 0; i < s.width; ++i) {
          const double weight = 1.0 + modulation.at(group, i);
          const double normal = x.at(row, i) * factor;
          const double shift = modulation.at(group, s.width + i);
          const double expected = normal * weight + shift;
          const double tolerance =
              std::abs(weight) * SumTolerance(s.width, std::abs(normal)) +
              4 * kUlpF32 * (std::abs(normal) * (1 + std::abs(weight)) + std::abs(shift));
          const auto near = Near(y.at(row, i), expected, tolerance, s.dtype);
          if (!near && ++failures <= 3) {
            ADD_FAILURE() << "row " << row << " column " << i << ": " << near.message();
          }
        }
      }
      EXPECT_EQ(failures, 0);
    }
  }
}

TEST_P(AdaptiveTest, GatedSumsAreExact) {
  for (const Shape& s : Shapes()) {
    for (const bool one_gate : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << s.width << " " << DTypeName(s.dtype) << (one_gate ? ", one gate" : ""));
      constexpr int64_t kRows = 19;
      const HostTensor x = Random(kF32, {kRows, s.width}, 1);
      const HostTensor branch = Random(s.dtype, {kRows, s.width}, 2);
      const HostTensor groups = GroupsOf(kRows);
      const HostTensor modulation = Modulation(s.width);
      Rig rig(GetParam());
      HostTensor expected = x;
      for (int64_t row = 0; row < kRows; ++row) {
        const auto group = static_cast<int64_t>(groups.values[static_cast<size_t>(row)]);
        for (int64_t i = 0; i < s.width; ++i) {
          const double gate = modulation.at(group, 2 * s.width + (one_gate ? 0 : i));
          const double product = RoundTo(kF32, gate * branch.at(row, i));
          expected.at(row, i) = RoundTo(kF32, x.at(row, i) + product);
        }
      }
      EXPECT_TRUE(SameBits(RunGated(rig, s, x, branch, groups, one_gate), expected));
    }
  }
}

TEST_P(AdaptiveTest, RowsAreIndependent) {
  for (const Shape& s : Shapes()) {
    SCOPED_TRACE(testing::Message() << s.width << " " << DTypeName(s.dtype));
    constexpr int64_t kRows = 33;
    HostTensor x = Random(kF32, {kRows, s.width}, 1);
    const HostTensor branch = Random(s.dtype, {kRows, s.width}, 2);
    const HostTensor groups = GroupsOf(kRows);
    Rig rig(GetParam());
    const HostTensor norm = RunNorm(rig, s, x, groups);
    const HostTensor sum = RunGated(rig, s, x, branch, groups, false);
    for (const auto& [begin, end] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {32, 33}, {5, 18}}) {
      const HostTensor part = RowsOf(groups, begin, end);
      EXPECT_TRUE(SameBits(RunNorm(rig, s, x.Rows(begin, end), part), norm.Rows(begin, end)));
      EXPECT_TRUE(
          SameBits(RunGated(rig, s, x.Rows(begin, end), branch.Rows(begin, end), part, false),
                   sum.Rows(begin, end)));
    }
    for (int threads : {2, 3}) {
      Rig several(GetParam(), threads);
      EXPECT_TRUE(SameBits(RunNorm(several, s, x, groups), norm)) << threads << " threads";
      EXPECT_TRUE(SameBits(RunGated(several, s, x, branch, groups, false), sum))
          << threads << " threads";
    }
    x.at(7, 0) = kNan;
    const HostTensor sick = RunNorm(rig, s, x, groups);
    EXPECT_TRUE(SameBits(sick.Rows(0, 7), norm.Rows(0, 7)));
    EXPECT_TRUE(SameBits(sick.Rows(8, kRows), norm.Rows(8, kRows)));
    for (int64_t i = 0; i < s.width; ++i) EXPECT_TRUE(std::isnan(sick.at(7, i)));
  }
}

TEST_P(AdaptiveTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  const Ops& ops = rig.ops();
  Stream& stream = rig.stream();
  const TensorView x = rig.InOut(Random(kF32, {2, 4}, 1));
  const TensorView y = rig.Out(kF32, {2, 4});
  const TensorView groups = rig.In(Ints({0, 1}));
  const TensorView scale = rig.In(Random(kF32, {2, 4}, 2));
  const TensorView branch = rig.In(Random(kF32, {2, 4}, 3));
  const TensorView three = rig.In(Random(kF32, {2, 3}, 2));
  const TensorView narrow = rig.In(Random(kBf16, {2, 4}, 2));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, narrow, scale, scale, groups, y, kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, three, scale, groups, y, kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, scale, three, groups, y, kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, scale, scale.Rows(0, 1), groups, y, kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, narrow, scale, groups, y, kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, scale, scale, rig.In(Ints({0})), y, kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, scale, scale, scale, y, kEps)));
  EXPECT_TRUE(
      Refused(ops.AdaRmsNorm(stream, x, scale, scale, groups, rig.Out(kF32, {3, 4}), kEps)));
  EXPECT_TRUE(
      Refused(ops.AdaRmsNorm(stream, x, scale, scale, groups, rig.Out(kI32, {2, 4}), kEps)));
  EXPECT_TRUE(Refused(ops.AdaRmsNorm(stream, x, scale, scale, groups, y, -1.0f)));
  EXPECT_TRUE(Refused(ops.AddGated(stream, branch, three, groups, x)));
  EXPECT_TRUE(Refused(ops.AddGated(stream, three, scale, groups, x)));
  EXPECT_TRUE(Refused(ops.AddGated(stream, branch, narrow, groups, x)));
  EXPECT_TRUE(Refused(ops.AddGated(stream, branch, scale, rig.In(Ints({0})), x)));
  EXPECT_TRUE(Refused(ops.AddGated(stream, branch, scale, branch, x)));
  EXPECT_TRUE(Refused(ops.AddGated(stream, branch, scale, groups, narrow)));
  Must(stream.Synchronize());
}

// A group out of range is found when the work runs, and ends the stream.
TEST_P(AdaptiveTest, AGroupOutOfRangeFailsTheStream) {
  for (const int64_t group : {-1, 2}) {
    for (const bool norm : {false, true}) {
      const auto backend = Must(GetParam().make(1));
      const auto stream = Must(backend->NewStream());
      const auto staging = Must(backend->Allocate(256, MemKind::kPinned));
      const auto device = Must(backend->Allocate(256, MemKind::kDevice));
      std::memset(staging->data(), 0, 256);
      reinterpret_cast<int32_t*>(staging->data())[0] = static_cast<int32_t>(group);
      Must(stream->Copy(device->View(DType::kU8, {256}), staging->View(DType::kU8, {256})));
      const TensorView groups = device->View(kI32, {1});
      const TensorView two = device->View(kF32, {2, 4}, 64);
      const TensorView in = device->View(kF32, {1, 4}, 128);
      const TensorView out = device->View(kF32, {1, 4}, 192);
      EXPECT_TRUE((norm ? backend->ops().AdaRmsNorm(*stream, in, two, two, groups, out, kEps)
                        : backend->ops().AddGated(*stream, in, two, groups, out))
                      .ok());
      EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kInternal);
    }
  }
}

INSTANTIATE_FOR_ALL_BACKENDS(AdaptiveTest);

}  // namespace
}  // namespace saccade::optest
