#pragma once
// The inner products of GEMM and attention: a register tile of R rows times NV vectors, advanced
// one step of k at a time. Every accumulator is one chain over k in ascending order, whatever R and
// NV are: that is what makes a row's bits independent of its neighbours. `at(j)` gives the address
// of vector j of the current step.
#include "kernels/cpu/impl/math.h"

namespace saccade::cpu {
namespace {

// F32 rows times F32 columns; a step is one k.
struct MulF32 {
  using A = float;
  using B = float;
  static constexpr int kK = 1;
  static constexpr int kMaxRows = 6;
  static constexpr bool kWidens = false;

  template <int R, int NV, class At>
  static SACCADE_INLINE void Step(V (&acc)[R][NV], const A* a, int64_t lda, const At& at) {
    V w[NV];
    SACCADE_UNROLL
    for (int j = 0; j < NV; ++j) w[j] = Simd::Load(at(j));
    SACCADE_UNROLL
    for (int i = 0; i < R; ++i) {
      const V x = Simd::Set(a[i * lda]);
      SACCADE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = Simd::Fma(x, w[j], acc[i][j]);
    }
  }
  static SACCADE_INLINE void StoreA(A* p, V v) { Simd::Store(p, v); }
  static SACCADE_INLINE V SoftmaxExp(V x) { return Exp(x); }
};

// BF16 columns widened on the way, F32 rows that hold BF16 values; a step is two k. The same chain
// as MulF32 over the widened columns.
struct MulWide {
  using A = float;
  using B = uint16_t;
  static constexpr int kK = 2;
  static constexpr int kMaxRows = 4;
  static constexpr bool kWidens = true;

  template <int R, int NV, class At>
  static SACCADE_INLINE void Step(V (&acc)[R][NV], const A* a, int64_t lda, const At& at) {
    SACCADE_UNROLL
    for (int j = 0; j < NV; ++j) {
      const V even = Simd::PairEven(at(j));
      const V odd = Simd::PairOdd(at(j));
      SACCADE_UNROLL
      for (int i = 0; i < R; ++i) {
        acc[i][j] = Simd::Fma(Simd::Set(a[i * lda]), even, acc[i][j]);
        acc[i][j] = Simd::Fma(Simd::Set(a[i * lda + 1]), odd, acc[i][j]);
      }
    }
  }
  static SACCADE_INLINE void StoreA(A* p, V v) { Simd::Store(p, v); }
  static SACCADE_INLINE V SoftmaxExp(V x) { return ExpNarrow(x); }
};

// Vectors of a GEMM panel, and the panels of one row count that are advanced together: a single row
// has too few chains in one panel to hide the latency of its multiplications.
constexpr int kPanelVecs = Simd::kLanes == 16 ? 4 : 2;
constexpr int64_t kPanel = int64_t{kPanelVecs} * Simd::kLanes;
template <int R>
constexpr int kPanelsAtOnce = R == 1 ? 8 / kPanelVecs : 1;

// Cache lines of one step of a panel.
template <class P>
constexpr int kStepLines = static_cast<int>(kPanel* P::kK * sizeof(typename P::B) / 64);

// C[R, NV vectors] (+)= A * B over `steps` steps of NP panels, `panel_stride` elements apart. Every
// step fetches kLines lines of each panel, the first of them at `ahead`.
template <class P, int R, int NP, int kLines>
SACCADE_INLINE void GemmTile(const typename P::A* a, int64_t lda, const typename P::B* b,
                             int64_t panel_stride, int64_t steps, float* c, int64_t ldc,
                             int64_t c_panel_stride, bool first, const char* ahead) {
  constexpr int kVecs = NP * kPanelVecs;
  V acc[R][kVecs];
  SACCADE_UNROLL
  for (int i = 0; i < R; ++i) {
    SACCADE_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      const float* from =
          c + i * ldc + (j / kPanelVecs) * c_panel_stride + (j % kPanelVecs) * Simd::kLanes;
      acc[i][j] = first ? Simd::Zero() : Simd::Load(from);
    }
  }
  SACCADE_UNROLL_BY(4)
  for (int64_t s = 0; s < steps; ++s) {
    SACCADE_UNROLL
    for (int p = 0; p < NP; ++p) {
      const char* lines = ahead + p * panel_stride * static_cast<int64_t>(sizeof(typename P::B));
      SACCADE_UNROLL
      for (int line = 0; line < kLines; ++line) _mm_prefetch(lines + 64 * line, _MM_HINT_T0);
    }
    ahead += 64 * kLines;
    P::template Step<R, kVecs>(acc, a, lda, [&](int j) {
      return b + (j / kPanelVecs) * panel_stride + (j % kPanelVecs) * Simd::kLanes * P::kK;
    });
    a += P::kK;
    b += kPanel * P::kK;
  }
  SACCADE_UNROLL
  for (int i = 0; i < R; ++i) {
    SACCADE_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      Simd::Store(c + i * ldc + (j / kPanelVecs) * c_panel_stride + (j % kPanelVecs) * Simd::kLanes,
                  acc[i][j]);
    }
  }
}

// The height of the next tile when `rows` are left: full tiles, but no thin last one.
SACCADE_INLINE int64_t TileRows(int64_t rows, int64_t most) {
  if (rows >= 2 * most || rows <= most) return rows < most ? rows : most;
  return (rows + 1) / 2;
}

}  // namespace
}  // namespace saccade::cpu
