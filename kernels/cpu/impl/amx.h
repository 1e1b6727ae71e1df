#pragma once
// GEMM of BF16 weights and attention over BF16 pages with AMX tiles. A panel is 16 columns wide and
// k-major, so that 32 k of it are one tile of 1 KiB; two panels and 32 rows make four sums in
// tiles. Sums of 32 k are made inside the instruction and added to the tile in order of k, for
// every number of rows (Intel SDM, TDPBF16PS), so a row's bits do not depend on its neighbours.
#include "kernels/cpu/impl/table.h"

namespace saccade::cpu {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileK = 32;
constexpr int64_t kTileElements = kTileColumns * kTileK;  // of a weight's tile

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
alignas(64) constexpr TileConfig kAllTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Tiles are set up for the life of this object; a thread that does not hold them is cheaper to
// switch.
struct TileScope {
  explicit TileScope(const TileConfig& config) { _tile_loadconfig(&config); }
  ~TileScope() { _tile_release(); }
};

// Lines of the weights to fetch while a block is multiplied.
struct Ahead {
  const char* panel[2];
  int64_t lines;        // of each panel for every step of k
  int64_t steps;        // until `panel` is at its end
  const char* then[2];  // and goes on here
};

// Sums that are complete but not stored yet. Their epilogue runs, a few rows at a time, between the
// tile instructions of the next block, which keep the core's own ports nearly idle. They are all
// stored before that block stores its own sums.
struct Pending {
  int64_t row, rows, panel;
  const float* c;
  int64_t ldc;
};
template <class Emit>
SACCADE_INLINE void EmitRows(Pending& p, int64_t most, const Emit& emit) {
  const int64_t rows = p.rows < most ? p.rows : most;
  if (rows <= 0) return;
  emit(p.row, rows, p.panel, p.c, p.ldc);
  p.row += rows;
  p.rows -= rows;
  p.c += rows * p.ldc;
}

// Sixteen rows of activations.
struct RowTile {
  const uint16_t* data;
  int64_t row_bytes;
};

// C[16 or 32, 32] (+)= A * B over `steps` tiles of k.
template <int kHeight, class Emit>
SACCADE_INLINE void MultiplyTiles(const RowTile (&a)[kHeight], const uint16_t* b0,
                                  const uint16_t* b1, int64_t steps, float* c, int64_t ldc,
                                  bool first, Ahead& ahead, Pending& pending, const Emit& emit) {
  const int64_t c_bytes = ldc * 4;
  float* const c1 = c + kTileRows * ldc;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kHeight == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + kTileColumns, c_bytes);
    if constexpr (kHeight == 2) {
      _tile_loadd(2, c1, c_bytes);
      _tile_loadd(3, c1 + kTileColumns, c_bytes);
    }
  }
  const int64_t emitted = (2 * kTileRows + steps - 1) / steps;
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, a[0].data + s * kTileK, a[0].row_bytes);
    _tile_loadd(6, b0 + s * kTileElements, 64);
    _tile_loadd(7, b1 + s * kTileElements, 64);
    if constexpr (kHeight == 2) _tile_loadd(5, a[1].data + s * kTileK, a[1].row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kHeight == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t i = 0; i < ahead.lines; ++i) {
      _mm_prefetch(ahead.panel[0] + 64 * i, _MM_HINT_T1);
      _mm_prefetch(ahead.panel[1] + 64 * i, _MM_HINT_T1);
    }
    ahead.panel[0] += 64 * ahead.lines;
    ahead.panel[1] += 64 * ahead.lines;
    if (--ahead.steps == 0) {
      ahead.panel[0] = ahead.then[0];
      ahead.panel[1] = ahead.then[1];
    }
    EmitRows(pending, emitted, emit);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + kTileColumns, c_bytes);
  if constexpr (kHeight == 2) {
    _tile_stored(2, c1, c_bytes);
    _tile_stored(3, c1 + kTileColumns, c_bytes);
  }
}

SACCADE_INLINE int64_t PaddedTileK(int64_t k) { return (k + kTileK - 1) / kTileK * kTileK; }

// k of a block: 32 columns of it stay in L1 while all rows pass by.
constexpr int64_t kBlockK = 512;
// How far ahead the weights are fetched, in tiles of each panel, when they are used once.
constexpr int64_t kAheadSteps = 4;
// Activations up to this size stay in L2 beside the weights that pass through; larger ones are
// taken in blocks of k, for groups of columns whose sums stay in L2.
constexpr int64_t kResidentBytes = 1400 << 10;
constexpr int64_t kGroupPanels = 16;
// Scratch: the last rows when they do not fill a tile, then the sums. A longer k is packed by the
// caller.
constexpr int64_t kMostTailK = 32768;
constexpr size_t kTailBytes = sizeof(uint16_t) * kTileRows * kMostTailK;
static_assert(kTailBytes + sizeof(float) * kGemmRows * kGroupPanels * kTileColumns <=
              kScratchBytes);
static_assert(kTailBytes + sizeof(float) * kQkvSums <= kScratchBytes);

// Sums of rows [row_begin, row_end) and panels [panel_begin, panel_end): c is [rows, columns of a
// group] with rows padded to a multiple of 32; emit(row, rows, panel, c, ldc) is called for rows
// of 2 panels whose sums are complete. `whole`: c holds the sums of all panels of the
// call, one group.
template <class Emit>
SACCADE_INLINE void MultiplyAmx(const Gemm& g, int64_t row_begin, int64_t row_end,
                                int64_t panel_begin, int64_t panel_end, bool whole,
                                unsigned char* scratch, const Emit& emit) {
  const TileScope tiles(kAllTiles);
  const auto* x = static_cast<const uint16_t*>(g.x.data);
  const auto* weight = static_cast<const uint16_t*>(g.weight);
  const int64_t rows = row_end - row_begin;
  const int64_t k = PaddedTileK(g.k);
  const int64_t panel_elements = k * kTileColumns;

  // The last rows, when they do not fill a tile and no zeros follow them in memory.
  auto* tail = reinterpret_cast<uint16_t*>(scratch);
  const int64_t tail_rows = g.x.padded ? 0 : rows % kTileRows;
  for (int64_t i = 0; i < tail_rows; ++i) {
    __builtin_memcpy(tail + i * k, x + (row_end - tail_rows + i) * g.x.stride,
                     static_cast<size_t>(k) * sizeof(uint16_t));
  }
  if (tail_rows > 0) {
    __builtin_memset(tail + tail_rows * k, 0,
                     static_cast<size_t>((kTileRows - tail_rows) * k) * sizeof(uint16_t));
  }
  const auto row_tile = [&](int64_t r, int64_t k0) {
    if (tail_rows > 0 && r + kTileRows > rows) return RowTile{tail + k0, k * 2};
    return RowTile{x + (row_begin + r) * g.x.stride + k0, g.x.stride * 2};
  };

  auto* sums = reinterpret_cast<float*>(scratch + kTailBytes);
  const int64_t blocks = (rows + 2 * kTileRows - 1) / (2 * kTileRows);
  const bool resident = rows * k * 2 <= kResidentBytes;
  // Rows of one block walk through the weights once: there is nothing to keep.
  const bool once = blocks == 1 && !whole;
  const int64_t group = whole ? panel_end - panel_begin : resident || once ? 2 : kGroupPanels;
  const int64_t k_blocks = once ? 1 : (k + kBlockK - 1) / kBlockK;
  const int64_t block_k = PaddedTileK((k + k_blocks - 1) / k_blocks);
  Pending pending{};
  for (int64_t g0 = panel_begin; g0 < panel_end; g0 += group) {
    const int64_t g1 = g0 + group < panel_end ? g0 + group : panel_end;
    const int64_t ldc = (g1 - g0 + 1) / 2 * 2 * kTileColumns;
    for (int64_t k0 = 0; k0 < k; k0 += block_k) {
      const int64_t steps = (k - k0 < block_k ? k - k0 : block_k) / kTileK;
      const bool last = k0 + steps * kTileK == k;
      for (int64_t p = g0; p < g1; p += 2) {
        const uint16_t* b0 = weight + p * panel_elements + k0 * kTileColumns;
        const uint16_t* b1 = p + 1 < panel_end ? b0 + panel_elements : b0;
        // The block that comes next: the same panels further on, the next two panels, or the
        // group's first again.
        int64_t next_panel = p;
        int64_t next_k = k0 + block_k;
        if (g1 - g0 > 2 || last) {
          next_panel = p + 2 < g1 ? p + 2 : last ? g1 : g0;
          next_k = p + 2 < g1 ? k0 : last ? 0 : k0 + block_k;
        }
        const auto* next = reinterpret_cast<const char*>(weight + next_panel * panel_elements +
                                                         next_k * kTileColumns);
        const char* next_pair[2] = {next, next + panel_elements * 2};
        Ahead ahead{{next_pair[0], next_pair[1]},
                    (kTileElements * 2 / 64 + blocks - 1) / blocks,
                    -1,
                    {next_pair[0], next_pair[1]}};
        if (once && steps > kAheadSteps) {
          ahead.panel[0] = reinterpret_cast<const char*>(b0 + kAheadSteps * kTileElements);
          ahead.panel[1] = reinterpret_cast<const char*>(b1 + kAheadSteps * kTileElements);
          ahead.steps = steps - kAheadSteps;
        }
        float* c = sums + (p - g0) * kTileColumns;
        for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
          const int64_t count = rows - r < 2 * kTileRows ? rows - r : 2 * kTileRows;
          if (rows - r > kTileRows) {
            const RowTile a[2] = {row_tile(r, k0), row_tile(r + kTileRows, k0)};
            MultiplyTiles<2>(a, b0, b1, steps, c + r * ldc, ldc, k0 == 0, ahead, pending, emit);
          } else {
            const RowTile a[1] = {row_tile(r, k0)};
            MultiplyTiles<1>(a, b0, b1, steps, c + r * ldc, ldc, k0 == 0, ahead, pending, emit);
          }
          if (last) pending = {row_begin + r, count, p, c + r * ldc, ldc};
        }
      }
    }
  }
  EmitRows(pending, pending.rows, emit);
}

struct AmxEntries {
  using Vector = GemmEntries<MulF32>;  // F32 weights have no tiles

  // Many rows that lie a multiple of this apart would share too few lines of the caches.
  static constexpr int64_t kBadStride = 4096;
  static bool RowsReady(Type weight, Type x, int64_t rows, int64_t k, int64_t stride) {
    if (weight == Type::kF32) return x == Type::kF32;
    const bool spread = rows <= 2 * kTileRows || stride % kBadStride != 0;
    return x == Type::kBf16 && k % kTileK == 0 && k <= kMostTailK && spread;
  }
  static int64_t Stride(Type weight, int64_t k) {
    if (weight == Type::kF32) return k;
    const int64_t padded = PaddedTileK(k);
    return padded % kBadStride == 0 ? padded + kTileK : padded;
  }
  static size_t Bytes(Type weight, int64_t rows, int64_t k) {
    if (weight == Type::kF32) return static_cast<size_t>(rows * k) * sizeof(float);
    return static_cast<size_t>((rows + kTileRows - 1) / kTileRows * kTileRows * Stride(weight, k)) *
           sizeof(uint16_t);
  }
  static void PackRows(Type weight, const void* x, Type x_type, int64_t x_stride, int64_t k,
                       int64_t row_begin, int64_t row_end, void* out) {
    if (weight == Type::kF32) {
      Vector::PackRows(weight, x, x_type, x_stride, k, row_begin, row_end, out);
      return;
    }
    const int64_t stride = Stride(weight, k);
    const int64_t in_size = x_type == Type::kF32 ? 4 : 2;
    auto* to = static_cast<uint16_t*>(out);
    for (int64_t row = row_begin; row < row_end; ++row) {
      PackRow(weight, static_cast<const unsigned char*>(x) + row * x_stride * in_size, x_type, k,
              stride, Type::kBf16, to + row * stride);
    }
    for (int64_t row = row_end; row % kTileRows != 0; ++row) {
      __builtin_memset(to + row * stride, 0, static_cast<size_t>(stride) * sizeof(uint16_t));
    }
  }
  static void Linear(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                     int64_t panel_end, void* scratch) {
    if (g.type == Type::kF32) {
      LinearPanels<MulF32>(g, row_begin, row_end, panel_begin, panel_end, scratch);
      return;
    }
    MultiplyAmx(g, row_begin, row_end, panel_begin, panel_end, false,
                static_cast<unsigned char*>(scratch),
                [&](int64_t row, int64_t rows, int64_t panel, const float* c, int64_t ldc) {
                  StorePanel(g.out, g.n, row, rows, panel * kTileColumns, 2 * kTileColumns, c, ldc);
                });
  }
  static void Gated(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                    int64_t panel_end, void* scratch) {
    if (g.type == Type::kF32) {
      GatedPanels<MulF32>(g, row_begin, row_end, panel_begin, panel_end, scratch);
      return;
    }
    MultiplyAmx(
        g, row_begin, row_end, panel_begin, panel_end, false, static_cast<unsigned char*>(scratch),
        [&](int64_t row, int64_t rows, int64_t panel, const float* c, int64_t ldc) {
          StoreGated(g.out, g.n / 2, row, rows, panel / 2 * kTileColumns, 2 * kTileColumns, c, ldc);
        });
  }
  static void Qkv(const Gemm& g, const QkvRope& e, int64_t row_begin, int64_t row_end,
                  int64_t panel_begin, int64_t panel_end, void* scratch) {
    if (g.type == Type::kF32) {
      QkvPanels<MulF32>(g, e, row_begin, row_end, panel_begin, panel_end, scratch);
      return;
    }
    const int64_t columns = (panel_end - panel_begin) * kTileColumns;
    MultiplyAmx(g, row_begin, row_end, panel_begin, panel_end, true,
                static_cast<unsigned char*>(scratch),
                [&](int64_t row, int64_t rows, int64_t panel, const float* c, int64_t ldc) {
                  if (panel + 2 < panel_end) return;  // the rows' other panels are still to come
                  StoreQkv(e, row, rows, panel_begin * kTileColumns, columns, g.n,
                           c - (panel - panel_begin) * kTileColumns, ldc);
                });
  }
};

// --- Attention over BF16 pages: 32 elements of the keys of a page are one tile; 16 tokens of the
// values of a page are half of one, of its own shape.

// Tiles 0 to 3 hold sums, 4 rows of q, 5 keys, 6 softmax weights, 7 values.
alignas(64) constexpr TileConfig kAttentionTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};

struct MulTiles : MulBf16 {};

template <>
struct TileProducts<MulTiles> {
  static SACCADE_INLINE void Scores(const uint16_t* q, const TilePages& t, const KvLayout& kv,
                                    int64_t rows, float* /*scratch*/, float* s) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < kv.k_dim; i += kTileK) {
        _tile_loadd(4, q + r * kv.k_dim + i, kv.k_dim * 2);
        const int64_t at = i * kPageTokens * 2;
        _tile_loadd(5, t.k[0] + at, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, t.k[1] + at, 64);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, t.k[2] + at, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, t.k[3] + at, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
      float* to = s + r * kTileTokens;
      _tile_stored(0, to, kTileTokens * 4);
      _tile_stored(1, to + 16, kTileTokens * 4);
      _tile_stored(2, to + 32, kTileTokens * 4);
      _tile_stored(3, to + 48, kTileTokens * 4);
    }
  }

  // Sixteen rows of o += p * V.
  static SACCADE_INLINE void AddValues(const uint16_t* p, const unsigned char* const* v,
                                       const KvLayout& kv, float* o) {
    const int64_t v_bytes = kv.v_dim * 4;  // of a pair of tokens, and of a row of o
    for (int64_t d = 0; d < kv.v_dim; d += 4 * kTileColumns) {
      const int64_t tiles = (kv.v_dim - d) / kTileColumns;
      float* to = o + d;
      _tile_loadd(0, to, v_bytes);
      if (tiles > 1) _tile_loadd(1, to + 16, v_bytes);
      if (tiles > 2) _tile_loadd(2, to + 32, v_bytes);
      if (tiles > 3) _tile_loadd(3, to + 48, v_bytes);
      for (int64_t page = 0; page < kTilePages; ++page) {
        const unsigned char* from = v[page] + d * 4;
        _tile_loadd(6, p + page * kPageTokens, kTileTokens * 2);
        _tile_loadd(7, from, v_bytes);
        _tile_dpbf16ps(0, 6, 7);
        if (tiles > 1) {
          _tile_loadd(7, from + 64, v_bytes);
          _tile_dpbf16ps(1, 6, 7);
        }
        if (tiles > 2) {
          _tile_loadd(7, from + 128, v_bytes);
          _tile_dpbf16ps(2, 6, 7);
        }
        if (tiles > 3) {
          _tile_loadd(7, from + 192, v_bytes);
          _tile_dpbf16ps(3, 6, 7);
        }
      }
      _tile_stored(0, to, v_bytes);
      if (tiles > 1) _tile_stored(1, to + 16, v_bytes);
      if (tiles > 2) _tile_stored(2, to + 32, v_bytes);
      if (tiles > 3) _tile_stored(3, to + 48, v_bytes);
    }
  }

  static SACCADE_INLINE void Values(const uint16_t* p, const float* alpha,
                                    const unsigned char* const* v, const KvLayout& kv, int64_t rows,
                                    float* scratch, float* o) {
    for (int64_t r = 0; r < rows; ++r) {
      if (alpha[r] == 1.0f) continue;  // as most are, after a few tiles
      const V factor = Simd::Set(alpha[r]);
      float* row = o + r * kv.v_dim;
      for (int64_t d = 0; d < kv.v_dim; d += Simd::kLanes)
        Simd::Store(row + d, Simd::Mul(Simd::Load(row + d), factor));
    }
    int64_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows)
      AddValues(p + r * kTileTokens, v, kv, o + r * kv.v_dim);
    if (r == rows) return;
    // The last rows do not fill a tile, and those behind them may be another's.
    const size_t bytes = static_cast<size_t>((rows - r) * kv.v_dim) * sizeof(float);
    __builtin_memcpy(scratch, o + r * kv.v_dim, bytes);
    AddValues(p + r * kTileTokens, v, kv, scratch);
    __builtin_memcpy(o + r * kv.v_dim, scratch, bytes);
  }
};

inline void AmxAttention(const Attention& a, int64_t kv_head, int64_t row_begin, int64_t row_end,
                         void* scratch) {
  auto* bytes = static_cast<unsigned char*>(scratch);
  if (a.kv.type == Type::kF32) {
    AttendRows<MulF32>(a, kv_head, row_begin, row_end, bytes);
    return;
  }
  const TileScope tiles(kAttentionTiles);
  AttendRows<MulTiles>(a, kv_head, row_begin, row_end, bytes);
}

constexpr Kernels MakeAmxTable() {
  Kernels table = MakeTable<MulBf16>(Isa::kAmxBf16);
  table.key_multiple = kTileK;
  table.attention = AmxAttention;
  table.bf16_layout = {kTileColumns, kTileK, kTileColumns, 4};
  table.rows_ready = AmxEntries::RowsReady;
  table.packed_rows_bytes = AmxEntries::Bytes;
  table.packed_stride = AmxEntries::Stride;
  table.pack_rows = AmxEntries::PackRows;
  table.linear = AmxEntries::Linear;
  table.gated = AmxEntries::Gated;
  table.qkv = AmxEntries::Qkv;
  return table;
}

}  // namespace
}  // namespace saccade::cpu
