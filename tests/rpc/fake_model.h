#pragma once
// FakeModel: a transformer of one layer with made-up weights on any backend. Small enough to run in
// microseconds, real enough that every answer depends on each frame, on the instruction and on the
// actions decoded so far. Frames are 4x4 pixels, a byte of the instruction is a token. A gate in
// Forward lets a test hold a step for as long as it wants.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/strings.h"
#include "model/model.h"
#include "tensor/arena.h"
#include "tensor/backend.h"

namespace saccade::testing {

// Open at first. While closed, whoever passes waits.
class Gate {
 public:
  void Close() {
    const std::lock_guard lock(mu_);
    open_ = false;
    passes_ = 0;
  }
  void Open() {
    {
      const std::lock_guard lock(mu_);
      open_ = true;
      passes_ = 0;
    }
    changed_.notify_all();
  }
  // Open for that many who pass from now on, then closed.
  void CloseAfter(int passes) {
    {
      const std::lock_guard lock(mu_);
      open_ = passes > 0;
      passes_ = passes;
    }
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mu_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
    ++passed_;
    if (passes_ > 0 && --passes_ == 0) open_ = false;
  }
  // Until someone stands before the closed gate.
  void AwaitWaiter() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }
  bool waiting() const {
    const std::lock_guard lock(mu_);
    return waiting_ > 0;
  }
  uint64_t passed() const {
    const std::lock_guard lock(mu_);
    return passed_;
  }

 private:
  mutable std::mutex mu_;
  std::condition_variable changed_;
  bool open_ = true;
  int passes_ = 0;  // until it closes by itself; 0: it does not
  int waiting_ = 0;
  uint64_t passed_ = 0;
};

struct FakeModelOptions {
  std::vector<std::string> cameras = {"front"};
  bool optional_cameras = false;  // any one of them is enough
  uint32_t float_cameras = 0;     // the last so many take normalised F32 pixels, the others U8
  std::vector<std::string> statistics = {"robot"};  // set i scales by 10^i
  uint32_t action_dim = 3;
  uint32_t state_dim = 0;
  bool writes_text = true;
  std::shared_ptr<Gate> gate = nullptr;         // passed once per trunk step; null: none
  std::shared_ptr<Gate> encode_gate = nullptr;  // passed once per encode step; null: none
  int32_t nan_token = -1;                       // its embedding is not finite; negative: none
  std::shared_ptr<Gate> decode_gate = nullptr;  // passed once per frame, before it is resized
  // What a trunk step ends with instead of running, when not OK; null: nothing.
  std::function<absl::Status()> fault = nullptr;
  // On whatever thread a prompt is built or a frame is resized; null: nothing.
  std::function<void()> on_prompt = nullptr;
  std::function<void()> on_frame = nullptr;
};

// A byte is a token; 256 begins a text, 257 ends one, and the action tokens have names.
class FakeTokenizer final : public Tokenizer {
 public:
  FakeTokenizer() {
    decoding_ = {.supported = true, .mark = "", .space = "", .bytes = true};
    for (int id = 0; id < kSize; ++id) {
      if (id < 256) {
        char name[8];
        std::snprintf(name, sizeof(name), "<0x%02X>", static_cast<unsigned>(id));
        names_.emplace_back(name);
      } else {
        names_.push_back(StrCat("a", id));
      }
    }
  }
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions&) const override {
    if (!IsValidUtf8(text)) return absl::InvalidArgumentError("text: not valid UTF-8");
    std::vector<int32_t> ids = {256};
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  std::optional<int32_t> TokenToId(std::string_view) const override { return std::nullopt; }
  std::optional<std::string_view> IdToToken(int32_t id) const override {
    if (id < 0 || id >= kSize) return std::nullopt;
    return names_[static_cast<size_t>(id)];
  }
  int32_t vocab_size() const override { return kSize; }
  bool IsControl(int32_t id) const override { return id == 256 || id == 257; }

 private:
  static constexpr int kSize = 288;
  std::vector<std::string> names_;
};

class FakeModel final : public Model {
 public:
  static constexpr uint32_t kPixels = 4;                    // side of a frame
  static constexpr uint32_t kPatch = 2;                     // side of a patch
  static constexpr uint32_t kHidden = kPatch * kPatch * 3;  // an embedding is the patch itself
  static constexpr uint32_t kVisionTokens = 4;
  static constexpr uint32_t kHeadDim = 4;
  static constexpr uint32_t kVocab = 288;  // 256 bytes, BOS, end, then 30 action tokens
  static constexpr int32_t kBos = 256;
  static constexpr int32_t kFirstAction = 258;

  static absl::StatusOr<std::unique_ptr<Model>> Load(Backend& backend, FakeModelOptions options) {
    auto model = std::unique_ptr<FakeModel>(new FakeModel(std::move(options)));
    ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend.NewStream());
    uint64_t state = 17;
    std::vector<float> table = Values(size_t{kVocab} * kHidden, state);
    if (model->options_.nan_token >= 0) {
      std::fill_n(table.begin() + int64_t{model->options_.nan_token} * kHidden, kHidden,
                  std::numeric_limits<float>::quiet_NaN());
    }
    ASSIGN_OR_RETURN(model->embed_, Upload(backend, *stream,
                                           TensorView::Dense(table.data(), DType::kF32,
                                                             MemKind::kHost, {kVocab, kHidden}),
                                           DType::kF32));
    ASSIGN_OR_RETURN(model->qkv_, model->RandomLinear(backend, 3 * kHeadDim, kHidden, state));
    ASSIGN_OR_RETURN(model->out_, model->RandomLinear(backend, kHidden, kHeadDim, state));
    ASSIGN_OR_RETURN(model->head_, model->RandomLinear(backend, kVocab, kHidden, state));
    // Only action tokens can win.
    std::vector<float> bias(kVocab, -1e9F);
    for (size_t i = kFirstAction; i < kVocab; ++i) bias[i] = 0;
    ASSIGN_OR_RETURN(
        model->head_bias_,
        Upload(backend, *stream,
               TensorView::Dense(bias.data(), DType::kF32, MemKind::kHost, {kVocab}), DType::kF32));
    return model;
  }

  // Without weights: only the host side works.
  static std::unique_ptr<Model> HostOnly(FakeModelOptions options) {
    return std::unique_ptr<Model>(new FakeModel(std::move(options)));
  }

  const ModelSpec& spec() const override { return spec_; }

  // BOS, the cameras in order, the bytes of the instruction, an end mark.
  absl::StatusOr<Prompt> BuildPrompt(const PromptInput& input) const override {
    if (options_.on_prompt != nullptr) options_.on_prompt();
    std::vector<int32_t> ids = {kBos};
    for (const char c : input.instruction) ids.push_back(static_cast<unsigned char>(c));
    ids.push_back(kBos + 1);
    return BuildPromptFromTokens(ids, input.missing_cameras);
  }
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                               uint64_t missing_cameras) const override {
    for (const int32_t id : ids) {
      if (id < 0 || id >= static_cast<int32_t>(kVocab)) {
        return InvalidField("token_ids", StrCat("id ", id, " is outside [0, ", kVocab, ")"));
      }
    }
    if (ids.size() < 2 || ids.front() != kBos)
      return InvalidField("token_ids", "must be BOS and at least one more");
    Prompt prompt{{{Modality::kText, {ids.front()}}}};
    for (uint32_t i = 0; i < spec_.cameras.size(); ++i) {
      if ((missing_cameras >> i & 1) == 0) prompt.segments.push_back({Modality::kVision, {}, i});
    }
    if (prompt.segments.size() == 1 && !spec_.cameras.empty())
      return InvalidField("cameras", "there must be a frame");
    prompt.segments.push_back({Modality::kText, {ids.begin() + 1, ids.end()}});
    return prompt;
  }
  // Nearest pixel.
  absl::StatusOr<ModelImage> Preprocess(uint32_t camera, ImageRows& rows) const override {
    if (options_.on_frame != nullptr) options_.on_frame();
    if (options_.decode_gate != nullptr) options_.decode_gate->Pass();
    ASSIGN_OR_RETURN(const Rgb8Image image, ReadImage(rows));
    Rgb8Image out{kPixels, kPixels, Pixels(size_t{kPixels} * kPixels * 3, 0)};
    for (uint32_t y = 0; y < kPixels; ++y) {
      for (uint32_t x = 0; x < kPixels; ++x) {
        const size_t from =
            (size_t{y} * image.height / kPixels * image.width + x * image.width / kPixels) * 3;
        for (size_t c = 0; c < 3; ++c) out.rgb[(y * kPixels + x) * 3 + c] = image.rgb[from + c];
      }
    }
    if (spec_.cameras[camera].dtype == DType::kU8) return out;
    ModelImage floats = GrayImage(kPixels, kPixels, DType::kF32, 0);
    for (size_t i = 0; i < out.rgb.size(); ++i) {
      const float value = (static_cast<float>(out.rgb[i]) / 255.0F - 0.5F) / 0.5F;
      std::memcpy(floats.rgb.data() + i * sizeof(value), &value, sizeof(value));
    }
    return floats;
  }
  const Tokenizer* tokenizer() const override {
    return options_.writes_text ? &tokenizer_ : nullptr;
  }
  // BOS, the cameras, the rest.
  absl::StatusOr<Prompt> BuildTextPrompt(std::span<const int32_t> ids,
                                         std::span<const uint32_t> cameras) const override {
    if (ids.empty() || ids.front() != kBos) return InvalidField("token_ids", "must begin with BOS");
    Prompt prompt{{{Modality::kText, {kBos}}}};
    for (const uint32_t camera : cameras)
      prompt.segments.push_back({Modality::kVision, {}, camera});
    prompt.segments.push_back({Modality::kText, {ids.begin() + 1, ids.end()}});
    return prompt;
  }
  absl::StatusOr<std::vector<float>> NormalizeState(std::span<const float> state,
                                                    std::string_view) const override {
    return std::vector<float>(state.begin(), state.end());
  }
  bool IsActionToken(int32_t id) const override {
    return id >= kFirstAction && id < static_cast<int32_t>(kVocab);
  }
  absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens,
                                            std::string_view statistics_key,
                                            InvalidTokenPolicy) const override {
    double scale = 1;
    for (const std::string& key : options_.statistics) {
      if (key == statistics_key) break;
      scale *= 10;
    }
    ActionChunk chunk;
    for (const int32_t id : tokens) {
      const float normalized = static_cast<float>(id - kFirstAction) / 15.0F - 1.0F;
      chunk.tokens.push_back(id);
      chunk.normalized.push_back(normalized);
      chunk.values.push_back(scale * normalized);
    }
    return chunk;
  }

  size_t WorkspaceBytes(uint32_t, uint32_t rows, uint32_t logit_rows) const override {
    return size_t{rows} * 64 * (kHidden + 2 * kHeadDim) +
           size_t{logit_rows} * 64 * (kVocab + kHidden) + 4096;
  }
  absl::Status Encode(ExecContext& ctx, const EncodeBatch& batch) const override {
    if (options_.encode_gate != nullptr) options_.encode_gate->Pass();
    const bool floats = batch.rgb.dtype == DType::kF32;
    const float m = floats ? 0 : 0.5F;
    const float s = floats ? 1 : 0.5F;
    const float mean[3] = {m, m, m};
    const float std[3] = {s, s, s};
    for (size_t g = 0; g < batch.out.size(); ++g) {
      const auto row = static_cast<int64_t>(g);
      RETURN_IF_ERROR(ctx.ops.Patchify(ctx.stream, batch.rgb.Rows(row, row + 1), kPatch, mean, std,
                                       batch.out[g]));
    }
    return absl::OkStatus();
  }
  absl::Status Forward(ExecContext& ctx, const TrunkBatch& batch) const override {
    if (options_.gate != nullptr) options_.gate->Pass();
    if (options_.fault != nullptr) RETURN_IF_ERROR(options_.fault());
    const int64_t rows = batch.paged.num_rows;
    ASSIGN_OR_RETURN(const TensorView x, ctx.arena.New(DType::kF32, {rows, kHidden}));
    ASSIGN_OR_RETURN(const TensorView q, ctx.arena.New(DType::kF32, {rows, kHeadDim}));
    ASSIGN_OR_RETURN(const TensorView attended, ctx.arena.New(DType::kF32, {rows, kHeadDim}));
    const TensorView table = embed_->View(DType::kF32, {kVocab, kHidden});
    RETURN_IF_ERROR(ctx.ops.Embed(ctx.stream, table, batch.tokens, batch.token_index, 1.0F, x));
    RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, batch.embeddings, batch.embedding_index, x));
    QkvRopeAppendArgs qkv;
    qkv.weight = qkv_.get();
    qkv.x = x;
    qkv.q = q;
    qkv.kv = batch.kv;
    qkv.q_heads = 1;
    qkv.batch = batch.paged;
    RETURN_IF_ERROR(ctx.ops.QkvRopeAppend(ctx.stream, qkv));
    PagedAttentionArgs attention;
    attention.q = q;
    attention.out = attended;
    attention.kv = batch.kv;
    attention.q_heads = 1;
    attention.scale = 0.5F;
    attention.batch = batch.paged;
    RETURN_IF_ERROR(ctx.ops.PagedAttention(ctx.stream, attention));
    LinearArgs out;
    out.weight = out_.get();
    out.x = attended;
    out.y = x;
    out.residual = x;
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, out));
    if (batch.num_logit_rows == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(const TensorView last,
                     ctx.arena.New(DType::kF32, {batch.num_logit_rows, kHidden}));
    ASSIGN_OR_RETURN(const TensorView logits,
                     ctx.arena.New(DType::kF32, {batch.num_logit_rows, kVocab}));
    RETURN_IF_ERROR(ctx.ops.GatherRows(ctx.stream, x, batch.logit_rows, last));
    LinearArgs head;
    head.weight = head_.get();
    head.x = last;
    head.y = logits;
    head.bias = head_bias_->View(DType::kF32, {kVocab});
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, head));
    return PickTokens(ctx, batch, logits);
  }

 private:
  explicit FakeModel(FakeModelOptions options) : options_(std::move(options)) {
    spec_.family = "fake";
    spec_.fingerprint = DigestBuilder("fake").Field(uint64_t{options_.cameras.size()}).Finish();
    for (const std::string& name : options_.cameras)
      spec_.cameras.push_back({name, kPixels, kPixels});
    for (CameraSpec& camera : spec_.cameras) camera.optional = options_.optional_cameras;
    for (uint32_t i = 0; i < options_.float_cameras; ++i)
      spec_.cameras[spec_.cameras.size() - 1 - i].dtype = DType::kF32;
    for (const std::string& key : options_.statistics)
      spec_.statistics.push_back({key, options_.action_dim});
    spec_.state_dim = spec_.state_width = options_.state_dim;
    spec_.kv.layers = 1;
    spec_.kv.kv_heads = 1;
    spec_.kv.head_dim = kHeadDim;
    spec_.hidden = kHidden;
    spec_.vocab_size = kVocab;
    spec_.max_positions = 256;
    spec_.vision_tokens = kVisionTokens;
    spec_.max_action_tokens = options_.action_dim;
    spec_.stop_tokens = {kBos + 1};
    spec_.parameters = kVocab * kHidden * 2;
    spec_.weight_bytes = spec_.parameters * sizeof(float);
  }

  // Uniform in [-1, 1), the same on every machine.
  static std::vector<float> Values(size_t count, uint64_t& state) {
    std::vector<float> values(count);
    for (float& v : values) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      v = static_cast<float>(state >> 40) / static_cast<float>(1 << 23) - 1.0F;
    }
    return values;
  }
  static absl::StatusOr<std::unique_ptr<PackedWeight>> RandomLinear(Backend& backend, int64_t n,
                                                                    int64_t k, uint64_t& state) {
    std::vector<float> values = Values(static_cast<size_t>(n * k), state);
    const TensorView view = TensorView::Dense(values.data(), DType::kF32, MemKind::kHost, {n, k});
    return backend.PackLinear({&view, 1}, DType::kF32);
  }

  const FakeModelOptions options_;
  const FakeTokenizer tokenizer_;
  ModelSpec spec_;
  std::unique_ptr<Buffer> embed_;
  std::unique_ptr<Buffer> head_bias_;
  std::unique_ptr<PackedWeight> qkv_;
  std::unique_ptr<PackedWeight> out_;
  std::unique_ptr<PackedWeight> head_;
};

}  // namespace saccade::testing
