#pragma once
// Operations on single rows. Sums run in four vectors of lanes whose order depends on n alone.
#include "kernels/cpu/impl/math.h"

namespace saccade::cpu {
namespace {

// Sum over i < n of f(masked vector at i).
template <class F>
SACCADE_INLINE float SumOver(int64_t n, const F& f) {
  V sum[4] = {Simd::Zero(), Simd::Zero(), Simd::Zero(), Simd::Zero()};
  constexpr int64_t kStep = 4 * Simd::kLanes;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    SACCADE_UNROLL
    for (int j = 0; j < 4; ++j)
      sum[j] = f(sum[j], i + j * Simd::kLanes, Simd::FirstLanes(Simd::kLanes));
  }
  for (; i < n; i += Simd::kLanes) sum[0] = f(sum[0], i, Simd::FirstLanes(n - i));
  return Simd::Sum(Simd::Add(Simd::Add(sum[0], sum[1]), Simd::Add(sum[2], sum[3])));
}

inline void RmsNorm(const float* x, const float* gamma, void* y, Type y_type, int64_t n,
                    float eps) {
  const float squares = SumOver(n, [&](V sum, int64_t i, Simd::M m) {
    const V v = Simd::LoadN(x + i, m);
    return Simd::Fma(v, v, sum);
  });
  const V factor = Simd::Set(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    StoreAsN(y, y_type, i,
             Simd::Mul(Simd::Mul(Simd::LoadN(x + i, m), factor), Simd::LoadN(gamma + i, m)), m);
  }
}

inline void LayerNorm(const float* x, const float* gamma, const float* beta, void* y, Type y_type,
                      int64_t n, float eps) {
  const float total = SumOver(
      n, [&](V sum, int64_t i, Simd::M m) { return Simd::Add(sum, Simd::LoadN(x + i, m)); });
  const V mean = Simd::Set(total / static_cast<float>(n));
  const float squares = SumOver(n, [&](V sum, int64_t i, Simd::M m) {
    const V v = Simd::Select(m, Simd::Sub(Simd::LoadN(x + i, m), mean), Simd::Zero());
    return Simd::Fma(v, v, sum);
  });
  const V factor = Simd::Set(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    const V v = Simd::Mul(Simd::Sub(Simd::LoadN(x + i, m), mean), factor);
    StoreAsN(y, y_type, i, Simd::Fma(v, Simd::LoadN(gamma + i, m), Simd::LoadN(beta + i, m)), m);
  }
}

inline void AdaRmsNorm(const float* x, const float* scale, const float* shift, void* y, Type y_type,
                       int64_t n, float eps) {
  const float squares = SumOver(n, [&](V sum, int64_t i, Simd::M m) {
    const V v = Simd::LoadN(x + i, m);
    return Simd::Fma(v, v, sum);
  });
  const V factor = Simd::Set(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  const V one = Simd::Set(1.0f);
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    const V v = Simd::Mul(Simd::LoadN(x + i, m), factor);
    const V weight = Simd::Add(Simd::LoadN(scale + i, m), one);
    StoreAsN(y, y_type, i, Simd::Add(Simd::Mul(v, weight), Simd::LoadN(shift + i, m)), m);
  }
}

inline void AddGated(const void* y, Type y_type, const float* gate, bool one_gate, float* x,
                     int64_t n) {
  const V all = Simd::Set(one_gate ? gate[0] : 0.0f);
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    const V factor = one_gate ? all : Simd::LoadN(gate + i, m);
    const V product = Simd::Mul(LoadAsN(y, y_type, i, m), factor);
    Simd::StoreN(x + i, Simd::Add(Simd::LoadN(x + i, m), product), m);
  }
}

inline void Scaled(const void* x, Type x_type, float scale, float* y, int64_t n) {
  const V factor = Simd::Set(scale);
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    Simd::StoreN(y + i, Simd::Mul(LoadAsN(x, x_type, i, m), factor), m);
  }
}

inline void ToBf16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    Simd::StoreBf16Exact(y + i, Simd::LoadN(x + i, m), m);
  }
}

inline void ToF32(const uint16_t* x, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) Simd::Store(y + i, Simd::LoadBf16(x + i));
  const Simd::M m = Simd::FirstLanes(n - i);
  if (i < n) Simd::StoreN(y + i, Simd::LoadBf16N(x + i, m), m);
}

inline int64_t ArgmaxFinite(const float* x, int64_t n) {
  const V low = Simd::Set(-__builtin_inff());
  V top = low;
  V bad = Simd::Zero();  // a NaN as soon as one value is not finite
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    const V v = Simd::LoadN(x + i, m);
    bad = Simd::Fma(v, Simd::Zero(), bad);
    top = Simd::Max(top, Simd::Select(m, v, low));
  }
  if (Simd::Bits(Simd::Equal(bad, bad)) != (1u << Simd::kLanes) - 1u) return -1;
  const float most = Simd::MaxLane(top);
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == most) return i;
  }
  return -1;
}

}  // namespace
}  // namespace saccade::cpu
