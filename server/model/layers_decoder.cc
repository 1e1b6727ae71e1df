#include "model/layers_decoder.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {

std::vector<TensorSpec> DecoderSpec::Tensors() const {
  const int64_t h = hidden;
  const int64_t q = int64_t{heads} * head_dim;
  const int64_t kv = int64_t{kv_heads} * head_dim;
  const int64_t i = intermediate;
  std::vector<TensorSpec> out;
  const auto add = [&](std::string_view name, std::vector<int64_t> dims, TensorUse use) {
    out.push_back({StrCat(prefix, name, ".weight"), std::move(dims), use});
  };
  out.push_back({table, {vocab, h}, TensorUse::kTable});
  for (uint32_t n = 0; n < layers; ++n) {
    const std::string layer = StrCat("layers.", n, ".");
    add(StrCat(layer, "input_layernorm"), {h}, TensorUse::kVector);
    add(StrCat(layer, "self_attn.q_proj"), {q, h}, TensorUse::kMatrix);
    add(StrCat(layer, "self_attn.k_proj"), {kv, h}, TensorUse::kMatrix);
    add(StrCat(layer, "self_attn.v_proj"), {kv, h}, TensorUse::kMatrix);
    if (fills_cache_only() && n + 1 == layers) break;  // the last layer only caches
    add(StrCat(layer, "self_attn.o_proj"), {h, q}, TensorUse::kMatrix);
    add(StrCat(layer, "post_attention_layernorm"), {h}, TensorUse::kVector);
    add(StrCat(layer, "mlp.gate_proj"), {i, h}, TensorUse::kMatrix);
    add(StrCat(layer, "mlp.up_proj"), {i, h}, TensorUse::kMatrix);
    add(StrCat(layer, "mlp.down_proj"), {h, i}, TensorUse::kMatrix);
  }
  for (const Derived& d : derived) {
    out.push_back({d.k, {kv, kv}, TensorUse::kMatrix});
    out.push_back({d.v, {kv, kv}, TensorUse::kMatrix});
  }
  if (!state.empty()) {
    out.push_back({StrCat(state, ".weight"), {h, state_width}, TensorUse::kHead});
    out.push_back({StrCat(state, ".bias"), {h}, TensorUse::kVector});
  }
  if (fills_cache_only()) return out;
  add("norm", {h}, TensorUse::kVector);
  if (!head.empty() && !tied_head()) out.push_back({head, {vocab, h}, TensorUse::kMatrix});
  return out;
}

std::vector<LayerCost> DecoderSpec::LayerCosts() const {
  const uint64_t h = hidden;
  const uint64_t q = uint64_t{heads} * head_dim;
  const uint64_t kv = uint64_t{kv_heads} * head_dim;
  const uint64_t attention = h * (q + 2 * kv) + q * h;
  const uint64_t all = attention + 3 * h * intermediate;
  std::vector<LayerCost> out(layers, LayerCost{all, all});
  if (fills_cache_only()) {
    out.back() = {h * (q + 2 * kv), h * (q + 2 * kv)};
    out.push_back({0, 0});
  } else {
    // After the last layer's attention only the rows that are sampled go on.
    out.back().row_weights = attention;
    out.push_back({head.empty() ? 0 : uint64_t{vocab} * h, 0});
  }
  for (const Derived& d : derived) {
    out[d.layer].weights += 2 * kv * kv;
    out[d.layer].row_weights += 2 * kv * kv;
  }
  return out;
}

size_t DecoderSpec::ParkingBytes(uint32_t rows, uint32_t logit_rows) const {
  return ArenaBytes(rows, hidden, DType::kF32) + ArenaBytes(logit_rows, hidden, DType::kF32);
}

size_t DecoderSpec::WorkspaceBytes(uint32_t rows, uint32_t logit_rows, DType compute) const {
  const uint64_t wide = std::max(rows, logit_rows);
  const uint64_t q = uint64_t{heads} * head_dim;
  return ArenaBytes(rows, hidden, DType::kF32) + ArenaBytes(wide, hidden, compute) +
         2 * ArenaBytes(rows, q, compute) + ArenaBytes(wide, intermediate, compute) +
         ArenaBytes(logit_rows, hidden, DType::kF32) +
         (head.empty() ? 0 : ArenaBytes(logit_rows, vocab, DType::kF32)) +
         (derived.empty() ? 0 : ArenaBytes(rows, uint64_t{4} * kv_width(), compute)) +
         (state.empty() ? 0 : ArenaBytes(rows, hidden, DType::kF32));
}

absl::StatusOr<DecoderTrunk> DecoderTrunk::Load(WeightLoader& loader, const DecoderSpec& spec) {
  DecoderTrunk trunk(spec, loader.compute());
  const float offset = spec.unit_norm ? 1.0F : 0.0F;
  if (spec.unscaled.empty()) {
    ASSIGN_OR_RETURN(trunk.table_, loader.Table(spec.table, &trunk.table_dtype_));
  } else {
    ASSIGN_OR_RETURN(trunk.table_,
                     loader.TableWithUnscaled(spec.table, spec.unscaled, spec.embedding_scale));
  }
  for (uint32_t n = 0; n < spec.layers; ++n) {
    const auto part = [&](std::string_view suffix) {
      return StrCat(spec.prefix, "layers.", n, ".", suffix, ".weight");
    };
    Layer layer;
    ASSIGN_OR_RETURN(layer.norm1, loader.Vector({part("input_layernorm")}, offset));
    ASSIGN_OR_RETURN(layer.qkv, loader.Linear({part("self_attn.q_proj"), part("self_attn.k_proj"),
                                               part("self_attn.v_proj")}));
    if (!spec.fills_cache_only() || n + 1 < spec.layers) {
      ASSIGN_OR_RETURN(layer.o, loader.Linear({part("self_attn.o_proj")}));
      ASSIGN_OR_RETURN(layer.norm2, loader.Vector({part("post_attention_layernorm")}, offset));
      ASSIGN_OR_RETURN(layer.gate_up, loader.Gated(part("mlp.gate_proj"), part("mlp.up_proj")));
      ASSIGN_OR_RETURN(layer.down, loader.Linear({part("mlp.down_proj")}));
    }
    trunk.layers_.push_back(std::move(layer));
  }
  for (const DecoderSpec::Derived& d : spec.derived) {
    Derived derived;
    ASSIGN_OR_RETURN(derived.k, loader.Linear({d.k}));
    ASSIGN_OR_RETURN(derived.v, loader.Linear({d.v}));
    trunk.derived_.push_back(std::move(derived));
  }
  if (!spec.state.empty()) {
    ASSIGN_OR_RETURN(trunk.state_, loader.WithBias(spec.state, DType::kF32));
  }
  if (spec.fills_cache_only()) return trunk;
  ASSIGN_OR_RETURN(trunk.final_norm_, loader.Vector({spec.prefix + "norm.weight"}, offset));
  if (spec.head.empty()) return trunk;
  ASSIGN_OR_RETURN(trunk.head_, loader.Linear({spec.head}));
  return trunk;
}

absl::Status DecoderTrunk::RecordCache(ExecContext& ctx, StageTap& tap, uint32_t layer,
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

absl::Status DecoderTrunk::Derive(ExecContext& ctx, StageTap& tap, uint32_t n,
                                  const TrunkBatch& batch, const Scratch& s) const {
  const int64_t width = spec_.kv_width();
  const auto part = [&](int64_t i) { return s.kv.Columns(i * width, (i + 1) * width); };
  for (size_t i = 0; i < derived_.size(); ++i) {
    if (spec_.derived[i].layer != n) continue;
    const uint32_t to = spec_.layers + static_cast<uint32_t>(i);
    const TensorView& slots = batch.paged.row_slot;
    RETURN_IF_ERROR(ctx.ops.GatherKv(ctx.stream, *batch.kv, n, slots, part(0), part(1)));
    LinearArgs linear;
    linear.weight = derived_[i].k.get();
    linear.x = part(0);
    linear.y = part(2);
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, linear));
    linear.weight = derived_[i].v.get();
    linear.x = part(1);
    linear.y = part(3);
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, linear));
    RETURN_IF_ERROR(ctx.ops.ScatterKv(ctx.stream, *batch.kv, to, slots, part(2), part(3)));
    RETURN_IF_ERROR(RecordCache(ctx, tap, to, batch));
  }
  return absl::OkStatus();
}

absl::Status DecoderTrunk::Attend(ExecContext& ctx, StageTap& tap, uint32_t n,
                                  const TrunkBatch& batch, const Scratch& s,
                                  bool append_only) const {
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
  RETURN_IF_ERROR(Derive(ctx, tap, n, batch, s));
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

absl::Status DecoderTrunk::Mlp(ExecContext& ctx, const Layer& layer, const Scratch& s,
                               const TensorView& x, const TensorView& out) const {
  const TensorView norm = s.norm.Rows(0, x.dim(0));
  const TensorView mlp = s.mlp.Rows(0, x.dim(0));
  RETURN_IF_ERROR(ctx.ops.RmsNorm(ctx.stream, x, Gamma(layer.norm2), norm, spec_.epsilon));
  GatedLinearArgs gate_up;
  gate_up.weight = layer.gate_up.get();
  gate_up.x = norm;
  gate_up.y = mlp;
  gate_up.activation = spec_.activation;
  RETURN_IF_ERROR(ctx.ops.GatedLinear(ctx.stream, gate_up));
  LinearArgs down;
  down.weight = layer.down.get();
  down.x = mlp;
  down.y = out;
  down.residual = x;
  return ctx.ops.Linear(ctx.stream, down);
}

absl::Status DecoderTrunk::Head(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch,
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

absl::Status DecoderTrunk::Embed(ExecContext& ctx, const TrunkBatch& batch, const Extra& extra,
                                 const TensorView& x) const {
  const auto table_rows = spec_.vocab + static_cast<int64_t>(spec_.unscaled.size());
  const TensorView table = table_->View(table_dtype_, {table_rows, spec_.hidden});
  RETURN_IF_ERROR(
      ctx.ops.Embed(ctx.stream, table, batch.tokens, batch.token_index, spec_.embedding_scale, x));
  RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, batch.embeddings, batch.embedding_index, x));
  if (extra.states.data != nullptr) {
    RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, extra.states, batch.state_index, x));
  }
  if (spec_.state.empty() || batch.states.rank == 0) return absl::OkStatus();
  const ArenaScope scope(ctx.arena);
  ASSIGN_OR_RETURN(const TensorView states,
                   ctx.arena.New(DType::kF32, {batch.states.dim(0), spec_.hidden}));
  RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, state_.Args(batch.states, states)));
  return ctx.ops.GatherRows(ctx.stream, states, batch.state_index, x);
}

absl::Status DecoderTrunk::Forward(ExecContext& ctx, StageTap& tap, const TrunkBatch& batch,
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
  if (!derived_.empty()) {
    ASSIGN_OR_RETURN(s.kv, ctx.arena.New(compute_, {rows, int64_t{4} * spec_.kv_width()}));
  }
  s.norm = norm.Rows(0, rows);

  if (run.begin == 0) {
    RETURN_IF_ERROR(Embed(ctx, batch, extra, s.x));
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
    const bool tapped =
        !spec_.fills_cache_only() && (tap.Wants("lm.final_norm.in") || tap.Wants("lm.final_norm") ||
                                      (last == 0 && tap.Wants("lm.layer0.out")));
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
