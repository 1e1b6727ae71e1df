#pragma once
// BF16 rows times BF16 columns with vdpbf16ps; a step is two k. Denormals count as zero, sums are
// rounded to nearest even (Intel SDM, VDPBF16PS).
#include "kernels/cpu/impl/multiply.h"

namespace saccade::cpu {
namespace {

struct MulBf16 {
  using A = uint16_t;
  using B = uint16_t;
  static constexpr int kK = 2;
  static constexpr int kMaxRows = 6;
  static constexpr bool kWidens = false;

  template <int R, int NV, class At>
  static SACCADE_INLINE void Step(V (&acc)[R][NV], const A* a, int64_t lda, const At& at) {
    __m512bh w[NV];
    SACCADE_UNROLL
    for (int j = 0; j < NV; ++j) w[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(at(j)));
    SACCADE_UNROLL
    for (int i = 0; i < R; ++i) {
      int pair;
      __builtin_memcpy(&pair, a + i * lda, sizeof(pair));
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      SACCADE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, w[j]);
    }
  }
  static SACCADE_INLINE void StoreA(A* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  }
  static SACCADE_INLINE V SoftmaxExp(V x) { return ExpNarrow(x); }
};

}  // namespace
}  // namespace saccade::cpu
