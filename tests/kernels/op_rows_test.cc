// Ops that work row by row, on every backend: norms, Embed, GatherRows, Patchify, Convert, Sample,
// and Stream::Copy.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/philox.h"
#include "kernels/common/sampling.h"
#include "tests/kernels/backends.h"

namespace saccade::optest {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;
constexpr DType kI32 = DType::kI32;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

bool Refused(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument;
}

// ---- norms
// ---------------------------------------------------------------------------------------------------------

struct NormCase {
  bool layer;  // LayerNorm, else RmsNorm
  int64_t width;
  DType y;
  Layout layout = kDense;
  double mean = 0;
  float eps = 1e-6f;
};

const std::vector<NormCase>& NormCases() {
  static const std::vector<NormCase> cases = {
      {false, 1, kF32},
      {false, 5, kF32, kStrided},
      {false, 36, kBf16},
      {false, 134, kBf16, kStrided},
      {false, 352, kF32, kDense, 3.0, 1e-5f},
      {false, 4096, kF32},
      {true, 2, kF32},
      {true, 5, kF32, kStrided},
      {true, 36, kBf16},
      {true, 134, kBf16, kStrided},
      {true, 352, kF32, kDense, 30.0, 1e-5f},
      {true, 1152, kF32},
  };
  return cases;
}

HostTensor RunNorm(Rig& rig, const NormCase& c, const HostTensor& x) {
  const DeviceTensor& y = rig.Out(c.y, x.dims, c.layout);
  const DeviceTensor& gamma = rig.In(Random(kF32, {c.width}, 2));
  if (c.layer) {
    Must(rig.ops().LayerNorm(rig.stream(), rig.In(x, c.layout), gamma,
                             rig.In(Random(kF32, {c.width}, 3)), y, c.eps));
  } else {
    Must(rig.ops().RmsNorm(rig.stream(), rig.In(x, c.layout), gamma, y, c.eps));
  }
  return rig.Read(y);
}

HostTensor NormInput(const NormCase& c, int64_t rows) {
  HostTensor x = Random(kF32, {rows, c.width}, 1, 2.0);
  for (double& value : x.values) value = RoundTo(kF32, value + c.mean);
  return x;
}

class NormTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(NormTest, MatchesTheOracle) {
  for (const NormCase& c : NormCases()) {
    for (int64_t rows : {1, 2, 5, 6, 7, 8, 13, 31, 316}) {
      SCOPED_TRACE(testing::Message()
                   << (c.layer ? "LayerNorm " : "RmsNorm ") << rows << " x " << c.width);
      const HostTensor x = NormInput(c, rows);
      const HostTensor gamma = Random(kF32, {c.width}, 2);
      const HostTensor beta = Random(kF32, {c.width}, 3);
      Rig rig(GetParam());
      const HostTensor y = RunNorm(rig, c, x);
      int failures = 0;
      for (int64_t row = 0; row < rows; ++row) {
        double mean = 0;
        for (int64_t i = 0; c.layer && i < c.width; ++i)
          mean += x.at(row, i) / static_cast<double>(c.width);
        double variance = 0;
        for (int64_t i = 0; i < c.width; ++i) {
          variance += (x.at(row, i) - mean) * (x.at(row, i) - mean) / static_cast<double>(c.width);
        }
        const double factor = 1.0 / std::sqrt(variance + static_cast<double>(c.eps));
        for (int64_t i = 0; i < c.width; ++i) {
          const auto column = static_cast<size_t>(i);
          const double weight = gamma.values[column];
          const double normal = (x.at(row, i) - mean) * factor;
          const double expected = normal * weight + (c.layer ? beta.values[column] : 0.0);
          // The mean's own error matters where the mean is large against the spread.
          const double mean_error =
              c.layer ? SumTolerance(c.width, std::abs(mean) + 2.0) * factor : 0.0;
          const double tolerance =
              std::abs(weight) * (SumTolerance(c.width, std::abs(normal)) + mean_error) +
              2 * kUlpF32 * std::abs(expected);
          const auto near = Near(y.at(row, i), expected, tolerance, c.y);
          if (!near && ++failures <= 3)
            ADD_FAILURE() << "row " << row << " column " << i << ": " << near.message();
        }
      }
      EXPECT_EQ(failures, 0);
    }
  }
}

TEST_P(NormTest, RowsAreIndependent) {
  for (const NormCase& c : NormCases()) {
    SCOPED_TRACE(testing::Message() << (c.layer ? "LayerNorm " : "RmsNorm ") << c.width);
    HostTensor x = NormInput(c, 33);
    Rig rig(GetParam());
    const HostTensor all = RunNorm(rig, c, x);
    for (const auto& [begin, end] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {32, 33}, {5, 18}}) {
      EXPECT_TRUE(SameBits(RunNorm(rig, c, x.Rows(begin, end)), all.Rows(begin, end)));
    }
    for (int threads : {2, 3}) {
      Rig several(GetParam(), threads);
      EXPECT_TRUE(SameBits(RunNorm(several, c, x), all)) << threads << " threads";
    }
    x.at(7, 0) = kNan;
    const HostTensor mixed = RunNorm(rig, c, x);
    EXPECT_TRUE(SameBits(mixed.Rows(0, 7), all.Rows(0, 7)));
    EXPECT_TRUE(SameBits(mixed.Rows(8, 33), all.Rows(8, 33)));
    for (int64_t i = 0; i < c.width; ++i) EXPECT_TRUE(std::isnan(mixed.at(7, i)));
  }
}

TEST_P(NormTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  const TensorView x = rig.In(Random(kF32, {2, 4}, 1));
  const TensorView y = rig.Out(kF32, {2, 4});
  const TensorView gamma = rig.In(Random(kF32, {4}, 1));
  const TensorView three = rig.In(Random(kF32, {3}, 1));
  const TensorView narrow = rig.In(Random(kBf16, {2, 4}, 1));
  const Ops& ops = rig.ops();
  Stream& stream = rig.stream();
  EXPECT_TRUE(Refused(ops.RmsNorm(stream, x, three, y, 1e-6f)));
  EXPECT_TRUE(Refused(ops.RmsNorm(stream, narrow, gamma, y, 1e-6f)));
  EXPECT_TRUE(Refused(ops.RmsNorm(stream, x, gamma, rig.Out(kF32, {3, 4}), 1e-6f)));
  EXPECT_TRUE(Refused(ops.RmsNorm(stream, x, gamma, rig.Out(kI32, {2, 4}), 1e-6f)));
  EXPECT_TRUE(Refused(ops.LayerNorm(stream, x, three, gamma, y, 1e-6f)));
  EXPECT_TRUE(Refused(ops.LayerNorm(stream, x, gamma, three, y, 1e-6f)));
  EXPECT_TRUE(Refused(ops.LayerNorm(stream, x, gamma, gamma, rig.Out(kF32, {2, 5}), 1e-6f)));
  Must(stream.Synchronize());
}

// ---- Embed, GatherRows
// ---------------------------------------------------------------------------------------------

class RowsTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(RowsTest, EmbedLooksUpThroughTheIndex) {
  for (const auto& [dtype, scale] : std::vector<std::pair<DType, float>>{
           {kF32, 1.0f}, {kBf16, 1.0f}, {kF32, 30.983866f}, {kBf16, 45.254834f}}) {
    for (int64_t width : {1, 5, 36, 134}) {
      Rig rig(GetParam());
      const HostTensor table = Random(dtype, {11, width}, 1);
      const std::vector<int64_t> ids = {3, 10, 0, -1, 11, 2147483647, 3};
      const std::vector<int64_t> index = {6, 0, 1, 2, 3, 4, 5, 1};
      const DeviceTensor& out = rig.Out(kF32, {8, width}, kStrided);
      Must(rig.ops().Embed(rig.stream(), rig.In(table), rig.In(Ints(ids)), rig.In(Ints(index)),
                           scale, out));
      const HostTensor got = rig.Read(out);
      for (int64_t row = 0; row < 8; ++row) {
        const int64_t id = ids[static_cast<size_t>(index[static_cast<size_t>(row)])];
        for (int64_t i = 0; i < width; ++i) {
          if (id < 0 || id >= 11) {
            EXPECT_TRUE(std::isnan(got.at(row, i)));
          } else {
            EXPECT_EQ(got.at(row, i), RoundTo(kF32, table.at(id, i) * static_cast<double>(scale)));
          }
        }
      }
    }
  }
}

TEST_P(RowsTest, GatherCopiesRowsAndSkipsNegativeOnes) {
  for (int64_t width : {1, 5, 36, 134}) {
    Rig rig(GetParam());
    const HostTensor in = Random(kF32, {6, width}, 1);
    const HostTensor before = Random(kF32, {7, width}, 2);
    const std::vector<int64_t> index = {5, -1, 0, 0, -2147483647, 3, 5};
    const DeviceTensor& out = rig.InOut(before, kStrided);
    Must(rig.ops().GatherRows(rig.stream(), rig.In(in, kStrided), rig.In(Ints(index)), out));
    const HostTensor got = rig.Read(out);
    for (int64_t row = 0; row < 7; ++row) {
      const int64_t from = index[static_cast<size_t>(row)];
      EXPECT_TRUE(SameBits(got.Rows(row, row + 1),
                           from < 0 ? before.Rows(row, row + 1) : in.Rows(from, from + 1)));
    }
  }
}

TEST_P(RowsTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  const Ops& ops = rig.ops();
  Stream& stream = rig.stream();
  const TensorView table = rig.In(Random(kF32, {3, 4}, 1));
  const TensorView ids = rig.In(Ints({0, 1}));
  const TensorView out = rig.Out(kF32, {2, 4});
  EXPECT_TRUE(Refused(ops.Embed(stream, ids, ids, ids, 1.0f, out)));
  EXPECT_TRUE(Refused(ops.Embed(stream, table, table, ids, 1.0f, out)));
  EXPECT_TRUE(Refused(ops.Embed(stream, table, ids, rig.In(Ints({0})), 1.0f, out)));
  EXPECT_TRUE(Refused(ops.Embed(stream, table, ids, ids, 1.0f, rig.Out(kF32, {2, 5}))));
  EXPECT_TRUE(Refused(ops.Embed(stream, table, ids, ids, 1.0f, rig.Out(kBf16, {2, 4}))));
  EXPECT_TRUE(
      Refused(ops.Embed(stream, table, ids, ids, std::numeric_limits<float>::infinity(), out)));
  EXPECT_TRUE(Refused(ops.GatherRows(stream, table, rig.In(Ints({0})), out)));
  EXPECT_TRUE(Refused(ops.GatherRows(stream, table, ids, rig.Out(kF32, {2, 3}))));
  EXPECT_TRUE(Refused(ops.GatherRows(stream, rig.In(Random(kBf16, {3, 4}, 1)), ids, out)));
  EXPECT_TRUE(Refused(ops.Convert(stream, table, out)));
  EXPECT_TRUE(Refused(ops.Convert(stream, rig.In(Ints({1, 2, 3})), out)));
  Must(stream.Synchronize());
}

// ---- Convert
// -------------------------------------------------------------------------------------------------------

TEST_P(RowsTest, ConvertRoundsToNearestEven) {
  // Values, and the BF16 they become.
  const std::vector<std::pair<double, double>> pairs = {
      {0.0, 0.0},
      {-0.0, -0.0},
      {1.0, 1.0},
      {1.0 + 0x1p-8, 1.0},               // a tie, to even
      {1.0 + 3 * 0x1p-8, 1.0 + 0x1p-6},  // a tie, to even
      {1.0 + 0x1p-8 + 0x1p-20, 1.0 + 0x1p-7},
      {-1.0 - 0x1p-8 - 0x1p-20, -1.0 - 0x1p-7},
      {0x1.fep127, 0x1.fep127},
      {0x1.ffp127, kInf},  // a tie, to even, beyond the largest
      {-0x1.fffffep127, -kInf},
      {kInf, kInf},
      {kNan, kNan},
      {0x1p-133, 0x1p-133},  // the smallest denormal
      {0x1p-134, 0.0},       // half of it, to even
      {0x1.8p-134, 0x1p-133},
      {0x1p-149, 0.0},
  };
  for (int64_t width : {1, 4, 16}) {
    HostTensor wide{kF32, {static_cast<int64_t>(pairs.size()) / width, width}, {}};
    HostTensor narrow{kBf16, wide.dims, {}};
    for (const auto& [from, to] : pairs) {
      wide.values.push_back(from);
      narrow.values.push_back(to);
    }
    Rig rig(GetParam());
    const DeviceTensor& down = rig.Out(kBf16, wide.dims, kStrided);
    Must(rig.ops().Convert(rig.stream(), rig.In(wide, kStrided), down));
    EXPECT_TRUE(SameBits(rig.Read(down), narrow));
    const DeviceTensor& up = rig.Out(kF32, wide.dims, kStrided);
    Must(rig.ops().Convert(rig.stream(), rig.In(narrow, kStrided), up));
    HostTensor widened = narrow;
    widened.dtype = kF32;
    EXPECT_TRUE(SameBits(rig.Read(up), widened));
  }
  for (int64_t rows : {1, 13, 316}) {
    for (int64_t width : {1, 36, 134}) {
      Rig rig(GetParam());
      const HostTensor wide = Random(kF32, {rows, width}, 1);
      HostTensor narrow = wide;
      narrow.dtype = kBf16;
      for (double& value : narrow.values) value = RoundTo(kBf16, value);
      const DeviceTensor& down = rig.Out(kBf16, wide.dims);
      Must(rig.ops().Convert(rig.stream(), rig.In(wide), down));
      EXPECT_TRUE(SameBits(rig.Read(down), narrow));
    }
  }
}

// ---- Patchify
// ------------------------------------------------------------------------------------------------------

TEST_P(RowsTest, PatchifyTakesNormalisedPixels) {
  const std::array<float, 3> zero = {0, 0, 0};
  const std::array<float, 3> one = {1, 1, 1};
  const std::array<float, 3> mean = {0.484375f, 0.455078125f, 0.40625f};
  const std::array<float, 3> std = {0.228515625f, 0.2236328125f, 0.224609375f};
  for (const DType type : {kF32, kBf16}) {
    constexpr int64_t kFrames = 2, kDown = 2, kAcross = 3, kPatch = 4;
    Rig rig(GetParam());
    HostTensor pixels{kF32, {kFrames, kDown * kPatch, kAcross * kPatch, 3}, {}};
    for (int64_t i = 0; i < pixels.numel(); ++i) {
      pixels.values.push_back(static_cast<double>(static_cast<float>(i % 509) / 254.0f - 1.0f));
    }
    pixels.values[5] = -0.0;
    const DeviceTensor& in = rig.In(pixels);
    for (const bool identity : {true, false}) {
      const DeviceTensor& out =
          rig.Out(type, {kFrames * kDown * kAcross, 3 * kPatch * kPatch}, kStrided);
      Must(rig.ops().Patchify(rig.stream(), in, kPatch, identity ? zero : mean,
                              identity ? one : std, out));
      HostTensor expected{type, {kFrames * kDown * kAcross, 3 * kPatch * kPatch}, {}};
      for (int64_t row = 0; row < expected.dims[0]; ++row) {
        for (int64_t at = 0; at < expected.dims[1]; ++at) {
          const int64_t c = at / (kPatch * kPatch);
          const int64_t y = row / kAcross * kPatch + at / kPatch % kPatch;  // of all frames
          const int64_t x = row % kAcross * kPatch + at % kPatch;
          const auto v = static_cast<float>(
              pixels.values[static_cast<size_t>((y * kAcross * kPatch + x) * 3 + c)]);
          const auto channel = static_cast<size_t>(c);
          const float value = identity ? v : (v - mean[channel]) / std[channel];
          expected.values.push_back(RoundTo(type, static_cast<double>(value)));
        }
      }
      EXPECT_TRUE(SameBits(rig.Read(out), expected)) << DTypeName(type) << identity;
    }
  }
}

TEST_P(RowsTest, PatchifyIsExact) {
  const std::array<float, 3> mean = {0.484375f, 0.455078125f, 0.40625f};
  const std::array<float, 3> std = {0.228515625f, 0.2236328125f, 0.224609375f};
  struct Case {
    int64_t frames;
    int64_t height;
    int64_t width;
    int64_t patch;
    DType out;
  };
  for (const Case& c : std::vector<Case>{{1, 14, 14, 14, kF32},
                                         {2, 28, 42, 14, kF32},
                                         {3, 6, 9, 3, kBf16},
                                         {1, 5, 7, 1, kF32},
                                         {2, 32, 16, 16, kBf16}}) {
    Rig rig(GetParam());
    HostTensor rgb{DType::kU8, {c.frames, c.height, c.width, 3}, {}};
    for (int64_t i = 0; i < rgb.numel(); ++i)
      rgb.values.push_back(static_cast<double>((i * 37 + i / 256) % 256));
    const int64_t down = c.height / c.patch;
    const int64_t across = c.width / c.patch;
    const int64_t rows = c.frames * down * across;
    const DeviceTensor& out = rig.Out(c.out, {rows, 3 * c.patch * c.patch}, kStrided);
    Must(rig.ops().Patchify(rig.stream(), rig.In(rgb), static_cast<uint32_t>(c.patch), mean, std,
                            out));
    HostTensor expected{c.out, {rows, 3 * c.patch * c.patch}, {}};
    for (int64_t frame = 0; frame < c.frames; ++frame) {
      for (int64_t py = 0; py < down; ++py) {
        for (int64_t px = 0; px < across; ++px) {
          for (int64_t channel = 0; channel < 3; ++channel) {
            for (int64_t y = 0; y < c.patch; ++y) {
              for (int64_t x = 0; x < c.patch; ++x) {
                const int64_t pixel =
                    ((frame * c.height + py * c.patch + y) * c.width + px * c.patch + x) * 3 +
                    channel;
                const float unit =
                    static_cast<float>(rgb.values[static_cast<size_t>(pixel)]) / 255.0f;
                const auto at = static_cast<size_t>(channel);
                expected.values.push_back(
                    RoundTo(c.out, static_cast<double>((unit - mean[at]) / std[at])));
              }
            }
          }
        }
      }
    }
    EXPECT_TRUE(SameBits(rig.Read(out), expected)) << c.height << " x " << c.width;
    EXPECT_TRUE(Refused(rig.ops().Patchify(rig.stream(), rig.In(rgb), 0, mean, std, out)));
    EXPECT_TRUE(Refused(rig.ops().Patchify(rig.stream(), rig.In(rgb), 11, mean, std, out)));
    EXPECT_TRUE(
        Refused(rig.ops().Patchify(rig.stream(), rig.In(rgb), static_cast<uint32_t>(c.patch), mean,
                                   std, rig.Out(c.out, {rows + 1, 3 * c.patch * c.patch}))));
  }
}

// ---- Sample
// --------------------------------------------------------------------------------------------------------

struct Draw {
  int64_t row;
  float temperature;
  int64_t seed;
  int64_t draw;
  int64_t dest;
  float top_p = 1.0f;
};

// Token ids by destination; -7 where none was written.
std::vector<int64_t> RunSample(Rig& rig, const HostTensor& logits, const std::vector<Draw>& draws,
                               int64_t tokens, Layout layout = kDense) {
  HostTensor row = Ints({});
  HostTensor temperature{kF32, {static_cast<int64_t>(draws.size())}, {}};
  HostTensor top_p = temperature;
  HostTensor seed = Ints({}, DType::kI64);
  HostTensor draw = Ints({});
  HostTensor dest = Ints({});
  for (HostTensor* tensor : {&row, &seed, &draw, &dest}) tensor->dims = temperature.dims;
  for (const Draw& d : draws) {
    row.values.push_back(static_cast<double>(d.row));
    temperature.values.push_back(static_cast<double>(d.temperature));
    top_p.values.push_back(static_cast<double>(d.top_p));
    seed.values.push_back(static_cast<double>(d.seed));
    draw.values.push_back(static_cast<double>(d.draw));
    dest.values.push_back(static_cast<double>(d.dest));
  }
  const DeviceTensor& out =
      rig.InOut({kI32, {tokens}, std::vector<double>(static_cast<size_t>(tokens), -7.0)});
  SampleArgs args;
  args.logits = rig.In(logits, layout);
  args.source_row = rig.In(row);
  args.temperature = rig.In(temperature);
  args.top_p = rig.In(top_p);
  args.seed = rig.In(seed);
  args.draw = rig.In(draw);
  args.dest = rig.In(dest);
  args.tokens = out;
  Must(rig.ops().Sample(rig.stream(), args));
  const HostTensor got = rig.Read(out);
  return {got.values.begin(), got.values.end()};
}

class SampleTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(SampleTest, GreedyTakesTheLowestOfTheLargest) {
  for (int64_t vocabulary : {1, 2, 7, 64, 257, 1031}) {
    HostTensor logits = Random(kF32, {4, vocabulary}, 1);
    const int64_t low = vocabulary / 3;
    const int64_t high = vocabulary - 1;
    logits.at(0, low) = 9;
    logits.at(0, high) = 9;
    logits.at(1, high) = 9;
    for (int64_t i = 0; i < vocabulary; ++i) logits.at(2, i) = -5;  // all equal
    for (int64_t i = 0; i < vocabulary; ++i)
      logits.at(3, i) = i == low ? 0.0 : -0.0;  // equal as numbers
    Rig rig(GetParam());
    const auto tokens = RunSample(
        rig, logits,
        {{1, 0, 5, 0, 3}, {0, 0, 5, 1, 0}, {2, 0, 0, 0, 2}, {0, 0, 0, 9, 5}, {3, 0, 0, 0, 1}}, 7,
        kStrided);
    EXPECT_EQ(tokens, (std::vector<int64_t>{low, 0, 0, high, -7, low, -7})) << vocabulary;
  }
}

TEST_P(SampleTest, ABadRowIsInvalidAlone) {
  for (int64_t vocabulary : {3, 64, 129}) {
    for (double bad : {kNan, kInf, -kInf}) {
      for (int64_t at : {int64_t{0}, vocabulary / 2, vocabulary - 1}) {
        HostTensor logits = Random(kF32, {3, vocabulary}, 1);
        logits.at(0, 1) = 9;
        logits.at(2, 2) = 9;
        logits.at(1, at) = bad;
        Rig rig(GetParam());
        const auto tokens = RunSample(
            rig, logits, {{0, 0, 1, 0, 0}, {1, 0, 1, 0, 1}, {1, 1, 1, 0, 2}, {2, 0, 1, 0, 3}}, 4);
        EXPECT_EQ(tokens, (std::vector<int64_t>{1, kInvalidSample, kInvalidSample, 2}))
            << bad << " at " << at;
      }
    }
  }
}

TEST_P(SampleTest, BadTemperaturesAreInvalid) {
  Rig rig(GetParam());
  const auto tokens = RunSample(rig, Random(kF32, {1, 9}, 1),
                                {{0, -1, 1, 0, 0},
                                 {0, std::nanf(""), 1, 0, 1},
                                 {0, std::numeric_limits<float>::infinity(), 1, 0, 2}},
                                3);
  EXPECT_EQ(tokens, (std::vector<int64_t>{kInvalidSample, kInvalidSample, kInvalidSample}));
}

TEST_P(SampleTest, DrawsByInversionOfTheCumulativeWeights) {
  for (int64_t vocabulary : {2, 7, 100, 1031}) {
    const HostTensor logits = Random(kF32, {2, vocabulary}, 1, 2.0);
    Rig rig(GetParam());
    std::vector<Draw> draws;
    for (int64_t i = 0; i < 60; ++i) {
      draws.push_back({i % 2, i % 3 == 0 ? 0.25f : 1.5f, i % 5 == 0 ? -i : i * 1000003, i / 4, i});
    }
    const auto tokens = RunSample(rig, logits, draws, 60);
    for (size_t n = 0; n < draws.size(); ++n) {
      const Draw& d = draws[n];
      std::vector<double> cumulative;
      double sum = 0;
      for (int64_t i = 0; i < vocabulary; ++i) {
        sum += std::exp(logits.at(d.row, i) / static_cast<double>(d.temperature));
        cumulative.push_back(sum);
      }
      const double u = UniformDraw(static_cast<uint64_t>(d.seed), static_cast<uint64_t>(d.draw));
      const auto token = static_cast<size_t>(tokens[n]);
      ASSERT_LT(token, cumulative.size());
      const double slack = 1e-9;
      EXPECT_GT(cumulative[token] / sum, u - slack);
      if (token > 0) {
        EXPECT_LE(cumulative[token - 1] / sum, u + slack);
      }
    }
    // A draw depends on nothing but its own arguments.
    const std::vector<Draw> alone = {
        {draws[17].row, draws[17].temperature, draws[17].seed, draws[17].draw, 0}};
    EXPECT_EQ(RunSample(rig, logits, alone, 1)[0], tokens[17]);
  }
}

TEST_P(SampleTest, FrequenciesFollowTheSoftmax) {
  HostTensor logits{kF32, {1, 4}, {0.0, 1.0, 2.0, -1.0}};
  Rig rig(GetParam());
  constexpr int64_t kDraws = 4000;
  std::vector<Draw> draws;
  for (int64_t i = 0; i < kDraws; ++i) draws.push_back({0, 1.0f, 42, i, i});
  std::array<double, 4> counts{};
  for (int64_t token : RunSample(rig, logits, draws, kDraws))
    counts.at(static_cast<size_t>(token)) += 1;
  const double total = 1 + std::exp(1.0) + std::exp(2.0) + std::exp(-1.0);
  for (size_t i = 0; i < 4; ++i) {
    const double p = std::exp(logits.values[i]) / total;
    EXPECT_NEAR(counts[i] / kDraws, p, 4 * std::sqrt(p * (1 - p) / kDraws));
  }
}

TEST_P(SampleTest, EveryBackendDrawsTheSameWithTopP) {
  for (int64_t vocabulary : {1, 2, 7, 100, 1031}) {
    const HostTensor logits = Random(kF32, {3, vocabulary}, 1, 3.0);
    Rig rig(GetParam());
    std::vector<Draw> draws;
    for (int64_t i = 0; i < 90; ++i) {
      draws.push_back({i % 3, i % 4 == 0 ? 0.0f : 0.5f + 0.1f * static_cast<float>(i % 10), i * 31,
                       i / 3, i, 0.1f * static_cast<float>(1 + i % 9)});
    }
    draws.push_back({0, 1.0f, 1, 0, 90, 0.0f});
    draws.push_back({0, 1.0f, 1, 0, 91, 1.5f});
    const auto tokens = RunSample(rig, logits, draws, 92, kStrided);
    std::vector<float> row(static_cast<size_t>(vocabulary));
    for (size_t n = 0; n < draws.size(); ++n) {
      const Draw& d = draws[n];
      for (int64_t i = 0; i < vocabulary; ++i) {
        row[static_cast<size_t>(i)] = static_cast<float>(logits.at(d.row, i));
      }
      EXPECT_EQ(tokens[n], SampleRow(row.data(), vocabulary, d.temperature, d.top_p, d.seed,
                                     static_cast<int32_t>(d.draw)))
          << n << " of " << vocabulary;
    }
    EXPECT_EQ(tokens[90], kInvalidSample);
    EXPECT_EQ(tokens[91], kInvalidSample);
  }
}

TEST_P(SampleTest, TopTokensInOrderWithTheirLogProbabilities) {
  for (int64_t vocabulary : {1, 5, 64, 1031}) {
    for (int64_t count : {1, 2, 8}) {
      HostTensor logits = Random(kF32, {4, vocabulary}, 1, 2.0);
      for (int64_t i = 0; i < vocabulary; ++i) logits.at(1, i) = 0.25;  // all equal
      logits.at(2, vocabulary / 2) = kNan;
      Rig rig(GetParam());
      TopTokensArgs args;
      args.logits = rig.In(logits, kStrided);
      args.source_row = rig.In(Ints({3, 0, 1, 2, 3}));
      const DeviceTensor& ids = rig.Out(kI32, {5, count});
      const DeviceTensor& log_probs = rig.Out(kF32, {5, count});
      args.ids = ids;
      args.log_probs = log_probs;
      Must(rig.ops().TopTokens(rig.stream(), args));
      const HostTensor got_ids = rig.Read(ids);
      const HostTensor got = rig.Read(log_probs);
      const std::array<int64_t, 5> rows = {3, 0, 1, 2, 3};
      std::vector<float> row(static_cast<size_t>(vocabulary));
      std::vector<int32_t> want_ids(static_cast<size_t>(count));
      std::vector<float> want(static_cast<size_t>(count));
      for (int64_t n = 0; n < 5; ++n) {
        for (int64_t i = 0; i < vocabulary; ++i) {
          row[static_cast<size_t>(i)] =
              static_cast<float>(logits.at(rows.at(static_cast<size_t>(n)), i));
        }
        TopOfRow(row.data(), vocabulary, count, want_ids.data(), want.data());
        for (int64_t k = 0; k < count; ++k) {
          EXPECT_EQ(got_ids.at(n, k), want_ids[static_cast<size_t>(k)]);
          EXPECT_EQ(static_cast<float>(got.at(n, k)), want[static_cast<size_t>(k)]);
        }
      }
      args.log_probs = rig.Out(kF32, {5, count + 1});
      EXPECT_TRUE(Refused(rig.ops().TopTokens(rig.stream(), args)));
    }
  }
}

TEST_P(SampleTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  SampleArgs good;
  good.logits = rig.In(Random(kF32, {2, 4}, 1));
  good.source_row = rig.In(Ints({0, 1}));
  good.temperature = rig.In({kF32, {2}, {0, 0}});
  good.top_p = rig.In({kF32, {2}, {1, 1}});
  good.seed = rig.In(Ints({1, 2}, DType::kI64));
  good.draw = rig.In(Ints({0, 0}));
  good.dest = rig.In(Ints({0, 1}));
  good.tokens = rig.Out(kI32, {2});
  const auto refused = [&](auto change) {
    SampleArgs args = good;
    change(args);
    return Refused(rig.ops().Sample(rig.stream(), args));
  };
  EXPECT_TRUE(refused([&](auto& a) { a.logits = rig.In(Random(kBf16, {2, 4}, 1)); }));
  EXPECT_TRUE(refused([&](auto& a) { a.source_row = rig.In(Ints({0})); }));
  EXPECT_TRUE(refused([&](auto& a) { a.temperature = rig.In({kF32, {3}, {0, 0, 0}}); }));
  EXPECT_TRUE(refused([&](auto& a) { a.top_p = rig.In({kF32, {1}, {1}}); }));
  EXPECT_TRUE(refused([&](auto& a) { a.seed = rig.In(Ints({1, 2})); }));
  EXPECT_TRUE(refused([&](auto& a) { a.draw = rig.In(Ints({1, 2}, DType::kI64)); }));
  EXPECT_TRUE(refused([&](auto& a) { a.tokens = rig.Out(kF32, {2}); }));
  EXPECT_TRUE(rig.ops().Sample(rig.stream(), good).ok());
  Must(rig.stream().Synchronize());
}

// ---- Copy
// ----------------------------------------------------------------------------------------------------------

class CopyTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(CopyTest, CopiesBetweenStridedViews) {
  for (DType dtype : {kF32, kBf16, kI32, DType::kI64, DType::kU8}) {
    Rig rig(GetParam());
    HostTensor host{dtype, {5, 7}, {}};
    for (int64_t i = 0; i < host.numel(); ++i)
      host.values.push_back(static_cast<double>(i * 3 % 128));
    const DeviceTensor& out = rig.Out(dtype, {5, 7}, {1, 4});
    Must(rig.stream().Copy(out, rig.In(host, kStrided)));
    EXPECT_TRUE(SameBits(rig.Read(out), host));
  }
}

TEST_P(CopyTest, CopiesRankFour) {
  Rig rig(GetParam());
  HostTensor host{kF32, {2, 3, 4, 5}, {}};
  for (int64_t i = 0; i < host.numel(); ++i) host.values.push_back(static_cast<double>(i));
  const DeviceTensor& in = rig.In(host);
  const DeviceTensor& out = rig.Out(kF32, {2, 3, 2, 3});
  // The middle of the last two dimensions.
  TensorView part = in;
  part.data += (1 * 5 + 1) * sizeof(float);
  part.dims = {2, 3, 2, 3};
  Must(rig.stream().Copy(out, part));
  const HostTensor got = rig.Read(out);
  for (int64_t i = 0; i < got.numel(); ++i) {
    const int64_t from = i / 18 * 60 + i / 6 % 3 * 20 + (i / 3 % 2 + 1) * 5 + i % 3 + 1;
    EXPECT_EQ(got.values[static_cast<size_t>(i)], static_cast<double>(from));
  }
}

TEST_P(CopyTest, EventsCompleteInOrder) {
  Rig rig(GetParam());
  const DeviceTensor& a = rig.In(Random(kF32, {100}, 1));
  const DeviceTensor& b = rig.Out(kF32, {100});
  Must(rig.stream().Copy(b, a));
  const auto first = Must(rig.stream().Record());
  Must(rig.stream().Copy(b, a));
  const auto second = Must(rig.stream().Record());
  Must(second->Wait());
  EXPECT_TRUE(first->Done());
  EXPECT_TRUE(second->Done());
  Must(first->Wait());
}

TEST_P(CopyTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  const TensorView a = rig.In(Random(kF32, {2, 3}, 1));
  EXPECT_TRUE(Refused(rig.stream().Copy(rig.Out(kF32, {3, 2}), a)));
  EXPECT_TRUE(Refused(rig.stream().Copy(rig.Out(kF32, {6}), a)));
  EXPECT_TRUE(Refused(rig.stream().Copy(rig.Out(kI32, {2, 3}), a)));
  std::vector<float> pageable(6);
  EXPECT_TRUE(Refused(
      rig.stream().Copy(TensorView::Dense(pageable.data(), kF32, MemKind::kHost, {2, 3}), a)));
}

INSTANTIATE_FOR_ALL_BACKENDS(NormTest);
INSTANTIATE_FOR_ALL_BACKENDS(RowsTest);
INSTANTIATE_FOR_ALL_BACKENDS(SampleTest);
INSTANTIATE_FOR_ALL_BACKENDS(CopyTest);

}  // namespace
}  // namespace saccade::optest
