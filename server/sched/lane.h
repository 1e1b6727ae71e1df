#pragma once
// Lane: one model on one worker, and what its requests hold there: blocks, embedding and sequence
// slots. Private to sched/; engine thread only.
//
// A start is all or nothing: a request takes everything it will ever need (blocks for the prompt
// and every token of every sample's answer, a sequence slot per sample, a place for every frame) or
// nothing. Beams take the blocks of their answers as one reserve, which they share out among them.
// So a started request waits for no resource, and no two can wait for each other.
#include <cmath>
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

inline Micros Scaled(Micros t, double factor) {
  return Micros(std::llround(static_cast<double>(t.count()) * factor));
}

// How the cost of a pass is spread over its layers.
class LayerSplit {
 public:
  explicit LayerSplit(const std::vector<LayerShare>& costs);
  uint32_t layers() const { return static_cast<uint32_t>(until_.size()) - 1; }
  bool divisible() const { return layers() > 1; }
  // Of layers [begin, end).
  LayerShare Part(uint32_t begin, uint32_t end) const {
    return {until_[end].base - until_[begin].base, until_[end].rows - until_[begin].rows};
  }
  // Of the layer that rows make longest.
  LayerShare largest() const { return largest_; }

 private:
  std::vector<LayerShare> until_;  // [i]: of the layers before i
  LayerShare largest_{0, 0};
};

// Predicted time that an item takes from its class and session.
struct Charge {
  size_t klass = 0;
  SessionId session;
  double us = 0;
};

// A pass that is cut into slices. What is in it is "in flight" until its last slice is done.
struct Pass {
  StepPlan plan;  // all of it, as its first slice
  bool vision = false;
  uint32_t place = 0;
  uint32_t layers = 0;
  uint32_t planned = 0;                  // layers in slices that are done or in flight
  uint32_t in_flight = 0;                // slices
  absl::Status failure;                  // of a slice: no more are planned
  Micros p50{0};                         // of all of it
  std::vector<ActiveRequest*> requests;  // one entry per item
  std::vector<Charge> charges;           // one per item, for all of it
};

// What is in one slot of the embedding pool, as far as steps are concerned.
struct FrameState {
  enum class Stage : uint8_t {
    kEmpty,
    kWanted,    // taken; no step encodes it yet
    kParked,    // a parked pass encodes it: rows that read it wait for the pass
    kInFlight,  // a step in flight encodes it: later rows may read it, since steps run in order
    kReady,
  };
  Stage stage = Stage::kEmpty;
  uint32_t users = 0;              // references, counted here as well
  const Content* frame = nullptr;  // compared only
  uint32_t camera = 0;
  Pass* pass = nullptr;  // while kParked
  TimePoint ready_at{};
};

class Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(const LaneOptions& options,
                                                      uint32_t parking_places);

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

  const LayerSplit& split(bool vision) const { return vision ? vision_split : trunk_split; }
  bool divisible() const { return vision_split.divisible() || trunk_split.divisible(); }
  // Whether `unit` is too long for a step and can be cut.
  bool NeedsCut(const StepShape& unit, Micros ceiling) const;
  // What a pass with `unit` in it may take: a few times as long, so that what is paid once is paid
  // for more rows, and who waits behind it on this lane does not wait much longer than for `unit`.
  Micros PassLimit(const StepShape& unit) const;
  // The longest that a layer of such a pass may take under `ceiling`.
  Micros PieceLimit(const StepShape& unit, Micros ceiling) const;
  // Puts a pass with slices left into its place: what is in it waits for it.
  void Park(const std::shared_ptr<Pass>& pass);
  // Its last slice is planned: later steps may count on what is in it.
  void Unpark(Pass& pass);
  // It gets no more slices.
  void Forget(Pass& pass);
  // The parked pass that `r` waits for: one it is in, or one that encodes a frame before its next
  // `chunk` rows. Null: it can go on.
  Pass* WaitsFor(const ActiveRequest& r, uint32_t chunk) const;
  // The next slice of `pass` ends before this layer.
  uint32_t SliceEnd(const Pass& pass, Micros ceiling) const;
  // Predicted time of the slices that are not planned.
  Micros Left(const Pass& pass) const;

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
  const LayerSplit vision_split;
  const LayerSplit trunk_split;
  std::vector<std::shared_ptr<Pass>> parked;  // by place; null: free
  std::vector<ActiveRequest*> active;         // not ended; order has no meaning
  // For the next step, whatever it is. A destination that was freed meanwhile does no harm: its new
  // owner writes it in that step or later.
  std::vector<BlockCopy> copies;
  TimePoint observed_at{};     // of the cost model's newest observation
  double pass = 0;             // predicted microseconds given to this lane, for ties
  uint64_t epoch = 1;          // grows whenever resources may have become free
  uint64_t planned_epoch = 0;  // `epoch` after the worker's newest step was planned
  bool lost = false;

 private:
  Lane(const LaneOptions& options, uint32_t parking_places, std::unique_ptr<KvCache> cache);
  bool TakeEmbeddings(ActiveRequest& r, uint32_t cached_tokens);
  bool TakeBlocks(ActiveRequest& r, std::unique_ptr<Sequence> sequence, TimePoint now);
  bool TakeReserve(ActiveRequest& r, TimePoint now);
  void ReleaseEmbedding(EmbeddingId slot, bool poisoned);

  std::vector<SequenceSlot> free_slots_;
  std::vector<FrameState> frames_;
};

}  // namespace saccade
