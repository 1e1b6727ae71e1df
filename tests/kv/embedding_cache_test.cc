// The embedding cache: sharing while filling, LRU, failure, and random operations against a naive
// model.
#include "kv/embedding_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "tests/kv/kv_testing.h"

namespace saccade {
namespace {

using State = EmbeddingCache::State;

EmbeddingId Fill(EmbeddingCache& cache, const ContentRef& frame, uint32_t camera = 0) {
  const auto slot = cache.Reserve(frame, camera);
  EXPECT_TRUE(slot.ok()) << Message(slot.status());
  cache.Publish(*slot);
  cache.Release(*slot);
  EXPECT_OK(cache.CheckInvariants());
  return *slot;
}

TEST(EmbeddingCache, SharesASlotInFlight) {
  EmbeddingCache cache(2);
  const ContentRef frame = Frame(1);
  EXPECT_FALSE(cache.Acquire(frame, 0).has_value());
  const auto slot = cache.Reserve(frame, 0);
  ASSERT_TRUE(slot.ok());
  EXPECT_FALSE(cache.Ready(*slot));
  const auto second = cache.Acquire(frame, 0);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->slot, *slot);
  EXPECT_EQ(second->state, State::kFilling);
  EXPECT_EQ(cache.Reserve(frame, 0).status().code(), absl::StatusCode::kAlreadyExists);
  cache.Publish(*slot);
  EXPECT_TRUE(cache.Ready(*slot));
  const auto third = cache.Acquire(frame, 0);
  ASSERT_TRUE(third.has_value());
  EXPECT_EQ(third->state, State::kReady);
  EXPECT_EQ(cache.hits(), 2u);
  EXPECT_EQ(cache.misses(), 1u);
  EXPECT_EQ(cache.held(), 1u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cache.idle(), 0u);
    cache.Release(*slot);
    ASSERT_OK(cache.CheckInvariants());
  }
  EXPECT_EQ(cache.held(), 0u);
  EXPECT_EQ(cache.idle(), 1u);
}

TEST(EmbeddingCache, CameraAndIdentityAreTheKey) {
  EmbeddingCache cache(4);
  const ContentRef frame = Frame(1);
  const ContentRef twin = NewFrame(1);  // equal digest, another object
  Fill(cache, frame, 0);
  EXPECT_FALSE(cache.Acquire(frame, 1).has_value());
  EXPECT_FALSE(cache.Acquire(twin, 0).has_value());
  EXPECT_FALSE(cache.Acquire(nullptr, 0).has_value());
  EXPECT_EQ(cache.Reserve(nullptr, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(cache.Acquire(frame, 0).has_value());
  ASSERT_OK(cache.CheckInvariants());
}

TEST(EmbeddingCache, EvictsTheLeastRecentlyUsedIdleSlot) {
  EmbeddingCache cache(3);
  const std::vector<ContentRef> frames = {Frame(0), Frame(1), Frame(2), Frame(3), Frame(4)};
  Fill(cache, frames[0]);
  const EmbeddingId one = Fill(cache, frames[1]);
  const EmbeddingId two = Fill(cache, frames[2]);
  const auto again = cache.Acquire(frames[0], 0);  // now the newest once released
  ASSERT_TRUE(again.has_value());
  cache.Release(again->slot);
  EXPECT_EQ(Fill(cache, frames[3]), one);
  EXPECT_EQ(Fill(cache, frames[4]), two);
  EXPECT_TRUE(cache.Acquire(frames[0], 0).has_value());
  EXPECT_FALSE(cache.Acquire(frames[1], 0).has_value());
  ASSERT_OK(cache.CheckInvariants());
}

TEST(EmbeddingCache, ExhaustedWhenAllAreHeld) {
  EmbeddingCache cache(2);
  const auto a = cache.Reserve(Frame(1), 0);
  const auto b = cache.Reserve(Frame(2), 0);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(cache.Reserve(Frame(3), 0).status().code(), absl::StatusCode::kResourceExhausted);
  cache.Release(*a);  // never filled: free at once
  EXPECT_EQ(cache.idle(), 0u);
  EXPECT_TRUE(cache.Reserve(Frame(3), 0).ok());
  ASSERT_OK(cache.CheckInvariants());
  EXPECT_EQ(EmbeddingCache(0).Reserve(Frame(1), 0).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(EmbeddingCache, AbandonedSlotIsNotFoundAndFreedWithItsLastReference) {
  EmbeddingCache cache(1);
  const ContentRef frame = Frame(1);
  const auto slot = cache.Reserve(frame, 0);
  ASSERT_TRUE(slot.ok());
  ASSERT_TRUE(cache.Acquire(frame, 0).has_value());
  cache.Abandon(*slot);
  ASSERT_OK(cache.CheckInvariants());
  EXPECT_FALSE(cache.Acquire(frame, 0).has_value());
  cache.Publish(*slot);  // too late
  EXPECT_FALSE(cache.Ready(*slot));
  EXPECT_EQ(cache.Reserve(frame, 0).status().code(), absl::StatusCode::kResourceExhausted);
  cache.Release(*slot);
  EXPECT_EQ(cache.held(), 1u);
  cache.Release(*slot);
  EXPECT_EQ(cache.held() + cache.idle(), 0u);
  ASSERT_OK(cache.CheckInvariants());

  // Also after it was published.
  const EmbeddingId again = Fill(cache, frame);
  ASSERT_TRUE(cache.Acquire(frame, 0).has_value());
  cache.Abandon(again);
  EXPECT_FALSE(cache.Ready(again));
  EXPECT_FALSE(cache.Acquire(frame, 0).has_value());
  cache.Release(again);
  EXPECT_EQ(cache.held() + cache.idle(), 0u);
  ASSERT_OK(cache.CheckInvariants());
}

TEST(EmbeddingCache, IgnoresWhatIsNotHeld) {
  EmbeddingCache cache(2);
  const EmbeddingId idle = Fill(cache, Frame(1));
  for (const EmbeddingId id : {EmbeddingId(), EmbeddingId(7), idle}) {
    cache.Release(id);
    cache.Abandon(id);
    ASSERT_OK(cache.CheckInvariants());
  }
  EXPECT_FALSE(cache.Ready(EmbeddingId()));
  EXPECT_EQ(cache.idle(), 1u);
}

// The model: a list of slots in order of last use, searched from end to end.
struct ModelSlot {
  int key = -1;  // -1: not findable
  EmbeddingId slot;
  int refs = 0;
  bool ready = false;
};

TEST(EmbeddingCache, RandomOperationsMatchANaiveModel) {
  constexpr int kFrames = 9;
  constexpr int kCameras = 2;
  std::vector<ContentRef> frames;
  for (int f = 0; f < kFrames; ++f) frames.push_back(Frame(static_cast<uint8_t>(f)));
  for (const uint32_t num_slots : {1u, 2u, 5u, 16u}) {
    std::mt19937 rng(num_slots);
    SCOPED_TRACE(testing::Message() << "slots and seed " << num_slots);
    EmbeddingCache cache(num_slots);
    std::vector<ModelSlot> model;  // live slots; idle ones in order of their last release
    uint64_t hits = 0;
    uint64_t misses = 0;
    for (int op = 0; op < 20000; ++op) {
      const int key = static_cast<int>(rng() % (kFrames * kCameras));
      const ContentRef& frame = frames[static_cast<size_t>(key % kFrames)];
      const auto camera = static_cast<uint32_t>(key / kFrames);
      const auto found = std::find_if(model.begin(), model.end(),
                                      [&](const ModelSlot& s) { return s.key == key; });
      switch (rng() % 4) {
        case 0: {
          const auto got = cache.Acquire(frame, camera);
          ASSERT_EQ(got.has_value(), found != model.end());
          ++(got ? hits : misses);
          if (!got) break;
          ASSERT_EQ(got->slot, found->slot);
          ASSERT_EQ(got->state == State::kReady, found->ready);
          ++found->refs;
          break;
        }
        case 1: {
          const auto got = cache.Reserve(frame, camera);
          const auto victim = std::find_if(model.begin(), model.end(),
                                           [](const ModelSlot& s) { return s.refs == 0; });
          if (found != model.end()) {
            ASSERT_EQ(got.status().code(), absl::StatusCode::kAlreadyExists);
          } else if (model.size() == num_slots && victim == model.end()) {
            ASSERT_EQ(got.status().code(), absl::StatusCode::kResourceExhausted);
          } else {
            ASSERT_TRUE(got.ok());
            if (model.size() == num_slots) {
              ASSERT_EQ(*got, victim->slot);
              model.erase(victim);
            }
            for (const ModelSlot& s : model) ASSERT_NE(s.slot, *got);
            model.push_back({key, *got, 1, false});
          }
          break;
        }
        default: {
          if (model.empty()) break;
          const auto it = model.begin() + static_cast<std::ptrdiff_t>(rng() % model.size());
          if (it->refs == 0) break;
          if (rng() % 4 == 0) {
            cache.Publish(it->slot);
            it->ready = it->key >= 0;
          } else if (rng() % 8 == 0) {
            cache.Abandon(it->slot);
            it->key = -1;
            it->ready = false;
          } else {
            cache.Release(it->slot);
            if (--it->refs == 0) {
              const ModelSlot slot = *it;
              model.erase(it);
              if (slot.ready) model.push_back(slot);
            }
          }
        }
      }
      ASSERT_OK(cache.CheckInvariants());
      const auto held = static_cast<uint32_t>(
          std::count_if(model.begin(), model.end(), [](const ModelSlot& s) { return s.refs > 0; }));
      ASSERT_EQ(cache.held(), held);
      ASSERT_EQ(cache.idle(), model.size() - held);
      ASSERT_EQ(cache.hits(), hits);
      ASSERT_EQ(cache.misses(), misses);
      for (const ModelSlot& s : model) ASSERT_EQ(cache.Ready(s.slot), s.ready);
    }
  }
}

}  // namespace
}  // namespace saccade
