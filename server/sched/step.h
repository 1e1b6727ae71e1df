#pragma once
// What the scheduler hands to a worker, and what comes back: copies and immutable data, never a
// request.
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "kv/kv_cache.h"
#include "kv/timeline.h"
#include "sched/beam_search.h"

namespace saccade {

class TapSink;

struct EncodeItem {
  RequestId request;  // the one that asked first
  ContentRef frame;
  uint32_t camera = 0;
  EmbeddingId slot;
  std::shared_ptr<TapSink> tap;
};

// Where a sampled id goes: row `slot` of the device's token array, column `index` modulo the
// columns: a row that reads a token follows it directly.
struct SampleTarget {
  uint32_t sample = 0;  // 0 .. samples-1 of the request
  SequenceSlot slot;
  uint32_t index = 0;  // number of the token in the answer, 0-based
  float temperature = 0;
  float top_p = 1;
  uint64_t seed = 0;  // already mixed with the sample's number
};

// The most likely tokens after a row, with their log-probabilities: for a beam, whose next token is
// chosen from those of all beams.
struct TopTarget {
  uint32_t sample = 0;  // the beam
  uint32_t index = 0;
  uint32_t count = 0;  // 1 .. kMaxTopTokens
};
inline constexpr uint32_t kMaxTopTokens = 128;

// Rows of one sequence: tokens [begin, begin + count). Prompt tokens come from the timeline; a
// token past it is token (t - num_tokens) of the answer (an action, or generated text), read on the
// device from row `slot` of the token array, or taken from `known_tokens` when that is not empty.
struct TrunkItem {
  RequestId request;
  std::shared_ptr<const Timeline> timeline;
  uint32_t begin = 0;
  uint32_t count = 0;
  std::vector<PageRef> pages;  // covers tokens [0, begin + count)
  // One per segment of the timeline; invalid where this item does not need it.
  std::vector<EmbeddingId> embeddings;
  SequenceSlot slot;  // valid when the item has answer rows
  // Values of the item's answer rows, in order: a beam's token was chosen here, and a request that
  // was preempted after it had emitted tokens computes their K/V again, when its old device row is
  // somebody else's. Empty, or one per row; then every row of the item is an answer row.
  std::vector<int32_t> known_tokens;
  // What the last row's logits are for: samples, or one beam, or nothing. Of a model whose head
  // reads the prompt, one sample: its chunk.
  std::vector<SampleTarget> samples;
  std::optional<TopTarget> top;
  std::shared_ptr<TapSink> tap;
};

// How a chunk goes on with actions that are committed already, its first ones (real-time chunking).
// With x_t the latents at flow time t, 1: noise, 0: actions. Source: Black et al., "Real-Time
// Execution of Action Chunking Flow Policies" (2025), and "Training-Time Action Conditioning for
// Efficient Real-Time Chunking" (2025).
enum class CommitMode : uint8_t {
  // Before every step x_t = t * noise + (1 - t) * action for them (inpainting of a frozen prefix).
  kInpaint,
  // They are at flow time 0 throughout, whatever the time of the others, as a model that was
  // trained so expects.
  kPerActionTime,
};

// What a denoised answer is made from beside its prompt. Immutable, shared by its samples.
struct FlowInput {
  std::vector<float> state{};      // [state_width], normalised; of a head with a state row
  std::vector<float> noise{};      // [samples, horizon, width]; empty: from the seed
  std::vector<float> committed{};  // [delay, width], normalised; the answer begins with them
  CommitMode commit_mode = CommitMode::kInpaint;
};

// One denoise step of one sample, over the K/V of its whole prompt. What it makes stays in the
// sample's row of the device's latents until the next step, or the end.
struct FlowItem {
  RequestId request;
  uint32_t sample = 0;
  uint32_t index = 0;  // of the step, of `steps`
  uint32_t steps = 0;
  SequenceSlot slot;
  std::shared_ptr<const Timeline> timeline;
  std::vector<PageRef> pages;  // covers the prompt
  uint64_t seed = 0;           // already mixed with the sample's number
  std::shared_ptr<const FlowInput> input;
  std::shared_ptr<TapSink> tap;
};

// What a step costs, as the cost model sees it.
struct StepShape {
  uint32_t frames = 0;
  uint32_t prefill_rows = 0;
  uint32_t decode_rows = 0;  // and denoise steps: a lane has one kind of answer
  friend bool operator==(const StepShape&, const StepShape&) = default;
};

// The part that some layers have of what all of them cost.
struct LayerShare {
  double base = 1;  // of what does not depend on rows (reading weights), and of decode rows
  double rows = 1;  // of what each frame or prefill row costs
};

// A pass that is longer than the step ceiling is cut into steps of consecutive layers, its slices;
// they run in order, and other steps may run between two of them. Each names the whole work of the
// pass. Between slices its hidden states lie in one of the model's parking places.
struct LayerSlice {
  uint32_t begin = 0;  // layers [begin, end) of the pass
  uint32_t end = 0;
  uint32_t layers = 0;  // of the pass; 0: the step is a whole pass
  uint32_t place = 0;   // parking place
  StepId pass;          // id of the first slice
  LayerShare share;
  bool whole() const { return layers == 0; }
  bool first() const { return begin == 0; }
  bool last() const { return end == layers; }
};

struct StepPlan {
  StepId id;
  WorkerId worker;
  ModelId model;
  std::vector<BlockCopy> copies;    // before everything else
  std::vector<EncodeItem> encodes;  // before the trunk, which may read their slots
  std::vector<TrunkItem> trunk;     // before the denoise steps, which may read its K/V
  std::vector<FlowItem> flows;
  StepShape shape;   // of the whole pass
  LayerSlice slice;  // a slice has encodes of one camera, or trunk items, never both
  Micros predicted_p50{0};
  Micros predicted_p99{0};
};

struct SampledToken {
  RequestId request;
  uint32_t sample = 0;
  uint32_t index = 0;
  int32_t token = 0;  // kInvalidSample (-1): the logits, or the chunk, held NaN or Inf; 0 of a
                      // denoise step or of a head of one pass, which is done
};

// The finished chunk of a sample, as the model's head left it: [horizon, width].
struct SampledChunk {
  RequestId request;
  uint32_t sample = 0;
  std::vector<float> values;
};

struct TopTokens {
  RequestId request;
  uint32_t sample = 0;
  uint32_t index = 0;
  // Most likely first, as many as the target's count or the vocabulary has. Empty: the logits held
  // NaN or Inf.
  std::vector<ScoredToken> tokens;
};

struct StepResult {
  StepId id;
  absl::Status status;  // not OK: the whole step failed
  TimePoint started{};
  TimePoint finished{};
  std::vector<SampledToken> tokens;
  std::vector<TopTokens> tops{};
  std::vector<SampledChunk> chunks{};  // beside the token that ends each

  // As new, in old memory.
  void Clear() {
    id = StepId();
    status = absl::OkStatus();
    started = finished = TimePoint();
    tokens.clear();
    tops.clear();
    chunks.clear();
  }
};

}  // namespace saccade
