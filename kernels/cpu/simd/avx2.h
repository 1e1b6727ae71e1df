#pragma once
// Eight floats in a 256-bit register (AVX2, FMA). Everything is internal to the file that includes
// it.
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/simd/macros.h"

namespace saccade::cpu {
namespace {

struct Simd {
  using V = __m256;
  using I = __m256i;
  using M = __m256;  // all ones or all zeros per lane
  static constexpr int kLanes = 8;

  static SACCADE_INLINE M FirstLanes(int64_t n) {
    const int count = n > 8 ? 8 : static_cast<int>(n);
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
  }
  static SACCADE_INLINE V Zero() { return _mm256_setzero_ps(); }
  static SACCADE_INLINE V Set(float x) { return _mm256_set1_ps(x); }
  static SACCADE_INLINE V Load(const float* p) { return _mm256_loadu_ps(p); }
  static SACCADE_INLINE V LoadN(const float* p, M m) {
    return _mm256_maskload_ps(p, _mm256_castps_si256(m));
  }
  static SACCADE_INLINE void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static SACCADE_INLINE void StoreN(float* p, V v, M m) {
    _mm256_maskstore_ps(p, _mm256_castps_si256(m), v);
  }

  static SACCADE_INLINE V Widen(__m128i h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  static SACCADE_INLINE V LoadBf16(const uint16_t* p) {
    return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static SACCADE_INLINE V LoadBf16N(const uint16_t* p, M m) {
    alignas(16) uint16_t lanes[8] = {};
    const unsigned bits = Bits(m);
    for (int i = 0; i < 8; ++i) {
      if ((bits >> i) & 1u) lanes[i] = p[i];
    }
    return LoadBf16(lanes);
  }
  // Round to nearest even; a NaN stays a (quiet) NaN.
  static SACCADE_INLINE __m128i Narrow(V v) {
    const I u = _mm256_castps_si256(v);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const I rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const I quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const I r = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
  static SACCADE_INLINE void StoreBf16(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), Narrow(v));
  }
  static SACCADE_INLINE void StoreBf16Exact(uint16_t* p, V v, M m) { StoreBf16N(p, v, m); }
  static SACCADE_INLINE void StoreBf16N(uint16_t* p, V v, M m) {
    alignas(16) uint16_t lanes[8];
    StoreBf16(lanes, v);
    const unsigned bits = Bits(m);
    for (int i = 0; i < 8; ++i) {
      if ((bits >> i) & 1u) p[i] = lanes[i];
    }
  }

  // Eight pairs of bf16 (lower address first), as two vectors of the even and the odd elements.
  static SACCADE_INLINE V PairEven(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
  }
  static SACCADE_INLINE V PairOdd(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                         _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  static SACCADE_INLINE V Add(V a, V b) { return _mm256_add_ps(a, b); }
  static SACCADE_INLINE V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static SACCADE_INLINE V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static SACCADE_INLINE V Div(V a, V b) { return _mm256_div_ps(a, b); }
  static SACCADE_INLINE V Quotient(V a, V b) { return Div(a, b); }
  static SACCADE_INLINE V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
  static SACCADE_INLINE V Fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
  static SACCADE_INLINE V Max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static SACCADE_INLINE V Min(V a, V b) { return _mm256_min_ps(a, b); }
  static SACCADE_INLINE V Abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static SACCADE_INLINE V CopySign(V magnitude, V sign) {
    return _mm256_or_ps(Abs(magnitude), _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
  }
  static SACCADE_INLINE V Round(V a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static SACCADE_INLINE M Less(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static SACCADE_INLINE M Greater(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static SACCADE_INLINE M Equal(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static SACCADE_INLINE unsigned Bits(M m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
  static SACCADE_INLINE V Select(M m, V yes, V no) { return _mm256_blendv_ps(no, yes, m); }
  // a * 2^n for whole n in [-150, 150], normal results: two factors, as 2^n itself may not be a
  // normal number.
  static SACCADE_INLINE V Scale(V a, V n) {
    const I whole = _mm256_cvtps_epi32(n);
    const I half = _mm256_srai_epi32(whole, 1);
    const I bias = _mm256_set1_epi32(127);
    const I low = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const I high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return Mul(Mul(a, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high));
  }

  static SACCADE_INLINE float First(V v) { return _mm256_cvtss_f32(v); }
  static SACCADE_INLINE float Sum(V v) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  static SACCADE_INLINE float MaxLane(V v) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
};

}  // namespace
}  // namespace saccade::cpu
