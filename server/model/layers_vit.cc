#include "model/layers_vit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {

namespace {

// What the parts of a tower are called in a state dict.
struct PartNames {
  std::string_view positions, patches, blocks, norm1, norm2, proj;
  std::vector<std::string_view> qkv;
};

const PartNames& NamesOf(const VitSpec& spec) {
  static const PartNames timm = {"pos_embed", "patch_embed.proj", "blocks.",   "norm1",
                                 "norm2",     "attn.proj",        {"attn.qkv"}};
  static const PartNames siglip = {"embeddings.position_embedding.weight",
                                   "embeddings.patch_embedding",
                                   "encoder.layers.",
                                   "layer_norm1",
                                   "layer_norm2",
                                   "self_attn.out_proj",
                                   {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}};
  return spec.names == VitNames::kTimm ? timm : siglip;
}

}  // namespace

std::vector<TensorSpec> VitSpec::Tensors() const {
  const int64_t w = width;
  const int64_t p = patch_size;
  std::vector<TensorSpec> out;
  const auto add = [&](std::string_view name, std::vector<int64_t> dims,
                       TensorUse use = TensorUse::kVector) {
    out.push_back({StrCat(prefix, name), std::move(dims), use});
  };
  const auto linear = [&](const std::string& name, int64_t n, int64_t k) {
    add(StrCat(name, ".weight"), {n, k}, TensorUse::kMatrix);
    add(StrCat(name, ".bias"), {n});
  };
  if (class_tokens != 0) add("cls_token", {1, class_tokens, w});
  if (register_tokens != 0) add("reg_token", {1, register_tokens, w});
  const PartNames& part = NamesOf(*this);
  const int64_t places = positions.empty() ? patches() : position_rows;
  add(part.positions, names == VitNames::kTimm ? std::vector<int64_t>{1, places, w}
                                               : std::vector<int64_t>{places, w});
  add(StrCat(part.patches, ".weight"), {w, 3, p, p}, TensorUse::kMatrix);
  add(StrCat(part.patches, ".bias"), {w});
  for (uint32_t i = 0; i < blocks; ++i) {
    const std::string block = StrCat(part.blocks, i, ".");
    for (const std::string_view norm : {part.norm1, part.norm2}) {
      add(StrCat(block, norm, ".weight"), {w});
      add(StrCat(block, norm, ".bias"), {w});
    }
    const auto count = static_cast<int64_t>(part.qkv.size());
    for (const std::string_view name : part.qkv) linear(StrCat(block, name), 3 / count * w, w);
    linear(StrCat(block, part.proj), w, w);
    linear(StrCat(block, "mlp.fc1"), mlp, w);
    linear(StrCat(block, "mlp.fc2"), w, mlp);
    if (layer_scale) {
      add(StrCat(block, "ls1.scale_factor"), {w});
      add(StrCat(block, "ls2.scale_factor"), {w});
    }
  }
  if (final_norm) {
    add("post_layernorm.weight", {w});
    add("post_layernorm.bias", {w});
  }
  return out;
}

std::vector<LayerCost> VitSpec::LayerCosts() const {
  const uint64_t w = width;
  const uint64_t block = 4 * w * w + 2 * w * mlp;
  std::vector<LayerCost> out(blocks, LayerCost{block, block});
  out.front().weights += w * patch_values();
  out.front().row_weights += w * patch_values();
  return out;
}

size_t VitSpec::ParkingBytes(uint32_t frames) const {
  return ArenaBytes(uint64_t{frames} * rows(), width, DType::kF32);
}

size_t VitSpec::WorkspaceBytes(uint32_t frames, DType compute) const {
  const uint64_t r = uint64_t{frames} * rows();
  const size_t block = ArenaBytes(r, width, compute) + ArenaBytes(r, uint64_t{3} * width, compute) +
                       ArenaBytes(r, width, compute) + ArenaBytes(r, mlp, compute);
  const size_t patch_rows = ArenaBytes(uint64_t{frames} * patches(), patch_values(), compute);
  return ArenaBytes(r, width, DType::kF32) + std::max(block, patch_rows);
}

absl::StatusOr<VitTower> VitTower::Load(WeightLoader& loader, const VitSpec& spec) {
  VitTower tower(spec, loader.compute());
  const auto name = [&](std::string_view suffix) { return StrCat(spec.prefix, suffix); };
  const PartNames& names = NamesOf(spec);
  ASSIGN_OR_RETURN(tower.patch_weight_, loader.Linear({name(StrCat(names.patches, ".weight"))}));
  ASSIGN_OR_RETURN(tower.patch_bias_, loader.Vector({name(StrCat(names.patches, ".bias"))}));
  if (spec.positions.empty()) {
    ASSIGN_OR_RETURN(tower.positions_, loader.Vector({name(names.positions)}));
  } else {
    ASSIGN_OR_RETURN(tower.positions_, loader.Rows(name(names.positions), spec.positions));
  }
  if (spec.class_tokens != 0 && spec.register_tokens != 0) {
    ASSIGN_OR_RETURN(tower.prefix_tokens_, loader.Vector({name("cls_token"), name("reg_token")}));
  } else if (spec.class_tokens != 0) {
    ASSIGN_OR_RETURN(tower.prefix_tokens_, loader.Vector({name("cls_token")}));
  } else if (spec.register_tokens != 0) {
    ASSIGN_OR_RETURN(tower.prefix_tokens_, loader.Vector({name("reg_token")}));
  }
  for (uint32_t i = 0; i < spec.blocks; ++i) {
    const auto part = [&](std::string_view suffix) {
      return StrCat(spec.prefix, names.blocks, i, ".", suffix);
    };
    const auto vector = [&](std::string_view suffix, std::string_view kind) {
      return loader.Vector({part(StrCat(suffix, kind))});
    };
    Block b;
    ASSIGN_OR_RETURN(b.norm1_gamma, vector(names.norm1, ".weight"));
    ASSIGN_OR_RETURN(b.norm1_beta, vector(names.norm1, ".bias"));
    std::vector<std::string> qkv;
    for (const std::string_view one : names.qkv) qkv.push_back(part(one));
    ASSIGN_OR_RETURN(b.qkv, loader.WithBias(qkv));
    ASSIGN_OR_RETURN(b.proj, loader.WithBias(part(names.proj)));
    ASSIGN_OR_RETURN(b.norm2_gamma, vector(names.norm2, ".weight"));
    ASSIGN_OR_RETURN(b.norm2_beta, vector(names.norm2, ".bias"));
    ASSIGN_OR_RETURN(b.fc1, loader.WithBias(part("mlp.fc1")));
    ASSIGN_OR_RETURN(b.fc2, loader.WithBias(part("mlp.fc2")));
    if (spec.layer_scale) {
      ASSIGN_OR_RETURN(b.scale1, loader.Vector({part("ls1.scale_factor")}));
      ASSIGN_OR_RETURN(b.scale2, loader.Vector({part("ls2.scale_factor")}));
    }
    tower.blocks_.push_back(std::move(b));
  }
  if (spec.final_norm) {
    ASSIGN_OR_RETURN(tower.final_gamma_, loader.Vector({name("post_layernorm.weight")}));
    ASSIGN_OR_RETURN(tower.final_beta_, loader.Vector({name("post_layernorm.bias")}));
  }
  return tower;
}

TensorView VitTower::Vec(const std::unique_ptr<Buffer>& buffer) const {
  return buffer->View(DType::kF32, {static_cast<int64_t>(buffer->size() / sizeof(float))});
}

absl::Status VitTower::Embed(ExecContext& ctx, StageTap& tap, const TensorView& rgb,
                             const TensorView& h) const {
  const ArenaScope scope(ctx.arena);
  const int64_t frames = rgb.dim(0);
  const int64_t patches = spec_.patches();
  const int64_t prefix = spec_.prefix_tokens();
  const int64_t rows = spec_.rows();
  if (tap.Wants(spec_.pixels_tap)) {
    ASSIGN_OR_RETURN(const TensorView pixels,
                     tap.Scratch(DType::kF32, {frames * patches, spec_.patch_values()}));
    RETURN_IF_ERROR(
        ctx.ops.Patchify(ctx.stream, rgb, spec_.patch_size, spec_.mean, spec_.std, pixels));
    RETURN_IF_ERROR(tap.Record(spec_.pixels_tap, pixels));
  }
  ASSIGN_OR_RETURN(const TensorView x,
                   ctx.arena.New(compute_, {frames * patches, spec_.patch_values()}));
  RETURN_IF_ERROR(ctx.ops.Patchify(ctx.stream, rgb, spec_.patch_size, spec_.mean, spec_.std, x));
  LinearArgs args;
  args.weight = patch_weight_.get();
  args.bias = Vec(patch_bias_);
  const std::string embed_name = spec_.tap + ".patch_embed";
  if (tap.Wants(embed_name)) {
    ASSIGN_OR_RETURN(args.y, tap.Scratch(DType::kF32, {frames * patches, spec_.width}));
    args.x = x;
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
    RETURN_IF_ERROR(tap.Record(embed_name, args.y));
  }
  // Frame by frame: the position table is one frame long, and prefix rows lie between frames.
  args.residual = positions_->View(DType::kF32, {patches, spec_.width});
  for (int64_t g = 0; g < frames; ++g) {
    args.x = x.Rows(g * patches, (g + 1) * patches);
    args.y = h.Rows(g * rows + prefix, (g + 1) * rows);
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
    if (prefix != 0) {
      RETURN_IF_ERROR(ctx.stream.Copy(h.Rows(g * rows, g * rows + prefix),
                                      prefix_tokens_->View(DType::kF32, {prefix, spec_.width})));
    }
  }
  return absl::OkStatus();
}

absl::Status VitTower::RunBlock(ExecContext& ctx, StageTap& tap, const Block& block,
                                const Scratch& s, bool tapped) const {
  const Ops& ops = ctx.ops;
  const std::string stage = spec_.tap + ".block0";
  // The value before layer scale and residual, which the fused op of the serving path never stores.
  const auto record_branch = [&](const std::string& name, LinearArgs args) -> absl::Status {
    if (!tapped || !tap.Wants(name)) return absl::OkStatus();
    ASSIGN_OR_RETURN(args.y, tap.Scratch(DType::kF32, {s.h.dim(0), s.h.dim(1)}));
    args.scale.reset();
    args.residual.reset();
    RETURN_IF_ERROR(ops.Linear(ctx.stream, args));
    return tap.Record(name, args.y);
  };
  if (tapped) RETURN_IF_ERROR(tap.Record(stage + ".in", s.h));

  RETURN_IF_ERROR(ops.LayerNorm(ctx.stream, s.h, Vec(block.norm1_gamma), Vec(block.norm1_beta),
                                s.norm, spec_.epsilon));
  RETURN_IF_ERROR(ops.Linear(ctx.stream, block.qkv.Args(s.norm, s.qkv)));
  DenseAttentionArgs attention;
  attention.qkv = s.qkv;
  attention.out = s.attention;
  attention.group_rows = spec_.rows();
  attention.heads = spec_.heads;
  const auto head_dim = spec_.width / spec_.heads;
  attention.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  RETURN_IF_ERROR(ops.DenseAttention(ctx.stream, attention));
  LinearArgs proj = block.proj.Args(s.attention, s.h);
  if (block.scale1 != nullptr) proj.scale = Vec(block.scale1);
  proj.residual = s.h;
  RETURN_IF_ERROR(record_branch(stage + ".attn", proj));
  RETURN_IF_ERROR(ops.Linear(ctx.stream, proj));

  RETURN_IF_ERROR(ops.LayerNorm(ctx.stream, s.h, Vec(block.norm2_gamma), Vec(block.norm2_beta),
                                s.norm, spec_.epsilon));
  LinearArgs fc1 = block.fc1.Args(s.norm, s.mlp);
  fc1.activation = spec_.activation;
  RETURN_IF_ERROR(ops.Linear(ctx.stream, fc1));
  LinearArgs fc2 = block.fc2.Args(s.mlp, s.h);
  if (block.scale2 != nullptr) fc2.scale = Vec(block.scale2);
  fc2.residual = s.h;
  RETURN_IF_ERROR(record_branch(stage + ".mlp", fc2));
  RETURN_IF_ERROR(ops.Linear(ctx.stream, fc2));
  return tapped ? tap.Record(stage + ".out", s.h) : absl::OkStatus();
}

absl::Status VitTower::Run(ExecContext& ctx, StageTap& tap, Arena& kept, uint32_t begin,
                           uint32_t end, const TensorView& rgb, const TensorView& out) const {
  const ArenaScope kept_scope(kept);
  const ArenaScope scope(ctx.arena);
  const int64_t frames = rgb.dim(0);
  const int64_t total = frames * spec_.rows();
  Scratch s;
  ASSIGN_OR_RETURN(s.h, kept.New(DType::kF32, {total, spec_.width}));
  if (begin == 0) RETURN_IF_ERROR(Embed(ctx, tap, rgb, s.h));
  ASSIGN_OR_RETURN(s.norm, ctx.arena.New(compute_, {total, spec_.width}));
  ASSIGN_OR_RETURN(s.qkv, ctx.arena.New(compute_, {total, int64_t{3} * spec_.width}));
  ASSIGN_OR_RETURN(s.attention, ctx.arena.New(compute_, {total, spec_.width}));
  ASSIGN_OR_RETURN(s.mlp, ctx.arena.New(compute_, {total, spec_.mlp}));
  for (uint32_t i = begin; i < end; ++i) {
    RETURN_IF_ERROR(RunBlock(ctx, tap, blocks_[i], s, i == 0));
  }
  if (end < blocks_.size()) return absl::OkStatus();
  const int64_t patches = spec_.patches();
  for (int64_t g = 0; g < frames; ++g) {
    const TensorView from = s.h.Rows(g * spec_.rows() + spec_.prefix_tokens(),
                                     (g + 1) * static_cast<int64_t>(spec_.rows()));
    const TensorView to = out.Rows(g * patches, (g + 1) * patches);
    if (spec_.final_norm) {
      RETURN_IF_ERROR(ctx.ops.LayerNorm(ctx.stream, from, Vec(final_gamma_), Vec(final_beta_), to,
                                        spec_.epsilon));
    } else if (out.dtype == DType::kF32) {
      RETURN_IF_ERROR(ctx.stream.Copy(to, from));
    } else {
      RETURN_IF_ERROR(ctx.ops.Convert(ctx.stream, from, to));
    }
  }
  return absl::OkStatus();
}

}  // namespace saccade
