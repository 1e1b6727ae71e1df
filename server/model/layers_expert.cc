#include "model/layers_expert.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {

std::vector<TensorSpec> ExpertSpec::Tensors() const {
  const int64_t h = hidden;
  const int64_t q = int64_t{heads} * head_dim;
  const int64_t kv = int64_t{kv_heads} * head_dim;
  const int64_t i = intermediate;
  std::vector<TensorSpec> out;
  const auto matrix = [&](const std::string& name, int64_t n, int64_t k) {
    out.push_back({StrCat(name, ".weight"), {n, k}, TensorUse::kMatrix});
  };
  const auto with_bias = [&](const std::string& name, int64_t n, int64_t k, TensorUse use) {
    out.push_back({StrCat(name, ".weight"), {n, k}, use});
    out.push_back({StrCat(name, ".bias"), {n}, TensorUse::kVector});
  };
  const auto norm = [&](const std::string& name) {
    if (adaptive) {
      with_bias(StrCat(name, ".dense"), 3 * h, h, TensorUse::kMatrix);
    } else {
      out.push_back({StrCat(name, ".weight"), {h}, TensorUse::kVector});
    }
  };
  with_bias(StrCat(ends, "action_in_proj"), h, action_width, TensorUse::kHead);
  with_bias(StrCat(ends, "action_out_proj"), action_width, h, TensorUse::kHead);
  with_bias(StrCat(time_mlp, "_in"), h, adaptive ? h : 2 * h, TensorUse::kHead);
  with_bias(StrCat(time_mlp, "_out"), h, h, TensorUse::kHead);
  if (state_width > 0) with_bias(StrCat(ends, "state_proj"), h, state_width, TensorUse::kHead);
  for (uint32_t n = 0; n < layers; ++n) {
    const std::string layer = StrCat(prefix, "layers.", n, ".");
    norm(StrCat(layer, "input_layernorm"));
    matrix(StrCat(layer, "self_attn.q_proj"), q, h);
    if (cross[n] < 0) {
      matrix(StrCat(layer, "self_attn.k_proj"), kv, h);
      matrix(StrCat(layer, "self_attn.v_proj"), kv, h);
    }
    matrix(StrCat(layer, "self_attn.o_proj"), h, q);
    norm(StrCat(layer, "post_attention_layernorm"));
    matrix(StrCat(layer, "mlp.gate_proj"), i, h);
    matrix(StrCat(layer, "mlp.up_proj"), i, h);
    matrix(StrCat(layer, "mlp.down_proj"), h, i);
  }
  norm(StrCat(prefix, "norm"));
  return out;
}

std::vector<LayerCost> ExpertSpec::LayerCosts() const {
  const uint64_t h = hidden;
  const uint64_t q = uint64_t{heads} * head_dim;
  std::vector<LayerCost> out;
  for (uint32_t n = 0; n < layers; ++n) {
    const uint64_t kv = cross[n] < 0 ? uint64_t{kv_heads} * head_dim : 0;
    const uint64_t all = h * (q + 2 * kv) + q * h + 3 * h * intermediate;
    // What modulates the norms is read, but multiplied with times and not with rows.
    out.push_back({all + (adaptive ? 6 * h * h : 0), all});
  }
  const uint64_t in = h * action_width + (adaptive ? 0 : 3 * h * h);
  out.front().weights += in + (adaptive ? 2 * h * h : 0);
  out.front().row_weights += in;
  out.back().weights += h * action_width + (adaptive ? 3 * h * h : 0);
  out.back().row_weights += h * action_width;
  return out;
}

namespace {
// Flow times of so many items: of each its own, and that of its committed actions.
uint64_t Times(uint32_t items) { return uint64_t{2} * items; }
}  // namespace

size_t ExpertSpec::ParkingBytes(uint32_t items) const {
  return ArenaBytes(uint64_t{items} * rows(), hidden, DType::kF32) +
         (adaptive ? ArenaBytes(Times(items), hidden, DType::kF32) : 0);
}

size_t ExpertSpec::WorkspaceBytes(uint32_t items, DType compute) const {
  constexpr DType kF32 = DType::kF32;
  const uint64_t m = uint64_t{items} * rows();
  const uint64_t a = uint64_t{items} * horizon;
  const uint64_t q = uint64_t{heads} * head_dim;
  size_t layer = ArenaBytes(m, hidden, compute) + 2 * ArenaBytes(m, q, compute) +
                 ArenaBytes(m, intermediate, compute);
  if (adaptive) {
    layer += ArenaBytes(Times(items), uint64_t{3} * hidden, kF32) + ArenaBytes(m, hidden, kF32);
  }
  const size_t in = ArenaBytes(a, uint64_t{2} * hidden, kF32) + 2 * ArenaBytes(a, hidden, kF32) +
                    ArenaBytes(Times(items), hidden, kF32);
  const size_t out = 2 * ArenaBytes(a, hidden, kF32) + ArenaBytes(a, action_width, kF32);
  return ParkingBytes(items) + layer + std::max(in, out);
}

absl::StatusOr<ActionExpert::Norm> ActionExpert::LoadNorm(WeightLoader& loader,
                                                          const std::string& name) const {
  Norm norm;
  if (spec_.adaptive) {
    ASSIGN_OR_RETURN(norm.dense, loader.WithBias(StrCat(name, ".dense")));
  } else {
    ASSIGN_OR_RETURN(norm.gamma,
                     loader.Vector({StrCat(name, ".weight")}, spec_.unit_norm ? 1.0F : 0.0F));
  }
  return norm;
}

absl::StatusOr<ActionExpert> ActionExpert::Load(WeightLoader& loader, const ExpertSpec& spec) {
  ActionExpert expert(spec, loader.compute());
  const auto end = [&](std::string_view name) {
    return loader.WithBias(StrCat(spec.ends, name), DType::kF32);
  };
  ASSIGN_OR_RETURN(expert.action_in_, end("action_in_proj"));
  ASSIGN_OR_RETURN(expert.action_out_, end("action_out_proj"));
  ASSIGN_OR_RETURN(expert.time_in_, loader.WithBias(StrCat(spec.time_mlp, "_in"), DType::kF32));
  ASSIGN_OR_RETURN(expert.time_out_, loader.WithBias(StrCat(spec.time_mlp, "_out"), DType::kF32));
  if (spec.state_width > 0) {
    ASSIGN_OR_RETURN(expert.state_, end("state_proj"));
  }
  for (uint32_t n = 0; n < spec.layers; ++n) {
    const std::string prefix = StrCat(spec.prefix, "layers.", n, ".");
    const auto part = [&](std::string_view suffix) { return StrCat(prefix, suffix, ".weight"); };
    Layer layer;
    ASSIGN_OR_RETURN(layer.norm1, expert.LoadNorm(loader, StrCat(prefix, "input_layernorm")));
    if (spec.cross[n] < 0) {
      ASSIGN_OR_RETURN(layer.qkv, loader.Linear({part("self_attn.q_proj"), part("self_attn.k_proj"),
                                                 part("self_attn.v_proj")}));
    } else {
      ASSIGN_OR_RETURN(layer.qkv, loader.Linear({part("self_attn.q_proj")}));
    }
    ASSIGN_OR_RETURN(layer.o, loader.Linear({part("self_attn.o_proj")}));
    ASSIGN_OR_RETURN(layer.norm2,
                     expert.LoadNorm(loader, StrCat(prefix, "post_attention_layernorm")));
    ASSIGN_OR_RETURN(layer.gate_up, loader.Gated(part("mlp.gate_proj"), part("mlp.up_proj")));
    ASSIGN_OR_RETURN(layer.down, loader.Linear({part("mlp.down_proj")}));
    expert.layers_.push_back(std::move(layer));
  }
  ASSIGN_OR_RETURN(expert.final_norm_, expert.LoadNorm(loader, StrCat(spec.prefix, "norm")));
  return expert;
}

absl::Status ActionExpert::Embed(ExecContext& ctx, StageTap& tap, const DenoiseBatch& batch,
                                 const Scratch& s) const {
  const Ops& ops = ctx.ops;
  const ArenaScope scope(ctx.arena);
  const int64_t actions = batch.x.dim(0);
  const int64_t times = batch.time.dim(0);
  const int64_t h = spec_.hidden;
  RETURN_IF_ERROR(tap.Record("step.x_t", batch.x));
  RETURN_IF_ERROR(tap.Record("step.time_emb", batch.time));
  ASSIGN_OR_RETURN(const TensorView embedded, ctx.arena.New(DType::kF32, {actions, h}));
  if (spec_.adaptive) {
    RETURN_IF_ERROR(ops.Linear(ctx.stream, action_in_.Args(batch.x, embedded)));
    ASSIGN_OR_RETURN(const TensorView inner, ctx.arena.New(DType::kF32, {times, h}));
    LinearArgs in = time_in_.Args(batch.time, inner);
    in.activation = Activation::kSilu;
    RETURN_IF_ERROR(ops.Linear(ctx.stream, in));
    LinearArgs out = time_out_.Args(inner, s.cond);
    out.activation = Activation::kSilu;
    RETURN_IF_ERROR(ops.Linear(ctx.stream, out));
    RETURN_IF_ERROR(tap.Record("step.adarms_cond", s.cond));
  } else {
    ASSIGN_OR_RETURN(const TensorView both, ctx.arena.New(DType::kF32, {actions, 2 * h}));
    ASSIGN_OR_RETURN(const TensorView inner, ctx.arena.New(DType::kF32, {actions, h}));
    RETURN_IF_ERROR(ops.Linear(ctx.stream, action_in_.Args(batch.x, both.Columns(0, h))));
    RETURN_IF_ERROR(
        ops.GatherRows(ctx.stream, batch.time, batch.action_time, both.Columns(h, 2 * h)));
    LinearArgs in = time_in_.Args(both, inner);
    in.activation = Activation::kSilu;
    RETURN_IF_ERROR(ops.Linear(ctx.stream, in));
    RETURN_IF_ERROR(ops.Linear(ctx.stream, time_out_.Args(inner, embedded)));
  }
  RETURN_IF_ERROR(ops.GatherRows(ctx.stream, embedded, batch.row_action, s.h));
  if (spec_.state_width > 0) {
    ASSIGN_OR_RETURN(const TensorView states, ctx.arena.New(DType::kF32, {batch.states.dim(0), h}));
    RETURN_IF_ERROR(ops.Linear(ctx.stream, state_.Args(batch.states, states)));
    RETURN_IF_ERROR(ops.GatherRows(ctx.stream, states, batch.row_state, s.h));
  }
  return tap.Record("step.suffix_embs", s.h);
}

absl::Status ActionExpert::Normalize(ExecContext& ctx, const Norm& norm, const Scratch& s,
                                     const TensorView& x, const TensorView& row_time,
                                     const TensorView& y) const {
  const int64_t h = spec_.hidden;
  if (!spec_.adaptive) {
    return ctx.ops.RmsNorm(ctx.stream, x, norm.gamma->View(DType::kF32, {h}), y, spec_.epsilon);
  }
  RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, norm.dense.Args(s.cond, s.modulation)));
  return ctx.ops.AdaRmsNorm(ctx.stream, x, s.modulation.Columns(0, h),
                            s.modulation.Columns(h, 2 * h), row_time, y, spec_.epsilon);
}

absl::Status ActionExpert::AddBranch(ExecContext& ctx, const PackedWeight& weight,
                                     const TensorView& x, const DenoiseBatch& batch,
                                     const Scratch& s) const {
  LinearArgs args;
  args.weight = &weight;
  args.x = x;
  args.y = s.h;
  if (!spec_.adaptive) {
    args.residual = s.h;
    return ctx.ops.Linear(ctx.stream, args);
  }
  args.y = s.branch;
  RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
  const int64_t h = spec_.hidden;
  return ctx.ops.AddGated(ctx.stream, s.branch, s.modulation.Columns(2 * h, 3 * h), batch.row_time,
                          s.h);
}

absl::Status ActionExpert::RunLayer(ExecContext& ctx, uint32_t n, const DenoiseBatch& batch,
                                    const Scratch& s) const {
  const Layer& layer = layers_[n];
  const bool cross = spec_.cross[n] >= 0;
  PagedBatch paged = batch.paged;
  RETURN_IF_ERROR(Normalize(ctx, layer.norm1, s, s.h, batch.row_time, s.norm));
  QkvRopeAppendArgs qkv;
  qkv.weight = layer.qkv.get();
  qkv.x = s.norm;
  qkv.q = s.q;
  qkv.q_heads = spec_.heads;
  qkv.rope_theta = spec_.rope_theta;
  PagedAttentionArgs attention;
  attention.q = s.q;
  attention.out = s.attention;
  attention.kv = batch.kv;
  attention.q_heads = spec_.heads;
  attention.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec_.head_dim)));
  if (cross) {
    paged.row_pos = batch.suffix_pos;
    paged.row_limit = batch.prefix_limit;
    attention.layer = static_cast<uint32_t>(spec_.cross[n]);
  } else {
    qkv.kv = batch.kv;
    qkv.layer = n;
    attention.layer = n;
  }
  qkv.batch = paged;
  attention.batch = paged;
  RETURN_IF_ERROR(ctx.ops.QkvRopeAppend(ctx.stream, qkv));
  RETURN_IF_ERROR(ctx.ops.PagedAttention(ctx.stream, attention));
  RETURN_IF_ERROR(AddBranch(ctx, *layer.o, s.attention, batch, s));

  RETURN_IF_ERROR(Normalize(ctx, layer.norm2, s, s.h, batch.row_time, s.norm));
  GatedLinearArgs gate_up;
  gate_up.weight = layer.gate_up.get();
  gate_up.x = s.norm;
  gate_up.y = s.mlp;
  gate_up.activation = spec_.activation;
  RETURN_IF_ERROR(ctx.ops.GatedLinear(ctx.stream, gate_up));
  return AddBranch(ctx, *layer.down, s.mlp, batch, s);
}

// The end of a step: what the rows of the actions became moves the latents.
absl::Status ActionExpert::Move(ExecContext& ctx, StageTap& tap, const DenoiseBatch& batch,
                                const Scratch& s) const {
  const ArenaScope scope(ctx.arena);
  const int64_t actions = batch.x.dim(0);
  ASSIGN_OR_RETURN(const TensorView rows, ctx.arena.New(DType::kF32, {actions, spec_.hidden}));
  ASSIGN_OR_RETURN(const TensorView norm, ctx.arena.New(DType::kF32, {actions, spec_.hidden}));
  ASSIGN_OR_RETURN(const TensorView v, ctx.arena.New(DType::kF32, {actions, spec_.action_width}));
  RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, s.h, batch.action_row, rows));
  RETURN_IF_ERROR(Normalize(ctx, final_norm_, s, rows, batch.action_time, norm));
  RETURN_IF_ERROR(tap.Record("step.suffix_out", norm));
  RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, action_out_.Args(norm, v)));
  RETURN_IF_ERROR(tap.Record("step.v_t", v));
  return ctx.ops.AddGated(ctx.stream, v, batch.dt, batch.action_time, batch.x);
}

absl::Status ActionExpert::Denoise(ExecContext& ctx, StageTap& tap,
                                   const DenoiseBatch& batch) const {
  const ArenaScope scope(ctx.arena);
  const int64_t rows = batch.paged.num_rows;
  if (rows == 0) return absl::OkStatus();
  if (batch.time.dim(0) > int64_t{2} * batch.num_items) {
    return absl::InvalidArgumentError("a denoise step has more than two flow times a sample");
  }
  const LayerRange& run = batch.layers;
  // What a later slice goes on with: laid out alike by every slice.
  std::optional<Arena> parked;
  if (run.parked != nullptr) parked.emplace(*run.parked);
  Arena& kept = parked.has_value() ? *parked : ctx.arena;
  const int64_t h = spec_.hidden;
  const int64_t times = batch.time.dim(0);
  const int64_t q_width = int64_t{spec_.heads} * spec_.head_dim;
  Scratch s;
  ASSIGN_OR_RETURN(s.h, kept.New(DType::kF32, {rows, h}));
  if (spec_.adaptive) {
    ASSIGN_OR_RETURN(s.cond, kept.New(DType::kF32, {times, h}));
    ASSIGN_OR_RETURN(s.modulation, ctx.arena.New(DType::kF32, {times, 3 * h}));
    ASSIGN_OR_RETURN(s.branch, ctx.arena.New(DType::kF32, {rows, h}));
  }
  ASSIGN_OR_RETURN(s.norm, ctx.arena.New(compute_, {rows, h}));
  ASSIGN_OR_RETURN(s.q, ctx.arena.New(compute_, {rows, q_width}));
  ASSIGN_OR_RETURN(s.attention, ctx.arena.New(compute_, {rows, q_width}));
  ASSIGN_OR_RETURN(s.mlp, ctx.arena.New(compute_, {rows, spec_.intermediate}));
  if (run.begin == 0) RETURN_IF_ERROR(Embed(ctx, tap, batch, s));
  for (uint32_t n = run.begin; n < std::min(spec_.layers, run.end); ++n) {
    RETURN_IF_ERROR(RunLayer(ctx, n, batch, s));
  }
  return run.Has(spec_.layers - 1) ? Move(ctx, tap, batch, s) : absl::OkStatus();
}

}  // namespace saccade
