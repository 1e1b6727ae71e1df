#pragma once
// GEMM over packed weights with fused epilogues, for levels that multiply in vector registers.
// `Narrow` is the policy of few rows and `Many` that of many for BF16 weights: a level that widens
// BF16 does it once per block of a panel then.
#include "kernels/cpu/impl/multiply.h"

namespace saccade::cpu {
namespace {

// --- Activations in the form of policy P.

template <class P>
SACCADE_INLINE constexpr Type RowType() {
  return sizeof(typename P::A) == 4 ? Type::kF32 : Type::kBf16;
}
template <class P>
SACCADE_INLINE int64_t PaddedK(int64_t k) {
  return (k + P::kK - 1) / P::kK * P::kK;
}

// One row of x, rounded to `weight`'s type, as F32 or BF16, followed by zeros up to `padded`.
inline void PackRow(Type weight, const void* x, Type x_type, int64_t k, int64_t padded,
                    Type out_type, void* out) {
  alignas(64) uint16_t narrow[Simd::kLanes];
  for (int64_t i = 0; i < padded; i += Simd::kLanes) {
    const Simd::M in = Simd::FirstLanes(k - i);
    const Simd::M to = Simd::FirstLanes(padded - i);
    V v = LoadAsN(x, x_type, i, in);
    if (weight == Type::kBf16 && x_type == Type::kF32 && out_type == Type::kF32) {
      Simd::StoreBf16(narrow, v);
      v = Simd::LoadBf16(narrow);
    }
    StoreAsN(out, out_type, i, v, to);
  }
}

// --- Epilogues. c holds `rows` rows of `width` columns (a multiple of the lanes), `ldc` apart; the
// first one is n0 of n.

inline void StorePanel(const Epilogue& e, int64_t n, int64_t row0, int64_t rows, int64_t n0,
                       int64_t width, const float* c, int64_t ldc) {
  for (int64_t j = 0; j < width && n0 + j < n; j += Simd::kLanes) {
    const int64_t column = n0 + j;
    const bool whole = n - column >= Simd::kLanes;
    const Simd::M m = Simd::FirstLanes(n - column);
    const V bias = e.bias != nullptr ? Simd::LoadN(e.bias + column, m) : Simd::Zero();
    const V scale = e.scale != nullptr ? Simd::LoadN(e.scale + column, m) : Simd::Zero();
    const float* from = c + j;
    for (int64_t row = row0; row < row0 + rows; ++row, from += ldc) {
      V v = Simd::Load(from);
      if (e.bias != nullptr) v = Simd::Add(v, bias);
      if (e.act != Act::kNone) v = Activate(v, e.act);
      if (e.scale != nullptr) v = Simd::Mul(v, scale);
      if (e.residual != nullptr) {
        v = Simd::Add(v, Simd::LoadN(e.residual + row * e.residual_stride + column, m));
      }
      if (whole) {
        StoreAs(e.y, e.y_type, row * e.y_stride + column, v);
      } else {
        StoreAsN(e.y, e.y_type, row * e.y_stride + column, v, m);
      }
    }
  }
}

// Gate and up alternate vector by vector; n0 is the first column of y, n the number of them.
inline void StoreGated(const Epilogue& e, int64_t n, int64_t row0, int64_t rows, int64_t n0,
                       int64_t width, const float* c, int64_t ldc) {
  for (int64_t j = 0; j < width / 2 && n0 + j < n; j += Simd::kLanes) {
    const int64_t column = n0 + j;
    const bool whole = n - column >= Simd::kLanes;
    const Simd::M m = Simd::FirstLanes(n - column);
    const float* from = c + 2 * j;
    for (int64_t row = row0; row < row0 + rows; ++row, from += ldc) {
      const V v = Simd::Mul(Activate(Simd::Load(from), e.act), Simd::Load(from + Simd::kLanes));
      if (whole) {
        StoreAs(e.y, e.y_type, row * e.y_stride + column, v);
      } else {
        StoreAsN(e.y, e.y_type, row * e.y_stride + column, v, m);
      }
    }
  }
}

// One head of `d` elements, rotated: element i pairs with i + d/2.
inline void Rotate(const float* x, const float* cos_sin, int64_t d, float* out) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(half - i);
    const V low = Simd::LoadN(x + i, m);
    const V high = Simd::LoadN(x + half + i, m);
    const V cos = Simd::LoadN(cos_sin + i, m);
    const V sin = Simd::LoadN(cos_sin + half + i, m);
    Simd::StoreN(out + i, Simd::Sub(Simd::Mul(low, cos), Simd::Mul(high, sin)), m);
    Simd::StoreN(out + half + i, Simd::Add(Simd::Mul(high, cos), Simd::Mul(low, sin)), m);
  }
}

inline void ConvertRow(const float* x, void* y, Type type, int64_t n) {
  for (int64_t i = 0; i < n; i += Simd::kLanes) {
    const Simd::M m = Simd::FirstLanes(n - i);
    StoreAsN(y, type, i, Simd::LoadN(x + i, m), m);
  }
}

// Writes one token's key or value of one head, F32, to lane `offset` of its page.
inline void AppendKey(const KvLayout& kv, unsigned char* page, int64_t offset, const float* x) {
  if (kv.type == Type::kF32) {
    float* to = reinterpret_cast<float*>(page) + offset;
    for (int64_t i = 0; i < kv.head_dim; ++i) to[i * kPageTokens] = x[i];
    return;
  }
  alignas(64) uint16_t narrow[kMaxHeadDim + 1];
  ConvertRow(x, narrow, Type::kBf16, kv.head_dim);
  if (kv.head_dim % 2 != 0) narrow[kv.head_dim] = 0;
  unsigned char* to = page + offset * 4;
  const int64_t pairs = (kv.head_dim + 1) / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    __builtin_memcpy(to + i * kPageTokens * 4, narrow + 2 * i, 4);
  }
}

inline void AppendValue(const KvLayout& kv, unsigned char* page, int64_t offset, const float* x) {
  if (kv.type == Type::kF32) {
    ConvertRow(x, reinterpret_cast<float*>(page) + offset * kv.v_dim, Type::kF32, kv.head_dim);
    return;
  }
  alignas(64) uint16_t narrow[kMaxHeadDim];
  ConvertRow(x, narrow, Type::kBf16, kv.head_dim);
  uint16_t* to = reinterpret_cast<uint16_t*>(page) + offset / 2 * kv.v_dim * 2 + offset % 2;
  for (int64_t i = 0; i < kv.head_dim; ++i) to[2 * i] = narrow[i];
}

// c holds `rows` rows of `columns` columns, whole heads, `ldc` apart; the first one is n0 of n.
inline void StoreQkv(const QkvRope& e, int64_t row0, int64_t rows, int64_t n0, int64_t columns,
                     int64_t n, const float* c, int64_t ldc) {
  const KvLayout& kv = e.kv;
  const int64_t d = kv.head_dim;
  alignas(64) float turned[kMaxHeadDim];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = row0 + i;
    const int64_t slot = e.row_slot != nullptr ? e.row_slot[row] : 0;
    unsigned char* block = kv.base + static_cast<size_t>(slot / kPageTokens) * kv.block_stride;
    for (int64_t at = 0; at + d <= columns && n0 + at < n; at += d) {
      const float* x = c + i * ldc + at;
      const int64_t head = (n0 + at) / d;
      if (head < e.q_heads + kv.heads) Rotate(x, e.row_cos_sin[row], d, turned);
      if (head < e.q_heads) {
        unsigned char* q = static_cast<unsigned char*>(e.q);
        const int64_t size = e.q_type == Type::kF32 ? 4 : 2;
        ConvertRow(turned, q + (row * e.q_stride + head * d) * size, e.q_type, d);
      } else if (head < e.q_heads + kv.heads) {
        const auto h = static_cast<size_t>(head - e.q_heads);
        AppendKey(kv, block + h * kv.k_head_bytes, slot % kPageTokens, turned);
      } else {
        const auto h = static_cast<size_t>(head - e.q_heads - kv.heads);
        AppendValue(kv, block + kv.v_offset + h * kv.v_head_bytes, slot % kPageTokens, x);
      }
    }
  }
}

// --- Products of one panel.

// `lines` to fetch in a step: 0, or kStepLines over 1, 2 or 4.
template <class P, int R>
SACCADE_INLINE void OneTile(const typename P::A* a, int64_t lda, const typename P::B* b,
                            int64_t steps, float* c, int64_t ldc, bool first, int lines,
                            const char* ahead) {
  constexpr int kAll = kStepLines<P>;
  if (lines == 0) {
    GemmTile<P, R, 1, 0>(a, lda, b, 0, steps, c, ldc, 0, first, ahead);
  } else if (lines == 1) {
    GemmTile<P, R, 1, 1>(a, lda, b, 0, steps, c, ldc, 0, first, ahead);
  } else if (lines < kAll) {
    GemmTile<P, R, 1, (kAll + 1) / 2>(a, lda, b, 0, steps, c, ldc, 0, first, ahead);
  } else {
    GemmTile<P, R, 1, kAll>(a, lda, b, 0, steps, c, ldc, 0, first, ahead);
  }
}

template <class P>
inline void AnyTile(int64_t rows, const typename P::A* a, int64_t lda, const typename P::B* b,
                    int64_t steps, float* c, int64_t ldc, bool first, int lines,
                    const char* ahead) {
  static_assert(P::kMaxRows <= 6);
  switch (rows) {
    case 1:
      return OneTile<P, 1>(a, lda, b, steps, c, ldc, first, lines, ahead);
    case 2:
      return OneTile<P, 2>(a, lda, b, steps, c, ldc, first, lines, ahead);
    case 3:
      return OneTile<P, 3>(a, lda, b, steps, c, ldc, first, lines, ahead);
    case 4:
      return OneTile<P, 4>(a, lda, b, steps, c, ldc, first, lines, ahead);
    default:
      break;
  }
  if constexpr (P::kMaxRows > 4) {
    if (rows == 5) return OneTile<P, 5>(a, lda, b, steps, c, ldc, first, lines, ahead);
    return OneTile<P, 6>(a, lda, b, steps, c, ldc, first, lines, ahead);
  }
}

// Bytes of a block of a panel that the rows of a call share: in L1 for few rows, in L2 for many.
constexpr int64_t kFewBlockBytes = 32 << 10;
constexpr int64_t kManyBlockBytes = 128 << 10;
constexpr int64_t kFewRows = 16;
// From here on it pays to widen a block of BF16 weights once instead of in every tile.
constexpr int64_t kWidenRows = Simd::kLanes == 16 ? 40 : 16;
// Rows of one tile walk through a panel once: memory is kept busy from this far ahead.
constexpr int64_t kAheadBytes = 2048;
// Scratch: a widened block, then the sums.
constexpr size_t kWideBytes = size_t{64} << 10;
static_assert(kWideBytes + sizeof(float) * kGemmRows * kPanel <= kScratchBytes);
static_assert(kWideBytes + sizeof(float) * kQkvSums <= kScratchBytes);

// c[row_end - row_begin, kPanel] = x * panel; emit(row, rows, c) is called when rows are complete.
template <class P, class Emit>
SACCADE_INLINE void MultiplyPanel(const Gemm& g, int64_t row_begin, int64_t row_end,
                                  const typename P::B* panel, float* c, int64_t ldc,
                                  const Emit& emit) {
  const auto* a = static_cast<const typename P::A*>(g.x.data);
  const int64_t rows = row_end - row_begin;
  const int64_t steps = PaddedK<P>(g.k) / P::kK;
  const int64_t step_bytes = kPanel * P::kK * static_cast<int64_t>(sizeof(typename P::B));
  int64_t block = steps;
  if (rows > P::kMaxRows)
    block = (rows <= kFewRows ? kFewBlockBytes : kManyBlockBytes) / step_bytes;
  // The tiles of a block share the work of fetching the next one from memory.
  const int64_t tiles = (rows + P::kMaxRows - 1) / P::kMaxRows;
  const int all = kStepLines<P>;
  const int lines = tiles == 1 ? all : tiles <= 3 ? (all + 1) / 2 : 1;
  for (int64_t s = 0; s < steps; s += block) {
    const int64_t count = steps - s < block ? steps - s : block;
    const typename P::B* b = panel + s * kPanel * P::kK;
    const auto* ahead =
        reinterpret_cast<const char*>(b) + (tiles == 1 ? kAheadBytes : count * step_bytes);
    int fetched = 0;
    for (int64_t r = 0; r < rows;) {
      const int64_t tile = TileRows(rows - r, P::kMaxRows);
      const int fetch = fetched < all ? lines : 0;
      AnyTile<P>(tile, a + (row_begin + r) * g.x.stride + s * P::kK, g.x.stride, b, count,
                 c + r * ldc, ldc, s == 0, fetch, ahead);
      ahead += count * 64 * fetch;
      fetched += lines;
      if (s + count == steps) emit(row_begin + r, tile, c + r * ldc);
      r += tile;
    }
  }
}

// The same for many rows and a policy that widens: each block of the panel is widened once, then
// multiplied as F32.
template <class Emit>
SACCADE_INLINE void MultiplyWidened(const Gemm& g, int64_t row_begin, int64_t row_end,
                                    const uint16_t* panel, float* c, int64_t ldc, float* wide,
                                    const Emit& emit) {
  const auto* a = static_cast<const float*>(g.x.data);
  const int64_t rows = row_end - row_begin;
  const int64_t k = PaddedK<MulWide>(g.k);
  constexpr int64_t kBlock = static_cast<int64_t>(kWideBytes) / (kPanel * 4);
  for (int64_t s = 0; s < k; s += kBlock) {
    const int64_t count = k - s < kBlock ? k - s : kBlock;
    for (int64_t i = 0; i < count; i += 2) {
      const uint16_t* from = panel + (s + i) * kPanel;
      for (int64_t j = 0; j < kPanel; j += Simd::kLanes) {
        Simd::Store(wide + i * kPanel + j, Simd::PairEven(from + 2 * j));
        Simd::Store(wide + (i + 1) * kPanel + j, Simd::PairOdd(from + 2 * j));
      }
    }
    // The first tiles fetch the next block, which follows in memory, a line in a step.
    const auto* ahead = reinterpret_cast<const char*>(panel + (s + count) * kPanel);
    const auto* const fetched = ahead + count * kPanel * 2;
    for (int64_t r = 0; r < rows;) {
      const int64_t tile = TileRows(rows - r, MulF32::kMaxRows);
      const int lines = ahead < fetched ? 1 : 0;
      AnyTile<MulF32>(tile, a + (row_begin + r) * g.x.stride + s, g.x.stride, wide, count,
                      c + r * ldc, ldc, s == 0, lines, ahead);
      ahead += count * 64 * lines;
      if (s + count == k) emit(row_begin + r, tile, c + r * ldc);
      r += tile;
    }
  }
}

template <class P>
inline const typename P::B* PanelAt(const Gemm& g, int64_t panel) {
  return static_cast<const typename P::B*>(g.weight) + panel * kPanel * PaddedK<P>(g.k);
}

template <class P, class Emit>
SACCADE_INLINE void MultiplyAny(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel,
                                float* c, int64_t ldc, unsigned char* scratch, const Emit& emit) {
  if constexpr (P::kWidens) {
    if (row_end - row_begin > kWidenRows) {
      auto* wide = reinterpret_cast<float*>(scratch);
      MultiplyWidened(g, row_begin, row_end, PanelAt<P>(g, panel), c, ldc, wide, emit);
      return;
    }
  }
  MultiplyPanel<P>(g, row_begin, row_end, PanelAt<P>(g, panel), c, ldc, emit);
}

// Panels one after another; a single row takes several at once.
template <class P, class Emit>
SACCADE_INLINE void MultiplyPanels(const Gemm& g, int64_t row_begin, int64_t row_end,
                                   int64_t panel_begin, int64_t panel_end, unsigned char* scratch,
                                   const Emit& emit) {
  auto* c = reinterpret_cast<float*>(scratch + kWideBytes);
  int64_t p = panel_begin;
  if (row_end - row_begin == 1) {
    constexpr int kAtOnce = kPanelsAtOnce<1>;
    const auto* a = static_cast<const typename P::A*>(g.x.data) + row_begin * g.x.stride;
    const int64_t k = PaddedK<P>(g.k);
    for (; p + kAtOnce <= panel_end; p += kAtOnce) {
      const auto* b = PanelAt<P>(g, p);
      GemmTile<P, 1, kAtOnce, kStepLines<P>>(a, 0, b, kPanel * k, k / P::kK, c, 0, kPanel, true,
                                             reinterpret_cast<const char*>(b) + kAheadBytes);
      for (int64_t i = 0; i < kAtOnce; ++i) emit(p + i, row_begin, int64_t{1}, c + i * kPanel);
    }
  }
  for (; p < panel_end; ++p) {
    MultiplyAny<P>(g, row_begin, row_end, p, c, kPanel, scratch,
                   [&](int64_t row, int64_t rows, const float* sums) { emit(p, row, rows, sums); });
  }
}

template <class P>
inline void LinearPanels(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                         int64_t panel_end, void* scratch) {
  MultiplyPanels<P>(g, row_begin, row_end, panel_begin, panel_end,
                    static_cast<unsigned char*>(scratch),
                    [&](int64_t p, int64_t row, int64_t rows, const float* c) {
                      StorePanel(g.out, g.n, row, rows, p * kPanel, kPanel, c, kPanel);
                    });
}

template <class P>
inline void GatedPanels(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                        int64_t panel_end, void* scratch) {
  MultiplyPanels<P>(g, row_begin, row_end, panel_begin, panel_end,
                    static_cast<unsigned char*>(scratch),
                    [&](int64_t p, int64_t row, int64_t rows, const float* c) {
                      StoreGated(g.out, g.n / 2, row, rows, p * (kPanel / 2), kPanel, c, kPanel);
                    });
}

template <class P>
inline void QkvPanels(const Gemm& g, const QkvRope& e, int64_t row_begin, int64_t row_end,
                      int64_t panel_begin, int64_t panel_end, void* scratch) {
  auto* bytes = static_cast<unsigned char*>(scratch);
  auto* c = reinterpret_cast<float*>(bytes + kWideBytes);
  const int64_t columns = (panel_end - panel_begin) * kPanel;
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    MultiplyAny<P>(g, row_begin, row_end, p, c + (p - panel_begin) * kPanel, columns, bytes,
                   [](int64_t, int64_t, const float*) {});
  }
  StoreQkv(e, row_begin, row_end - row_begin, panel_begin * kPanel, columns, g.n, c, columns);
}

// --- The table's entries; P is the policy of BF16 weights.

template <class P>
struct GemmEntries {
  static bool RowsReady(Type weight, Type x, int64_t /*rows*/, int64_t k, int64_t /*stride*/) {
    if (weight == Type::kF32) return x == Type::kF32;
    return x == Type::kBf16 && RowType<P>() == Type::kBf16 && k % P::kK == 0;
  }
  static int64_t Stride(Type weight, int64_t k) { return weight == Type::kF32 ? k : PaddedK<P>(k); }
  static size_t Bytes(Type weight, int64_t rows, int64_t k) {
    const size_t size = weight == Type::kF32 ? 4 : sizeof(typename P::A);
    return static_cast<size_t>(rows * Stride(weight, k)) * size;
  }
  static void PackRows(Type weight, const void* x, Type x_type, int64_t x_stride, int64_t k,
                       int64_t row_begin, int64_t row_end, void* out) {
    const Type out_type = weight == Type::kF32 ? Type::kF32 : RowType<P>();
    const int64_t stride = Stride(weight, k);
    const int64_t in_size = x_type == Type::kF32 ? 4 : 2;
    const int64_t out_size = out_type == Type::kF32 ? 4 : 2;
    for (int64_t row = row_begin; row < row_end; ++row) {
      PackRow(weight, static_cast<const unsigned char*>(x) + row * x_stride * in_size, x_type, k,
              stride, out_type, static_cast<unsigned char*>(out) + row * stride * out_size);
    }
  }
  static void Linear(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                     int64_t panel_end, void* scratch) {
    if (g.type == Type::kF32) {
      LinearPanels<MulF32>(g, row_begin, row_end, panel_begin, panel_end, scratch);
    } else {
      LinearPanels<P>(g, row_begin, row_end, panel_begin, panel_end, scratch);
    }
  }
  static void Gated(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                    int64_t panel_end, void* scratch) {
    if (g.type == Type::kF32) {
      GatedPanels<MulF32>(g, row_begin, row_end, panel_begin, panel_end, scratch);
    } else {
      GatedPanels<P>(g, row_begin, row_end, panel_begin, panel_end, scratch);
    }
  }
  static void Qkv(const Gemm& g, const QkvRope& e, int64_t row_begin, int64_t row_end,
                  int64_t panel_begin, int64_t panel_end, void* scratch) {
    if (g.type == Type::kF32) {
      QkvPanels<MulF32>(g, e, row_begin, row_end, panel_begin, panel_end, scratch);
    } else {
      QkvPanels<P>(g, e, row_begin, row_end, panel_begin, panel_end, scratch);
    }
  }
};

}  // namespace
}  // namespace saccade::cpu
