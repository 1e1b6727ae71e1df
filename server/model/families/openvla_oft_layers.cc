#include "model/families/openvla_oft_layers.h"

#include <numeric>
#include <utility>

#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {
namespace {

constexpr std::string_view kHead = "action_head.model.";
constexpr float kEpsilon = 1e-5F;  // of every LayerNorm: torch's default

struct Affine {
  std::unique_ptr<PackedWeight> weight;
  std::unique_ptr<Buffer> bias;

  static absl::StatusOr<Affine> Load(WeightLoader& loader, const std::string& name) {
    Affine out;
    ASSIGN_OR_RETURN(out.weight, loader.Linear({StrCat(name, ".weight")}));
    ASSIGN_OR_RETURN(out.bias, loader.Vector({StrCat(name, ".bias")}));
    return out;
  }
  LinearArgs Args(const TensorView& x, const TensorView& y, Activation activation) const {
    LinearArgs args;
    args.weight = weight.get();
    args.x = x;
    args.y = y;
    args.bias = bias->View(DType::kF32, {weight->n()});
    args.activation = activation;
    return args;
  }
};

struct Norm {
  std::unique_ptr<Buffer> gamma, beta;

  static absl::StatusOr<Norm> Load(WeightLoader& loader, const std::string& name) {
    Norm out;
    ASSIGN_OR_RETURN(out.gamma, loader.Vector({StrCat(name, ".weight")}));
    ASSIGN_OR_RETURN(out.beta, loader.Vector({StrCat(name, ".bias")}));
    return out;
  }
  absl::Status Run(ExecContext& ctx, const TensorView& x, const TensorView& y) const {
    return ctx.ops.LayerNorm(ctx.stream, x, gamma->View(DType::kF32, {x.dim(1)}),
                             beta->View(DType::kF32, {x.dim(1)}), y, kEpsilon);
  }
};

class Proprio final : public OftProprio {
 public:
  explicit Proprio(DType compute) : compute_(compute) {}
  absl::Status Load(WeightLoader& heads) {
    ASSIGN_OR_RETURN(fc1_, Affine::Load(heads, "proprio_projector.fc1"));
    ASSIGN_OR_RETURN(fc2_, Affine::Load(heads, "proprio_projector.fc2"));
    return absl::OkStatus();
  }
  absl::Status Run(ExecContext& ctx, const TensorView& states,
                   const TensorView& out) const override {
    const ArenaScope scope(ctx.arena);
    ASSIGN_OR_RETURN(const TensorView middle, ctx.arena.New(compute_, {out.dim(0), out.dim(1)}));
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, fc1_.Args(states, middle, Activation::kGeluErf)));
    return ctx.ops.Linear(ctx.stream, fc2_.Args(middle, out, Activation::kNone));
  }

 private:
  DType compute_;
  Affine fc1_, fc2_;
};

class RegressionHead final : public OftHead {
 public:
  RegressionHead(DType compute, uint32_t width) : compute_(compute), width_(width) {}
  absl::Status Load(WeightLoader& heads, uint32_t blocks);
  absl::Status Run(ExecContext& ctx, const TensorView& hidden,
                   const TensorView& actions) const override;

 private:
  struct Block {
    Norm norm;
    Affine fc;
  };
  DType compute_;
  uint32_t width_;
  Norm norm1_, norm2_;
  Affine fc1_, fc2_;
  std::vector<Block> blocks_;
};

absl::Status RegressionHead::Load(WeightLoader& heads, uint32_t blocks) {
  const auto name = [](std::string_view suffix) { return StrCat(kHead, suffix); };
  ASSIGN_OR_RETURN(norm1_, Norm::Load(heads, name("layer_norm1")));
  ASSIGN_OR_RETURN(fc1_, Affine::Load(heads, name("fc1")));
  for (uint32_t i = 0; i < blocks; ++i) {
    const std::string ffn = name(StrCat("mlp_resnet_blocks.", i, ".ffn."));
    Block block;
    ASSIGN_OR_RETURN(block.norm, Norm::Load(heads, ffn + "0"));
    ASSIGN_OR_RETURN(block.fc, Affine::Load(heads, ffn + "1"));
    blocks_.push_back(std::move(block));
  }
  ASSIGN_OR_RETURN(norm2_, Norm::Load(heads, name("layer_norm2")));
  ASSIGN_OR_RETURN(fc2_, Affine::Load(heads, name("fc2")));
  return absl::OkStatus();
}

absl::Status RegressionHead::Run(ExecContext& ctx, const TensorView& hidden,
                                 const TensorView& actions) const {
  const ArenaScope scope(ctx.arena);
  const int64_t rows = actions.dim(0);
  const int64_t wide = actions.dim(1) * hidden.dim(1);
  ASSIGN_OR_RETURN(const TensorView places, ctx.arena.New(compute_, {rows, wide}));
  ASSIGN_OR_RETURN(const TensorView x, ctx.arena.New(DType::kF32, {rows, width_}));
  ASSIGN_OR_RETURN(const TensorView norm, ctx.arena.New(compute_, {rows, width_}));
  RETURN_IF_ERROR(norm1_.Run(ctx, hidden.Reshape({rows, wide}), places));
  RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, fc1_.Args(places, x, Activation::kRelu)));
  for (const Block& block : blocks_) {
    RETURN_IF_ERROR(block.norm.Run(ctx, x, norm));
    LinearArgs fc = block.fc.Args(norm, x, Activation::kRelu);
    fc.residual = x;
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, fc));
  }
  RETURN_IF_ERROR(norm2_.Run(ctx, x, norm));
  return ctx.ops.Linear(ctx.stream, fc2_.Args(norm, actions, Activation::kNone));
}

class TokenHead final : public OftHead {
 public:
  explicit TokenHead(uint32_t read_rows) : read_rows_(read_rows) {}
  absl::Status Load(WeightLoader& checkpoint, Backend& backend, Stream& stream,
                    const OpenVlaOftConfig& config);
  absl::Status Run(ExecContext& ctx, const TensorView& hidden,
                   const TensorView& actions) const override;

 private:
  int64_t read_rows_;
  std::unique_ptr<PackedWeight> weight_;
  std::unique_ptr<Buffer> ids_as_floats_;  // [vocabulary, 1]
  // Of a chunk's greedy samples, [read_rows] each.
  std::unique_ptr<Buffer> index_;  // I32: 0, 1, ...
  std::unique_ptr<Buffer> zeros_;  // of 8 bytes
  std::unique_ptr<Buffer> ones_;   // F32
};

absl::Status TokenHead::Load(WeightLoader& checkpoint, Backend& backend, Stream& stream,
                             const OpenVlaOftConfig& config) {
  ASSIGN_OR_RETURN(weight_, checkpoint.Linear({config.lm_head}));
  const auto upload = [&](auto values, DType dtype) {
    const auto count = static_cast<int64_t>(values.size());
    return Upload(backend, stream, TensorView::Dense(values.data(), dtype, MemKind::kHost, {count}),
                  dtype);
  };
  std::vector<float> ids(static_cast<size_t>(weight_->n()));
  std::iota(ids.begin(), ids.end(), 0.0F);  // exact: a vocabulary has fewer than 2^24 ids
  ASSIGN_OR_RETURN(ids_as_floats_, upload(std::move(ids), DType::kF32));
  std::vector<int32_t> index(static_cast<size_t>(read_rows_));
  std::iota(index.begin(), index.end(), 0);
  ASSIGN_OR_RETURN(index_, upload(std::move(index), DType::kI32));
  ASSIGN_OR_RETURN(zeros_,
                   upload(std::vector<int64_t>(static_cast<size_t>(read_rows_)), DType::kI64));
  ASSIGN_OR_RETURN(ones_,
                   upload(std::vector<float>(static_cast<size_t>(read_rows_), 1), DType::kF32));
  return absl::OkStatus();
}

absl::Status TokenHead::Run(ExecContext& ctx, const TensorView& hidden,
                            const TensorView& actions) const {
  const ArenaScope scope(ctx.arena);
  ASSIGN_OR_RETURN(const TensorView logits, ctx.arena.New(DType::kF32, {read_rows_, weight_->n()}));
  ASSIGN_OR_RETURN(const TensorView ids, ctx.arena.New(DType::kI32, {read_rows_}));
  const TensorView index = index_->View(DType::kI32, {read_rows_});
  const TensorView floats = actions.Reshape({hidden.dim(0), 1});
  SampleArgs greedy;
  greedy.logits = logits;
  greedy.source_row = index;
  greedy.temperature = zeros_->View(DType::kF32, {read_rows_});
  greedy.top_p = ones_->View(DType::kF32, {read_rows_});
  greedy.seed = zeros_->View(DType::kI64, {read_rows_});
  greedy.draw = zeros_->View(DType::kI32, {read_rows_});
  greedy.dest = index;
  greedy.tokens = ids;
  // One chunk after another: the logits are by far the most that is held.
  for (int64_t row = 0; row < hidden.dim(0); row += read_rows_) {
    LinearArgs head;
    head.weight = weight_.get();
    head.x = hidden.Rows(row, row + read_rows_);
    head.y = logits;
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, head));
    RETURN_IF_ERROR(ctx.ops.Sample(ctx.stream, greedy));
    RETURN_IF_ERROR(ctx.ops.Embed(ctx.stream, ids_as_floats_->View(DType::kF32, {weight_->n(), 1}),
                                  ids, index, 1.0F, floats.Rows(row, row + read_rows_)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<OftProprio>> LoadProprio(WeightLoader& heads) {
  auto proprio = std::make_unique<Proprio>(heads.compute());
  RETURN_IF_ERROR(proprio->Load(heads));
  return proprio;
}

absl::StatusOr<std::unique_ptr<OftHead>> LoadRegressionHead(WeightLoader& heads,
                                                            const OpenVlaOftConfig& config) {
  auto head = std::make_unique<RegressionHead>(heads.compute(), config.head_width);
  RETURN_IF_ERROR(head->Load(heads, config.head_blocks));
  return head;
}

absl::StatusOr<std::unique_ptr<OftHead>> LoadTokenHead(WeightLoader& checkpoint, Backend& backend,
                                                       Stream& stream,
                                                       const OpenVlaOftConfig& config) {
  auto head = std::make_unique<TokenHead>(config.read_rows());
  RETURN_IF_ERROR(head->Load(checkpoint, backend, stream, config));
  return head;
}

}  // namespace saccade
