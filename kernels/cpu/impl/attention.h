#pragma once
// Attention as online softmax over tiles of four pages. P is the policy of the products for the
// type of the pages. Source of the online softmax: Milakov and Gimelshein, arXiv 1805.02867; of the
// tiling: Dao et al., arXiv 2205.14135.
#include "kernels/cpu/impl/gemm.h"

namespace saccade::cpu {
namespace {

// Rows (a query row of one head) that share a pass over the pages: enough to reuse a tile from L1.
constexpr int64_t kBlockRows = 48;
constexpr int kPageVecs = static_cast<int>(kPageTokens) / Simd::kLanes;

struct TilePages {
  const unsigned char* k[kTilePages];
  const unsigned char* v[kTilePages];
  int64_t len[kTilePages];
  int64_t pos[kTilePages];
};

// S[R, 64] = Q[R, d] * K^T of the tile.
template <class P, int R>
SACCADE_INLINE void ScoreTile(const typename P::A* q, int64_t ldq, const TilePages& t,
                              int64_t steps, float* s) {
  constexpr int kVecs = kPanelVecs;
  constexpr int kPages = kVecs / kPageVecs;  // at once
  for (int64_t page = 0; page < kTilePages; page += kPages) {
    V acc[R][kVecs];
    SACCADE_UNROLL
    for (int i = 0; i < R; ++i) {
      SACCADE_UNROLL
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Simd::Zero();
    }
    const typename P::B* k[kPages];
    SACCADE_UNROLL
    for (int p = 0; p < kPages; ++p) k[p] = reinterpret_cast<const typename P::B*>(t.k[page + p]);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t at = step * kPageTokens * P::kK;
      P::template Step<R, kVecs>(acc, q + step * P::kK, ldq, [&](int j) {
        return k[j / kPageVecs] + at + (j % kPageVecs) * Simd::kLanes * P::kK;
      });
    }
    SACCADE_UNROLL
    for (int i = 0; i < R; ++i) {
      SACCADE_UNROLL
      for (int j = 0; j < kVecs; ++j) {
        Simd::Store(s + i * kTileTokens + page * kPageTokens + j * Simd::kLanes, acc[i][j]);
      }
    }
  }
}

// O[R, NV vectors] = O * alpha + P[R, 64] * V of the tile, columns from `d0`.
template <class P, int R, int NV>
SACCADE_INLINE void ValueColumns(const typename P::A* p, const float* alpha,
                                 const unsigned char* const* v, int64_t v_dim, int64_t d0,
                                 float* o) {
  V acc[R][NV];
  SACCADE_UNROLL
  for (int i = 0; i < R; ++i) {
    const V factor = Simd::Set(alpha[i]);
    SACCADE_UNROLL
    for (int j = 0; j < NV; ++j)
      acc[i][j] = Simd::Mul(Simd::Load(o + i * v_dim + d0 + j * Simd::kLanes), factor);
  }
  for (int64_t page = 0; page < kTilePages; ++page) {
    const auto* from = reinterpret_cast<const typename P::B*>(v[page]) + d0 * P::kK;
    for (int64_t step = 0; step < kPageTokens / P::kK; ++step) {
      P::template Step<R, NV>(acc, p, kTileTokens,
                              [&](int j) { return from + j * Simd::kLanes * P::kK; });
      p += P::kK;
      from += v_dim * P::kK;
    }
  }
  SACCADE_UNROLL
  for (int i = 0; i < R; ++i) {
    SACCADE_UNROLL
    for (int j = 0; j < NV; ++j) Simd::Store(o + i * v_dim + d0 + j * Simd::kLanes, acc[i][j]);
  }
}

template <class P, int R>
SACCADE_INLINE void ValueTile(const typename P::A* p, const float* alpha,
                              const unsigned char* const* v, int64_t v_dim, float* o) {
  const int64_t vecs = v_dim / Simd::kLanes;
  int64_t j = 0;
  for (; j + kPanelVecs <= vecs; j += kPanelVecs) {
    ValueColumns<P, R, kPanelVecs>(p, alpha, v, v_dim, j * Simd::kLanes, o);
  }
  for (; j < vecs; ++j) ValueColumns<P, R, 1>(p, alpha, v, v_dim, j * Simd::kLanes, o);
}

// Calls f.operator()<R>(first row) for row tiles of at most P::kMaxRows.
template <class P, class F>
SACCADE_INLINE void ForRowTiles(int64_t rows, const F& f) {
  static_assert(P::kMaxRows <= 6);
  for (int64_t r = 0; r < rows;) {
    const int64_t tile = TileRows(rows - r, P::kMaxRows);
    switch (tile) {
      case 1:
        f.template operator()<1>(r);
        break;
      case 2:
        f.template operator()<2>(r);
        break;
      case 3:
        f.template operator()<3>(r);
        break;
      case 4:
        f.template operator()<4>(r);
        break;
      default:
        if constexpr (P::kMaxRows > 4) {
          if (tile == 5) {
            f.template operator()<5>(r);
          } else {
            f.template operator()<6>(r);
          }
        }
        break;
    }
    r += tile;
  }
}

// Whether every value of the tile's pages is finite, lanes that nothing was written to included.
template <class P>
inline bool ValuesFinite(const TilePages& t, int64_t v_dim) {
  V sum = Simd::Zero();  // a NaN as soon as one value is not finite
  const V zero = Simd::Zero();
  const int64_t count = kPageTokens * v_dim / P::kK;
  for (int64_t page = 0; page < kTilePages; ++page) {
    const auto* v = reinterpret_cast<const typename P::B*>(t.v[page]);
    for (int64_t i = 0; i < count; i += Simd::kLanes) {
      if constexpr (P::kK == 1) {
        sum = Simd::Fma(Simd::Load(reinterpret_cast<const float*>(v) + i), zero, sum);
      } else {
        const auto* pair = reinterpret_cast<const uint16_t*>(v) + 2 * i;
        sum = Simd::Fma(Simd::PairEven(pair), zero, sum);
        sum = Simd::Fma(Simd::PairOdd(pair), zero, sum);
      }
    }
  }
  return Simd::Bits(Simd::Equal(sum, sum)) == (1u << Simd::kLanes) - 1u;
}

// The pages of V with the lanes that a row does not see set to zero.
template <class P>
inline void MaskValues(const TilePages& t, const int64_t* visible, int64_t v_dim,
                       typename P::B* masked, const unsigned char** pages) {
  for (int64_t page = 0; page < kTilePages; ++page) {
    typename P::B* to = masked + page * kPageTokens * v_dim;
    __builtin_memcpy(to, t.v[page],
                     static_cast<size_t>(kPageTokens * v_dim) * sizeof(typename P::B));
    for (int64_t token = visible[page]; token < kPageTokens; ++token) {
      for (int64_t i = 0; i < v_dim; ++i)
        to[(token / P::kK * v_dim + i) * P::kK + token % P::kK] = 0;
    }
    pages[page] = reinterpret_cast<const unsigned char*>(to);
  }
}

// How many of a page's first lanes a row sees whose last position is `limit`.
SACCADE_INLINE int64_t Visible(int64_t len, int64_t pos, int64_t limit) {
  const int64_t seen = limit - pos + 1;
  const int64_t n = seen < len ? seen : len;
  return n < 0 ? 0 : n;
}

// What a row has seen so far: the largest score, and the sum of its weights, lane by lane.
struct RowState {
  float most;
  alignas(64) float sum[Simd::kLanes];
};

// One row of a tile: scores to weights. `alpha`: what the row's earlier weights are multiplied
// with.
template <class P>
SACCADE_INLINE void SoftmaxRow(const float* s, const int64_t* visible, bool all, float scale,
                               typename P::A* p, RowState& state, float& alpha) {
  constexpr int kVecs = static_cast<int>(kTileTokens) / Simd::kLanes;
  const V low = Simd::Set(-__builtin_inff());
  const V factor = Simd::Set(scale);
  V x[kVecs];
  V top = low;
  SACCADE_UNROLL
  for (int j = 0; j < kVecs; ++j) {
    x[j] = Simd::Mul(Simd::Load(s + j * Simd::kLanes), factor);
    if (!all) {
      const int64_t first = int64_t{j} % kPageVecs * Simd::kLanes;
      x[j] = Simd::Select(Simd::FirstLanes(visible[j / kPageVecs] - first), x[j], low);
    }
    top = Simd::Max(x[j], top);
  }
  const float most = state.most;
  float new_most = most;
  alpha = 1.0f;
  V sum = Simd::Load(state.sum);
  // After a few tiles a row has mostly met its maximum.
  if (Simd::Bits(Simd::Greater(top, Simd::Set(most))) != 0) {
    new_most = Simd::MaxLane(top);
    alpha = Simd::First(Exp(Simd::Set(most - new_most)));
    sum = Simd::Mul(sum, Simd::Set(alpha));
    state.most = new_most;
  }
  // Until a row has seen a finite score its maximum is -inf, and its weights must be 0 and not NaN.
  const V base = Simd::Set(new_most == -__builtin_inff() ? 0.0f : new_most);
  V total = Simd::Zero();
  SACCADE_UNROLL
  for (int j = 0; j < kVecs; ++j) {
    const V e = P::SoftmaxExp(Simd::Sub(x[j], base));
    total = Simd::Add(total, e);
    P::StoreA(p + j * Simd::kLanes, e);
  }
  Simd::Store(state.sum, Simd::Add(sum, total));
}

// The two products of a tile, with scratch of [64, kMaxHeadDim] floats.
template <class P>
struct VectorProducts {
  // s[rows, 64] = q[rows, k_dim] * K^T
  static SACCADE_INLINE void Scores(const typename P::A* q, const TilePages& t, const KvLayout& kv,
                                    int64_t rows, float* /*scratch*/, float* s) {
    ForRowTiles<P>(rows, [&]<int R>(int64_t r) {
      ScoreTile<P, R>(q + r * kv.k_dim, kv.k_dim, t, kv.k_dim / P::kK, s + r * kTileTokens);
    });
  }
  // o[rows, v_dim] = o * alpha[rows] + p[rows, 64] * V
  static SACCADE_INLINE void Values(const typename P::A* p, const float* alpha,
                                    const unsigned char* const* v, const KvLayout& kv, int64_t rows,
                                    float* /*scratch*/, float* o) {
    ForRowTiles<P>(rows, [&]<int R>(int64_t r) {
      ValueTile<P, R>(p + r * kTileTokens, alpha + r, v, kv.v_dim, o + r * kv.v_dim);
    });
  }
};

// Those of policy P. A level with another way to multiply specialises this.
template <class P>
struct TileProducts : VectorProducts<P> {};

// `lines` lines of `width` pairs as twice as many lines of `width` floats.
inline void WidenPairs(const uint16_t* pairs, int64_t lines, int64_t width, float* wide) {
  for (int64_t line = 0; line < lines; ++line, pairs += 2 * width, wide += 2 * width) {
    for (int64_t i = 0; i < width; i += Simd::kLanes) {
      Simd::Store(wide + i, Simd::PairEven(pairs + 2 * i));
      Simd::Store(wide + width + i, Simd::PairOdd(pairs + 2 * i));
    }
  }
}

// Widens a tile once for all rows: the pages become F32 pages, and the chains of sums stay the
// same.
template <>
struct TileProducts<MulWide> {
  static constexpr int64_t kWidenRows = 8;  // from here on it pays

  static SACCADE_INLINE void Scores(const float* q, const TilePages& t, const KvLayout& kv,
                                    int64_t rows, float* scratch, float* s) {
    if (rows < kWidenRows) return VectorProducts<MulWide>::Scores(q, t, kv, rows, scratch, s);
    TilePages wide;
    for (int64_t page = 0; page < kTilePages; ++page, scratch += kPageTokens * kv.k_dim) {
      WidenPairs(reinterpret_cast<const uint16_t*>(t.k[page]), kv.k_dim / 2, kPageTokens, scratch);
      wide.k[page] = reinterpret_cast<const unsigned char*>(scratch);
    }
    VectorProducts<MulF32>::Scores(q, wide, kv, rows, scratch, s);
  }

  static SACCADE_INLINE void Values(const float* p, const float* alpha,
                                    const unsigned char* const* v, const KvLayout& kv, int64_t rows,
                                    float* scratch, float* o) {
    if (rows < kWidenRows) {
      return VectorProducts<MulWide>::Values(p, alpha, v, kv, rows, scratch, o);
    }
    const unsigned char* wide[kTilePages];
    for (int64_t page = 0; page < kTilePages; ++page, scratch += kPageTokens * kv.v_dim) {
      WidenPairs(reinterpret_cast<const uint16_t*>(v[page]), kPageTokens / 2, kv.v_dim, scratch);
      wide[page] = reinterpret_cast<const unsigned char*>(scratch);
    }
    VectorProducts<MulF32>::Values(p, alpha, wide, kv, rows, scratch, o);
  }
};

template <class P>
struct AttentionBlock {
  typename P::A* q;  // [kBlockRows, k_dim]
  float* s;          // [kBlockRows, 64]
  typename P::A* p;  // [kBlockRows + 16, 64]: a product may read, but not use, rows after the last
  float* o;          // [kBlockRows, v_dim]
  float* scratch;    // [64, kMaxHeadDim], of a product
  typename P::B* masked;  // [64, v_dim]
  RowState state[kBlockRows];
  float alpha[kBlockRows];
  int64_t limit[kBlockRows];
};

template <class P>
inline void AttendTile(AttentionBlock<P>& b, const KvLayout& kv, const TilePages& t, int64_t rows,
                       float scale, bool all) {
  TileProducts<P>::Scores(b.q, t, kv, rows, b.scratch, b.s);
  int64_t visible[kTilePages] = {kPageTokens, kPageTokens, kPageTokens, kPageTokens};
  for (int64_t r = 0; r < rows; ++r) {
    if (!all) {
      for (int64_t page = 0; page < kTilePages; ++page)
        visible[page] = Visible(t.len[page], t.pos[page], b.limit[r]);
    }
    SoftmaxRow<P>(b.s + r * kTileTokens, visible, all, scale, b.p + r * kTileTokens, b.state[r],
                  b.alpha[r]);
  }
  if (all || ValuesFinite<P>(t, kv.v_dim)) {
    TileProducts<P>::Values(b.p, b.alpha, t.v, kv, rows, b.scratch, b.o);
    return;
  }
  // A weight of 0 does not silence a NaN or an Inf: take those values away from every row that must
  // not see them.
  for (int64_t r = 0; r < rows; ++r) {
    const unsigned char* pages[kTilePages];
    for (int64_t page = 0; page < kTilePages; ++page)
      visible[page] = Visible(t.len[page], t.pos[page], b.limit[r]);
    MaskValues<P>(t, visible, kv.v_dim, b.masked, pages);
    TileProducts<P>::Values(b.p + r * kTileTokens, b.alpha + r, pages, kv, 1, b.scratch,
                            b.o + r * kv.v_dim);
  }
}

constexpr int64_t kEveryPosition = INT32_MAX;

template <class P>
inline void AttendRows(const Attention& a, int64_t kv_head, int64_t row_begin, int64_t row_end,
                       unsigned char* scratch) {
  const KvLayout& kv = a.kv;
  const int64_t group = a.q_heads / kv.heads;
  const int64_t d = kv.head_dim;
  const int64_t io_size = a.io_type == Type::kF32 ? 4 : 2;
  const auto head = static_cast<size_t>(kv_head);

  AttentionBlock<P> b;
  unsigned char* next = scratch;
  const auto take = [&](int64_t count, size_t size) {
    unsigned char* at = next;
    next += (static_cast<size_t>(count) * size + 63) / 64 * 64;
    return at;
  };
  b.q =
      reinterpret_cast<typename P::A*>(take(kBlockRows * (kMaxHeadDim + 2), sizeof(typename P::A)));
  b.s = reinterpret_cast<float*>(take(kBlockRows * kTileTokens, sizeof(float)));
  b.p = reinterpret_cast<typename P::A*>(
      take((kBlockRows + 16) * kTileTokens, sizeof(typename P::A)));
  b.o = reinterpret_cast<float*>(take(kBlockRows * kMaxHeadDim, sizeof(float)));
  b.scratch = reinterpret_cast<float*>(take(kTileTokens * kMaxHeadDim, sizeof(float)));
  b.masked =
      reinterpret_cast<typename P::B*>(take(kTileTokens * kMaxHeadDim, sizeof(typename P::B)));
  static_assert(kBlockRows * (kMaxHeadDim + 2) * 4 + (2 * kBlockRows + 16) * kTileTokens * 4 +
                    kBlockRows * kMaxHeadDim * 4 + 2 * kTileTokens * kMaxHeadDim * 4 + 6 * 64 <=
                static_cast<int64_t>(kScratchBytes));

  const int64_t lines = (row_end - row_begin) * group;  // (row, head of the group) in that order
  for (int64_t line0 = 0; line0 < lines; line0 += kBlockRows) {
    const int64_t rows = lines - line0 < kBlockRows ? lines - line0 : kBlockRows;
    int64_t least = INT64_MAX;
    int64_t greatest = INT64_MIN;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = row_begin + (line0 + r) / group;
      const int64_t column = (kv_head * group + (line0 + r) % group) * d;
      const auto* q =
          static_cast<const unsigned char*>(a.q) + (row * a.q_stride + column) * io_size;
      PackRow(kv.type, q, a.io_type, d, kv.k_dim, RowType<P>(), b.q + r * kv.k_dim);
      b.limit[r] = a.row_limit != nullptr ? int64_t{a.row_limit[row]} : kEveryPosition;
      least = b.limit[r] < least ? b.limit[r] : least;
      greatest = b.limit[r] > greatest ? b.limit[r] : greatest;
      b.state[r].most = -__builtin_inff();
      Simd::Store(b.state[r].sum, Simd::Zero());
    }
    __builtin_memset(b.o, 0, static_cast<size_t>(rows * kv.v_dim) * sizeof(float));

    for (int64_t page0 = 0; page0 < a.num_pages; page0 += kTilePages) {
      TilePages t;
      bool all = true;
      bool any = false;
      for (int64_t i = 0; i < kTilePages; ++i) {
        const bool present = page0 + i < a.num_pages;
        const int64_t page = present ? page0 + i : page0;
        const unsigned char* block = kv.base + static_cast<size_t>(a.pages[page]) * kv.block_stride;
        t.k[i] = block + head * kv.k_head_bytes;
        t.v[i] = block + kv.v_offset + head * kv.v_head_bytes;
        t.len[i] = present ? a.page_len[page] : 0;
        t.pos[i] = a.page_pos != nullptr ? a.page_pos[page] : 0;
        any = any || Visible(t.len[i], t.pos[i], greatest) > 0;
        all = all && Visible(t.len[i], t.pos[i], least) == kPageTokens;
      }
      if (any) AttendTile<P>(b, kv, t, rows, a.scale, all);
    }

    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = row_begin + (line0 + r) / group;
      const int64_t column = (kv_head * group + (line0 + r) % group) * d;
      auto* out = static_cast<unsigned char*>(a.out) + (row * a.out_stride + column) * io_size;
      // A row that saw nothing has sum 0 and weights 0: its answer is 0. A NaN sum stays a NaN.
      const float sum = Simd::Sum(Simd::Load(b.state[r].sum));
      const V divisor = Simd::Set(sum == 0 ? 1.0f : sum);
      for (int64_t i = 0; i < d; i += Simd::kLanes) {
        const V v = Simd::Div(Simd::Load(b.o + r * kv.v_dim + i), divisor);
        StoreAsN(out, a.io_type, i, v, Simd::FirstLanes(d - i));
      }
    }
  }
}

// P is the policy of BF16 pages.
template <class P>
inline void AttentionEntry(const Attention& a, int64_t kv_head, int64_t row_begin, int64_t row_end,
                           void* scratch) {
  auto* bytes = static_cast<unsigned char*>(scratch);
  if (a.kv.type == Type::kF32) {
    AttendRows<MulF32>(a, kv_head, row_begin, row_end, bytes);
  } else {
    AttendRows<P>(a, kv_head, row_begin, row_end, bytes);
  }
}

// --- Pages from dense rows.

// [k_dim/2][16 tokens][2]: a line of the page at a time.
inline void PackBf16Keys(const KvLayout& kv, const uint16_t* k, int64_t stride, int64_t count,
                         unsigned char* page) {
  const int64_t pairs = kv.head_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    for (int64_t t = 0; t < count; ++t)
      __builtin_memcpy(page + (i * kPageTokens + t) * 4, k + t * stride + 2 * i, 4);
  }
  if (kv.head_dim % 2 == 0) return;
  for (int64_t t = 0; t < count; ++t)
    __builtin_memcpy(page + (pairs * kPageTokens + t) * 4, k + t * stride + 2 * pairs, 2);
}

// [8][v_dim][2]: two tokens side by side.
inline void PackBf16Values(const KvLayout& kv, const uint16_t* v, int64_t stride, int64_t count,
                           unsigned char* page) {
  for (int64_t t = 0; t < count; t += 2) {
    const uint16_t* even = v + t * stride;
    auto* to = reinterpret_cast<uint16_t*>(page) + t * kv.v_dim;
    if (t + 1 == count) {
      for (int64_t i = 0; i < kv.head_dim; ++i) to[2 * i] = even[i];
      return;
    }
    const uint16_t* odd = even + stride;
    for (int64_t i = 0; i < kv.head_dim; ++i) {
      const uint32_t pair = even[i] | static_cast<uint32_t>(odd[i]) << 16;
      __builtin_memcpy(to + 2 * i, &pair, sizeof(pair));
    }
  }
}

inline void PackKv(const KvLayout& kv, int64_t kv_head, const void* k, const void* v,
                   int64_t stride, int64_t tokens) {
  const auto head = static_cast<size_t>(kv_head);
  for (int64_t token0 = 0; token0 < tokens; token0 += kPageTokens) {
    unsigned char* block = kv.base + static_cast<size_t>(token0 / kPageTokens) * kv.block_stride;
    unsigned char* k_page = block + head * kv.k_head_bytes;
    unsigned char* v_page = block + kv.v_offset + head * kv.v_head_bytes;
    const int64_t count = tokens - token0 < kPageTokens ? tokens - token0 : kPageTokens;
    if (count < kPageTokens || kv.k_dim != kv.head_dim)
      __builtin_memset(k_page, 0, kv.k_head_bytes);
    if (count < kPageTokens || kv.v_dim != kv.head_dim)
      __builtin_memset(v_page, 0, kv.v_head_bytes);
    if (kv.type == Type::kBf16) {
      PackBf16Keys(kv, static_cast<const uint16_t*>(k) + token0 * stride, stride, count, k_page);
      PackBf16Values(kv, static_cast<const uint16_t*>(v) + token0 * stride, stride, count, v_page);
      continue;
    }
    for (int64_t t = 0; t < count; ++t) {
      const int64_t at = (token0 + t) * stride;
      const float* key = static_cast<const float*>(k) + at;
      auto* to = reinterpret_cast<float*>(k_page) + t;
      for (int64_t i = 0; i < kv.head_dim; ++i) to[i * kPageTokens] = key[i];
      __builtin_memcpy(reinterpret_cast<float*>(v_page) + t * kv.v_dim,
                       static_cast<const float*>(v) + at,
                       static_cast<size_t>(kv.head_dim) * sizeof(float));
    }
  }
}

// --- Single slots.

inline void ReadSlot(const KvLayout& kv, int64_t slot, void* k, Type k_type, void* v, Type v_type) {
  const unsigned char* block = kv.base + static_cast<size_t>(slot / kPageTokens) * kv.block_stride;
  const int64_t at = slot % kPageTokens;
  alignas(64) float key[kMaxHeadDim];
  alignas(64) float value[kMaxHeadDim];
  for (int64_t h = 0; h < kv.heads; ++h) {
    const unsigned char* k_page = block + static_cast<size_t>(h) * kv.k_head_bytes;
    const unsigned char* v_page = block + kv.v_offset + static_cast<size_t>(h) * kv.v_head_bytes;
    if (kv.type == Type::kF32) {
      const auto* keys = reinterpret_cast<const float*>(k_page) + at;
      for (int64_t i = 0; i < kv.head_dim; ++i) key[i] = keys[i * kPageTokens];
      __builtin_memcpy(value, reinterpret_cast<const float*>(v_page) + at * kv.v_dim,
                       static_cast<size_t>(kv.head_dim) * sizeof(float));
    } else {
      const auto* keys = reinterpret_cast<const uint16_t*>(k_page) + at * 2;
      const auto* values =
          reinterpret_cast<const uint16_t*>(v_page) + at / 2 * kv.v_dim * 2 + at % 2;
      for (int64_t i = 0; i < kv.head_dim; ++i) {
        key[i] = Bf16Value(keys[i / 2 * kPageTokens * 2 + i % 2]);
        value[i] = Bf16Value(values[2 * i]);
      }
    }
    const int64_t column = h * kv.head_dim;
    ConvertRow(key, static_cast<unsigned char*>(k) + column * (k_type == Type::kF32 ? 4 : 2),
               k_type, kv.head_dim);
    ConvertRow(value, static_cast<unsigned char*>(v) + column * (v_type == Type::kF32 ? 4 : 2),
               v_type, kv.head_dim);
  }
}

inline void WriteSlot(const KvLayout& kv, int64_t slot, const void* k, Type k_type, const void* v,
                      Type v_type) {
  unsigned char* block = kv.base + static_cast<size_t>(slot / kPageTokens) * kv.block_stride;
  const int64_t at = slot % kPageTokens;
  alignas(64) float wide[kMaxHeadDim];
  for (int64_t h = 0; h < kv.heads; ++h) {
    const int64_t column = h * kv.head_dim;
    const auto widen = [&](const void* from, Type type) {
      for (int64_t i = 0; i < kv.head_dim; i += Simd::kLanes) {
        const Simd::M m = Simd::FirstLanes(kv.head_dim - i);
        Simd::StoreN(wide + i, LoadAsN(from, type, column + i, m), m);
      }
    };
    widen(k, k_type);
    AppendKey(kv, block + static_cast<size_t>(h) * kv.k_head_bytes, at, wide);
    widen(v, v_type);
    AppendValue(kv, block + kv.v_offset + static_cast<size_t>(h) * kv.v_head_bytes, at, wide);
  }
}

}  // namespace
}  // namespace saccade::cpu
