#include "kv/embedding_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"

namespace saccade {

EmbeddingCache::EmbeddingCache(uint32_t num_slots)
    : slots_(num_slots), buckets_(std::bit_ceil(std::max<size_t>(num_slots, 1)), kNone) {
  for (int32_t i = static_cast<int32_t>(num_slots) - 1; i >= 0; --i) PushFree(i);
}

size_t EmbeddingCache::Bucket(const Content* content, uint32_t camera) const {
  return (content->digest.low + camera) & (buckets_.size() - 1);
}

int32_t EmbeddingCache::Lookup(const Content* content, uint32_t camera) const {
  int32_t i = buckets_[Bucket(content, camera)];
  while (i != kNone && (at(i).content.get() != content || at(i).camera != camera)) i = at(i).chain;
  return i;
}

std::optional<EmbeddingCache::Found> EmbeddingCache::Acquire(const ContentRef& content,
                                                             uint32_t camera) {
  const int32_t i = content == nullptr ? kNone : Lookup(content.get(), camera);
  if (i == kNone) {
    ++misses_;
    return std::nullopt;
  }
  ++hits_;
  Slot& s = at(i);
  if (s.refs++ == 0) {
    Unlink(i);
    --idle_;
    ++held_;
  }
  return Found{EmbeddingId(i), s.ready ? State::kReady : State::kFilling};
}

absl::StatusOr<EmbeddingId> EmbeddingCache::Reserve(const ContentRef& content, uint32_t camera) {
  if (content == nullptr) return absl::InvalidArgumentError("embedding cache: no frame");
  if (Lookup(content.get(), camera) != kNone) {
    return absl::AlreadyExistsError("embedding cache: the frame has a slot");
  }
  if (free_head_ == kNone && oldest_ != kNone) {
    const int32_t victim = oldest_;
    Unlink(victim);
    --idle_;
    Forget(victim);
    PushFree(victim);
  }
  if (free_head_ == kNone) {
    return absl::ResourceExhaustedError(
        absl::StrCat("embedding cache: all ", num_slots(), " slots are in use"));
  }
  const int32_t i = free_head_;
  Slot& s = at(i);
  free_head_ = s.next;
  s.next = kNone;
  s.content = content;
  s.camera = camera;
  s.refs = 1;
  ++held_;
  int32_t& head = buckets_[Bucket(content.get(), camera)];
  s.chain = head;
  head = i;
  return EmbeddingId(i);
}

EmbeddingCache::Slot* EmbeddingCache::Held(EmbeddingId slot) {
  if (slot.value() < 0 || static_cast<size_t>(slot.value()) >= slots_.size()) return nullptr;
  Slot& s = at(slot.value());
  return s.refs > 0 ? &s : nullptr;
}

bool EmbeddingCache::Ready(EmbeddingId slot) const {
  return slot.value() >= 0 && static_cast<size_t>(slot.value()) < slots_.size() &&
         at(slot.value()).ready;
}

void EmbeddingCache::Publish(EmbeddingId slot) {
  Slot* s = Held(slot);
  if (s != nullptr && s->content != nullptr) s->ready = true;
}

void EmbeddingCache::Abandon(EmbeddingId slot) {
  const Slot* s = Held(slot);
  if (s != nullptr && s->content != nullptr) Forget(slot.value());
}

void EmbeddingCache::Release(EmbeddingId slot) {
  Slot* s = Held(slot);
  if (s == nullptr || --s->refs > 0) return;
  const int32_t i = slot.value();
  --held_;
  if (!s->ready) {
    if (s->content != nullptr) Forget(i);
    PushFree(i);
    return;
  }
  ++idle_;
  s->prev = newest_;
  (newest_ == kNone ? oldest_ : at(newest_).next) = i;
  newest_ = i;
}

void EmbeddingCache::Forget(int32_t i) {
  Slot& s = at(i);
  int32_t* link = &buckets_[Bucket(s.content.get(), s.camera)];
  while (*link != i) link = &at(*link).chain;
  *link = s.chain;
  s.chain = kNone;
  s.ready = false;
  s.content.reset();
}

void EmbeddingCache::Unlink(int32_t i) {
  Slot& s = at(i);
  (s.prev == kNone ? oldest_ : at(s.prev).next) = s.next;
  (s.next == kNone ? newest_ : at(s.next).prev) = s.prev;
  s.prev = kNone;
  s.next = kNone;
}

void EmbeddingCache::PushFree(int32_t i) {
  at(i).next = free_head_;
  free_head_ = i;
}

absl::Status EmbeddingCache::CheckInvariants() const {
  const auto broken = [](auto&&... parts) {
    return absl::InternalError(absl::StrCat("embedding cache: ", parts...));
  };
  std::vector<uint8_t> where(slots_.size(), 0);  // 0: in no list, 1: free, 2: idle
  uint32_t free = 0;
  for (int32_t i = free_head_; i != kNone; i = at(i).next, ++free) {
    if (std::exchange(where[static_cast<size_t>(i)], 1) != 0)
      return broken("slot ", i, " is in two lists");
    if (at(i).refs != 0 || at(i).ready || at(i).content != nullptr)
      return broken("free slot ", i, " is in use");
  }
  uint32_t idle = 0;
  int32_t last = kNone;
  for (int32_t i = oldest_; i != kNone; last = i, i = at(i).next, ++idle) {
    if (std::exchange(where[static_cast<size_t>(i)], 2) != 0)
      return broken("slot ", i, " is in two lists");
    if (at(i).prev != last) return broken("LRU links of slot ", i, " disagree");
    if (at(i).refs != 0 || !at(i).ready) return broken("idle slot ", i, " is held or not ready");
  }
  if (newest_ != last) return broken("the LRU ends elsewhere");
  uint32_t held = 0;
  uint32_t findable = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    if (s.refs > 0) ++held;
    if ((s.refs > 0) != (where[i] == 0))
      return broken("slot ", i, " is held and in a list, or lost");
    if (s.ready && s.content == nullptr) return broken("slot ", i, " is ready without a frame");
    if (s.content == nullptr) continue;
    ++findable;
    if (Lookup(s.content.get(), s.camera) != static_cast<int32_t>(i))
      return broken("slot ", i, " is not found");
  }
  uint32_t chained = 0;
  for (const int32_t head : buckets_) {
    for (int32_t i = head; i != kNone && chained <= findable; i = at(i).chain) ++chained;
  }
  if (chained != findable)
    return broken("the index holds ", chained, " slots, findable are ", findable);
  if (held != held_ || idle != idle_) {
    return broken("counted ", held_, " held and ", idle_, " idle, found ", held, " and ", idle);
  }
  if (held + idle + free != num_slots())
    return broken("held + idle + free is not the number of slots");
  return absl::OkStatus();
}

}  // namespace saccade
