// Our packed GEMM against oneDNN's on shapes of real models: a second opinion on values that the
// scalar reference is too slow for. Skipped in builds without oneDNN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/kernels/backends.h"
#if defined(SACCADE_HAVE_ONEDNN)
#include <unordered_map>

#include "dnnl.hpp"
#endif

namespace saccade::optest {
namespace {

class OneDnnGemmTest : public testing::TestWithParam<BackendFactory> {};

#if defined(SACCADE_HAVE_ONEDNN)

// y[m, n] = x[m, k] * w[n, k]^T in F32.
std::vector<float> OneDnnProduct(std::vector<float> x, std::vector<float> w, int64_t m, int64_t n,
                                 int64_t k) {
  using Tag = dnnl::memory::format_tag;
  constexpr auto kType = dnnl::memory::data_type::f32;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const dnnl::memory::desc x_desc({m, k}, kType, Tag::ab);
  const dnnl::memory::desc w_desc({k, n}, kType, Tag::ba);
  const dnnl::memory::desc y_desc({m, n}, kType, Tag::ab);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc primitive(engine, x_desc, w_desc, y_desc);
#else
  const dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(x_desc, w_desc, y_desc), engine);
#endif
  std::vector<float> y(static_cast<size_t>(m * n));
  dnnl::memory x_memory(x_desc, engine, x.data());
  dnnl::memory w_memory(w_desc, engine, w.data());
  dnnl::memory y_memory(y_desc, engine, y.data());
  dnnl::matmul(primitive).execute(
      stream, {{DNNL_ARG_SRC, x_memory}, {DNNL_ARG_WEIGHTS, w_memory}, {DNNL_ARG_DST, y_memory}});
  stream.wait();
  return y;
}

std::vector<float> Floats(const HostTensor& tensor) {
  return {tensor.values.begin(), tensor.values.end()};
}

// Inputs are exact in `dtype`, so both sides multiply the same numbers and differ in the order of
// their sums alone.
void Compare(const BackendFactory& factory, DType dtype, int64_t m, int64_t n, int64_t k) {
  SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << m << " x " << n << " x " << k);
  const HostTensor x = Random(dtype, {m, k}, 1);
  const HostTensor w = Random(dtype, {n, k}, 2, 0.05);
  const std::vector<float> expected = OneDnnProduct(Floats(x), Floats(w), m, n, k);
  Rig rig(factory);
  const auto weight = rig.Pack({w}, dtype);
  const DeviceTensor& y = rig.Out(DType::kF32, {m, n});
  LinearArgs args;
  args.weight = weight.get();
  args.x = rig.In(x);
  args.y = y;
  Must(rig.ops().Linear(rig.stream(), args));
  const HostTensor got = rig.Read(y);
  // The sum of the products' sizes is about k * E|x| * E|w|.
  const double tolerance = SumTolerance(k, static_cast<double>(k) * 0.05 * 0.64);
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, std::abs(got.values[i] - static_cast<double>(expected[i])));
  }
  EXPECT_LE(worst, tolerance);
}

TEST_P(OneDnnGemmTest, AgreesOnShapesOfModels) {
  if (GetParam().name.rfind("ref", 0) == 0) GTEST_SKIP() << "too slow";
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    Compare(GetParam(), dtype, 1, 960, 2560);
    Compare(GetParam(), dtype, 8, 1600, 960);
    Compare(GetParam(), dtype, 61, 640, 1184);
    Compare(GetParam(), dtype, 45, 96, 6144);  // k in several blocks, rows that do not fill a tile
    Compare(GetParam(), dtype, 45, 96, 4096);  // a stride that caches dislike
  }
}

#else

TEST_P(OneDnnGemmTest, AgreesOnShapesOfModels) { GTEST_SKIP() << "built without oneDNN"; }

#endif

INSTANTIATE_FOR_ALL_BACKENDS(OneDnnGemmTest);

}  // namespace
}  // namespace saccade::optest
