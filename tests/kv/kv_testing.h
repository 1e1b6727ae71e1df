#pragma once
// What the tests of kv/ share: frames, timelines, a cache that checks its invariants after every
// call, and doors into private parts for damage that the interface cannot do.
#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv/block_pool.h"
#include "kv/kv_cache.h"
#include "kv/timeline.h"

#define ASSERT_OK(expr)                                                \
  do {                                                                 \
    const absl::Status assert_ok_ = (expr);                            \
    ASSERT_TRUE(assert_ok_.ok()) << std::string(assert_ok_.message()); \
  } while (false)
#define EXPECT_OK(expr)                                                \
  do {                                                                 \
    const absl::Status expect_ok_ = (expr);                            \
    EXPECT_TRUE(expect_ok_.ok()) << std::string(expect_ok_.message()); \
  } while (false)

namespace saccade {

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

class TimelineTestPeer {
 public:
  // A timeline whose key `block` is `key`, as if the digest had collided.
  static std::shared_ptr<const Timeline> WithKey(const Timeline& timeline, uint32_t block,
                                                 const Digest128& key) {
    auto copy = std::make_shared<Timeline>(timeline);
    copy->blocks_[block].key = key;
    return copy;
  }
};

class KvCacheTestPeer {
 public:
  static BlockPool& pool(KvCache& cache) { return *cache.pool_; }
  static BlockPool::Block& block(KvCache& cache, BlockId id) { return cache.pool_->at(id); }
  static BlockId Find(const KvCache& cache, const Digest128& key) { return cache.pool_->Find(key); }
  static void EvictIdle(KvCache& cache, BlockId id) {
    cache.pool_->Unlink(id.value());
    cache.pool_->EvictIdle(id.value(), EvictionReason::kOwnPartition);
  }
  static uint32_t& held(KvCache& cache, Modality m) {
    return cache.pool_->partitions_[static_cast<size_t>(m)].held;
  }
  static uint32_t& idle(KvCache& cache, Modality m) {
    return cache.pool_->partitions_[static_cast<size_t>(m)].idle;
  }
  static uint32_t& free_blocks(KvCache& cache) { return cache.pool_->free_; }
};

inline std::shared_ptr<Content> NewFrame(uint8_t value) {
  auto content = std::make_shared<Content>();
  content->width = content->height = 1;
  content->rgb = {value, value, value};
  content->digest = DigestBytes("frame.v1", content->rgb);
  return content;
}
inline ContentRef Frame(uint8_t value) { return NewFrame(value); }

inline Digest128 Salt(std::string_view name) { return DigestBuilder("salt").Field(name).Finish(); }

inline std::array<PartitionQuota, kModalities> OpenQuotas(uint32_t blocks) {
  std::array<PartitionQuota, kModalities> quotas;
  quotas.fill({0, blocks});
  return quotas;
}

inline PartitionQuota& Of(std::array<PartitionQuota, kModalities>& quotas, Modality m) {
  return quotas[static_cast<size_t>(m)];
}
inline const PartitionStats& Of(const KvStats& stats, Modality m) {
  return stats.partitions[static_cast<size_t>(m)];
}

inline constexpr TimePoint kNow{};

// Text tokens first, first + 1, ...
inline std::vector<int32_t> Ids(int32_t first, uint32_t count) {
  std::vector<int32_t> ids(count);
  for (uint32_t i = 0; i < count; ++i) ids[i] = first + static_cast<int32_t>(i);
  return ids;
}

// A KvCache whose invariants are checked after every call.
class CheckedCache {
 public:
  CheckedCache(uint32_t num_blocks, uint32_t block_tokens,
               const std::array<PartitionQuota, kModalities>& quotas) {
    KvCacheOptions options;
    options.num_blocks = num_blocks;
    options.block_tokens = block_tokens;
    options.partitions = quotas;
    auto cache = KvCache::Create(options);
    EXPECT_TRUE(cache.ok()) << Message(cache.status());
    cache_ = std::move(cache).value();
  }
  CheckedCache(uint32_t num_blocks, uint32_t block_tokens)
      : CheckedCache(num_blocks, block_tokens, OpenQuotas(num_blocks)) {}

  KvCache& operator*() { return *cache_; }
  KvCache* operator->() { return cache_.get(); }
  void Check() const { ASSERT_OK(cache_->CheckInvariants()); }

  std::unique_ptr<Sequence> Open(const std::shared_ptr<const Timeline>& timeline) {
    const uint32_t expected = cache_->CachedTokens(*timeline);
    auto sequence = cache_->Open(timeline, kNow);
    EXPECT_EQ(sequence->cached_tokens(), expected);
    Check();
    return sequence;
  }
  // One transaction for one sequence.
  absl::Status Reserve(Sequence& sequence, uint32_t upto,
                       std::vector<BlockCopy>* copies = nullptr) {
    KvTransaction transaction = cache_->Begin(kNow);
    const absl::Status status = transaction.Reserve(sequence, upto);
    Check();
    if (!status.ok()) return status;
    std::vector<BlockCopy> made = std::move(transaction).Commit();
    if (copies != nullptr) *copies = std::move(made);
    Check();
    return status;
  }
  void Publish(Sequence& sequence, uint32_t tokens) {
    cache_->Publish(sequence, tokens, kNow);
    Check();
  }
  std::unique_ptr<Sequence> Fork(const Sequence& sequence) {
    auto fork = cache_->Fork(sequence);
    Check();
    return fork;
  }
  void Close(std::unique_ptr<Sequence> sequence, bool poisoned = false) {
    cache_->Close(std::move(sequence), kNow, poisoned);
    Check();
  }
  // Computes the whole prompt of `timeline` and closes it, so that its blocks are idle.
  void Warm(const std::shared_ptr<const Timeline>& timeline) {
    auto sequence = Open(timeline);
    ASSERT_OK(Reserve(*sequence, timeline->num_tokens()));
    Publish(*sequence, timeline->num_tokens());
    Close(std::move(sequence));
  }
  uint32_t free_blocks() const { return cache_->stats().free_blocks; }
  uint32_t held(Modality m) const { return Of(cache_->stats(), m).held; }
  uint32_t idle(Modality m) const { return Of(cache_->stats(), m).idle; }
  uint64_t evictions(Modality m, EvictionReason reason) const {
    return Of(cache_->stats(), m).evictions[static_cast<size_t>(reason)];
  }

 private:
  std::unique_ptr<KvCache> cache_;
};

inline std::vector<BlockId> Blocks(const Sequence& sequence) {
  std::vector<BlockId> ids;
  for (const PageRef& page : sequence.PageTable(sequence.reserved_tokens()))
    ids.push_back(page.block);
  return ids;
}

}  // namespace saccade
