#include "model/layers_llama.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {

std::vector<TensorSpec> LlamaSpec::Tensors() const {
  const int64_t h = hidden;
  const int64_t q = int64_t{heads} * head_dim;
  const int64_t kv = int64_t{kv_heads} * head_dim;
  const int64_t i = intermediate;
  std::vector<TensorSpec> out;
  const auto add = [&](std::string_view name, std::vector<int64_t> dims, TensorUse use) {
    out.push_back({StrCat(prefix, name, ".weight"), std::move(dims), use});
  };
  add("model.embed_tokens", {vocab, h}, TensorUse::kTable);
  for (uint32_t n = 0; n < layers; ++n) {
    const std::string layer = StrCat("model.layers.", n, ".");
    add(StrCat(layer, "input_layernorm"), {h}, TensorUse::kVector);
    add(StrCat(layer, "self_attn.q_proj"), {q, h}, TensorUse::kMatrix);
    add(StrCat(layer, "self_attn.k_proj"), {kv, h}, TensorUse::kMatrix);
    add(StrCat(layer, "self_attn.v_proj"), {kv, h}, TensorUse::kMatrix);
    add(StrCat(layer, "self_attn.o_proj"), {h, q}, TensorUse::kMatrix);
    add(StrCat(layer, "post_attention_layernorm"), {h}, TensorUse::kVector);
    add(StrCat(layer, "mlp.gate_proj"), {i, h}, TensorUse::kMatrix);
    add(StrCat(layer, "mlp.up_proj"), {i, h}, TensorUse::kMatrix);
    add(StrCat(layer, "mlp.down_proj"), {h, i}, TensorUse::kMatrix);
  }
  add("model.norm", {h}, TensorUse::kVector);
  if (head && !tied_head) add("lm_head", {vocab, h}, TensorUse::kMatrix);
  return out;
}

std::vector<LayerCost> LlamaSpec::LayerCosts() const {
  const uint64_t h = hidden;
  const uint64_t q = uint64_t{heads} * head_dim;
  const uint64_t kv = uint64_t{kv_heads} * head_dim;
  const uint64_t attention = h * (q + 2 * kv) + q * h;
  const uint64_t all = attention + 3 * h * intermediate;
  std::vector<LayerCost> out(layers, LayerCost{all, all});
  // After the last layer's attention only the rows that are sampled go on.
  out.back().row_weights = attention;
  out.push_back({head ? uint64_t{vocab} * h : 0, 0});
  return out;
}

size_t LlamaSpec::ParkingBytes(uint32_t rows, uint32_t logit_rows) const {
  return ArenaBytes(rows, hidden, DType::kF32) + ArenaBytes(logit_rows, hidden, DType::kF32);
}

size_t LlamaSpec::WorkspaceBytes(uint32_t rows, uint32_t logit_rows, DType compute) const {
  const uint64_t wide = std::max(rows, logit_rows);
  const uint64_t q = uint64_t{heads} * head_dim;
  return ArenaBytes(rows, hidden, DType::kF32) + ArenaBytes(wide, hidden, compute) +
         2 * ArenaBytes(rows, q, compute) + ArenaBytes(wide, intermediate, compute) +
         ArenaBytes(logit_rows, hidden, DType::kF32) +
         (head ? ArenaBytes(logit_rows, vocab, DType::kF32) : 0);
}

absl::StatusOr<LlamaTrunk> LlamaTrunk::Load(WeightLoader& loader, const LlamaSpec& spec) {
  LlamaTrunk trunk(spec, loader.compute());
  const std::string table = spec.prefix + "model.embed_tokens.weight";
  ASSIGN_OR_RETURN(trunk.table_, loader.Table(table, &trunk.table_dtype_));
  for (uint32_t n = 0; n < spec.layers; ++n) {
    const auto part = [&](std::string_view suffix) {
      return StrCat(spec.prefix, "model.layers.", n, ".", suffix, ".weight");
    };
    Layer layer;
    ASSIGN_OR_RETURN(layer.norm1, loader.Vector({part("input_layernorm")}));
    ASSIGN_OR_RETURN(layer.qkv, loader.Linear({part("self_attn.q_proj"), part("self_attn.k_proj"),
                                               part("self_attn.v_proj")}));
    ASSIGN_OR_RETURN(layer.o, loader.Linear({part("self_attn.o_proj")}));
    ASSIGN_OR_RETURN(layer.norm2, loader.Vector({part("post_attention_layernorm")}));
    ASSIGN_OR_RETURN(layer.gate_up, loader.Gated(part("mlp.gate_proj"), part("mlp.up_proj")));
    ASSIGN_OR_RETURN(layer.down, loader.Linear({part("mlp.down_proj")}));
    trunk.layers_.push_back(std::move(layer));
  }
  ASSIGN_OR_RETURN(trunk.final_norm_, loader.Vector({spec.prefix + "model.norm.weight"}));
  if (!spec.head) return trunk;
  const std::string head = spec.tied_head ? table : spec.prefix + "lm_head.weight";
  ASSIGN_OR_RETURN(trunk.head_, loader.Linear({head}));
  return trunk;
}

absl::Status LlamaTrunk::RecordCache(ExecContext& ctx, StageTap& tap, uint32_t layer,
                                     const TrunkBatch& batch) const {
  const std::string k_name = StrCat("prefill.k.", layer);
  const std::string v_name = StrCat("prefill.v.", layer);
  if (batch.paged.num_seqs != 1 || !(tap.Wants(k_name) || tap.Wants(v_name))) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const int64_t tokens, tap.CachedTokens(batch.paged));
  const int64_t width = int64_t{spec_.kv_heads} * spec_.head_dim;
  ASSIGN_OR_RETURN(const TensorView k, tap.Scratch(DType::kF32, {tokens, width}));
  ASSIGN_OR_RETURN(const TensorView v, tap.Scratch(DType::kF32, {tokens, width}));
  RETURN_IF_ERROR(ctx.ops.ReadKv(ctx.stream, *batch.kv, layer, batch.paged, k, v));
  RETURN_IF_ERROR(tap.Record(k_name, k));
  return tap.Record(v_name, v);
}

absl::Status LlamaTrunk::Attend(ExecContext& ctx, StageTap& tap, uint32_t n,
                                const TrunkBatch& batch, const Scratch& s, bool append_only) const {
  const Layer& layer = layers_[n];
  RETURN_IF_ERROR(ctx.ops.RmsNorm(ctx.stream, s.x, Gamma(layer.norm1), s.norm, spec_.epsilon));
  QkvRopeAppendArgs qkv;
  qkv.weight = layer.qkv.get();
  qkv.x = s.norm;
  qkv.q = s.q;
  qkv.kv = batch.kv;
  qkv.layer = n;
  qkv.q_heads = spec_.heads;
  qkv.rope_theta = spec_.rope_theta;
  qkv.batch = batch.paged;
  RETURN_IF_ERROR(ctx.ops.QkvRopeAppend(ctx.stream, qkv));
  RETURN_IF_ERROR(RecordCache(ctx, tap, n, batch));
  if (append_only) return absl::OkStatus();
  PagedAttentionArgs attention;
  attention.q = s.q;
  attention.out = s.attention;
  attention.kv = batch.kv;
  attention.layer = n;
  attention.q_heads = spec_.heads;
  attention.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec_.head_dim)));
  attention.batch = batch.paged;
  RETURN_IF_ERROR(ctx.ops.PagedAttention(ctx.stream, attention));
  LinearArgs o;
  o.weight = layer.o.get();
  o.x = s.attention;
  o.y = s.x;
  o.residual = s.x;
  return ctx.ops.Linear(ctx.stream, o);
}

absl::Status LlamaTrunk::Mlp(ExecContext& ctx, const Layer& layer, const Scratch& s,
                             const TensorView& x, const TensorView& out) const {
  const TensorView norm = s.norm.Rows(0, x.dim(0));
  const TensorView mlp = s.mlp.Rows(0, x.dim(0));
  RETURN_IF_ERROR(ctx.ops.RmsNorm(ctx.stream, x, Gamma(layer.norm2), norm, spec_.epsilon));
  GatedLinearArgs gate_up;
  gate_up.weight = layer.gate_up.get();
  gate_up.x = norm;
  gate_up.y = mlp;
  RETURN_IF_ERROR(ctx.ops.GatedLinear(ctx.stream, gate_up));
  LinearArgs down;
  down.weight = layer.down.get();
  down.x = mlp;
  down.y = out;
  down.residual = x;
  return ctx.ops.Linear(ctx.stream, down);
}

absl::Status LlamaTrunk::Head(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch,
                              const Scratch& s, const TensorView& x) const {
  const TensorView norm = s.norm.Rows(0, x.dim(0));
  RETURN_IF_ERROR(ctx.ops.RmsNorm(ctx.stream, x, Gamma(final_norm_), norm, spec_.epsilon));
  ASSIGN_OR_RETURN(const TensorView logits, ctx.arena.New(DType::kF32, {x.dim(0), spec_.vocab}));
  LinearArgs head;
  head.weight = head_.get();
  head.x = norm;
  head.y = logits;
  RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, head));
  RETURN_IF_ERROR(tap.Record("lm.logits", logits));
  return PickTokens(ctx, batch, logits);
}

absl::Status LlamaTrunk::Forward(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch,
                                 const Extra& extra) const {
  const ArenaScope scope(ctx.arena);
  const int64_t rows = batch.paged.num_rows;
  const int64_t logit_rows = batch.num_logit_rows;
  if (rows == 0) return absl::OkStatus();
  if (logit_rows > 0 && head_ == nullptr && extra.hidden.data == nullptr &&
      batch.layers.Has(spec_.layers)) {
    return absl::InvalidArgumentError("the trunk has no LM head: there are no logits");
  }
  const LayerRange& run = batch.layers;
  // What a later slice goes on with: laid out alike by every slice.
  std::optional<Arena> parked;
  if (run.parked != nullptr) parked.emplace(*run.parked);
  Arena& kept = parked.has_value() ? *parked : ctx.arena;
  const int64_t wide = std::max(rows, logit_rows);
  const int64_t q_width = int64_t{spec_.heads} * spec_.head_dim;
  Scratch s;
  ASSIGN_OR_RETURN(s.x, kept.New(DType::kF32, {rows, spec_.hidden}));
  ASSIGN_OR_RETURN(const TensorView norm, ctx.arena.New(compute_, {wide, spec_.hidden}));
  ASSIGN_OR_RETURN(s.q, ctx.arena.New(compute_, {rows, q_width}));
  ASSIGN_OR_RETURN(s.attention, ctx.arena.New(compute_, {rows, q_width}));
  ASSIGN_OR_RETURN(s.mlp, ctx.arena.New(compute_, {wide, spec_.intermediate}));
  s.norm = norm.Rows(0, rows);

  if (run.begin == 0) {
    const TensorView table = table_->View(table_dtype_, {spec_.vocab, spec_.hidden});
    RETURN_IF_ERROR(ctx.ops.Embed(ctx.stream, table, batch.tokens, batch.token_index, 1.0F, s.x));
    RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, batch.embeddings, batch.embedding_index, s.x));
    if (extra.states.data != nullptr) {
      RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, extra.states, batch.state_index, s.x));
    }
    RETURN_IF_ERROR(tap.Record("lm.embeds", s.x));
  }
  const uint32_t last = spec_.layers - 1;
  for (uint32_t n = run.begin; n < std::min(last, run.end); ++n) {
    RETURN_IF_ERROR(Attend(ctx, tap, n, batch, s, /*append_only=*/false));
    RETURN_IF_ERROR(Mlp(ctx, layers_[n], s, s.x, s.x));
    if (n == 0) RETURN_IF_ERROR(tap.Record("lm.layer0.out", s.x));
  }
  if (run.Has(last)) {
    // After the last layer's K and V only the rows that are sampled matter.
    const bool tapped = tap.Wants("lm.final_norm.in") || tap.Wants("lm.final_norm") ||
                        (last == 0 && tap.Wants("lm.layer0.out"));
    RETURN_IF_ERROR(Attend(ctx, tap, last, batch, s, logit_rows == 0 && !tapped));
    if (tapped) {
      ASSIGN_OR_RETURN(const TensorView all, tap.Scratch(DType::kF32, {rows, spec_.hidden}));
      RETURN_IF_ERROR(Mlp(ctx, layers_[last], s, s.x, all));
      if (last == 0) RETURN_IF_ERROR(tap.Record("lm.layer0.out", all));
      RETURN_IF_ERROR(tap.Record("lm.final_norm.in", all));
      if (tap.Wants("lm.final_norm")) {
        ASSIGN_OR_RETURN(const TensorView normed, tap.Scratch(DType::kF32, {rows, spec_.hidden}));
        RETURN_IF_ERROR(
            ctx.ops.RmsNorm(ctx.stream, all, Gamma(final_norm_), normed, spec_.epsilon));
        RETURN_IF_ERROR(tap.Record("lm.final_norm", normed));
      }
    }
  }
  if (logit_rows == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const TensorView sampled, kept.New(DType::kF32, {logit_rows, spec_.hidden}));
  s.norm = norm;
  if (run.Has(last)) {
    RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, s.x, batch.logit_rows, sampled));
    RETURN_IF_ERROR(Mlp(ctx, layers_[last], s, sampled, sampled));
  }
  if (!run.Has(spec_.layers)) return absl::OkStatus();
  if (extra.hidden.data == nullptr) return Head(ctx, tap, batch, s, sampled);
  return ctx.ops.RmsNorm(ctx.stream, sampled, Gamma(final_norm_), extra.hidden, spec_.epsilon);
}

}  // namespace saccade
