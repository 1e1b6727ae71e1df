#pragma once
// Host kernels: one table of functions per instruction-set level, chosen once at start-up. The
// kernels know nothing of tensors, threads or errors: the caller has checked every shape, splits
// the work and hands each task its own scratch. A row's bits depend neither on how the work is
// split nor on the other rows of a call.
//
// The files of a level are compiled with that level's flags and share this header, so it holds
// plain data and declarations only: nothing here may become code.
#include <cstddef>
#include <cstdint>

namespace saccade::cpu {

enum class Isa : uint8_t {
  kAuto,        // the best the machine has
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL
  kAvx512Bf16,  // and BF16 (vdpbf16ps)
  kAmxBf16,     // and AMX tiles with BF16 (tdpbf16ps)
};

enum class Type : uint8_t { kF32, kBf16 };

enum class Act : uint8_t { kNone, kGeluErf, kGeluTanh, kSilu, kRelu };

// Tokens of one K/V page. Fixed, so that one 512-bit register holds one element of all tokens of a
// page.
constexpr int64_t kPageTokens = 16;
constexpr int64_t kTilePages = 4;
constexpr int64_t kTileTokens = kPageTokens * kTilePages;
constexpr int64_t kMaxHeadDim = 512;
// Every scratch pointer below is 64-byte aligned and this large, and belongs to one thread during
// the call.
constexpr size_t kScratchBytes = size_t{4} << 20;

// How a weight matrix [n, k] lies in memory: panels of `panel` columns n, k padded with zeros to a
// multiple of `k_multiple`. With k_multiple 1 a panel is [k][panel]; else two consecutive k of a
// column lie side by side: [k/2][panel][2].
struct PanelLayout {
  int64_t panel;
  int64_t k_multiple;
  int64_t
      interleave;  // of a gated weight: this many gate columns, then as many up columns, and so on
  int64_t unit;    // tasks of a GEMM take a multiple of this many panels, as far as there are more
};

// Activations of a GEMM in the form that the level multiplies.
struct PackedRows {
  const void* data;
  int64_t stride;  // elements from row to row
  bool padded;     // made by pack_rows: followed by zero rows up to a multiple of 16
};

// What happens to a sum before it is stored; see LinearArgs in server/tensor/ops.h. Null means
// absent.
struct Epilogue {
  const float* bias;
  const float* scale;
  const float* residual;
  int64_t residual_stride;
  void* y;
  int64_t y_stride;
  Type y_type;
  Act act;
};

struct Gemm {
  PackedRows x;
  const void* weight;
  Type type;
  int64_t n, k;
  Epilogue
      out;  // of gated weights: y is [rows, n/2], act is applied to the gate, the rest is absent
};

// Where K and V of a layer lie. Head h of block b: K at base + b*block_stride + h*k_head_bytes, V
// at base + b*block_stride + v_offset + h*v_head_bytes. D is head_dim, padded with zeros to k_dim
// (even) and v_dim (a multiple of 16). BF16: K [k_dim/2][16 tokens][2], V [8][v_dim][2] (pairs of
// tokens). F32: K [k_dim][16], V [16][v_dim].
struct KvLayout {
  unsigned char* base;
  size_t block_stride, k_head_bytes, v_head_bytes, v_offset;
  int64_t heads, head_dim, k_dim, v_dim;
  Type type;
};

// The epilogue of a fused projection: rope(q), rope(k) and v into the pages. With kv.heads 0 there
// is q alone, and row_slot is null.
struct QkvRope {
  void* q;
  int64_t q_stride;
  Type q_type;
  int64_t q_heads;
  KvLayout kv;
  const int32_t* row_slot;          // [rows] block * 16 + offset
  const float* const* row_cos_sin;  // [rows] head_dim/2 cosines, then head_dim/2 sines
};

// Attention of one block of query rows over pages. Lane t of page p is visible to a row iff t <
// page_len[p] and page_pos[p] + t <= row_limit. Pages are taken four at a time from the first: a
// tile.
struct Attention {
  const void* q;
  int64_t q_stride;
  void* out;
  int64_t out_stride;
  Type io_type;
  int64_t q_heads;
  float scale;
  KvLayout kv;
  const int32_t* row_limit;  // [rows]; null: every row sees every token
  const int32_t* pages;      // of the sequence
  const int32_t* page_len;
  const int32_t* page_pos;  // null where row_limit is
  int64_t num_pages;
};

// Limits of one GEMM task.
constexpr int64_t kGemmRows = 384;
constexpr int64_t kQkvSums = int64_t{32} * 33 * kMaxHeadDim;

struct Kernels {
  Isa isa;
  PanelLayout f32_layout, bf16_layout;
  int64_t key_multiple;  // of KvLayout::k_dim for BF16 pages; F32 pages: 2

  // --- GEMM. Rows of x are used as they are when `rows_ready`, else packed into
  // `packed_rows_bytes` by `pack_rows`, which takes any range of rows [row_begin, row_end) whose
  // begin is a multiple of 32 and whose end is one or the last row.
  bool (*rows_ready)(Type weight, Type x, int64_t rows, int64_t k, int64_t stride);
  size_t (*packed_rows_bytes)(Type weight, int64_t rows, int64_t k);
  int64_t (*packed_stride)(Type weight, int64_t k);
  void (*pack_rows)(Type weight, const void* x, Type x_type, int64_t x_stride, int64_t k,
                    int64_t row_begin, int64_t row_end, void* out);
  // Rows [row_begin, row_end), at most kGemmRows, begin a multiple of 32, times panels
  // [panel_begin, panel_end).
  void (*linear)(const Gemm&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end, void* scratch);
  void (*gated)(const Gemm&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                int64_t panel_end, void* scratch);
  // Panels that hold whole heads only; rows * (panel_end - panel_begin) * panel <= kQkvSums.
  void (*qkv)(const Gemm&, const QkvRope&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
              int64_t panel_end, void* scratch);

  // --- Attention. Rows [row_begin, row_end) of the query heads of one K/V head. All pages of a
  // call are of one sequence.
  void (*attention)(const Attention&, int64_t kv_head, int64_t row_begin, int64_t row_end,
                    void* scratch);
  // Writes `tokens` rows of k and v of one head to the pages of head `kv_head` of blocks 0, 1, ...,
  // padding included. The type is the layout's.
  void (*pack_kv)(const KvLayout&, int64_t kv_head, const void* k, const void* v, int64_t stride,
                  int64_t tokens);
  // All heads of one slot (block * 16 + offset), as rows [heads * head_dim].
  void (*read_slot)(const KvLayout&, int64_t slot, void* k, Type k_type, void* v, Type v_type);
  void (*write_slot)(const KvLayout&, int64_t slot, const void* k, Type k_type, const void* v,
                     Type v_type);

  // --- Rows.
  void (*rms_norm)(const float* x, const float* gamma, void* y, Type y_type, int64_t n, float eps);
  void (*layer_norm)(const float* x, const float* gamma, const float* beta, void* y, Type y_type,
                     int64_t n, float eps);
  // y = x / rms(x) * (1 + scale) + shift
  void (*ada_rms_norm)(const float* x, const float* scale, const float* shift, void* y, Type y_type,
                       int64_t n, float eps);
  // x += gate * y; one_gate: gate[0] is that of all n.
  void (*add_gated)(const void* y, Type y_type, const float* gate, bool one_gate, float* x,
                    int64_t n);
  void (*scaled)(const void* x, Type x_type, float scale, float* y, int64_t n);
  void (*to_bf16)(const float* x, uint16_t* y, int64_t n);
  void (*to_f32)(const uint16_t* x, float* y, int64_t n);
  // The lowest index among the largest values; -1 when one of them is NaN or infinite, or n is 0.
  int64_t (*argmax_finite)(const float* x, int64_t n);
};

// Null where the machine, the operating system or the build lacks the level. `kAuto` gives the best
// one.
const Kernels* FindKernels(Isa isa);
bool IsaSupported(Isa isa);
const char* IsaName(Isa isa);

// One column of a weight, as the checkpoint has it: k elements; null means zeros.
struct WeightColumn {
  const void* data;
  Type type;
};
// Packs layout.panel columns, k long each. `out` holds PanelBytes.
void PackPanel(const PanelLayout& layout, Type type, const WeightColumn* columns, int64_t k,
               void* out);
size_t PanelBytes(const PanelLayout& layout, Type type, int64_t k);

}  // namespace saccade::cpu
