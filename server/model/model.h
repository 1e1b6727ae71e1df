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
#include "base/policy.h"
#include "base/status.h"
#include "base/strings.h"
#include "model/model_image.h"
#include "model/tokenizer.h"
#include "tensor/arena.h"
#include "tensor/backend.h"

namespace saccade {

struct CameraSpec {
  std::string name;
  uint32_t width = 0;  // pixels the model takes; any frame is resized to it
  uint32_t height = 0;
  bool optional = false;  // without a frame the model does as it was trained: the camera is masked
  DType dtype = DType::kU8;  // of a channel: U8, or F32 where Preprocess gives normalised values
  size_t FrameBytes() const { return size_t{width} * height * 3 * DTypeSize(dtype); }
};

// One set of dataset statistics: how a normalised action becomes a command.
struct StatisticsSpec {
  std::string key;
  uint32_t action_dim = 0;  // of one action; of all of a chunk where the horizon is not stated
};

// What a layer costs, in weights: a pass over the model may be cut between layers.
struct LayerCost {
  uint64_t weights = 0;      // that are read once, however many rows there are
  uint64_t row_weights = 0;  // that every row (of a frame, of a prompt) is multiplied with
};

// How a model answers.
enum class HeadKind : uint8_t {
  kTokens,   // token by token, from the trunk's LM head
  kFlow,     // a chunk of actions is denoised in steps over the prompt's K/V (flow matching)
  kOnePass,  // a chunk of actions comes out of the pass over the prompt (regression)
};

// What a row of a denoise step sees of its own suffix, beside the whole prefix.
enum class SuffixMask : uint8_t {
  kCausal,         // itself and the rows before it
  kBidirectional,  // all
  kStateFirst,     // row 0, the state, sees itself; the actions see all
};

struct ActionHeadSpec {
  HeadKind kind = HeadKind::kTokens;
  // Actions of a chunk; 0: the checkpoint does not say. kFlow and kOnePass: the device holds a
  // chunk as [horizon, width] F32.
  uint32_t horizon = 0;
  uint32_t width = 0;
  uint32_t served = 0;  // actions of a chunk that are answered, from the first one; 0: all
  // kOnePass: rows at the end of the prompt whose hidden states the head reads, and how many rows
  // before the prompt's end they end (a row predicts what stands after it).
  uint32_t read_rows = 0;
  uint32_t read_before_end = 0;
  // kTokens: that end an answer whose length the model chooses; it has max_action_tokens at most.
  std::vector<int32_t> stop_tokens;
  // kFlow.
  uint32_t steps = 0;       // denoise steps, when a request names none
  uint32_t time_width = 0;  // of the embedding of a flow time
  bool state_row = false;   // a step has a row of the state before those of the actions
  bool relative = false;    // FinishActions adds the request's state to what was denoised
  SuffixMask mask = SuffixMask::kCausal;
  std::vector<LayerCost> layers;  // of a denoise step, in the order in which they run

  uint32_t actions() const { return served > 0 ? served : horizon; }  // of an answer
  uint32_t suffix_rows() const { return horizon + (state_row ? 1 : 0); }
};

// Facts about a loaded model; immutable.
struct ModelSpec {
  std::string family;     // "openvla"
  Digest128 fingerprint;  // weights, compute dtype and every setting that changes K/V bytes
  DType compute = DType::kF32;
  std::vector<CameraSpec> cameras;         // in prompt order
  std::vector<StatisticsSpec> statistics;  // sorted by key
  uint32_t state_dim = 0;                  // 0: the model takes no proprioception
  uint32_t state_width = 0;                // F32 values of a state on the device: state_dim, padded
  bool state_in_text = false;              // the prompt's text changes with the state
  ActionHeadSpec head;
  std::optional<bool> relative_actions;  // to the state; absent: the checkpoint does not say
  KvGeometry kv;
  uint32_t hidden = 0;
  uint32_t vocab_size = 0;  // rows of the LM head
  uint32_t max_positions = 0;
  uint32_t max_group_rows = 0;     // of the longest bidirectional group: one step must hold them
  uint32_t vision_tokens = 0;      // per frame
  uint32_t max_action_tokens = 0;  // over all statistics keys
  // The layers in the order in which they run; empty: Encode or Forward cannot be cut. The last of
  // the trunk is its head, which runs only where logits are needed.
  std::vector<LayerCost> vision_layers;
  std::vector<LayerCost> trunk_layers;
  std::vector<int32_t> stop_tokens;  // that end a text the model writes, and FAST actions
  uint64_t parameters = 0;
  size_t weight_bytes = 0;  // on the device
};

// One piece of the prompt. The order of the pieces is the order of positions, starting at 0.
struct PromptSegment {
  Modality modality = Modality::kText;
  std::vector<int32_t> tokens{};  // kText: the ids
  uint32_t camera = 0;  // kVision: index into ModelSpec::cameras; spec.vision_tokens tokens
  uint32_t rows = 0;    // kAction: rows whose embeddings are 0, places for the answer
                        // kState: one row, made of the request's state
};
struct Prompt {
  std::vector<PromptSegment> segments{};
  // The first so many segments are one group whose rows see each other in full; what follows is
  // causal.
  uint32_t bidirectional = 0;
};

// What a prompt is made of.
struct PromptInput {
  std::string_view instruction{};  // UTF-8
  // Normalised, [state_width]; empty for a model without state.
  std::span<const float> state{};
  uint64_t missing_cameras = 0;  // bit i: camera i of ModelSpec::cameras has no frame
};

enum class InvalidTokenPolicy : uint8_t { kFail, kClamp };

struct ActionChunk {
  std::vector<int32_t> tokens;    // of a model that answers in tokens
  uint32_t horizon = 1;           // actions, in the order in which they are executed
  std::vector<float> normalized;  // [horizon, action_dim], as the model was trained
  std::vector<double> values;  // the same in the robot's units; normalized where the mask says so
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
  TensorView embedding_index;  // [M] I32: row m takes embeddings[embedding_index[m]]; < 0: neither
                               // a vision row nor a placeholder, whose embedding is 0
  TensorView states;           // [S, state_width] F32, normalised, by sequence
  TensorView state_index;      // [M] I32: row m is made of states[state_index[m]]; < 0: not a state
  int32_t num_logit_rows = 0;  // R; 0: nothing is sampled in this step
  TensorView logit_rows;       // [R] I32: rows of this batch whose logits are needed; of a head of
                               // one pass, the rows that it reads, chunk after chunk
  TensorView actions;          // [chunks * horizon, width] F32: out of a head of one pass
  SampleArgs sample;           // all but `logits`, which Forward fills in
  TopTokensArgs top;           // the same
  LayerRange layers;
};

// One denoise step of several samples, each over its own prefix and at its own flow time. Item i
// has suffix_rows rows, one after another; M rows in all, of which A = items * horizon are actions.
// Views are device memory.
struct DenoiseBatch {
  int32_t num_items = 0;
  // One sequence per item: the pages of its prefix (P tokens), then pages of scratch for the rows'
  // own K/V, which no later step reads. row_pos is P, P + 1, ...; row_limit is as the head's mask
  // says.
  PagedBatch paged;
  KvStorage* kv = nullptr;
  TensorView prefix_limit;  // [M] I32: P - 1, as row_limit of a layer that reads the prefix alone
  TensorView suffix_pos;    // [M] I32: 0, 1, ... in its item
  TensorView x;             // [A, width] F32: the latents at the step's time, and after it
  TensorView states;        // [items, state_width] F32, normalised
  TensorView time;          // [T, time_width] F32: embeddings of the batch's flow times, T at most
                            // 2 * items: each item's own, and that of its committed actions
  TensorView dt;            // [T, 1] F32: what a latent at that time moves by, times its velocity
  TensorView action_time;   // [A] I32: row of `time` of each action
  TensorView row_action;    // [M] I32: row of `x`; < 0: a state row
  TensorView row_state;     // [M] I32: row of `states`; < 0: an action row
  TensorView row_time;      // [M] I32: row of `time`
  TensorView action_row;    // [A] I32: row of the batch
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
  // The prompt for an instruction and what else goes into it. INVALID_ARGUMENT names the field,
  // "instruction", "token_ids", "state" or "cameras"; kNeverFits when it is too long for the model.
  virtual absl::StatusOr<Prompt> BuildPrompt(const PromptInput& input) const = 0;
  // The same from token ids of the whole prompt text, BOS first; ids are range-checked.
  virtual absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                                       uint64_t missing_cameras) const = 0;
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
  // [state_width] from a state in the robot's units: as the checkpoint's statistics say, padded.
  // INVALID_ARGUMENT names "state" (its size, an index that is not finite) or "statistics_key".
  virtual absl::StatusOr<std::vector<float>> NormalizeState(std::span<const float> state,
                                                            std::string_view statistics_key) const {
    (void)state;
    (void)statistics_key;
    return InvalidField("state", "the model takes none");
  }
  // kFlow and kOnePass: the chunk from what the device computed, [horizon, width]; `state` is the
  // robot's, for actions that are relative to it. A value that is not finite: INTERNAL, kNonFinite.
  virtual absl::StatusOr<ActionChunk> FinishActions(std::span<const float> chunk,
                                                    std::string_view statistics_key,
                                                    std::span<const float> state) const {
    (void)chunk;
    (void)statistics_key;
    (void)state;
    return absl::UnimplementedError("the model answers in tokens");
  }
  // kFlow: the embedding of flow time `t` (1: noise, 0: actions), [time_width].
  virtual void EmbedTime(float t, std::span<float> out) const {
    (void)t;
    (void)out;
  }
  // kTokens: `tokens` are exactly action_dim ids, or, where the spec has max_action_tokens but no
  // fixed number, an answer up to a stop token. An id outside the action range: kFail -> INTERNAL
  // with kInvalidActionToken; kClamp -> the reference's clamping.
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
  // kFlow. Arena bytes of a step with that many items.
  virtual size_t DenoiseBytes(uint32_t /*items*/) const { return 0; }
  // Of the hidden state of a step that is cut, of so many items.
  virtual size_t DenoiseParkingBytes(uint32_t /*items*/) const { return 0; }
  virtual absl::Status Denoise(ExecContext& ctx, const DenoiseBatch& batch) const {
    (void)ctx;
    (void)batch;
    return absl::UnimplementedError("the model has no flow head");
  }
};

// INVALID_ARGUMENT names "camera" where that index is none of the model's.
inline absl::Status CheckCamera(const ModelSpec& spec, uint32_t camera) {
  const size_t cameras = spec.cameras.size();
  if (camera < cameras) return absl::OkStatus();
  return InvalidField("camera", StrCat("index ", camera, ", but the model has ", cameras,
                                       cameras == 1 ? " camera" : " cameras"));
}

class Checkpoint;

// What no file of an OpenVLA-OFT folder says: its code had these as constants.
struct OftOptions {
  OftPlatform platform = OftPlatform::kAuto;
  uint32_t chunk = 0;                // actions of a chunk; 0: the platform's
  std::vector<std::string> cameras;  // names, in the order of training; empty: the platform's
  bool use_heads = true;  // false: tokens and no state, whatever lies beside the checkpoint
};

struct ModelOptions {
  DType compute = DType::kF32;  // F32 or BF16
  uint32_t block_tokens = 16;   // of the K/V layout
  // Of chunks that are made of tokens.
  InvalidTokenPolicy invalid_tokens = InvalidTokenPolicy::kFail;
  std::optional<OftOptions> oft;  // the folder is OpenVLA-OFT's, whatever files it has
};

// One table in families/families.cc; no registration at static initialisation.
struct Family {
  std::string_view name;
  bool (*matches)(const Checkpoint&, const ModelOptions&);
  absl::StatusOr<std::unique_ptr<Model>> (*load)(const Checkpoint&, Backend&, const ModelOptions&);
};
std::span<const Family> Families();
// The family of the folder; NOT_FOUND lists the known ones.
absl::StatusOr<const Family*> FindFamily(const Checkpoint& checkpoint, const ModelOptions& options);
// Finds it and loads the folder.
absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Checkpoint& checkpoint, Backend& backend,
                                                 const ModelOptions& options);

}  // namespace saccade
