#pragma once
// FlowRunner: runs Encode, Forward and Denoise of a model whose prompt is a bidirectional group on
// hand-laid batches, without engine or scheduler, so that tests decide what shares a step. Not
// thread-safe.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/model.h"
#include "tensor/arena.h"
#include "tensor/backend.h"

namespace saccade {

struct FlowLimits {
  uint32_t sequences = 1;
  uint32_t layers = 0;  // of one slice; 0: passes are not cut
};

class FlowRunner {
 public:
  // Arenas and parking places hold exactly what the model asks for.
  static absl::StatusOr<std::unique_ptr<FlowRunner>> Create(Backend& backend, const Model& model,
                                                            const FlowLimits& limits);

  // Gives sequence `s` a prompt and its normalised state; its cache starts anew.
  void Start(uint32_t s, const Prompt& prompt, std::vector<float> state);
  uint32_t prompt_tokens(uint32_t s) const {
    return static_cast<uint32_t>(sequences_[s].prompt.size());
  }
  // Preprocessed frames of cameras of one sequence, all in one batch.
  struct Frame {
    uint32_t sequence = 0;
    uint32_t camera = 0;
    const ModelImage* image = nullptr;
  };
  absl::Status Encode(std::span<const Frame> frames, TapSink* tap = nullptr);
  // The whole prompts of sequences in one batch.
  absl::Status Prefill(std::span<const uint32_t> sequences, TapSink* tap = nullptr);
  // The prompt of one sequence and `count` tokens, the likeliest ones, of a model that answers in
  // tokens.
  absl::StatusOr<std::vector<int32_t>> Generate(uint32_t s, uint32_t count, TapSink* tap = nullptr);
  // One sample of a sequence: its latents [horizon, width], moved from time `t` by `dt`.
  struct Item {
    uint32_t sequence = 0;
    std::vector<float>* x = nullptr;
    float t = 0;
    float dt = 0;
    uint32_t frozen = 0;  // first actions that are at time 0 and do not move
  };
  absl::Status Denoise(std::span<const Item> items, TapSink* tap = nullptr);
  // All steps of the model's schedule.
  absl::Status DenoiseAll(uint32_t s, std::vector<float>& x, TapSink* tap = nullptr);

  // [tokens, kv_heads * head_dim] of the prompt.
  struct LayerCache {
    std::vector<float> k;
    std::vector<float> v;
  };
  absl::StatusOr<LayerCache> ReadCache(uint32_t s, uint32_t layer);

 private:
  struct Token {
    int32_t id = -1;         // text
    int32_t embedding = -1;  // row of the sequence's embeddings
    bool state = false;
    uint32_t block = 0;   // of the sequence
    uint32_t offset = 0;  // in the block
  };
  struct Sequence {
    std::vector<Token> prompt;
    uint32_t group = 0;  // tokens of the bidirectional group
    uint32_t blocks = 0;
    std::vector<float> state;
  };

  FlowRunner(Backend& backend, const Model& model, const FlowLimits& limits)
      : backend_(backend), model_(model), limits_(limits) {}
  absl::Status Allocate();
  // Calls `run` with each slice of a pass of so many layers, or once.
  absl::Status Slices(size_t layers, Buffer& arena, Buffer* parked, TapSink* tap,
                      const std::function<absl::Status(ExecContext&, const LayerRange&)>& run);
  // Prompts of sequences; or, of one sequence that has said `said`, the row of the last of them.
  // With `next`, the token that the last row makes likeliest.
  absl::Status Forward(std::span<const uint32_t> sequences, std::span<const int32_t> said,
                       int32_t* next, TapSink* tap);
  // Arrays of one step live until it is done.
  template <class T>
  absl::StatusOr<TensorView> Put(const std::vector<T>& values, DType dtype);
  absl::StatusOr<TensorView> Put(const std::vector<int32_t>& values) {
    return Put(values, DType::kI32);
  }
  // Page tables of several sequences, pages and rows being added token by token.
  struct Pages {
    std::vector<int32_t> row_begin{0}, page_begin{0}, pages, page_len, page_pos, row_pos, row_limit,
        row_slot;
    int32_t max_pages = 0;
  };
  void AddToken(Pages& p, uint32_t s, uint32_t block, uint32_t offset, int32_t position) const;
  static void EndSequence(Pages& p);
  absl::Status Upload(const Pages& p, PagedBatch& batch);

  Backend& backend_;
  const Model& model_;
  FlowLimits limits_;
  uint32_t blocks_per_sequence_ = 0;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvStorage> kv_;
  std::unique_ptr<Buffer> embeddings_, arena_, parked_, denoise_arena_, denoise_parked_;
  std::vector<std::unique_ptr<Buffer>> step_;
  std::vector<Sequence> sequences_;
};

}  // namespace saccade
