// Every op: check the arguments, split the work into tasks, let the kernels of the level run them.
#include "backend/cpu/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "backend/cpu/check.h"
#include "backend/cpu/storage.h"
#include "backend/cpu/stream.h"
#include "base/strings.h"
#include "kernels/common/bf16.h"
#include "kernels/common/sampling.h"

namespace saccade::cpu {
namespace {

static_assert(kNoSample == kInvalidSample);

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;
constexpr DType kI32 = DType::kI32;

absl::Status NotOurs(std::string_view op, std::string_view what) {
  return absl::InvalidArgumentError(StrCat(op, ": ", what, " is missing or of another backend"));
}

CpuStream* StreamOf(Stream& stream) { return dynamic_cast<CpuStream*>(&stream); }

const CpuPackedWeight* WeightOf(const PackedWeight* weight, const CpuStream& stream) {
  const auto* ours = dynamic_cast<const CpuPackedWeight*>(weight);
  return ours != nullptr && ours->isa() == stream.kernels().isa ? ours : nullptr;
}

const CpuKvStorage* KvOf(const KvStorage* kv, const CpuStream& stream) {
  const auto* ours = dynamic_cast<const CpuKvStorage*>(kv);
  return ours != nullptr && ours->isa() == stream.kernels().isa ? ours : nullptr;
}

std::byte* RowOf(const TensorView& view, int64_t row) {
  return view.data + row * view.strides[0] * static_cast<int64_t>(DTypeSize(view.dtype));
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// ---- GEMM

constexpr int64_t kRowStep = 32;  // tasks begin at multiples of it

// The rows of x in the form that the level multiplies, packed into the stream's workspace where
// needed.
absl::StatusOr<PackedRows> PrepareRows(CpuStream& stream, const TensorView& x, Type weight) {
  const Kernels& kernels = stream.kernels();
  const Type type = TypeOf(x.dtype);
  const int64_t rows = x.dims[0];
  const int64_t k = x.dims[1];
  if (kernels.rows_ready(weight, type, rows, k, x.strides[0]))
    return PackedRows{x.data, x.strides[0], false};
  ASSIGN_OR_RETURN(std::byte * packed,
                   stream.scratch().rows.Reserve(kernels.packed_rows_bytes(weight, rows, k)));
  const int64_t block = std::max(kRowStep, RoundUp((int64_t{64} << 10) / k, kRowStep));
  stream.core().ParallelFor(CeilDiv(rows, block), [&](int64_t task, void*) {
    kernels.pack_rows(weight, x.data, type, x.strides[0], k, task * block,
                      std::min(rows, (task + 1) * block), packed);
  });
  return PackedRows{packed, kernels.packed_stride(weight, k), true};
}

const PanelLayout& LayoutOf(const Kernels& kernels, Type type) {
  return type == Type::kF32 ? kernels.f32_layout : kernels.bf16_layout;
}

// A rectangle of rows times panels for each task.
struct Split {
  int64_t rows, panels;            // of the whole
  int64_t row_block, panel_block;  // of a task
  int64_t row_tasks, panel_tasks;

  // `unit` panels stay together; at most `most_rows` rows.
  Split(int64_t row_count, int64_t panel_count, int64_t unit, int64_t most_rows, int threads)
      : rows(row_count), panels(panel_count) {
    row_block = std::min(RoundUp(rows, kRowStep), most_rows / kRowStep * kRowStep);
    const int64_t units = CeilDiv(panels, unit);
    // Enough tasks that a thread which lags holds up the others little, but as few as that allows:
    // larger tasks reuse more. Rows are split only where there are not enough panels.
    const int64_t wanted = threads == 1 ? 1 : int64_t{4} * threads;
    while (CeilDiv(rows, row_block) * units < wanted && row_block >= 4 * kRowStep) {
      row_block = RoundUp(row_block / 2, kRowStep);
    }
    row_tasks = CeilDiv(rows, row_block);
    const int64_t panel_wanted = std::min(units, CeilDiv(wanted, row_tasks));
    panel_block = CeilDiv(units, panel_wanted) * unit;
    panel_tasks = CeilDiv(panels, panel_block);
  }
  int64_t tasks() const { return row_tasks * panel_tasks; }

  // body(row_begin, row_end, panel_begin, panel_end)
  template <class Body>
  void Run(int64_t task, const Body& body) const {
    const int64_t row = task % row_tasks * row_block;
    const int64_t panel = task / row_tasks * panel_block;
    body(row, std::min(rows, row + row_block), panel, std::min(panels, panel + panel_block));
  }
};

Act ActOf(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return Act::kNone;
    case Activation::kGeluErf:
      return Act::kGeluErf;
    case Activation::kGeluTanh:
      return Act::kGeluTanh;
    case Activation::kSilu:
      return Act::kSilu;
    case Activation::kRelu:
      return Act::kRelu;
  }
  return Act::kNone;
}

// ---- rows

// Calls body(row) for every row; `cost` is the number of elements of one.
template <class Body>
void ForRows(CpuStream& stream, int64_t rows, int64_t cost, const Body& body) {
  constexpr int64_t kTaskElements = int64_t{32} << 10;
  const int64_t block = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, cost));
  stream.core().ParallelFor(CeilDiv(rows, block), [&](int64_t task, void*) {
    const int64_t end = std::min(rows, (task + 1) * block);
    for (int64_t row = task * block; row < end; ++row) body(row);
  });
}

void ConvertRow(const Kernels& kernels, const std::byte* from, DType from_type, std::byte* to,
                DType to_type, int64_t n) {
  if (from_type == to_type) {
    std::memmove(to, from, static_cast<size_t>(n) * DTypeSize(to_type));
  } else if (to_type == kBf16) {
    kernels.to_bf16(reinterpret_cast<const float*>(from), reinterpret_cast<uint16_t*>(to), n);
  } else {
    kernels.to_f32(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<float*>(to), n);
  }
}

constexpr int64_t kAttentionLines =
    48;  // query rows times heads of a task: what the kernel takes in one pass

absl::Status AttendPages(CpuStream& s, const PagedAttentionArgs& args, const CpuKvStorage& kv) {
  const PagedBatch& batch = args.batch;
  RETURN_IF_ERROR(CheckPages(batch, kv));
  const auto* row_begin = batch.row_begin.As<const int32_t>();
  const auto* page_begin = batch.page_begin.As<const int32_t>();
  const auto group = static_cast<int32_t>(args.q_heads / kv.geometry().kv_heads);
  const int32_t block = std::max(1, static_cast<int32_t>(kAttentionLines) / group);
  auto& blocks = s.scratch().row_blocks;
  blocks.clear();
  for (int32_t sequence = 0; sequence < batch.num_seqs; ++sequence) {
    // Later rows see more where attention is causal: they are taken first, so that no thread starts
    // the longest task last.
    const int32_t begin = row_begin[sequence];
    for (int32_t end = row_begin[sequence + 1]; end > begin; end -= block) {
      blocks.push_back({sequence, std::max(begin, end - block), end});
    }
  }
  Attention attention{};
  attention.q = args.q.data;
  attention.q_stride = args.q.strides[0];
  attention.out = args.out.data;
  attention.out_stride = args.out.strides[0];
  attention.io_type = TypeOf(args.q.dtype);
  attention.q_heads = args.q_heads;
  attention.scale = args.scale;
  attention.kv = kv.Layer(args.layer);
  attention.row_limit = batch.row_limit.As<const int32_t>();
  const auto heads = static_cast<int64_t>(kv.geometry().kv_heads);
  s.core().ParallelFor(static_cast<int64_t>(blocks.size()) * heads,
                       [&](int64_t task, void* scratch) {
                         const auto& rows = blocks[static_cast<size_t>(task / heads)];
                         Attention a = attention;
                         const int32_t first = page_begin[rows.sequence];
                         a.pages = batch.pages.As<const int32_t>() + first;
                         a.page_len = batch.page_len.As<const int32_t>() + first;
                         a.page_pos = batch.page_pos.As<const int32_t>() + first;
                         a.num_pages = page_begin[rows.sequence + 1] - first;
                         s.kernels().attention(a, task % heads, rows.begin, rows.end, scratch);
                       });
  return absl::OkStatus();
}

absl::Status AttendDense(CpuStream& s, const DenseAttentionArgs& args) {
  const int64_t rows = args.qkv.dims[0];
  const int64_t width = args.out.dims[1];
  const int64_t group_rows = args.group_rows;
  const int64_t groups = rows / group_rows;
  const int64_t heads = args.heads;
  const int64_t head_dim = width / heads;
  const Type type = TypeOf(args.qkv.dtype);
  const int64_t pages = CeilDiv(group_rows, kPageTokens);
  KvLayout kv = MakeKvLayout(s.kernels(), heads, head_dim, type);
  ASSIGN_OR_RETURN(std::byte * memory, s.scratch().pages.Reserve(
                                           kv.block_stride * static_cast<size_t>(groups * pages)));
  kv.base = reinterpret_cast<unsigned char*>(memory);
  auto& page_list = s.scratch().dense_pages;
  auto& lengths = s.scratch().dense_lengths;
  page_list.resize(static_cast<size_t>(pages));
  std::iota(page_list.begin(), page_list.end(), 0);
  lengths.assign(static_cast<size_t>(pages), static_cast<int32_t>(kPageTokens));
  lengths.back() = static_cast<int32_t>(group_rows - (pages - 1) * kPageTokens);

  const auto element = static_cast<int64_t>(DTypeSize(args.qkv.dtype));
  const auto layout_of = [&](int64_t group) {
    KvLayout layout = kv;
    layout.base += static_cast<size_t>(group * pages) * kv.block_stride;
    return layout;
  };
  s.core().ParallelFor(groups * heads, [&](int64_t task, void*) {
    const int64_t group = task / heads;
    const int64_t head = task % heads;
    const std::byte* k = RowOf(args.qkv, group * group_rows) + (width + head * head_dim) * element;
    s.kernels().pack_kv(layout_of(group), head, k, k + width * element, args.qkv.strides[0],
                        group_rows);
  });

  const int64_t row_blocks = CeilDiv(group_rows, kAttentionLines);
  s.core().ParallelFor(groups * heads * row_blocks, [&](int64_t task, void* scratch) {
    const int64_t block = task % row_blocks;
    const int64_t head = task / row_blocks % heads;
    const int64_t group = task / row_blocks / heads;
    Attention a{};
    a.q = RowOf(args.qkv, group * group_rows);
    a.q_stride = args.qkv.strides[0];
    a.out = RowOf(args.out, group * group_rows);
    a.out_stride = args.out.strides[0];
    a.io_type = type;
    a.q_heads = heads;
    a.scale = args.scale;
    a.kv = layout_of(group);
    a.pages = page_list.data();
    a.page_len = lengths.data();
    a.num_pages = pages;
    const int64_t begin = block * kAttentionLines;
    s.kernels().attention(a, head, begin, std::min(group_rows, begin + kAttentionLines), scratch);
  });
  return absl::OkStatus();
}

// Calls move(kernels, layout, slot, key, its type, value, its type) for every row of k and v.
template <class Move>
absl::Status MoveSlots(Stream& stream, std::string_view op, const KvStorage& kv, uint32_t layer,
                       const TensorView& slots, const TensorView& k, const TensorView& v,
                       const Move& move) {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs(op, "stream");
  const CpuKvStorage* storage = KvOf(&kv, *s);
  if (storage == nullptr) return NotOurs(op, "kv");
  Check check(op);
  const KvGeometry& geometry = storage->geometry();
  const int64_t rows = k.dims[0];
  const int64_t width = int64_t{geometry.kv_heads} * geometry.head_dim;
  check.Require(layer < geometry.layers, "layer");
  check.Device(k, "k", {geometry.dtype, kF32}, {kAnyDim, width});
  check.Device(v, "v", {geometry.dtype, kF32}, {rows, width});
  check.Array(slots, "slots", kI32, rows);
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(
        CheckIndices(slots, rows, 0, int64_t{storage->num_blocks()} * kPageTokens, "slots"));
    const KvLayout layout = storage->Layer(layer);
    ForRows(*s, rows, width, [&](int64_t row) {
      move(s->kernels(), layout, slots.As<const int32_t>()[row], RowOf(k, row), TypeOf(k.dtype),
           RowOf(v, row), TypeOf(v.dtype));
    });
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status CpuOps::Linear(Stream& stream, const LinearArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("Linear", "stream");
  const CpuPackedWeight* weight = WeightOf(args.weight, *s);
  if (weight == nullptr) return NotOurs("Linear", "weight");
  Check check("Linear");
  const int64_t rows = args.x.dims[0];
  const int64_t n = weight->n();
  check.Require(!weight->gated(), "the weight was packed by PackGated");
  check.Device(args.x, "x", {kF32, weight->dtype()}, {kAnyDim, weight->k()});
  check.Device(args.y, "y", {kF32, weight->dtype()}, {rows, n});
  if (args.bias) check.Device(*args.bias, "bias", {kF32}, {n});
  if (args.scale) check.Device(*args.scale, "scale", {kF32}, {n});
  if (args.residual) check.Device(*args.residual, "residual", {kF32}, {rows, n});
  if (!check.ok()) return check.status();
  if (rows == 0) return absl::OkStatus();
  return s->Run([&]() -> absl::Status {
    Gemm gemm{};
    gemm.type = TypeOf(weight->dtype());
    ASSIGN_OR_RETURN(gemm.x, PrepareRows(*s, args.x, gemm.type));
    gemm.weight = weight->data();
    gemm.n = n;
    gemm.k = weight->k();
    gemm.out.bias = args.bias ? args.bias->As<const float>() : nullptr;
    gemm.out.scale = args.scale ? args.scale->As<const float>() : nullptr;
    gemm.out.residual = args.residual ? args.residual->As<const float>() : nullptr;
    gemm.out.residual_stride = args.residual ? args.residual->strides[0] : 0;
    gemm.out.y = args.y.data;
    gemm.out.y_stride = args.y.strides[0];
    gemm.out.y_type = TypeOf(args.y.dtype);
    gemm.out.act = ActOf(args.activation);
    const Split split(rows, weight->panels(), LayoutOf(s->kernels(), gemm.type).unit, kGemmRows,
                      s->core().threads());
    s->core().ParallelFor(split.tasks(), [&](int64_t task, void* scratch) {
      split.Run(task,
                [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
                  s->kernels().linear(gemm, row_begin, row_end, panel_begin, panel_end, scratch);
                });
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::GatedLinear(Stream& stream, const GatedLinearArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("GatedLinear", "stream");
  const CpuPackedWeight* weight = WeightOf(args.weight, *s);
  if (weight == nullptr) return NotOurs("GatedLinear", "weight");
  Check check("GatedLinear");
  const int64_t rows = args.x.dims[0];
  check.Require(weight->gated(), "the weight was not packed by PackGated");
  check.Require(args.activation == Activation::kSilu || args.activation == Activation::kGeluTanh,
                "activation");
  check.Device(args.x, "x", {weight->dtype()}, {kAnyDim, weight->k()});
  check.Device(args.y, "y", {weight->dtype()}, {rows, weight->n() / 2});
  if (!check.ok()) return check.status();
  if (rows == 0) return absl::OkStatus();
  return s->Run([&]() -> absl::Status {
    Gemm gemm{};
    gemm.type = TypeOf(weight->dtype());
    ASSIGN_OR_RETURN(gemm.x, PrepareRows(*s, args.x, gemm.type));
    gemm.weight = weight->data();
    gemm.n = weight->n();
    gemm.k = weight->k();
    gemm.out.y = args.y.data;
    gemm.out.y_stride = args.y.strides[0];
    gemm.out.y_type = TypeOf(args.y.dtype);
    gemm.out.act = ActOf(args.activation);
    const Split split(rows, weight->panels(), LayoutOf(s->kernels(), gemm.type).unit, kGemmRows,
                      s->core().threads());
    s->core().ParallelFor(split.tasks(), [&](int64_t task, void* scratch) {
      split.Run(task,
                [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
                  s->kernels().gated(gemm, row_begin, row_end, panel_begin, panel_end, scratch);
                });
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::QkvRopeAppend(Stream& stream, const QkvRopeAppendArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("QkvRopeAppend", "stream");
  const CpuPackedWeight* weight = WeightOf(args.weight, *s);
  if (weight == nullptr) return NotOurs("QkvRopeAppend", "weight");
  const CpuKvStorage* kv = KvOf(args.kv, *s);
  if (kv == nullptr && args.kv != nullptr) return NotOurs("QkvRopeAppend", "kv");
  Check check("QkvRopeAppend");
  const int64_t rows = args.batch.num_rows;
  const int64_t kv_heads = kv == nullptr ? 0 : kv->geometry().kv_heads;
  const int64_t heads = int64_t{args.q_heads} + 2 * kv_heads;
  const int64_t head_dim =
      kv != nullptr ? kv->geometry().head_dim : weight->n() / std::max<int64_t>(1, heads);
  check.Require(!weight->gated(), "the weight was packed by PackGated");
  check.Require(kv == nullptr || args.layer < kv->geometry().layers, "layer");
  check.Require(args.q_heads > 0 && head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % 2 == 0,
                "head_dim must be even, and not too wide");
  check.Require(weight->n() == heads * head_dim,
                "weight rows are not (q_heads + 2 * kv_heads) * head_dim");
  check.Require(std::isfinite(args.rope_theta) && args.rope_theta > 0, "rope_theta");
  check.Device(args.x, "x", {weight->dtype()}, {rows, weight->k()});
  check.Device(args.q, "q", {weight->dtype()}, {rows, int64_t{args.q_heads} * head_dim});
  check.Require(rows >= 0, "batch: negative count");
  check.Array(args.batch.row_pos, "batch.row_pos", kI32, rows);
  if (kv != nullptr) check.Array(args.batch.row_slot, "batch.row_slot", kI32, rows);
  if (!check.ok()) return check.status();
  if (rows == 0) return absl::OkStatus();
  return s->Run([&]() -> absl::Status {
    if (kv != nullptr) {
      RETURN_IF_ERROR(CheckIndices(args.batch.row_slot, rows, 0,
                                   int64_t{kv->num_blocks()} * kPageTokens, "batch.row_slot"));
    }
    auto& rope_rows = s->scratch().rope_rows;
    auto& spill = s->scratch().rope_spill;
    rope_rows.clear();
    spill.clear();
    RopeTable& table = s->core().Rope(args.rope_theta, static_cast<uint32_t>(head_dim));
    for (int64_t row = 0; row < rows; ++row) {
      rope_rows.push_back(table.Row(args.batch.row_pos.As<const int32_t>()[row], spill));
    }
    Gemm gemm{};
    gemm.type = TypeOf(weight->dtype());
    ASSIGN_OR_RETURN(gemm.x, PrepareRows(*s, args.x, gemm.type));
    gemm.weight = weight->data();
    gemm.n = weight->n();
    gemm.k = weight->k();
    QkvRope rope{};
    rope.q = args.q.data;
    rope.q_stride = args.q.strides[0];
    rope.q_type = TypeOf(args.q.dtype);
    rope.q_heads = args.q_heads;
    if (kv != nullptr) {
      rope.kv = kv->Layer(args.layer);
      rope.row_slot = args.batch.row_slot.As<const int32_t>();
    } else {
      rope.kv.head_dim = head_dim;
    }
    rope.row_cos_sin = rope_rows.data();
    // Panels that hold whole heads stay together.
    const Kernels& kernels = s->kernels();
    const int64_t panel = LayoutOf(kernels, gemm.type).panel;
    const int64_t unit = std::lcm(panel, head_dim) / panel;
    const int64_t most_rows = std::min<int64_t>(kGemmRows, kQkvSums / ((unit + 1) * panel));
    const Split split(rows, weight->panels(), unit, most_rows, s->core().threads());
    s->core().ParallelFor(split.tasks(), [&](int64_t task, void* scratch) {
      split.Run(task, [&](int64_t row_begin, int64_t row_end, int64_t panel_begin,
                          int64_t panel_end) {
        for (int64_t p = panel_begin; p < panel_end; p += unit) {
          kernels.qkv(gemm, rope, row_begin, row_end, p, std::min(panel_end, p + unit), scratch);
        }
      });
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::PagedAttention(Stream& stream, const PagedAttentionArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("PagedAttention", "stream");
  const CpuKvStorage* kv = KvOf(args.kv, *s);
  if (kv == nullptr) return NotOurs("PagedAttention", "kv");
  Check check("PagedAttention");
  check.Require(args.layer < kv->geometry().layers, "layer");
  check.Require(args.q_heads > 0 && args.q_heads % kv->geometry().kv_heads == 0,
                "q_heads is no multiple of kv_heads");
  check.Require(std::isfinite(args.scale), "scale");
  const int64_t width = int64_t{args.q_heads} * kv->geometry().head_dim;
  check.Device(args.q, "q", {kF32, kBf16}, {args.batch.num_rows, width});
  check.Device(args.out, "out", {args.q.dtype}, {args.batch.num_rows, width});
  check.Batch(args.batch);
  if (!check.ok()) return check.status();
  if (args.batch.num_rows == 0) return absl::OkStatus();
  return s->Run([&] { return AttendPages(*s, args, *kv); });
}

absl::Status CpuOps::DenseAttention(Stream& stream, const DenseAttentionArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("DenseAttention", "stream");
  Check check("DenseAttention");
  const int64_t rows = args.qkv.dims[0];
  const int64_t width = args.out.dims[1];
  check.Require(args.group_rows > 0 && rows % args.group_rows == 0,
                "rows are no multiple of group_rows");
  check.Require(
      args.heads > 0 && width > 0 && width % args.heads == 0 && width / args.heads <= kMaxHeadDim,
      "width is no multiple of heads, or a head is too wide");
  check.Require(std::isfinite(args.scale), "scale");
  check.Device(args.qkv, "qkv", {kF32, kBf16}, {rows, 3 * width});
  check.Device(args.out, "out", {args.qkv.dtype}, {rows, width});
  if (!check.ok()) return check.status();
  if (rows == 0) return absl::OkStatus();
  return s->Run([&] { return AttendDense(*s, args); });
}

absl::Status CpuOps::RmsNorm(Stream& stream, TensorView x, TensorView gamma, TensorView y,
                             float eps) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("RmsNorm", "stream");
  Check check("RmsNorm");
  check.Require(std::isfinite(eps) && eps >= 0, "eps");
  check.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  check.Device(gamma, "gamma", {kF32}, {x.dims[1]});
  check.Device(y, "y", {kF32, kBf16}, {x.dims[0], x.dims[1]});
  if (!check.ok()) return check.status();
  return s->Run([&] {
    ForRows(*s, x.dims[0], x.dims[1], [&](int64_t row) {
      s->kernels().rms_norm(reinterpret_cast<const float*>(RowOf(x, row)), gamma.As<const float>(),
                            RowOf(y, row), TypeOf(y.dtype), x.dims[1], eps);
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::LayerNorm(Stream& stream, TensorView x, TensorView gamma, TensorView beta,
                               TensorView y, float eps) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("LayerNorm", "stream");
  Check check("LayerNorm");
  check.Require(std::isfinite(eps) && eps >= 0, "eps");
  check.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  check.Device(gamma, "gamma", {kF32}, {x.dims[1]});
  check.Device(beta, "beta", {kF32}, {x.dims[1]});
  check.Device(y, "y", {kF32, kBf16}, {x.dims[0], x.dims[1]});
  if (!check.ok()) return check.status();
  return s->Run([&] {
    ForRows(*s, x.dims[0], x.dims[1], [&](int64_t row) {
      s->kernels().layer_norm(reinterpret_cast<const float*>(RowOf(x, row)),
                              gamma.As<const float>(), beta.As<const float>(), RowOf(y, row),
                              TypeOf(y.dtype), x.dims[1], eps);
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::AdaRmsNorm(Stream& stream, TensorView x, TensorView scale, TensorView shift,
                                TensorView row_group, TensorView y, float eps) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("AdaRmsNorm", "stream");
  Check check("AdaRmsNorm");
  const int64_t rows = x.dims[0];
  check.Require(std::isfinite(eps) && eps >= 0, "eps");
  check.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  check.Device(scale, "scale", {kF32}, {kAnyDim, x.dims[1]});
  check.Device(shift, "shift", {kF32}, {scale.dims[0], x.dims[1]});
  check.Device(y, "y", {kF32, kBf16}, {rows, x.dims[1]});
  check.Array(row_group, "row_group", kI32, rows);
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(row_group, rows, 0, scale.dims[0], "AdaRmsNorm: row_group"));
    ForRows(*s, rows, x.dims[1], [&](int64_t row) {
      const int64_t group = row_group.As<const int32_t>()[row];
      s->kernels().ada_rms_norm(reinterpret_cast<const float*>(RowOf(x, row)),
                                reinterpret_cast<const float*>(RowOf(scale, group)),
                                reinterpret_cast<const float*>(RowOf(shift, group)), RowOf(y, row),
                                TypeOf(y.dtype), x.dims[1], eps);
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::AddGated(Stream& stream, TensorView y, TensorView gate, TensorView row_group,
                              TensorView x) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("AddGated", "stream");
  Check check("AddGated");
  const int64_t rows = x.dims[0];
  const bool one_gate = gate.dims[1] == 1;
  check.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  check.Device(y, "y", {kF32, kBf16}, {rows, x.dims[1]});
  check.Device(gate, "gate", {kF32}, {kAnyDim, one_gate ? 1 : x.dims[1]});
  check.Array(row_group, "row_group", kI32, rows);
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(row_group, rows, 0, gate.dims[0], "AddGated: row_group"));
    ForRows(*s, rows, x.dims[1], [&](int64_t row) {
      const int64_t group = row_group.As<const int32_t>()[row];
      s->kernels().add_gated(RowOf(y, row), TypeOf(y.dtype),
                             reinterpret_cast<const float*>(RowOf(gate, group)), one_gate,
                             reinterpret_cast<float*>(RowOf(x, row)), x.dims[1]);
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::Embed(Stream& stream, TensorView table, TensorView ids, TensorView index,
                           float scale, TensorView out) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("Embed", "stream");
  Check check("Embed");
  const int64_t rows = out.dims[0];
  check.Device(table, "table", {kF32, kBf16}, {kAnyDim, kAnyDim});
  check.Device(ids, "ids", {kI32}, {kAnyDim});
  check.Device(out, "out", {kF32}, {kAnyDim, table.dims[1]});
  check.Array(index, "index", kI32, rows);
  check.Require(std::isfinite(scale), "scale");
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(index, rows, std::numeric_limits<int32_t>::min(), ids.dims[0],
                                 "Embed: index"));
    ForRows(*s, rows, out.dims[1], [&](int64_t row) {
      const int32_t at = index.As<const int32_t>()[row];
      if (at < 0) return;
      const int32_t id = ids.As<const int32_t>()[at];
      auto* to = reinterpret_cast<float*>(RowOf(out, row));
      if (id < 0 || id >= table.dims[0]) {
        std::fill_n(to, out.dims[1], std::numeric_limits<float>::quiet_NaN());
      } else {
        s->kernels().scaled(RowOf(table, id), TypeOf(table.dtype), scale, to, out.dims[1]);
      }
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::GatherRows(Stream& stream, TensorView in, TensorView index,
                                TensorView out) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("GatherRows", "stream");
  Check check("GatherRows");
  const int64_t rows = out.dims[0];
  check.Device(in, "in", {kF32}, {kAnyDim, kAnyDim});
  check.Device(out, "out", {kF32}, {kAnyDim, in.dims[1]});
  check.Array(index, "index", kI32, rows);
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(index, rows, std::numeric_limits<int32_t>::min(), in.dims[0],
                                 "GatherRows: index"));
    ForRows(*s, rows, out.dims[1], [&](int64_t row) {
      const int32_t source = index.As<const int32_t>()[row];
      if (source >= 0)
        ConvertRow(s->kernels(), RowOf(in, source), kF32, RowOf(out, row), kF32, out.dims[1]);
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::Patchify(Stream& stream, TensorView rgb, uint32_t patch_size,
                              std::span<const float, 3> mean, std::span<const float, 3> std,
                              TensorView out) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("Patchify", "stream");
  Check check("Patchify");
  const int64_t size = patch_size;
  check.Device(rgb, "rgb", {DType::kU8, kF32}, {kAnyDim, kAnyDim, kAnyDim, 3});
  check.Require(size > 0 && rgb.dims[1] % std::max<int64_t>(1, size) == 0 &&
                    rgb.dims[2] % std::max<int64_t>(1, size) == 0,
                "the frame is no multiple of the patch");
  for (const float deviation : std)
    check.Require(std::isfinite(deviation) && deviation != 0, "std");
  if (!check.ok()) return check.status();
  const int64_t down = rgb.dims[1] / size;
  const int64_t across = rgb.dims[2] / size;
  const int64_t rows = rgb.dims[0] * down * across;
  check.Device(out, "out", {kF32, kBf16}, {rows, 3 * size * size});
  if (!check.ok()) return check.status();
  // `value` gives pixel (frame, y, x, c), of that offset in elements.
  const auto patches = [&](const auto& value) {
    ForRows(*s, rows, out.dims[1], [&](int64_t row) {
      const int64_t frame = row / (down * across);
      const int64_t top = row / across % down * size;
      const int64_t left = row % across * size;
      int64_t at = 0;
      for (int64_t c = 0; c < 3; ++c) {
        for (int64_t y = 0; y < size; ++y) {
          const int64_t line =
              frame * rgb.strides[0] + (top + y) * rgb.strides[1] + left * rgb.strides[2] + c;
          for (int64_t x = 0; x < size; ++x, ++at) {
            const float v = value(static_cast<size_t>(c), line + x * rgb.strides[2]);
            if (out.dtype == kF32) {
              reinterpret_cast<float*>(RowOf(out, row))[at] = v;
            } else {
              reinterpret_cast<uint16_t*>(RowOf(out, row))[at] = F32ToBf16(v);
            }
          }
        }
      }
    });
  };
  return s->Run([&] {
    if (rgb.dtype == kF32) {
      patches([&](size_t c, int64_t at) { return (rgb.As<const float>()[at] - mean[c]) / std[c]; });
      return absl::OkStatus();
    }
    std::array<std::array<float, 256>, 3> values;  // of every channel and pixel
    for (size_t c = 0; c < 3; ++c) {
      for (size_t pixel = 0; pixel < 256; ++pixel) {
        values[c][pixel] = (static_cast<float>(pixel) / 255.0f - mean[c]) / std[c];
      }
    }
    patches([&](size_t c, int64_t at) { return values[c][rgb.As<const uint8_t>()[at]]; });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::Convert(Stream& stream, TensorView src, TensorView dst) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("Convert", "stream");
  Check check("Convert");
  check.Device(src, "src", {kF32, kBf16}, {kAnyDim, kAnyDim});
  check.Device(dst, "dst", {kF32, kBf16}, {src.dims[0], src.dims[1]});
  if (!check.ok()) return check.status();
  return s->Run([&] {
    ForRows(*s, src.dims[0], src.dims[1], [&](int64_t row) {
      ConvertRow(s->kernels(), RowOf(src, row), src.dtype, RowOf(dst, row), dst.dtype, src.dims[1]);
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::Sample(Stream& stream, const SampleArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("Sample", "stream");
  Check check("Sample");
  const int64_t samples = args.dest.dims[0];
  check.Device(args.logits, "logits", {kF32}, {kAnyDim, kAnyDim});
  check.Device(args.source_row, "source_row", {kI32}, {samples});
  check.Device(args.temperature, "temperature", {kF32}, {samples});
  check.Device(args.top_p, "top_p", {kF32}, {samples});
  check.Device(args.seed, "seed", {DType::kI64}, {samples});
  check.Device(args.draw, "draw", {kI32}, {samples});
  check.Device(args.dest, "dest", {kI32}, {samples});
  check.Device(args.tokens, "tokens", {kI32}, {kAnyDim});
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(
        CheckIndices(args.source_row, samples, 0, args.logits.dims[0], "Sample: source_row"));
    RETURN_IF_ERROR(CheckIndices(args.dest, samples, 0, args.tokens.dims[0], "Sample: dest"));
    const int64_t width = args.logits.dims[1];
    s->core().ParallelFor(samples, [&](int64_t n, void*) {
      const auto* row = reinterpret_cast<const float*>(
          RowOf(args.logits, args.source_row.As<const int32_t>()[n]));
      const float temperature = args.temperature.As<const float>()[n];
      const float top_p = args.top_p.As<const float>()[n];
      const int32_t token =
          temperature == 0 && top_p == 1
              ? static_cast<int32_t>(s->kernels().argmax_finite(row, width))
              : SampleRow(row, width, temperature, top_p, args.seed.As<const int64_t>()[n],
                          args.draw.As<const int32_t>()[n]);
      args.tokens.As<int32_t>()[args.dest.As<const int32_t>()[n]] = token;
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::TopTokens(Stream& stream, const TopTokensArgs& args) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("TopTokens", "stream");
  Check check("TopTokens");
  const int64_t rows = args.ids.dims[0];
  const int64_t count = args.ids.dims[1];
  check.Device(args.logits, "logits", {kF32}, {kAnyDim, kAnyDim});
  check.Device(args.source_row, "source_row", {kI32}, {rows});
  check.Device(args.ids, "ids", {kI32}, {kAnyDim, kAnyDim});
  check.Device(args.log_probs, "log_probs", {kF32}, {rows, count});
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(
        CheckIndices(args.source_row, rows, 0, args.logits.dims[0], "TopTokens: source_row"));
    s->core().ParallelFor(rows, [&](int64_t n, void*) {
      TopOfRow(reinterpret_cast<const float*>(
                   RowOf(args.logits, args.source_row.As<const int32_t>()[n])),
               args.logits.dims[1], count, reinterpret_cast<int32_t*>(RowOf(args.ids, n)),
               reinterpret_cast<float*>(RowOf(args.log_probs, n)));
    });
    return absl::OkStatus();
  });
}

absl::Status CpuOps::CopyBlocks(Stream& stream, KvStorage& kv, TensorView pairs,
                                int32_t count) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("CopyBlocks", "stream");
  const CpuKvStorage* storage = KvOf(&kv, *s);
  if (storage == nullptr) return NotOurs("CopyBlocks", "kv");
  Check check("CopyBlocks");
  check.Device(pairs, "pairs", {kI32}, {kAnyDim, 2});
  check.Require(count >= 0 && pairs.dims[0] >= count, "count");
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    for (int32_t i = 0; i < count; ++i) {
      const auto* pair = reinterpret_cast<const int32_t*>(RowOf(pairs, i));
      for (int side = 0; side < 2; ++side) {
        if (pair[side] < 0 || static_cast<uint32_t>(pair[side]) >= storage->num_blocks()) {
          return absl::InternalError(StrCat("CopyBlocks: pairs[", i, "] names block ", pair[side]));
        }
      }
      if (pair[0] != pair[1]) {
        std::memcpy(storage->block(pair[1]), storage->block(pair[0]), storage->block_bytes());
      }
    }
    return absl::OkStatus();
  });
}

absl::Status CpuOps::ReadKv(Stream& stream, const KvStorage& kv, uint32_t layer,
                            const PagedBatch& batch, TensorView k, TensorView v) const {
  CpuStream* s = StreamOf(stream);
  if (s == nullptr) return NotOurs("ReadKv", "stream");
  const CpuKvStorage* storage = KvOf(&kv, *s);
  if (storage == nullptr) return NotOurs("ReadKv", "kv");
  Check check("ReadKv");
  const int64_t head_dim = storage->geometry().head_dim;
  const int64_t heads = storage->geometry().kv_heads;
  check.Require(layer < storage->geometry().layers, "layer");
  check.Require(batch.num_seqs == 1, "the batch must hold one sequence");
  check.Batch(batch);
  check.Device(k, "k", {kF32}, {kAnyDim, heads * head_dim});
  check.Device(v, "v", {kF32}, {k.dims[0], heads * head_dim});
  if (!check.ok()) return check.status();
  return s->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(CheckPages(batch, *storage));
    const KvLayout layout = storage->Layer(layer);
    const auto* range = batch.page_begin.As<const int32_t>();
    const auto* lengths = batch.page_len.As<const int32_t>();
    const int64_t tokens = std::accumulate(lengths + range[0], lengths + range[1], int64_t{0});
    if (tokens != k.dims[0]) {
      return absl::InternalError(
          StrCat("ReadKv: ", tokens, " tokens do not fit ", k.DebugString()));
    }
    int64_t row = 0;
    for (int32_t p = range[0]; p < range[1]; ++p) {
      const int64_t first = batch.pages.As<const int32_t>()[p] * kPageTokens;
      for (int64_t t = 0; t < lengths[p]; ++t, ++row) {
        s->kernels().read_slot(layout, first + t, RowOf(k, row), Type::kF32, RowOf(v, row),
                               Type::kF32);
      }
    }
    return absl::OkStatus();
  });
}

absl::Status CpuOps::GatherKv(Stream& stream, const KvStorage& kv, uint32_t layer, TensorView slots,
                              TensorView k, TensorView v) const {
  return MoveSlots(stream, "GatherKv", kv, layer, slots, k, v,
                   [](const Kernels& kernels, const KvLayout& layout, int64_t slot, std::byte* key,
                      Type k_type, std::byte* value, Type v_type) {
                     kernels.read_slot(layout, slot, key, k_type, value, v_type);
                   });
}

absl::Status CpuOps::ScatterKv(Stream& stream, KvStorage& kv, uint32_t layer, TensorView slots,
                               TensorView k, TensorView v) const {
  return MoveSlots(stream, "ScatterKv", kv, layer, slots, k, v,
                   [](const Kernels& kernels, const KvLayout& layout, int64_t slot, std::byte* key,
                      Type k_type, std::byte* value, Type v_type) {
                     kernels.write_slot(layout, slot, key, k_type, value, v_type);
                   });
}

}  // namespace saccade::cpu
