#pragma once
// DeviceModel: everything one model needs on one worker's device (K/V bytes, embedding pool,
// sampled tokens, scratch, staging) and the translation of a StepPlan into model calls. Run is the
// worker thread's; made and destroyed on any thread, while no step of it is under way.
#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory_budget.h"
#include "base/status.h"
#include "engine/page_guard.h"
#include "model/model.h"
#include "sched/step.h"
#include "tensor/arena.h"
#include "tensor/backend.h"

namespace saccade {

struct DeviceModelOptions {
  uint32_t num_blocks = 0;
  uint32_t embedding_slots = 0;
  uint32_t sequence_slots = 0;
  uint32_t max_rows = 0;
  uint32_t max_frames = 0;
  // The most sequences and samples of a step; of a model with an action head, its chunks.
  uint32_t max_logit_rows = 0;
  uint32_t parking_places = 0;     // of passes that are cut into slices
  bool check_pages = kCheckPages;  // every page that is read is the one that the plan means
};

// The options with what the model makes of them: a group of rows must fit one step, and as many
// chunks of actions are worked on at once as their rows do.
DeviceModelOptions FitToModel(const ModelSpec& spec, DeviceModelOptions options);
// Blocks behind those of the cache, for the suffixes of denoise steps.
uint32_t ScratchBlocks(const ModelSpec& spec, const DeviceModelOptions& options);
// Of Model::WorkspaceBytes and ParkingBytes: what the head reads of each chunk.
uint32_t HeadRows(const ModelSpec& spec, const DeviceModelOptions& options);

// Bytes of a device model, weights not included.
struct DeviceBytes {
  uint64_t kv = 0;
  uint64_t embeddings = 0;
  uint64_t scratch = 0;
  uint64_t staging = 0;  // on the device and on the host
};
// `kv_storage`: Backend::KvBytes with the scratch blocks, `workspace`: the larger one of
// Model::WorkspaceBytes and DenoiseBytes, `parking`: Model::ParkingBytes, of the options' limits.
DeviceBytes PlanDeviceBytes(const ModelSpec& spec, const DeviceModelOptions& options,
                            uint64_t kv_storage, uint64_t workspace, uint64_t parking);

class DeviceModel {
 public:
  // `asked`, fitted to the model. All memory is held in `budget` (may be null) before it is
  // allocated. The backend, the stream, the model and the budget outlive it.
  static absl::StatusOr<std::unique_ptr<DeviceModel>> Create(Backend& backend, Stream& stream,
                                                             const Model& model,
                                                             const DeviceModelOptions& asked,
                                                             MemoryBudget* budget);
  // Runs the whole step and waits for it. The slices of a pass come in order, and no other pass
  // with its parking place between them. The last one fills `result.tokens`, `result.tops` and
  // `result.chunks`; on error they are empty.
  absl::Status Run(const StepPlan& plan, StepResult& result);

 private:
  DeviceModel(Backend& backend, Stream& stream, const Model& model,
              const DeviceModelOptions& options);
  absl::Status Allocate();
  absl::Status ClearPlaces();
  size_t ArenaBytes() const;
  size_t ParkingBytes() const;
  absl::StatusOr<LayerRange> RangeOf(const StepPlan& plan) const;
  absl::Status RunEncodes(ExecContext& ctx, const StepPlan& plan);
  absl::Status RunTrunk(ExecContext& ctx, const StepPlan& plan);
  void ReadResults(const StepPlan& plan, StepResult& result) const;
  void ReadChunk(RequestId request, uint32_t sample, uint32_t index, uint32_t at,
                 StepResult& result) const;

  // --- device_flow.cc ---
  absl::Status RunFlows(ExecContext& ctx, const StepPlan& plan);
  absl::Status StageFlows(const StepPlan& plan, DenoiseBatch& batch);
  absl::Status LoadLatents(const StepPlan& plan, const TensorView& x);
  absl::Status StoreLatents(const StepPlan& plan, const TensorView& x);
  TensorView Latent(SequenceSlot slot) const;
  // The index arrays of a step, in memory that the largest step fits.
  struct Staging {
    std::vector<int32_t> row_begin, page_begin, pages, page_len, page_pos, row_pos, row_limit,
        row_slot, token_index, embedding_index, text, logit_rows, source_row, draw, dest, top_rows,
        copies;
    std::vector<float> temperature, top_p, states;
    std::vector<int32_t> state_index;
    std::vector<int64_t> seed;
    void Reserve(size_t rows, size_t logits, size_t page_entries, size_t copy_words);
    void Clear();
  };
  absl::Status StageTrunk(const StepPlan& plan, TrunkBatch& batch);
  int32_t TokenCell(SequenceSlot slot, uint32_t index) const;

  Backend& backend_;
  Stream& stream_;
  const Model& model_;
  const DeviceModelOptions options_;
  std::vector<MemoryHold> holds_;  // of everything below
  Staging staging_;
  size_t meta_words_ = 0;  // capacity of the index staging, in 4-byte words
  size_t meta_used_ = 0;   // by this step so far

  std::unique_ptr<PageGuard> guard_;  // null unless pages are checked
  std::unique_ptr<KvStorage> kv_;
  // [embedding_slots * vision_tokens + 1, hidden] F32; the last row is 0
  std::unique_ptr<Buffer> embeddings_;
  std::unique_ptr<Buffer>
      tokens_;  // [sequence_slots * kTokenColumns + max_rows] I32; the tail is the step's text ids
  std::unique_ptr<Buffer> tops_;  // [max_logit_rows, kMaxTopTokens] I32, then as many F32
  std::unique_ptr<Buffer> arena_buffer_;
  std::vector<std::unique_ptr<Buffer>> parked_;  // hidden states between slices, by place
  std::unique_ptr<Buffer> meta_;                 // index arrays of a step
  std::unique_ptr<Buffer> rgb_;                  // [max_frames, H, W, 3] U8
  std::unique_ptr<Buffer> meta_host_;            // pinned staging of the three above
  std::unique_ptr<Buffer> rgb_host_;
  std::unique_ptr<Buffer> sampled_host_;
  std::unique_ptr<Buffer> tops_host_;

  // Of a model with an action head; [horizon, width] F32 each.
  std::unique_ptr<Buffer> latents_;  // [sequence_slots]: between denoise steps
  std::unique_ptr<Buffer> chunks_;   // [max_logit_rows]: of the step's items
  std::unique_ptr<Buffer> chunks_host_;
  std::unique_ptr<Buffer> noise_host_;
};

}  // namespace saccade
