#pragma once
#include "tensor/ops.h"

namespace saccade::cpu {

class CpuOps final : public Ops {
 public:
  absl::Status Linear(Stream& stream, const LinearArgs& args) const override;
  absl::Status GatedLinear(Stream& stream, const GatedLinearArgs& args) const override;
  absl::Status QkvRopeAppend(Stream& stream, const QkvRopeAppendArgs& args) const override;
  absl::Status PagedAttention(Stream& stream, const PagedAttentionArgs& args) const override;
  absl::Status DenseAttention(Stream& stream, const DenseAttentionArgs& args) const override;
  absl::Status RmsNorm(Stream& stream, TensorView x, TensorView gamma, TensorView y,
                       float eps) const override;
  absl::Status LayerNorm(Stream& stream, TensorView x, TensorView gamma, TensorView beta,
                         TensorView y, float eps) const override;
  absl::Status AdaRmsNorm(Stream& stream, TensorView x, TensorView scale, TensorView shift,
                          TensorView row_group, TensorView y, float eps) const override;
  absl::Status AddGated(Stream& stream, TensorView y, TensorView gate, TensorView row_group,
                        TensorView x) const override;
  absl::Status Embed(Stream& stream, TensorView table, TensorView ids, TensorView index,
                     float scale, TensorView out) const override;
  absl::Status GatherRows(Stream& stream, TensorView in, TensorView index,
                          TensorView out) const override;
  absl::Status Patchify(Stream& stream, TensorView rgb, uint32_t patch_size,
                        std::span<const float, 3> mean, std::span<const float, 3> std,
                        TensorView out) const override;
  absl::Status Convert(Stream& stream, TensorView src, TensorView dst) const override;
  absl::Status Sample(Stream& stream, const SampleArgs& args) const override;
  absl::Status TopTokens(Stream& stream, const TopTokensArgs& args) const override;
  absl::Status CopyBlocks(Stream& stream, KvStorage& kv, TensorView pairs,
                          int32_t count) const override;
  absl::Status ReadKv(Stream& stream, const KvStorage& kv, uint32_t layer, const PagedBatch& batch,
                      TensorView k, TensorView v) const override;
  absl::Status GatherKv(Stream& stream, const KvStorage& kv, uint32_t layer, TensorView slots,
                        TensorView k, TensorView v) const override;
  absl::Status ScatterKv(Stream& stream, KvStorage& kv, uint32_t layer, TensorView slots,
                         TensorView k, TensorView v) const override;
};

}  // namespace saccade::cpu
