#pragma once
// EmbeddingCache: which slot of a device's vision-embedding pool holds which frame. Engine thread only. A slot is taken
// before the encode step that fills it, and is usable by others once published.
#include <cstdint>
#include <memory>
#include <optional>

#include "base/content.h"
#include "base/ids.h"
#include "base/status.h"

namespace saccade {

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
  // A slot to fill, with one reference; evicts the least recently used idle one. RESOURCE_EXHAUSTED when all are in use.
  absl::StatusOr<EmbeddingId> Reserve(const ContentRef& content, uint32_t camera);
  bool Ready(EmbeddingId slot) const;
  void Publish(EmbeddingId slot);
  // The encode failed or was dropped: the slot is not published; it is freed with its last reference.
  void Abandon(EmbeddingId slot);
  void Release(EmbeddingId slot);
  uint32_t num_slots() const;
  uint32_t held() const;
  uint32_t idle() const;
  uint64_t hits() const;
  uint64_t misses() const;
  absl::Status CheckInvariants() const;
};

}  // namespace saccade
