#pragma once
// Sixteen floats in a 512-bit register. Everything is internal to the file that includes it: no
// code compiled with AVX-512 flags may be visible to another file.
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/simd/macros.h"

namespace saccade::cpu {
namespace {

struct Simd {
  using V = __m512;
  using I = __m512i;
  using M = __mmask16;
  static constexpr int kLanes = 16;

  static SACCADE_INLINE M FirstLanes(int64_t n) {
    return n >= 16 ? M{0xffff} : static_cast<M>((1u << static_cast<unsigned>(n < 0 ? 0 : n)) - 1u);
  }
  static SACCADE_INLINE V Zero() { return _mm512_setzero_ps(); }
  static SACCADE_INLINE V Set(float x) { return _mm512_set1_ps(x); }
  static SACCADE_INLINE V Load(const float* p) { return _mm512_loadu_ps(p); }
  static SACCADE_INLINE V LoadN(const float* p, M m) { return _mm512_maskz_loadu_ps(m, p); }
  static SACCADE_INLINE void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static SACCADE_INLINE void StoreN(float* p, V v, M m) { _mm512_mask_storeu_ps(p, m, v); }

  static SACCADE_INLINE V Widen(__m256i h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  static SACCADE_INLINE V LoadBf16(const uint16_t* p) {
    return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static SACCADE_INLINE V LoadBf16N(const uint16_t* p, M m) {
    return Widen(_mm256_maskz_loadu_epi16(m, p));
  }
  // Round to nearest even; a NaN stays a (quiet) NaN.
  static SACCADE_INLINE __m256i Narrow(V v) {
    const I u = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    I r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const M nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
  }
  // The same, but a subnormal number may become 0, as it does in a product of BF16.
  static SACCADE_INLINE __m256i NarrowActivation(V v) {
#ifdef __AVX512BF16__
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
    return Narrow(v);
#endif
  }
  static SACCADE_INLINE void StoreBf16Exact(uint16_t* p, V v, M m) {
    _mm256_mask_storeu_epi16(p, m, Narrow(v));
  }
  static SACCADE_INLINE void StoreBf16(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), NarrowActivation(v));
  }
  static SACCADE_INLINE void StoreBf16N(uint16_t* p, V v, M m) {
    _mm256_mask_storeu_epi16(p, m, NarrowActivation(v));
  }

  // Sixteen pairs of bf16 (lower address first), as two vectors of the even and the odd elements.
  static SACCADE_INLINE V PairEven(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  static SACCADE_INLINE V PairOdd(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  static SACCADE_INLINE V Add(V a, V b) { return _mm512_add_ps(a, b); }
  static SACCADE_INLINE V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static SACCADE_INLINE V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static SACCADE_INLINE V Div(V a, V b) { return _mm512_div_ps(a, b); }
  // a / b within 1.5 ulp for a b whose reciprocal is a normal number: an estimate and one step of
  // Newton.
  static SACCADE_INLINE V Quotient(V a, V b) {
    const V r = _mm512_rcp14_ps(b);
    const V error = Fnma(b, r, Set(1.0f));
    return Mul(a, Fma(r, error, r));
  }
  static SACCADE_INLINE V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
  static SACCADE_INLINE V Fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  static SACCADE_INLINE V Max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static SACCADE_INLINE V Min(V a, V b) { return _mm512_min_ps(a, b); }
  static SACCADE_INLINE V Abs(V a) { return _mm512_abs_ps(a); }
  static SACCADE_INLINE V CopySign(V magnitude, V sign) {
    const I s = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(Abs(magnitude)), s));
  }
  static SACCADE_INLINE V Round(V a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static SACCADE_INLINE M Less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static SACCADE_INLINE M Greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static SACCADE_INLINE M Equal(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static SACCADE_INLINE unsigned Bits(M m) { return m; }
  static SACCADE_INLINE V Select(M m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }
  // a * 2^n for whole n in [-150, 150], normal results.
  static SACCADE_INLINE V Scale(V a, V n) { return _mm512_scalef_ps(a, n); }

  static SACCADE_INLINE float First(V v) { return _mm512_cvtss_f32(v); }
  static SACCADE_INLINE float Sum(V v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  static SACCADE_INLINE float MaxLane(V v) {
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
};

}  // namespace
}  // namespace saccade::cpu
