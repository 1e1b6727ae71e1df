#pragma once
// The table of a level that multiplies in vector registers; P is its policy of BF16 weights and
// pages.
#include "kernels/cpu/impl/attention.h"
#include "kernels/cpu/impl/gemm.h"
#include "kernels/cpu/impl/rows.h"

namespace saccade::cpu {
namespace {

template <class P>
constexpr Kernels MakeTable(Isa isa) {
  using Entries = GemmEntries<P>;
  return Kernels{
      .isa = isa,
      .f32_layout = {kPanel, 1, Simd::kLanes, 1},
      .bf16_layout = {kPanel, 2, Simd::kLanes, 1},
      .key_multiple = 2,
      .rows_ready = Entries::RowsReady,
      .packed_rows_bytes = Entries::Bytes,
      .packed_stride = Entries::Stride,
      .pack_rows = Entries::PackRows,
      .linear = Entries::Linear,
      .gated = Entries::Gated,
      .qkv = Entries::Qkv,
      .attention = AttentionEntry<P>,
      .pack_kv = PackKv,
      .read_slot = ReadSlot,
      .write_slot = WriteSlot,
      .rms_norm = RmsNorm,
      .layer_norm = LayerNorm,
      .ada_rms_norm = AdaRmsNorm,
      .add_gated = AddGated,
      .scaled = Scaled,
      .to_bf16 = ToBf16,
      .to_f32 = ToF32,
      .argmax_finite = ArgmaxFinite,
  };
}

}  // namespace
}  // namespace saccade::cpu
