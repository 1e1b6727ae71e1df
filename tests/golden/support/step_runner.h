#pragma once
// StepRunner: runs a model's Encode and Forward on hand-laid batches, without engine or scheduler,
// so that tests decide what shares a step. Not thread-safe.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/model.h"
#include "tensor/arena.h"
#include "tensor/backend.h"

namespace saccade {

struct StepLimits {
  uint32_t sequences = 1;
  uint32_t frames = 1;      // of one step
  uint32_t rows = 512;      // of one step
  uint32_t logit_rows = 8;  // of one step
  uint32_t layers = 0;      // of one slice; 0: passes are not cut
};

class StepRunner {
 public:
  // The arena holds exactly model.WorkspaceBytes(limits), the parking place model.ParkingBytes.
  static absl::StatusOr<std::unique_ptr<StepRunner>> Create(Backend& backend, const Model& model,
                                                            const StepLimits& limits);

  // Gives sequence `s` a prompt; its cache, tokens and embeddings start anew.
  void Start(uint32_t s, const Prompt& prompt);
  uint32_t prompt_tokens(uint32_t s) const;
  // Encodes one preprocessed frame for each named sequence, all in one batch.
  absl::Status Encode(std::span<const uint32_t> sequences, std::span<const ModelImage> frames,
                      TapSink* tap = nullptr);

  // Rows [begin, begin + count) of a sequence; with `sample`, the last row's token is sampled.
  struct Part {
    uint32_t sequence = 0;
    uint32_t begin = 0;
    uint32_t count = 0;
    bool sample = false;
  };
  absl::Status Forward(std::span<const Part> parts, TapSink* tap = nullptr);
  // Action tokens of a sequence so far.
  absl::StatusOr<std::vector<int32_t>> Tokens(uint32_t s);
  // [tokens, kv_heads * head_dim] of the first `tokens` tokens.
  struct LayerCache {
    std::vector<float> k;
    std::vector<float> v;
  };
  absl::StatusOr<LayerCache> ReadCache(uint32_t s, uint32_t layer, uint32_t tokens);

  // Encode, prefill in chunks of at most `chunk` rows, then `actions` tokens.
  absl::StatusOr<std::vector<int32_t>> Act(uint32_t s, const Prompt& prompt,
                                           const ModelImage& frame, uint32_t actions,
                                           uint32_t chunk, TapSink* tap = nullptr);

 private:
  struct Token {
    int32_t id = -1;         // text
    int32_t embedding = -1;  // row of the sequence's embeddings
    uint32_t block = 0;      // of the sequence
    uint32_t offset = 0;     // in the block
  };
  struct Sequence {
    std::vector<Token> prompt;
    uint32_t sampled = 0;
  };

  StepRunner(Backend& backend, const Model& model, const StepLimits& limits)
      : backend_(backend), model_(model), limits_(limits) {}
  absl::Status Allocate();
  // Calls `run` with each slice of a pass of so many layers, or once.
  template <class Run>
  absl::Status Slices(size_t layers, TapSink* tap, const Run& run);
  Token TokenAt(uint32_t s, uint32_t t) const;
  // Arrays of one step live until it is done.
  absl::StatusOr<TensorView> Put(const std::vector<int32_t>& values);
  absl::Status PageTable(std::span<const Part> parts, PagedBatch& batch);

  Backend& backend_;
  const Model& model_;
  StepLimits limits_;
  uint32_t blocks_per_sequence_ = 0;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvStorage> kv_;
  std::unique_ptr<Buffer> embeddings_, tokens_, arena_, parked_;
  std::vector<std::unique_ptr<Buffer>> step_;
  std::vector<Sequence> sequences_;
};

}  // namespace saccade
