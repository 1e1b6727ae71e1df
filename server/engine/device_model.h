#pragma once
// DeviceModel: everything one model needs on one worker's device (K/V bytes, embedding pool,
// sampled tokens, scratch, staging) and the translation of a StepPlan into model calls. Owned and
// used by the worker thread only, after Create.
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
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
  uint32_t max_logit_rows = 0;  // also the most sequences and samples of a step
  uint32_t parking_places = 0;  // of passes that are cut into slices
};

class DeviceModel {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceModel>> Create(Backend& backend, Stream& stream,
                                                             const Model& model,
                                                             const DeviceModelOptions& options);
  // Runs the whole step and waits for it. The slices of a pass come in order, and no other pass
  // with its parking place between them. On error nothing in `tokens` is valid.
  absl::Status Run(const StepPlan& plan, std::vector<SampledToken>& tokens);
  // Device bytes held, weights not included.
  size_t device_bytes() const { return device_bytes_; }

 private:
  DeviceModel(Backend& backend, Stream& stream, const Model& model,
              const DeviceModelOptions& options);
  absl::Status Allocate();
  absl::StatusOr<std::unique_ptr<Buffer>> NewBuffer(size_t bytes, MemKind kind);
  absl::StatusOr<LayerRange> RangeOf(const StepPlan& plan) const;
  absl::Status RunEncodes(ExecContext& ctx, const StepPlan& plan);
  absl::Status RunTrunk(ExecContext& ctx, const StepPlan& plan, std::vector<SampledToken>& tokens);
  // The index arrays of a step, kept between steps for their memory.
  struct Staging {
    std::vector<int32_t> row_begin, page_begin, pages, page_len, page_pos, row_pos, row_slot,
        token_index, embedding_index, text, logit_rows, source_row, draw, dest, copies;
    std::vector<float> temperature;
    std::vector<int64_t> seed;
    void Clear();
  };
  absl::Status StageTrunk(const StepPlan& plan, TrunkBatch& batch, size_t& num_samples);

  Backend& backend_;
  Stream& stream_;
  const Model& model_;
  const DeviceModelOptions options_;
  const uint32_t token_columns_;  // of the token array: action tokens per sequence
  size_t device_bytes_ = 0;
  Staging staging_;
  size_t meta_words_ = 0;  // capacity of the index staging, in 4-byte words

  std::unique_ptr<KvStorage> kv_;
  std::unique_ptr<Buffer> embeddings_;  // [embedding_slots * vision_tokens, hidden] F32
  std::unique_ptr<Buffer>
      tokens_;  // [sequence_slots * token_columns_ + max_rows] I32; the tail is the step's text ids
  std::unique_ptr<Buffer> arena_buffer_;
  std::vector<std::unique_ptr<Buffer>> parked_;  // hidden states between slices, by place
  std::unique_ptr<Buffer> meta_;                 // index arrays of a step
  std::unique_ptr<Buffer> rgb_;                  // [max_frames, H, W, 3] U8
  std::unique_ptr<Buffer> meta_host_;            // pinned staging of the three above
  std::unique_ptr<Buffer> rgb_host_;
  std::unique_ptr<Buffer> sampled_host_;
};

}  // namespace saccade
