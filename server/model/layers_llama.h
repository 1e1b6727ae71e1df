#pragma once
// A Llama decoder over a paged K/V cache: one pass over rows of many sequences, from embeddings to
// sampled ids, or to the hidden states that a head of another kind reads. The residual stream is
// F32; what a matrix multiplies is in the compute dtype.
//   x += o(attention(rope(q, k), v));  x += down(silu(gate h) * (up h)),  h = rmsnorm(x) * gamma
// Source: transformers 4.40 models/llama/modeling_llama.py; names as in its state dict.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/layers_tap.h"
#include "model/layers_weights.h"
#include "model/model.h"
#include "tensor/ops.h"

namespace saccade {

struct LlamaSpec {
  std::string prefix;  // of the tensor names, with its dot
  uint32_t vocab = 0;  // rows of the embedding table and of the LM head
  uint32_t hidden = 0;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t intermediate = 0;
  double rope_theta = 10000.0;
  float epsilon = 1e-6F;   // of every RMSNorm
  bool tied_head = false;  // the embedding table is the LM head
  bool head = true;        // false: none, and what its rows would read is the answer

  std::vector<TensorSpec> Tensors() const;
  // One per layer, and the LM head (which costs nothing where there is none).
  std::vector<LayerCost> LayerCosts() const;
  // Of the residual stream between layers.
  size_t ParkingBytes(uint32_t rows, uint32_t logit_rows) const;
  // Arena bytes that Forward needs for that many rows.
  size_t WorkspaceBytes(uint32_t rows, uint32_t logit_rows, DType compute) const;
};

// Owns the trunk's weights. Forward only enqueues work.
class LlamaTrunk {
 public:
  static absl::StatusOr<LlamaTrunk> Load(WeightLoader& loader, const LlamaSpec& spec);

  const LlamaSpec& spec() const { return spec_; }
  // What a model has beside the batch. Both may be empty.
  struct Extra {
    TensorView states;  // [S, hidden] F32: row m takes states[state_index[m]]
    TensorView hidden;  // [R, hidden] F32, out: the normed rows of logit_rows, in place of logits
  };
  // Stages: lm.embeds, lm.layer0.out, lm.final_norm.in, lm.final_norm [M, hidden]; lm.logits
  // [R, vocab];
  // prefill.k.N and prefill.v.N [tokens, kv_heads * head_dim]: the cache so far, for a batch of one
  // sequence.
  absl::Status Forward(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch,
                       const Extra& extra) const;
  absl::Status Forward(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch) const {
    return Forward(ctx, tap, batch, Extra{});
  }

 private:
  struct Layer {
    std::unique_ptr<Buffer> norm1, norm2;
    std::unique_ptr<PackedWeight> qkv, o, gate_up, down;
  };
  // Scratch of one pass; `norm` and `mlp` are rewritten by every layer.
  struct Scratch {
    TensorView x, norm, q, attention, mlp;
  };

  LlamaTrunk(const LlamaSpec& spec, DType compute) : spec_(spec), compute_(compute) {}
  absl::Status Attend(ExecContext& ctx, StageTap& tap, uint32_t layer, const TrunkBatch& batch,
                      const Scratch& s, bool append_only) const;
  // out = x + mlp(x) for the rows of x; `out` may be x.
  absl::Status Mlp(ExecContext& ctx, const Layer& layer, const Scratch& s, const TensorView& x,
                   const TensorView& out) const;
  absl::Status Head(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch, const Scratch& s,
                    const TensorView& x) const;
  absl::Status RecordCache(ExecContext& ctx, StageTap& tap, uint32_t layer,
                           const TrunkBatch& batch) const;
  TensorView Gamma(const std::unique_ptr<Buffer>& buffer) const {
    return buffer->View(DType::kF32, {spec_.hidden});
  }

  LlamaSpec spec_;
  DType compute_;
  std::unique_ptr<Buffer> table_;
  DType table_dtype_ = DType::kF32;
  std::vector<Layer> layers_;
  std::unique_ptr<Buffer> final_norm_;
  std::unique_ptr<PackedWeight> head_;
};

}  // namespace saccade
