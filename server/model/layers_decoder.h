#pragma once
// A decoder of Llama's or Gemma's kind over a paged K/V cache: one pass over rows of many
// sequences, from embeddings to sampled ids, or, without a head, only to what the last layer
// caches. The residual stream is F32; what a matrix multiplies is in the compute dtype.
//   x += o(attention(rope(q, k), v));  x += down(act(gate h) * (up h)),  h = rmsnorm(x) * gamma
// Rows see what PagedBatch.row_limit says: causal, bidirectional groups or both.
// Sources: transformers 4.40 models/llama/modeling_llama.py, models/gemma/modeling_gemma.py; names
// as in their state dicts.
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

struct DecoderSpec {
  std::string prefix;  // of the names of layers and final norm, with its dot
  std::string table;   // the embedding table's tensor
  std::string head;    // the LM head's tensor, maybe `table`; empty: none
  // Without an LM head: a head of another kind reads the normed rows. Else the pass fills the
  // cache.
  bool ends_in_hidden = false;
  uint32_t vocab = 0;  // rows of the embedding table and of the LM head
  uint32_t hidden = 0;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t intermediate = 0;
  double rope_theta = 10000.0;
  float epsilon = 1e-6F;   // of every RMSNorm
  bool unit_norm = false;  // a norm's gamma is 1 + its weight (Gemma)
  Activation activation = Activation::kSilu;
  float embedding_scale = 1;  // of text
  // Ids that are also embedded unscaled, as ids vocab, vocab + 1, ...
  std::vector<int32_t> unscaled;
  std::string state;  // name of the layer that makes a row of a state; empty: none
  uint32_t state_width = 0;
  // Layers [layers, layers + n) of the cache: K and V of a layer, as cached, through two more
  // matrices (SmolVLA's expert reads those of every prompt).
  struct Derived {
    uint32_t layer = 0;
    std::string k;  // tensors, [kv_heads * head_dim, kv_heads * head_dim]
    std::string v;
  };
  std::vector<Derived> derived;

  bool fills_cache_only() const { return head.empty() && !ends_in_hidden; }
  bool tied_head() const { return head == table; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
  uint32_t cache_layers() const { return layers + static_cast<uint32_t>(derived.size()); }
  std::vector<TensorSpec> Tensors() const;
  // One per layer, and the LM head (which costs nothing where there is none).
  std::vector<LayerCost> LayerCosts() const;
  // Of the residual stream between layers.
  size_t ParkingBytes(uint32_t rows, uint32_t logit_rows) const;
  // Arena bytes that Forward needs for that many rows, of at most as many sequences.
  size_t WorkspaceBytes(uint32_t rows, uint32_t logit_rows, DType compute) const;
};

// Owns the trunk's weights. Forward only enqueues work.
class DecoderTrunk {
 public:
  static absl::StatusOr<DecoderTrunk> Load(WeightLoader& loader, const DecoderSpec& spec);

  const DecoderSpec& spec() const { return spec_; }
  // What a model has beside the batch. Both may be empty.
  struct Extra {
    TensorView states;  // [S, hidden] F32: row m takes states[state_index[m]]
    TensorView hidden;  // [R, hidden] F32, out: the normed rows of logit_rows, in place of logits
  };
  // Stages: lm.embeds, lm.layer0.out, and where the pass does more than to fill the cache,
  // lm.final_norm.in, lm.final_norm [M, hidden], and with a head lm.logits [R, vocab];
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
    TensorView kv;  // of derived layers: k, v, and what they become, kv_width each
  };

  DecoderTrunk(const DecoderSpec& spec, DType compute) : spec_(spec), compute_(compute) {}
  absl::Status Attend(ExecContext& ctx, StageTap& tap, uint32_t layer, const TrunkBatch& batch,
                      const Scratch& s, bool append_only) const;
  absl::Status Embed(ExecContext& ctx, const TrunkBatch& batch, const Extra& extra,
                     const TensorView& x) const;
  // What the cache holds of the rows in layer `n`, through the matrices of its derived layers.
  absl::Status Derive(ExecContext& ctx, StageTap& tap, uint32_t n, const TrunkBatch& batch,
                      const Scratch& s) const;
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

  DecoderSpec spec_;
  DType compute_;
  std::unique_ptr<Buffer> table_;
  DType table_dtype_ = DType::kF32;
  std::vector<Layer> layers_;
  struct Derived {
    std::unique_ptr<PackedWeight> k, v;
  };
  std::vector<Derived> derived_;
  LinearLayer state_;
  std::unique_ptr<Buffer> final_norm_;
  std::unique_ptr<PackedWeight> head_;
};

}  // namespace saccade
