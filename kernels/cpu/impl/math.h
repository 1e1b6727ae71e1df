#pragma once
// Vector exp, erf and the activations over the level's Simd. Errors are against the exact value, in
// units in the last place of the result, over the whole range. Coefficients: Chebyshev fits of ours
// to the functions named.
#include "kernels/cpu/api.h"

namespace saccade::cpu {
namespace {

using V = Simd::V;

// e^x within 1.2 ulp; exactly 1 at 0; 0 below -87.33 (results stay normal numbers), infinity
// above 88.72.
SACCADE_INLINE V Exp(V x) {
  const V n = Simd::Round(Simd::Mul(x, Simd::Set(1.44269504f)));
  V r =
      Simd::Fnma(n, Simd::Set(0.693359375f), x);  // ln 2 in two parts, the first exact times any n
  r = Simd::Fnma(n, Simd::Set(-2.12194440e-4f), r);
  V p = Simd::Set(1.98911803e-4f);  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2
  p = Simd::Fma(p, r, Simd::Set(1.39338208e-3f));
  p = Simd::Fma(p, r, Simd::Set(8.33331048e-3f));
  p = Simd::Fma(p, r, Simd::Set(4.16664630e-2f));
  p = Simd::Fma(p, r, Simd::Set(0.166666672f));
  p = Simd::Fma(p, r, Simd::Set(0.5f));
  p = Simd::Add(Simd::Fma(p, Simd::Mul(r, r), r), Simd::Set(1.0f));
  V y = Simd::Scale(p, n);
  y = Simd::Select(Simd::Less(x, Simd::Set(-87.33f)), Simd::Zero(), y);
  return Simd::Select(Simd::Greater(x, Simd::Set(88.72f)), Simd::Set(__builtin_inff()), y);
}

// e^x for x <= 0 within 2^-16 of itself, for a result that is rounded to BF16; 0 below -87.33.
SACCADE_INLINE V ExpNarrow(V x) {
  const V y = Simd::Mul(x, Simd::Set(1.44269504f));
  const V n = Simd::Round(y);
  const V r = Simd::Sub(y, n);
  V p = Simd::Set(0.00958285201f);  // 2^r on |r| <= 1/2
  p = Simd::Fma(p, r, Simd::Set(0.0559064262f));
  p = Simd::Fma(p, r, Simd::Set(0.240240991f));
  p = Simd::Fma(p, r, Simd::Set(0.693124175f));
  p = Simd::Fma(p, r, Simd::Set(1.0f));
  return Simd::Select(Simd::Less(x, Simd::Set(-87.33f)), Simd::Zero(), Simd::Scale(p, n));
}

// erf(x) within 1.5 ulp.
SACCADE_INLINE V Erf(V x) {
  const V s = Simd::Mul(x, x);
  V small = Simd::Set(8.52940138e-5f);  // erf(x) / x in x^2 on |x| <= 0.9
  small = Simd::Fma(small, s, Simd::Set(-8.17963213e-4f));
  small = Simd::Fma(small, s, Simd::Set(5.20422682e-3f));
  small = Simd::Fma(small, s, Simd::Set(-2.68606655e-2f));
  small = Simd::Fma(small, s, Simd::Set(0.112837180f));
  small = Simd::Fma(small, s, Simd::Set(-0.376126349f));
  small = Simd::Fma(small, s, Simd::Set(0.128379167f));
  small = Simd::Fma(small, x, x);
  const V t = Simd::Min(Simd::Abs(x), Simd::Set(4.0f));
  V big = Simd::Set(1.65620975e-6f);  // log(1 - erf(t)) on 0.88 <= t <= 4
  big = Simd::Fma(big, t, Simd::Set(-4.63968900e-5f));
  big = Simd::Fma(big, t, Simd::Set(5.99319814e-4f));
  big = Simd::Fma(big, t, Simd::Set(-4.76965541e-3f));
  big = Simd::Fma(big, t, Simd::Set(2.64444761e-2f));
  big = Simd::Fma(big, t, Simd::Set(-0.110111289f));
  big = Simd::Fma(big, t, Simd::Set(-0.631804109f));
  big = Simd::Fma(big, t, Simd::Set(-1.13023937f));
  big = Simd::Fma(big, t, Simd::Set(3.19792976e-4f));
  big = Simd::CopySign(Simd::Sub(Simd::Set(1.0f), Exp(big)), x);
  // The comparison is false for a NaN, which the small branch passes on.
  return Simd::Select(Simd::Greater(Simd::Abs(x), Simd::Set(0.9f)), big, small);
}

// x / (1 + e^-x). The clamp keeps the divisor finite; below it the result is less than 1e-34.
SACCADE_INLINE V Silu(V x) {
  const V e = Exp(Simd::Min(Simd::Sub(Simd::Zero(), x), Simd::Set(87.0f)));
  return Simd::Quotient(x, Simd::Add(Simd::Set(1.0f), e));
}

SACCADE_INLINE V GeluErf(V x) {
  const V half = Simd::Mul(x, Simd::Set(0.5f));
  return Simd::Fma(half, Erf(Simd::Mul(x, Simd::Set(0.707106781f))), half);
}

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3).
SACCADE_INLINE V GeluTanh(V x) {
  const V cube = Simd::Mul(Simd::Mul(x, x), x);
  const V u = Simd::Mul(Simd::Set(-1.59576912f), Simd::Fma(cube, Simd::Set(0.044715f), x));
  const V e = Exp(Simd::Min(u, Simd::Set(87.0f)));
  return Simd::Quotient(x, Simd::Add(Simd::Set(1.0f), e));
}

SACCADE_INLINE V Activate(V x, Act act) {
  switch (act) {
    case Act::kNone:
      return x;
    case Act::kGeluErf:
      return GeluErf(x);
    case Act::kGeluTanh:
      return GeluTanh(x);
    case Act::kSilu:
      return Silu(x);
    case Act::kRelu:
      return Simd::Select(Simd::Less(x, Simd::Zero()), Simd::Zero(), x);
  }
  return x;
}

SACCADE_INLINE float Bf16Value(uint16_t narrow) {
  const uint32_t bits = static_cast<uint32_t>(narrow) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
SACCADE_INLINE V LoadAs(const void* p, Type type, int64_t at) {
  return type == Type::kF32 ? Simd::Load(static_cast<const float*>(p) + at)
                            : Simd::LoadBf16(static_cast<const uint16_t*>(p) + at);
}
SACCADE_INLINE V LoadAsN(const void* p, Type type, int64_t at, Simd::M m) {
  return type == Type::kF32 ? Simd::LoadN(static_cast<const float*>(p) + at, m)
                            : Simd::LoadBf16N(static_cast<const uint16_t*>(p) + at, m);
}
SACCADE_INLINE void StoreAs(void* p, Type type, int64_t at, V v) {
  if (type == Type::kF32) {
    Simd::Store(static_cast<float*>(p) + at, v);
  } else {
    Simd::StoreBf16(static_cast<uint16_t*>(p) + at, v);
  }
}
SACCADE_INLINE void StoreAsN(void* p, Type type, int64_t at, V v, Simd::M m) {
  if (type == Type::kF32) {
    Simd::StoreN(static_cast<float*>(p) + at, v, m);
  } else {
    Simd::StoreBf16N(static_cast<uint16_t*>(p) + at, v, m);
  }
}

}  // namespace
}  // namespace saccade::cpu
