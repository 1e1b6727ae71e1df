#pragma once
// Lane: one model on one worker, and what its requests hold there: blocks, embedding and sequence
// slots. Private to sched/; engine thread only.
//
// A start is all or nothing: a request takes everything it will ever need (blocks for the prompt
// and every token of every sample's answer, a sequence slot per sample, a place for every frame) or
// nothing. Beams take the blocks of their answers as one reserve, which they share out among them.
// So a started request waits for no resource, and no two can wait for each other.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kv/embedding_cache.h"
#include "kv/kv_cache.h"
#include "sched/active_request.h"
#include "sched/cost_model.h"
#include "sched/scheduler.h"

namespace saccade {

// What is in one slot of the embedding pool, as far as steps are concerned.
struct FrameState {
  enum class Stage : uint8_t {
    kEmpty,
    kWanted,    // taken; no step encodes it yet
    kInFlight,  // a step in flight encodes it: later rows may read it, since steps run in order
    kReady,
  };
  Stage stage = Stage::kEmpty;
  uint32_t users = 0;              // references, counted here as well
  const Content* frame = nullptr;  // compared only
  uint32_t camera = 0;
  TimePoint ready_at{};
};

class Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(const LaneOptions& options);

  // OK when the request could run alone here; else kNeverFits or INVALID_ARGUMENT.
  absl::Status CheckFits(const Request& request) const;
  // Takes everything `r` needs; when it `can_wait`, only as far as the cache keeps its headroom.
  // Else something is short, and nothing was taken.
  enum class Start : uint8_t { kStarted, kShort, kNoHeadroom };
  Start TryStart(ActiveRequest& r, bool can_wait, TimePoint now);
  // Gives back everything `r` holds. No step in flight names it.
  void Release(ActiveRequest& r, TimePoint now);
  // Gives back everything at a step boundary; `r` waits again and keeps its tokens.
  void Preempt(ActiveRequest& r, TimePoint now);
  // Gives back the embeddings only: the prompt is computed.
  void ReleaseEmbeddings(ActiveRequest& r);
  // The beams go on as `next` says: they share what they have in common and own the rest.
  absl::Status Reorder(ActiveRequest& r, std::span<const BeamSearch::Next> next);
  // Updates the estimates of a request that is not started.
  void Estimate(ActiveRequest& r) const;
  RemainingWork Remaining(const ActiveRequest& r) const;

  void Add(ActiveRequest& r);
  void Remove(ActiveRequest& r);

  FrameState& frame(EmbeddingId slot) { return frames_[static_cast<size_t>(slot.value())]; }
  const FrameState& frame(EmbeddingId slot) const {
    return frames_[static_cast<size_t>(slot.value())];
  }
  uint32_t free_slots() const { return static_cast<uint32_t>(free_slots_.size()); }
  // Blocks, slots and embeddings `r` needs to start or, started, would give back: upper bounds.
  struct Needs {
    uint32_t blocks = 0;
    uint32_t slots = 0;
    uint32_t embeddings = 0;
  };
  Needs NeedsOf(const ActiveRequest& r) const;
  Needs Free() const;

  // `holders`: every request of this lane that is not destroyed.
  absl::Status CheckInvariants(const std::vector<const ActiveRequest*>& holders) const;

  const LaneOptions options;
  size_t index_on_worker = 0;
  std::unique_ptr<KvCache> kv;
  EmbeddingCache embeddings;
  CostModel cost;
  std::vector<ActiveRequest*> active;  // not ended; order has no meaning
  // For the next step, whatever it is. A destination that was freed meanwhile does no harm: its new
  // owner writes it in that step or later.
  std::vector<BlockCopy> copies;
  TimePoint observed_at{};     // of the cost model's newest observation
  double pass = 0;             // predicted microseconds given to this lane, for ties
  uint64_t epoch = 1;          // grows whenever resources may have become free
  uint64_t planned_epoch = 0;  // `epoch` after the worker's newest step was planned
  bool lost = false;

 private:
  Lane(const LaneOptions& options, std::unique_ptr<KvCache> cache);
  bool TakeEmbeddings(ActiveRequest& r, uint32_t cached_tokens);
  bool TakeBlocks(ActiveRequest& r, std::unique_ptr<Sequence> sequence, TimePoint now);
  bool TakeReserve(ActiveRequest& r, TimePoint now);
  void ReleaseEmbedding(EmbeddingId slot, bool poisoned);

  std::vector<SequenceSlot> free_slots_;
  std::vector<FrameState> frames_;
};

}  // namespace saccade
