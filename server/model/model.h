#pragma once
// Model: one checkpoint on one backend. Host-side methods are const and safe from any thread;
// Encode and Forward run on the worker that owns the backend and only enqueue work. A family of
// models is one file in families/.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/modality.h"
#include "base/status.h"
#include "model/model_image.h"
#include "model/tokenizer.h"
#include "tensor/arena.h"
#include "tensor/backend.h"

namespace saccade {

struct CameraSpec {
  std::string name;
  uint32_t width = 0;  // pixels the model takes; any frame is resized to it
  uint32_t height = 0;
  DType dtype = DType::kU8;  // of a channel: U8, or F32 where Preprocess gives normalised values
  size_t FrameBytes() const { return size_t{width} * height * 3 * DTypeSize(dtype); }
};

// One set of dataset statistics: how a normalised action becomes a command.
struct StatisticsSpec {
  std::string key;
  uint32_t action_dim = 0;
};

// What a layer costs, in weights: a pass over the model may be cut between layers.
struct LayerCost {
  uint64_t weights = 0;      // that are read once, however many rows there are
  uint64_t row_weights = 0;  // that every row (of a frame, of a prompt) is multiplied with
};

// Facts about a loaded model; immutable.
struct ModelSpec {
  std::string family;     // "openvla"
  Digest128 fingerprint;  // weights, compute dtype and every setting that changes K/V bytes
  DType compute = DType::kF32;
  std::vector<CameraSpec> cameras;         // in prompt order
  std::vector<StatisticsSpec> statistics;  // sorted by key
  uint32_t state_dim = 0;                  // 0: the model takes no proprioception
  KvGeometry kv;
  uint32_t hidden = 0;
  uint32_t vocab_size = 0;  // rows of the LM head
  uint32_t max_positions = 0;
  uint32_t vision_tokens = 0;      // per frame
  uint32_t max_action_tokens = 0;  // over all statistics keys
  // The layers in the order in which they run; empty: Encode or Forward cannot be cut. The last of
  // the trunk is its head, which runs only where logits are needed.
  std::vector<LayerCost> vision_layers;
  std::vector<LayerCost> trunk_layers;
  std::vector<int32_t> stop_tokens;  // that end a text the model writes
  uint64_t parameters = 0;
  size_t weight_bytes = 0;  // on the device
};

// One piece of the prompt. The order of the pieces is the order of positions, starting at 0.
struct PromptSegment {
  Modality modality = Modality::kText;
  std::vector<int32_t> tokens;  // kText: the ids
  uint32_t camera = 0;          // kVision: index into ModelSpec::cameras; spec.vision_tokens tokens
};
using Prompt = std::vector<PromptSegment>;

enum class InvalidTokenPolicy : uint8_t { kFail, kClamp };

struct ActionChunk {
  std::vector<int32_t> tokens;
  std::vector<float> normalized;  // [-1, 1], one per token
  std::vector<double> values;  // commands in the robot's units; normalized where the mask says so
};

// Receives copies of stage tensors while a request runs; for `verify` only. Called on the worker
// thread.
class TapSink {
 public:
  virtual ~TapSink() = default;
  virtual bool Wants(std::string_view name) const = 0;
  // Enqueues a copy of `tensor` (device, dense, F32 or U8). Called again for a name: a later step
  // of the same request.
  virtual absl::Status Record(Stream& stream, std::string_view name, TensorView tensor) = 0;
};

struct ExecContext {
  const Ops& ops;
  Stream& stream;
  Arena& arena;            // scratch of this step
  TapSink* tap = nullptr;  // not null only when the step belongs to one tapped request
};

// Layers [begin, end) of a pass, of which the layers before `begin` have run. Their hidden state
// lies in `parked`, memory of ParkingBytes that is kept from the first slice to the last; null: the
// whole pass runs, and its hidden state is scratch.
struct LayerRange {
  uint32_t begin = 0;
  uint32_t end = UINT32_MAX;
  Buffer* parked = nullptr;
  bool Has(uint32_t layer) const { return begin <= layer && layer < end; }
};

// Frames to embeddings. Frame g of `rgb` [G, H, W, 3] (device, in the camera's dtype) goes to
// out[g] [vision_tokens, hidden] F32 (device).
struct EncodeBatch {
  TensorView rgb;
  std::span<const TensorView> out;
  LayerRange layers;
};

// One trunk pass over rows of many sequences: prefill chunks and decode tokens alike. Views are
// device memory.
struct TrunkBatch {
  PagedBatch paged;
  KvStorage* kv = nullptr;
  TensorView tokens;           // [*] I32: ids of text rows, and the ids sampled so far
  TensorView token_index;      // [M] I32: row m embeds tokens[token_index[m]]; < 0: not a token row
  TensorView embeddings;       // [slots * vision_tokens, hidden] F32
  TensorView embedding_index;  // [M] I32: row m takes embeddings[embedding_index[m]]; < 0: not a
                               // vision row
  int32_t num_logit_rows = 0;  // R; 0: nothing is sampled in this step
  TensorView logit_rows;       // [R] I32: rows of this batch whose logits are needed
  SampleArgs sample;           // all but `logits`, which Forward fills in
  TopTokensArgs top;           // the same
  LayerRange layers;
};

// The end of a Forward: what the batch wants of its logits [R, vocabulary].
inline absl::Status PickTokens(ExecContext& ctx, const TrunkBatch& batch,
                               const TensorView& logits) {
  SampleArgs sample = batch.sample;
  sample.logits = logits;
  if (sample.dest.dims[0] > 0) RETURN_IF_ERROR(ctx.ops.Sample(ctx.stream, sample));
  TopTokensArgs top = batch.top;
  top.logits = logits;
  return top.ids.dims[0] > 0 ? ctx.ops.TopTokens(ctx.stream, top) : absl::OkStatus();
}

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelSpec& spec() const = 0;

  // --- host side, any thread ---
  // The prompt for an instruction (UTF-8). INVALID_ARGUMENT names the field, "instruction" or
  // "token_ids"; kNeverFits when it is too long for the model.
  virtual absl::StatusOr<Prompt> BuildPrompt(std::string_view instruction) const = 0;
  // The same from token ids of the whole prompt text, BOS first; ids are range-checked.
  virtual absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids) const = 0;
  // Resize, crop or letterbox to the model's input: size and dtype of the camera's spec. Takes all
  // rows.
  virtual absl::StatusOr<ModelImage> Preprocess(uint32_t camera, ImageRows& rows) const = 0;
  // What reads and writes the model's texts; null: it writes none.
  virtual const Tokenizer* tokenizer() const { return nullptr; }
  // A prompt as it is, without the words that BuildPrompt puts around an instruction: the frames of
  // `cameras` (in that order; indices are valid) where the model was trained to have them. `ids`
  // begin with what the tokenizer puts in front of a text. INVALID_ARGUMENT names "token_ids".
  virtual absl::StatusOr<Prompt> BuildTextPrompt(std::span<const int32_t> ids,
                                                 std::span<const uint32_t> cameras) const {
    (void)ids;
    (void)cameras;
    return absl::UnimplementedError("the model writes no text");
  }
  virtual bool IsActionToken(int32_t id) const = 0;
  // `tokens` are exactly action_dim ids. An id outside the action range: kFail -> INTERNAL with
  // kInvalidActionToken; kClamp -> the reference's clamping.
  virtual absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens,
                                                    std::string_view statistics_key,
                                                    InvalidTokenPolicy policy) const = 0;

  // --- worker side ---
  // Upper bound of arena bytes for a step with that many frames, trunk rows and logit rows.
  virtual size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const = 0;
  // Of the hidden state of one pass that is cut: of so many frames, or of so many rows.
  virtual size_t ParkingBytes(uint32_t /*frames*/, uint32_t /*rows*/,
                              uint32_t /*logit_rows*/) const {
    return 0;
  }
  virtual absl::Status Encode(ExecContext& ctx, const EncodeBatch& batch) const = 0;
  virtual absl::Status Forward(ExecContext& ctx, const TrunkBatch& batch) const = 0;
};

class Checkpoint;

struct ModelOptions {
  DType compute = DType::kF32;  // F32 or BF16
  uint32_t block_tokens = 16;   // of the K/V layout
};

// One table in families/families.cc; no registration at static initialisation.
struct Family {
  std::string_view name;
  bool (*matches)(const Checkpoint&);
  absl::StatusOr<std::unique_ptr<Model>> (*load)(const Checkpoint&, Backend&, const ModelOptions&);
};
std::span<const Family> Families();
// Finds the family of the folder and loads it; NOT_FOUND lists the known families.
absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Checkpoint& checkpoint, Backend& backend,
                                                 const ModelOptions& options);

}  // namespace saccade
