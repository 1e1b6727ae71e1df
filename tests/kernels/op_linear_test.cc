// Linear and GatedLinear on every backend: right values, bits independent of the number of rows and
// threads, no byte written outside the output.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/kernels/backends.h"

namespace saccade::optest {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;

double Activated(Activation activation, double v) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kGeluErf:
      return 0.5 * v * (1.0 + std::erf(v / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return 0.5 * v * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v)));
    case Activation::kSilu:
      return v / (1.0 + std::exp(-v));
    case Activation::kRelu:
      return v > 0 ? v : 0.0;
  }
  return v;
}

// Error that a vector approximation of an activation may add at `v`.
double ActivationTolerance(Activation activation, double v) {
  return activation == Activation::kNone || activation == Activation::kRelu
             ? 0.0
             : 1e-6 * std::max(1.0, std::abs(v));
}
constexpr double kActivationSlope = 1.13;  // the steepest of them

struct LinearCase {
  int64_t n;
  int64_t k;
  DType compute;
  DType x = kF32;
  DType y = kF32;
  bool bias = false;
  Activation activation = Activation::kNone;
  bool scale = false;
  enum class Residual { kNone, kSeparate, kInPlace } residual = Residual::kNone;
  Layout layout = kDense;
  DType weight_source = kF32;
  std::vector<int64_t> parts = {};  // rows of each stacked part; empty: one part
};

std::string Describe(const LinearCase& c) {
  return testing::PrintToString(c.n) + " x " + testing::PrintToString(c.k) + " compute " +
         std::string(DTypeName(c.compute)) + ", x " + std::string(DTypeName(c.x)) + ", y " +
         std::string(DTypeName(c.y));
}

using Residual = LinearCase::Residual;

const std::vector<LinearCase>& LinearCases() {
  static const std::vector<LinearCase> cases = {
      {.n = 1, .k = 1, .compute = kF32},
      {.n = 5, .k = 3, .compute = kF32, .bias = true, .layout = kStrided},
      {.n = 32, .k = 36, .compute = kF32, .bias = true, .activation = Activation::kGeluErf},
      {.n = 134, .k = 32, .compute = kF32, .residual = Residual::kInPlace},
      {.n = 36,
       .k = 134,
       .compute = kF32,
       .bias = true,
       .scale = true,
       .residual = Residual::kSeparate,
       .layout = kStrided},
      {.n = 257,
       .k = 352,
       .compute = kF32,
       .activation = Activation::kGeluTanh,
       .weight_source = kBf16},
      {.n = 64, .k = 64, .compute = kF32, .activation = Activation::kRelu, .parts = {17, 40, 7}},
      {.n = 352, .k = 588, .compute = kF32, .bias = true, .activation = Activation::kSilu},
      {.n = 1, .k = 1, .compute = kBf16},
      {.n = 7, .k = 5, .compute = kBf16, .x = kBf16, .y = kBf16, .bias = true, .layout = kStrided},
      {.n = 32,
       .k = 36,
       .compute = kBf16,
       .bias = true,
       .activation = Activation::kGeluErf,
       .residual = Residual::kInPlace},
      {.n = 134,
       .k = 33,
       .compute = kBf16,
       .x = kBf16,
       .residual = Residual::kInPlace,
       .weight_source = kBf16},
      {.n = 36,
       .k = 134,
       .compute = kBf16,
       .x = kBf16,
       .y = kBf16,
       .bias = true,
       .scale = true,
       .residual = Residual::kSeparate,
       .layout = kStrided},
      {.n = 257, .k = 352, .compute = kBf16, .x = kBf16, .activation = Activation::kGeluTanh},
      {.n = 64,
       .k = 64,
       .compute = kBf16,
       .y = kBf16,
       .activation = Activation::kRelu,
       .parts = {17, 40, 7}},
      {.n = 352,
       .k = 588,
       .compute = kBf16,
       .bias = true,
       .activation = Activation::kSilu,
       .weight_source = kBf16},
  };
  return cases;
}

struct LinearData {
  HostTensor x;
  std::vector<HostTensor> weight;
  HostTensor bias;
  HostTensor scale;
  HostTensor residual;
};

LinearData MakeLinearData(const LinearCase& c, int64_t m) {
  LinearData data;
  data.x = Random(c.x, {m, c.k}, 1);
  const std::vector<int64_t> parts = c.parts.empty() ? std::vector<int64_t>{c.n} : c.parts;
  uint32_t seed = 10;
  for (int64_t rows : parts)
    data.weight.push_back(Random(c.weight_source, {rows, c.k}, seed++, 0.2));
  data.bias = Random(kF32, {c.n}, 3);
  data.scale = Random(kF32, {c.n}, 4);
  data.residual = Random(kF32, {m, c.n}, 5);
  return data;
}

HostTensor RunLinear(Rig& rig, const LinearCase& c, const LinearData& data) {
  const auto weight = rig.Pack(data.weight, c.compute);
  EXPECT_EQ(weight->n(), c.n);
  EXPECT_EQ(weight->k(), c.k);
  EXPECT_EQ(weight->dtype(), c.compute);
  const DeviceTensor& y = c.residual == Residual::kInPlace
                              ? rig.InOut(data.residual, c.layout)
                              : rig.Out(c.y, {data.x.dims[0], c.n}, c.layout);
  LinearArgs args;
  args.weight = weight.get();
  args.x = rig.In(data.x, c.layout);
  args.y = y;
  if (c.bias) args.bias = rig.In(data.bias).view();
  args.activation = c.activation;
  if (c.scale) args.scale = rig.In(data.scale).view();
  if (c.residual == Residual::kInPlace) args.residual = y.view();
  if (c.residual == Residual::kSeparate) args.residual = rig.In(data.residual, c.layout).view();
  Must(rig.ops().Linear(rig.stream(), args));
  return rig.Read(y);  // waits, so that the weight may go
}

void CheckLinear(const LinearCase& c, const LinearData& data, const HostTensor& y) {
  int failures = 0;
  for (int64_t m = 0; m < y.dims[0]; ++m) {
    int64_t n = 0;
    for (const HostTensor& part : data.weight) {
      for (int64_t row = 0; row < part.dims[0]; ++row, ++n) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < c.k; ++k) {
          const double product =
              RoundTo(c.compute, data.x.at(m, k)) * RoundTo(c.compute, part.at(row, k));
          sum += product;
          magnitude += std::abs(product);
        }
        const auto column = static_cast<size_t>(n);
        double tolerance = SumTolerance(c.k, magnitude);
        if (c.bias) {
          sum += data.bias.values[column];
          tolerance += kUlpF32 * std::abs(sum);
        }
        double value = Activated(c.activation, sum);
        tolerance = tolerance * kActivationSlope + ActivationTolerance(c.activation, sum);
        if (c.scale) {
          value *= data.scale.values[column];
          tolerance = tolerance * std::abs(data.scale.values[column]) + kUlpF32 * std::abs(value);
        }
        if (c.residual != Residual::kNone) {
          tolerance += kUlpF32 * (std::abs(value) + std::abs(data.residual.at(m, n)));
          value += data.residual.at(m, n);
        }
        const auto near = Near(y.at(m, n), value, tolerance, y.dtype);
        if (!near && ++failures <= 3)
          ADD_FAILURE() << "row " << m << " column " << n << ": " << near.message();
      }
    }
  }
  EXPECT_EQ(failures, 0);
}

class LinearTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(LinearTest, MatchesTheOracleAtEverySize) {
  for (const LinearCase& c : LinearCases()) {
    for (int64_t m : {1, 2, 5, 6, 7, 8, 13, 31, 316}) {
      SCOPED_TRACE(Describe(c) + ", rows " + std::to_string(m));
      const LinearData data = MakeLinearData(c, m);
      Rig rig(GetParam());
      CheckLinear(c, data, RunLinear(rig, c, data));
    }
  }
}

TEST_P(LinearTest, ARowHasTheSameBitsAloneAndInAnyBatch) {
  for (const LinearCase& c : LinearCases()) {
    SCOPED_TRACE(Describe(c));
    const LinearData data = MakeLinearData(c, 67);
    Rig rig(GetParam());
    const HostTensor all = RunLinear(rig, c, data);
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1}, {66, 67}, {31, 33}, {5, 18}, {1, 67}, {3, 7}, {32, 64}, {17, 25}}) {
      SCOPED_TRACE(testing::Message() << "rows " << begin << " to " << end);
      LinearData part = data;
      part.x = data.x.Rows(begin, end);
      part.residual = data.residual.Rows(begin, end);
      EXPECT_TRUE(SameBits(RunLinear(rig, c, part), all.Rows(begin, end)));
    }
  }
}

TEST_P(LinearTest, ThreadsDoNotChangeBits) {
  for (const LinearCase& c : LinearCases()) {
    SCOPED_TRACE(Describe(c));
    for (int64_t m : {1, 7, 45}) {
      const LinearData data = MakeLinearData(c, m);
      Rig one(GetParam(), 1);
      const HostTensor expected = RunLinear(one, c, data);
      for (int threads : {2, 3}) {
        Rig several(GetParam(), threads);
        EXPECT_TRUE(SameBits(RunLinear(several, c, data), expected))
            << threads << " threads, " << m << " rows";
      }
    }
  }
}

TEST_P(LinearTest, ANanRowStaysAlone) {
  for (const LinearCase& c : LinearCases()) {
    SCOPED_TRACE(Describe(c));
    LinearData data = MakeLinearData(c, 13);
    Rig rig(GetParam());
    const HostTensor clean = RunLinear(rig, c, data);
    for (int64_t k = 0; k < c.k; ++k) data.x.at(6, k) = std::nan("");
    const HostTensor mixed = RunLinear(rig, c, data);
    EXPECT_TRUE(SameBits(mixed.Rows(0, 6), clean.Rows(0, 6)));
    EXPECT_TRUE(SameBits(mixed.Rows(7, 13), clean.Rows(7, 13)));
    for (int64_t n = 0; n < c.n; ++n) EXPECT_TRUE(std::isnan(mixed.at(6, n))) << n;
  }
}

// The heads of a BF16 model stay F32, and read and write columns of wider tensors.
TEST_P(LinearTest, PrecisionsTakeTurnsAndViewsMayBeColumns) {
  const int64_t rows = 51;
  const HostTensor x = Random(kF32, {rows, 70}, 1);
  const HostTensor first = Random(kF32, {48, 32}, 2, 0.2);
  const HostTensor second = Random(kF32, {19, 48}, 3, 0.2);
  Rig rig(GetParam(), 2);
  const DeviceTensor& wide = rig.InOut(Random(kF32, {rows, 101}, 4), kStrided);
  const DeviceTensor& out = rig.InOut(Random(kF32, {rows, 40}, 5));
  const HostTensor before = rig.Read(wide);
  const HostTensor out_before = rig.Read(out);
  const auto narrow_weight = rig.Pack({first}, kBf16);
  const auto weight = rig.Pack({first}, kF32);
  const auto head = rig.Pack({second}, kBf16);
  const TensorView in = TensorView(rig.In(x, kStrided)).Columns(5, 37);
  const auto run = [&](const PackedWeight& w, const TensorView& from, const TensorView& to) {
    LinearArgs args;
    args.weight = &w;
    args.x = from;
    args.y = to;
    Must(rig.ops().Linear(rig.stream(), args));
  };
  run(*narrow_weight, in, wide.view().Columns(1, 49));
  run(*weight, in, wide.view().Columns(50, 98));
  run(*head, wide.view().Columns(50, 98), out.view().Columns(20, 39));
  const HostTensor got = rig.Read(wide);
  const HostTensor last = rig.Read(out);
  const auto check = [&](const HostTensor& w, DType compute, const auto& input, double value,
                         int64_t n) {
    double sum = 0;
    double magnitude = 0;
    for (int64_t k = 0; k < w.dims[1]; ++k) {
      const double product = RoundTo(compute, input(k)) * RoundTo(compute, w.at(n, k));
      sum += product;
      magnitude += std::abs(product);
    }
    EXPECT_TRUE(Near(value, sum, SumTolerance(w.dims[1], magnitude), kF32));
  };
  for (int64_t row = 0; row < rows; ++row) {
    const auto from_x = [&](int64_t k) { return x.at(row, 5 + k); };
    const auto from_wide = [&](int64_t k) { return got.at(row, 50 + k); };
    for (int64_t n = 0; n < 48; ++n) {
      check(first, kBf16, from_x, got.at(row, 1 + n), n);
      check(first, kF32, from_x, got.at(row, 50 + n), n);
    }
    for (int64_t n = 0; n < 19; ++n) check(second, kBf16, from_wide, last.at(row, 20 + n), n);
    for (const int64_t column : {0, 49, 98, 100}) {
      EXPECT_EQ(got.at(row, column), before.at(row, column));
    }
    for (const int64_t column : {0, 19, 39}) {
      EXPECT_EQ(last.at(row, column), out_before.at(row, column));
    }
  }
}

TEST_P(LinearTest, NoRowsIsNoWork) {
  Rig rig(GetParam());
  const LinearCase c{.n = 5, .k = 3, .compute = kF32};
  const LinearData data = MakeLinearData(c, 0);
  EXPECT_EQ(RunLinear(rig, c, data).numel(), 0);
}

TEST_P(LinearTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  const auto weight = rig.Pack({Random(kF32, {6, 4}, 1)}, kF32);
  const auto gated = rig.PackGated(Random(kF32, {3, 4}, 1), Random(kF32, {3, 4}, 2), kF32);
  LinearArgs good;
  good.weight = weight.get();
  good.x = rig.In(Random(kF32, {2, 4}, 2));
  good.y = rig.Out(kF32, {2, 6});
  const auto refused = [&](auto change) {
    LinearArgs args = good;
    change(args);
    return rig.ops().Linear(rig.stream(), args).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.weight = nullptr; }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.weight = gated.get(); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.x = rig.In(Random(kF32, {2, 5}, 2)); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.x = rig.In(Random(kBf16, {2, 4}, 2)); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.x = rig.In(Random(kF32, {3, 4}, 2)); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.y = rig.Out(kF32, {2, 7}); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.y = rig.Out(kBf16, {2, 6}); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.y = rig.Out(kF32, {12}); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.bias = rig.In(Random(kF32, {5}, 2)).view(); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.bias = rig.In(Random(kBf16, {6}, 2)).view(); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.scale = rig.In(Random(kF32, {7}, 2)).view(); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.residual = rig.In(Random(kF32, {1, 6}, 2)).view(); }));
  EXPECT_TRUE(refused([&](LinearArgs& a) { a.x.mem = MemKind::kHost; }));
  EXPECT_TRUE(rig.ops().Linear(rig.stream(), good).ok());
  Must(rig.stream().Synchronize());

  const auto bad_pack = [&](std::vector<TensorView> parts, DType dtype) {
    return rig.backend().PackLinear(parts, dtype).status().code() ==
           absl::StatusCode::kInvalidArgument;
  };
  std::vector<float> host(64, 0.0f);
  const auto view = [&](std::initializer_list<int64_t> dims) {
    return TensorView::Dense(host.data(), kF32, MemKind::kHost, dims);
  };
  EXPECT_TRUE(bad_pack({}, kF32));
  EXPECT_TRUE(bad_pack({view({4, 4})}, DType::kI32));
  EXPECT_TRUE(bad_pack({view({4, 4}), view({4, 5})}, kF32));
  EXPECT_TRUE(bad_pack({view({16})}, kF32));
  EXPECT_TRUE(bad_pack({good.x}, kF32));
  EXPECT_EQ(rig.backend().PackGated(view({4, 4}), view({5, 4}), kF32).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ---- gated
// ---------------------------------------------------------------------------------------------------------

struct GatedCase {
  int64_t width;
  int64_t k;
  DType compute;
  Activation activation = Activation::kSilu;
  Layout layout = kDense;
  DType weight_source = kF32;
};

const std::vector<GatedCase>& GatedCases() {
  static const std::vector<GatedCase> cases = {
      {1, 1, kF32},
      {36, 32, kF32, Activation::kSilu, kStrided},
      {134, 36, kF32, Activation::kGeluTanh},
      {352, 134, kF32, Activation::kSilu, kDense, kBf16},
      {1, 1, kBf16},
      {36, 33, kBf16, Activation::kSilu, kStrided},
      {134, 36, kBf16, Activation::kGeluTanh, kDense, kBf16},
      {352, 134, kBf16},
  };
  return cases;
}

struct GatedData {
  HostTensor x;
  HostTensor gate;
  HostTensor up;
};

GatedData MakeGatedData(const GatedCase& c, int64_t m) {
  return {Random(c.compute, {m, c.k}, 1), Random(c.weight_source, {c.width, c.k}, 2, 0.3),
          Random(c.weight_source, {c.width, c.k}, 3, 0.3)};
}

HostTensor RunGated(Rig& rig, const GatedCase& c, const GatedData& data) {
  const auto weight = rig.PackGated(data.gate, data.up, c.compute);
  EXPECT_EQ(weight->n(), 2 * c.width);
  EXPECT_EQ(weight->k(), c.k);
  const DeviceTensor& y = rig.Out(c.compute, {data.x.dims[0], c.width}, c.layout);
  GatedLinearArgs args;
  args.weight = weight.get();
  args.x = rig.In(data.x, c.layout);
  args.y = y;
  args.activation = c.activation;
  Must(rig.ops().GatedLinear(rig.stream(), args));
  return rig.Read(y);
}

class GatedLinearTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(GatedLinearTest, MatchesTheOracleAtEverySize) {
  for (const GatedCase& c : GatedCases()) {
    for (int64_t m : {1, 2, 5, 6, 7, 8, 13, 31, 316}) {
      SCOPED_TRACE(testing::Message()
                   << c.width << " x " << c.k << " " << DTypeName(c.compute) << ", rows " << m);
      const GatedData data = MakeGatedData(c, m);
      Rig rig(GetParam());
      const HostTensor y = RunGated(rig, c, data);
      int failures = 0;
      for (int64_t row = 0; row < m; ++row) {
        for (int64_t n = 0; n < c.width; ++n) {
          double sums[2] = {0, 0};
          double magnitudes[2] = {0, 0};
          for (int64_t k = 0; k < c.k; ++k) {
            const double products[2] = {data.x.at(row, k) * RoundTo(c.compute, data.gate.at(n, k)),
                                        data.x.at(row, k) * RoundTo(c.compute, data.up.at(n, k))};
            for (int i = 0; i < 2; ++i) {
              sums[i] += products[i];
              magnitudes[i] += std::abs(products[i]);
            }
          }
          const double gate = Activated(c.activation, sums[0]);
          const double gate_error = SumTolerance(c.k, magnitudes[0]) * kActivationSlope +
                                    ActivationTolerance(c.activation, sums[0]);
          const double up_error = SumTolerance(c.k, magnitudes[1]);
          const double tolerance = gate_error * std::abs(sums[1]) + up_error * std::abs(gate) +
                                   gate_error * up_error + 2 * kUlpF32 * std::abs(gate * sums[1]);
          const auto near = Near(y.at(row, n), gate * sums[1], tolerance, c.compute);
          if (!near && ++failures <= 3)
            ADD_FAILURE() << "row " << row << " column " << n << ": " << near.message();
        }
      }
      EXPECT_EQ(failures, 0);
    }
  }
}

TEST_P(GatedLinearTest, RowsAndThreadsDoNotChangeBits) {
  for (const GatedCase& c : GatedCases()) {
    SCOPED_TRACE(testing::Message() << c.width << " x " << c.k << " " << DTypeName(c.compute));
    const GatedData data = MakeGatedData(c, 45);
    Rig rig(GetParam());
    const HostTensor all = RunGated(rig, c, data);
    for (const auto& [begin, end] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {44, 45}, {31, 33}, {5, 18}, {3, 7}}) {
      GatedData part = data;
      part.x = data.x.Rows(begin, end);
      EXPECT_TRUE(SameBits(RunGated(rig, c, part), all.Rows(begin, end))) << begin << " to " << end;
    }
    for (int threads : {2, 3}) {
      Rig several(GetParam(), threads);
      EXPECT_TRUE(SameBits(RunGated(several, c, data), all)) << threads << " threads";
    }
  }
}

TEST_P(GatedLinearTest, ANanRowStaysAlone) {
  for (const GatedCase& c : GatedCases()) {
    GatedData data = MakeGatedData(c, 9);
    Rig rig(GetParam());
    const HostTensor clean = RunGated(rig, c, data);
    for (int64_t k = 0; k < c.k; ++k) data.x.at(4, k) = std::nan("");
    const HostTensor mixed = RunGated(rig, c, data);
    EXPECT_TRUE(SameBits(mixed.Rows(0, 4), clean.Rows(0, 4)));
    EXPECT_TRUE(SameBits(mixed.Rows(5, 9), clean.Rows(5, 9)));
    for (int64_t n = 0; n < c.width; ++n) EXPECT_TRUE(std::isnan(mixed.at(4, n))) << n;
  }
}

TEST_P(GatedLinearTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  const auto weight = rig.PackGated(Random(kF32, {3, 4}, 1), Random(kF32, {3, 4}, 2), kF32);
  const auto plain = rig.Pack({Random(kF32, {6, 4}, 1)}, kF32);
  GatedLinearArgs good;
  good.weight = weight.get();
  good.x = rig.In(Random(kF32, {2, 4}, 2));
  good.y = rig.Out(kF32, {2, 3});
  const auto refused = [&](auto change) {
    GatedLinearArgs args = good;
    change(args);
    return rig.ops().GatedLinear(rig.stream(), args).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([&](GatedLinearArgs& a) { a.weight = nullptr; }));
  EXPECT_TRUE(refused([&](GatedLinearArgs& a) { a.weight = plain.get(); }));
  EXPECT_TRUE(refused([&](GatedLinearArgs& a) { a.activation = Activation::kRelu; }));
  EXPECT_TRUE(refused([&](GatedLinearArgs& a) { a.x = rig.In(Random(kF32, {2, 3}, 2)); }));
  EXPECT_TRUE(refused([&](GatedLinearArgs& a) { a.y = rig.Out(kF32, {2, 6}); }));
  EXPECT_TRUE(refused([&](GatedLinearArgs& a) { a.y = rig.Out(kBf16, {2, 3}); }));
  EXPECT_TRUE(rig.ops().GatedLinear(rig.stream(), good).ok());
  Must(rig.stream().Synchronize());
}

INSTANTIATE_FOR_ALL_BACKENDS(LinearTest);
INSTANTIATE_FOR_ALL_BACKENDS(GatedLinearTest);

}  // namespace
}  // namespace saccade::optest
