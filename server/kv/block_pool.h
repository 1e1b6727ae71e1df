#pragma once
// BlockPool: the blocks of one K/V pool and who may take them: references, quotas, the prefix index
// and the LRU of idle blocks. Private to kv/. Every operation is O(1) and allocates nothing after
// construction; lists are threaded through the blocks.
//
//   free ──Allocate──> held (refs > 0) ──last Unref, indexed──> idle ──Ref──> held
//    ^                        │                                   │
//    └──last Unref, unindexed─┘            Evict / FlushIdle ─────┘──> free
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/modality.h"
#include "base/status.h"
#include "kv/kv_cache.h"
#include "kv/timeline.h"

namespace saccade {

class BlockPool {
 public:
  enum class State : uint8_t {
    kFree,
    kFilling,    // held; may be written past its valid tokens
    kCommitted,  // all its tokens are valid and never change
  };
  struct Block {
    Digest128 key;                             // while indexed
    std::shared_ptr<const Timeline> timeline;  // while indexed: what its K/V was computed from
    uint32_t position = 0;                     // while indexed: which block of `timeline`
    uint32_t refs = 0;                         // sequences that name it
    uint32_t departures = 0;  // of these, copy-on-write planned by the open transaction
    int32_t prev = kNone;     // LRU of its partition
    int32_t next = kNone;     // LRU, or the free list
    int32_t chain = kNone;    // bucket of the index
    uint64_t idle_since = 0;  // order of becoming idle, over all partitions
    Modality modality = Modality::kText;
    State state = State::kFree;
    bool indexed = false;
    bool claimed = false;  // idle, out of its LRU: the open transaction will evict it
  };
  // What planning may still take. Idle blocks count as used by their partition.
  struct Capacity {
    uint32_t free = 0;
    std::array<uint32_t, kModalities> used{};
  };
  struct Victim {
    int32_t block = kNone;
    EvictionReason reason = EvictionReason::kOwnPartition;
  };
  struct Partition {
    PartitionQuota quota;
    uint32_t held = 0;
    uint32_t idle = 0;  // claimed ones included
    int32_t oldest = kNone;
    int32_t newest = kNone;
    std::array<uint64_t, kEvictionReasons> evictions{};
  };

  BlockPool(uint32_t num_blocks, const std::array<PartitionQuota, kModalities>& quotas);

  uint32_t num_blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t free_blocks() const { return free_; }
  const Block& block(BlockId id) const { return blocks_[static_cast<size_t>(id.value())]; }
  const Partition& partition(size_t m) const { return partitions_[m]; }
  Capacity capacity() const;

  // Planning. Takes one block for `m` out of `capacity`: a free one that no other partition's floor
  // needs, else the oldest idle block of `m`, else the oldest idle block of a partition above its
  // floor. Victims are claimed, which hides them from Find, and appended to `victims`. False:
  // nothing was taken.
  bool Take(Capacity& capacity, Modality m, std::vector<Victim>& victims);
  // Undoes Take for victims [from, end): they are again where they were in their LRU.
  void Unclaim(std::vector<Victim>& victims, size_t from);
  void PlanDeparture(BlockId id) { ++at(id).departures; }
  void CancelDeparture(BlockId id) { --at(id).departures; }

  // Committing.
  void Evict(const Victim& victim);
  BlockId Allocate(Modality m);  // one reference; the plan has made sure that one is free

  void Ref(BlockId id);
  void Unref(BlockId id);
  void MarkCommitted(BlockId id) { at(id).state = State::kCommitted; }

  // The block that holds `key`; invalid when none does, or when it is claimed.
  BlockId Find(const Digest128& key) const;
  // The block of this key is there, or was and has been evicted, as far as is remembered: by 32
  // bits of the key beside its place, and four of five of the last num_blocks evictions.
  bool Knew(const Digest128& key) const {
    return evicted_[key.low & (evicted_.size() - 1)] == Mark(key) || Lookup(key) != kNone;
  }
  // False when the key is taken: the first writer wins.
  bool Index(BlockId id, const std::shared_ptr<const Timeline>& timeline, uint32_t position);
  // A held block leaves the index: it is freed with its last reference. Nothing happens when it is
  // not in it.
  void Unindex(BlockId id);
  // Evicts every idle block that is not claimed.
  void FlushIdle();

  // Every promise of this file, recomputed from the blocks; `edges[b]` is the number of sequences
  // that name block b. `claimed` blocks belong to the open transaction.
  absl::Status Check(std::span<const uint32_t> edges, std::span<const Victim> claimed) const;

 private:
  static constexpr int32_t kNone = -1;
  friend class KvCacheTestPeer;

  Block& at(BlockId id) { return blocks_[static_cast<size_t>(id.value())]; }
  Block& at(int32_t i) { return blocks_[static_cast<size_t>(i)]; }
  const Block& at(int32_t i) const { return blocks_[static_cast<size_t>(i)]; }
  Partition& PartitionOf(const Block& b) { return partitions_[static_cast<size_t>(b.modality)]; }
  size_t Bucket(const Digest128& key) const { return key.low & (buckets_.size() - 1); }
  // Never 0, which stands for nothing.
  static uint32_t Mark(const Digest128& key) { return static_cast<uint32_t>(key.high >> 32) | 1; }
  int32_t Lookup(const Digest128& key) const;
  bool BelowCap(const Capacity& capacity, size_t m) const {
    return capacity.used[m] < partitions_[m].quota.cap;
  }
  void PushNewest(int32_t i);
  void PushOldest(int32_t i);
  void Unlink(int32_t i);
  void RemoveFromIndex(int32_t i);
  void PushFree(int32_t i);
  void EvictIdle(int32_t i, EvictionReason reason);

  std::vector<Block> blocks_;
  std::vector<int32_t> buckets_;   // heads; a power of two, at least num_blocks
  std::vector<uint32_t> evicted_;  // marks of evicted keys, newest wins; four times buckets_
  std::array<Partition, kModalities> partitions_;
  int32_t free_head_ = kNone;
  uint32_t free_ = 0;
  uint64_t idle_clock_ = 0;
};

}  // namespace saccade
