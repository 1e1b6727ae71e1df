#pragma once
// EmbeddingCache: which slot of a device's vision-embedding pool holds which frame. Engine thread
// only. A slot is taken before the encode step that fills it, and is usable by others once
// published.
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/content.h"
#include "base/ids.h"
#include "base/status.h"

namespace saccade {

// A frame is known by its address (frames are interned) and its camera, since a model may treat
// cameras differently. All operations are O(1) and allocate nothing after construction. A slot that
// is out of range or not held is ignored.
class EmbeddingCache {
 public:
  enum class State : uint8_t { kFilling, kReady };
  struct Found {
    EmbeddingId slot;
    State state;
  };
  explicit EmbeddingCache(uint32_t num_slots);
  // The slot of this (frame, camera), filling or ready; takes a reference when found.
  std::optional<Found> Acquire(const ContentRef& content, uint32_t camera);
  // A slot to fill, with one reference; evicts the least recently used idle one. RESOURCE_EXHAUSTED
  // when all are in use; ALREADY_EXISTS when Acquire would find it; INVALID_ARGUMENT when there is
  // no frame.
  absl::StatusOr<EmbeddingId> Reserve(const ContentRef& content, uint32_t camera);
  bool Ready(EmbeddingId slot) const;
  void Publish(EmbeddingId slot);
  // The encode failed or was dropped: the slot is found no more, and is freed with its last
  // reference. Also for one that was published, when its values turn out to be unusable.
  void Abandon(EmbeddingId slot);
  // With the last reference a published slot becomes idle, another is freed.
  void Release(EmbeddingId slot);
  uint32_t num_slots() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t held() const { return held_; }
  uint32_t idle() const { return idle_; }
  uint64_t hits() const { return hits_; }      // Acquire found a slot, ready or still filling
  uint64_t misses() const { return misses_; }  // Acquire found none
  // held + idle + free = slots; every slot in exactly one place; every findable slot found by its
  // own key only.
  absl::Status CheckInvariants() const;

 private:
  static constexpr int32_t kNone = -1;
  struct Slot {
    ContentRef content;  // while findable; keeps its address from being used by another frame
    uint32_t camera = 0;
    uint32_t refs = 0;
    int32_t prev = kNone;   // LRU of idle slots
    int32_t next = kNone;   // LRU, or the free list
    int32_t chain = kNone;  // bucket of the index
    bool ready = false;
  };
  Slot* Held(EmbeddingId slot);
  Slot& at(int32_t i) { return slots_[static_cast<size_t>(i)]; }
  const Slot& at(int32_t i) const { return slots_[static_cast<size_t>(i)]; }
  size_t Bucket(const Content* content, uint32_t camera) const;
  int32_t Lookup(const Content* content, uint32_t camera) const;
  void Forget(int32_t i);
  void Unlink(int32_t i);
  void PushFree(int32_t i);

  std::vector<Slot> slots_;
  std::vector<int32_t> buckets_;
  int32_t free_head_ = kNone;
  int32_t oldest_ = kNone;
  int32_t newest_ = kNone;
  uint32_t held_ = 0;
  uint32_t idle_ = 0;
  uint64_t hits_ = 0;
  uint64_t misses_ = 0;
};

}  // namespace saccade
