#pragma once
// Ops: the ~15 coarse operations every backend implements. A call enqueues work on a Stream and
// returns; it reads its arguments (shapes, scalars, views) at once and the bytes behind the views
// later, in stream order. All data, including index arrays, is device memory (MemKind::kDevice);
// scalars are host values. A shape or dtype that does not fit is INVALID_ARGUMENT and nothing is
// enqueued.
//
// Numerics: every op is batch-invariant. A row of an output depends on its own inputs alone:
// neither its bits nor its order of accumulation depend on the number of rows, on the row's
// position, on chunking or on threads.
//
// "Compute dtype" T below is the model's precision, F32 or BF16; residual streams and statistics
// are always F32.
//
// A rank-2 view may have strided rows and needs no more alignment than its elements have; index
// arrays are dense. Outputs do not overlap inputs except where an op says so. A view without rows
// is no work. An index in device memory that is out of range is a broken promise of the caller: the
// reference backend reports it through the stream, other backends may do anything.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/status.h"
#include "tensor/tensor.h"

namespace saccade {

class Stream;

enum class Activation : uint8_t { kNone, kGeluErf, kGeluTanh, kSilu, kRelu };

// A weight matrix in the backend's own layout, in device memory. Logical shape [n, k]: y = x · W^T.
class PackedWeight {
 public:
  virtual ~PackedWeight() = default;
  virtual int64_t n() const = 0;
  virtual int64_t k() const = 0;
  virtual DType dtype() const = 0;
  virtual size_t bytes() const = 0;
};

// Geometry of one K/V layout; a block holds `block_tokens` tokens of every layer.
struct KvGeometry {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t block_tokens = 16;  // an even number; backends may require 16
  DType dtype = DType::kF32;   // of the stored K and V: F32 or BF16
  size_t BytesPerToken() const {
    return size_t{2} * layers * kv_heads * head_dim * DTypeSize(dtype);
  }
};

// The bytes of a pool of blocks on one device, in the backend's own layout. All metadata lives in
// kv/.
class KvStorage {
 public:
  virtual ~KvStorage() = default;
  virtual const KvGeometry& geometry() const = 0;
  virtual uint32_t num_blocks() const = 0;
};

// Which rows belong to which sequence, and where their K/V is. All views are I32 device arrays.
// Sequence s owns query rows [row_begin[s], row_begin[s+1]) and pages [page_begin[s],
// page_begin[s+1]) of the page table. Page p is block pages[p]; it holds page_len[p] tokens (<=
// block_tokens, may be part-full anywhere), at positions page_pos[p] + 0, 1, 2, ...
struct PagedBatch {
  int32_t num_seqs = 0;   // S
  int32_t num_rows = 0;   // M, query rows of all sequences
  int32_t num_pages = 0;  // P, page-table entries of all sequences
  int32_t max_pages = 0;  // of one sequence
  TensorView row_begin;   // [S + 1]
  TensorView page_begin;  // [S + 1]
  TensorView pages;       // [P]
  TensorView page_len;    // [P]
  TensorView page_pos;    // [P]
  TensorView row_pos;     // [M] position of each query row, for RoPE
  // [M] the last position that the row sees: its own where attention is causal, the last one of its
  // group where that is bidirectional, the last one of a prefix that it only reads.
  TensorView row_limit;
  TensorView
      row_slot;  // [M] where the row's K/V is appended: block * block_tokens + offset in block
};

// y[M,N] = act(x[M,K] · W^T + bias[N]) * scale[N] + residual[M,N]; absent parts are skipped.
struct LinearArgs {
  const PackedWeight* weight = nullptr;
  TensorView x;                    // [M, K] T or F32 (rounded to T on the way in)
  TensorView y;                    // [M, N] F32 or T; rows may be strided
  std::optional<TensorView> bias;  // [N] F32
  Activation activation = Activation::kNone;
  std::optional<TensorView> scale;     // [N] F32 (LayerScale)
  std::optional<TensorView> residual;  // [M, N] F32, may be y itself
};

// y[M,I] = silu(x · Wgate^T) * (x · Wup^T), weight packed by Backend::PackGated.
struct GatedLinearArgs {
  const PackedWeight* weight = nullptr;       // logical [2 * I, K]
  TensorView x;                               // [M, K] T
  TensorView y;                               // [M, I] T
  Activation activation = Activation::kSilu;  // kSilu or kGeluTanh
};

// Fused projection: q = rope(x · Wq^T), and k = rope(x · Wk^T), v = x · Wv^T appended to the pages
// at row_slot. RoPE is half-split (rotate_half): element i pairs with i + D/2, angle = pos *
// theta^(-2i/D), angles in F32 as kernels/common/rope.h defines them. Without `kv` (and then
// `layer`) the weight is that of q alone, and nothing is appended: head_dim is what q_heads make of
// its rows.
struct QkvRopeAppendArgs {
  const PackedWeight* weight = nullptr;  // logical [(Hq + 2 * Hkv) * D, K], rows q then k then v
  TensorView x;                          // [M, K] T
  TensorView q;                          // [M, Hq * D] T, out
  KvStorage* kv = nullptr;               // null: q only
  uint32_t layer = 0;
  uint32_t q_heads = 0;
  double rope_theta = 10000.0;
  PagedBatch batch;
};

// Attention over the page table: row i sees every cached token of its sequence whose position <=
// row_limit[i]; there must be one. The page table need not be in order of position, and
// what a block holds beyond page_len never matters, NaN included. Scores and softmax in F32, online
// over fixed tiles of the page table.
struct PagedAttentionArgs {
  TensorView q;    // [M, Hq * D] T
  TensorView out;  // [M, Hq * D] T
  const KvStorage* kv = nullptr;
  uint32_t layer = 0;
  uint32_t q_heads = 0;
  float scale = 0;  // usually head_dim^-0.5
  PagedBatch batch;
};

// Dense bidirectional attention of a vision tower: groups of `group_rows` consecutive rows attend
// to each other only.
struct DenseAttentionArgs {
  TensorView qkv;  // [G * group_rows, 3 * H * D] T: q, then k, then v, heads inside each
  TensorView out;  // [G * group_rows, H * D] T
  uint32_t group_rows = 0;
  uint32_t heads = 0;
  float scale = 0;
};

// Sampling of one row of logits by the rule in kernels/common/sampling.h, so that one (seed, draw)
// gives the same token on every backend. temperature 0 is greedy: the lowest index among the
// largest logits. A temperature that is negative or not finite, and a top_p outside (0, 1], give
// kInvalidSample.
struct SampleArgs {
  TensorView logits;  // [R, V] F32
  TensorView
      source_row;  // [N] I32: row of `logits` that sample n reads (N samples may read one row)
  TensorView temperature;  // [N] F32, >= 0
  TensorView top_p;        // [N] F32 in (0, 1]; 1: every token may be drawn
  TensorView seed;         // [N] I64: one random draw is a pure function of (seed, draw)
  TensorView draw;         // [N] I32: index of the draw in its sequence
  TensorView dest;         // [N] I32: flat index into `tokens` where the id is written
  TensorView tokens;       // [*] I32; kInvalidSample where the row holds a NaN or an Inf
};
inline constexpr int32_t kInvalidSample = -1;

// The K most likely tokens of rows of logits, in the order and with the log-probabilities that
// kernels/common/sampling.h defines. A row with a NaN or an Inf gives K times kInvalidSample;
// places past the vocabulary do too.
struct TopTokensArgs {
  TensorView logits;      // [R, V] F32
  TensorView source_row;  // [N] I32: row of `logits`
  TensorView ids;         // [N, K] I32, out
  TensorView log_probs;   // [N, K] F32, out
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual absl::Status Linear(Stream&, const LinearArgs&) const = 0;
  virtual absl::Status GatedLinear(Stream&, const GatedLinearArgs&) const = 0;
  virtual absl::Status QkvRopeAppend(Stream&, const QkvRopeAppendArgs&) const = 0;
  virtual absl::Status PagedAttention(Stream&, const PagedAttentionArgs&) const = 0;
  virtual absl::Status DenseAttention(Stream&, const DenseAttentionArgs&) const = 0;
  // y = x * rsqrt(mean(x^2) + eps) * gamma. x [M,N] F32, gamma [N] F32, y [M,N] T or F32.
  virtual absl::Status RmsNorm(Stream&, TensorView x, TensorView gamma, TensorView y,
                               float eps) const = 0;
  // y = (x - mean) * rsqrt(var + eps) * gamma + beta, population variance. Shapes as RmsNorm.
  virtual absl::Status LayerNorm(Stream&, TensorView x, TensorView gamma, TensorView beta,
                                 TensorView y, float eps) const = 0;
  // y = x * rsqrt(mean(x^2) + eps) * (1 + scale[row_group[m],:]) + shift[row_group[m],:] (adaptive
  // RMSNorm). x [M,N] F32, scale and shift [G,N] F32, row_group [M] I32 in [0, G), y [M,N] T or
  // F32.
  virtual absl::Status AdaRmsNorm(Stream&, TensorView x, TensorView scale, TensorView shift,
                                  TensorView row_group, TensorView y, float eps) const = 0;
  // x[m,:] += gate[row_group[m],:] * y[m,:], product and sum each rounded to F32. x [M,N] F32, y
  // [M,N] T or F32, gate [G,N] or [G,1] F32, row_group [M] I32 in [0, G).
  virtual absl::Status AddGated(Stream&, TensorView y, TensorView gate, TensorView row_group,
                                TensorView x) const = 0;
  // out[m,:] = table[ids[index[m]],:] * scale. table [V,N] F32 or BF16, ids [*] I32, index [M] I32,
  // out [M,N] F32. An index < 0 leaves row m untouched. An id outside [0, V) gives a row of NaN
  // (its request then fails by kInvalidSample; nothing else is disturbed).
  virtual absl::Status Embed(Stream&, TensorView table, TensorView ids, TensorView index,
                             float scale, TensorView out) const = 0;
  // out[m,:] = in[index[m],:] for rank-2 F32; an index < 0 leaves row m untouched.
  virtual absl::Status GatherRows(Stream&, TensorView in, TensorView index,
                                  TensorView out) const = 0;
  // Frames to normalised patches: out[g*P + p, c*ps*ps + y*ps + x] = (v - mean[c]) / std[c],
  // patches row-major. rgb [G, H, W, 3] U8, v = rgb/255; or F32, v = rgb (mean 0 and std 1 keep its
  // bits). out [G * (H/ps) * (W/ps), 3*ps*ps] F32 or T. Division and subtraction each rounded to
  // F32.
  virtual absl::Status Patchify(Stream&, TensorView rgb, uint32_t patch_size,
                                std::span<const float, 3> mean, std::span<const float, 3> std,
                                TensorView out) const = 0;
  // dst = src with conversion between F32 and BF16 (round to nearest even); rank-2, rows may be
  // strided.
  virtual absl::Status Convert(Stream&, TensorView src, TensorView dst) const = 0;
  virtual absl::Status Sample(Stream&, const SampleArgs&) const = 0;
  virtual absl::Status TopTokens(Stream&, const TopTokensArgs&) const = 0;
  // Copies whole blocks of every layer. pairs [C, 2] I32: source block, destination block.
  virtual absl::Status CopyBlocks(Stream&, KvStorage&, TensorView pairs, int32_t count) const = 0;
  // k[m,:] and v[m,:] = what one layer holds in slot slots[m] (block * block_tokens + offset).
  // slots [M] I32; k and v [M, kv_heads * head_dim] of the storage's dtype or F32.
  virtual absl::Status GatherKv(Stream&, const KvStorage&, uint32_t layer, TensorView slots,
                                TensorView k, TensorView v) const = 0;
  // The reverse: slot slots[m] of one layer takes k[m,:] and v[m,:], which are as they are cached
  // (rotated already, or never).
  virtual absl::Status ScatterKv(Stream&, KvStorage&, uint32_t layer, TensorView slots,
                                 TensorView k, TensorView v) const = 0;
  // Reads one sequence's cache densely, for inspection: k and v [tokens, kv_heads * head_dim] F32,
  // in page order. The batch holds one sequence, and `tokens` is the sum of its page lengths.
  virtual absl::Status ReadKv(Stream&, const KvStorage&, uint32_t layer, const PagedBatch&,
                              TensorView k, TensorView v) const = 0;
};

}  // namespace saccade
