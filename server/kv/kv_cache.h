#pragma once
// KvCache: all metadata of one K/V pool (one model on one worker). The engine thread is the only caller; no lock, no clock,
// no device. Bytes are the worker's: it sees block ids and the copies a transaction lists.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/modality.h"
#include "base/policy.h"
#include "base/status.h"
#include "kv/timeline.h"

namespace saccade {

// Quota of one partition, in blocks: the floor is kept for it, the cap is never passed.
struct PartitionQuota {
  uint32_t floor = 0;
  uint32_t cap = 0;
};

struct KvCacheOptions {
  uint32_t num_blocks = 0;
  uint32_t block_tokens = 16;
  std::array<PartitionQuota, kModalities> partitions{};
};

struct PartitionStats {
  uint32_t held = 0;    // blocks named by an open sequence
  uint32_t idle = 0;    // committed, in the prefix index, named by nobody
  uint32_t floor = 0;
  uint32_t cap = 0;
  uint64_t hit_tokens = 0;   // prompt tokens found cached at Open, since start
  uint64_t miss_tokens = 0;
  double hit_rate_ema = 0;   // per Open: 0.9 * ema + 0.1 * this
  std::array<uint64_t, kEvictionReasons> evictions{};
};

struct KvStats {
  uint32_t num_blocks = 0;
  uint32_t free_blocks = 0;
  std::array<PartitionStats, kModalities> partitions{};
};

// One entry of a sequence's page table.
struct PageRef {
  BlockId block;
  uint16_t len = 0;       // tokens of this page that are valid for the step
  uint32_t position = 0;  // of its first token
};

// Whole blocks to copy on the device before the step runs.
struct BlockCopy {
  BlockId from;
  BlockId to;
};

class KvCache;

// The K/V of one token sequence: references to blocks. Made by Open or Fork, given back by Close.
class Sequence {
 public:
  const Timeline& timeline() const { return *timeline_; }
  uint32_t cached_tokens() const { return cached_tokens_; }        // prefix found at Open
  std::array<uint32_t, kModalities> cached_by_modality() const { return cached_by_modality_; }
  uint32_t reserved_tokens() const { return reserved_tokens_; }    // tokens that have a place
  uint32_t committed_tokens() const { return committed_tokens_; }  // tokens whose K/V is valid and immutable
  // Page table covering tokens [0, upto); upto <= reserved_tokens().
  std::vector<PageRef> PageTable(uint32_t upto) const;

 private:
  friend class KvCache;
  friend class KvTransaction;
  struct Page {
    BlockId block;
    Modality modality = Modality::kText;
    uint32_t begin = 0;  // first token
  };
  std::shared_ptr<const Timeline> timeline_;
  std::vector<Page> pages_;
  uint32_t cached_tokens_ = 0;
  std::array<uint32_t, kModalities> cached_by_modality_{};
  uint32_t reserved_tokens_ = 0;
  uint32_t committed_tokens_ = 0;
};

// Plans the blocks of one step on a copy of capacity; the cache changes in Commit only. All or nothing: either Commit is
// called, or the transaction is dropped and nothing happened. One at a time.
class KvTransaction {
 public:
  // Plans room for tokens [reserved, upto) of `sequence`; tokens past the timeline are action tokens. May plan evictions of
  // idle blocks. RESOURCE_EXHAUSTED leaves the plan as it was before the call. Copy-on-write: a part-full last block that
  // is shared gets a private copy.
  absl::Status Reserve(Sequence& sequence, uint32_t upto);
  // Marks for undoing later Reserve calls of this transaction.
  size_t Savepoint() const;
  void RollbackTo(size_t savepoint);
  // Applies the plan and returns the copies the worker must do first. Cannot fail.
  std::vector<BlockCopy> Commit() &&;
  // Implementation detail is the owner's.
};

class KvCache {
 public:
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const KvCacheOptions& options);
  // OK when the request could run on an empty cache; else RESOURCE_EXHAUSTED, kNeverFits, with both numbers.
  absl::Status CheckFits(const Timeline& timeline, uint32_t action_tokens, uint32_t samples) const;
  // Takes references on the longest cached prefix of whole timeline blocks; never the last block, whose last token must be
  // computed for its logits. Content is compared after the hash.
  std::unique_ptr<Sequence> Open(std::shared_ptr<const Timeline> timeline, TimePoint now);
  // Prompt tokens that Open would find, without taking them.
  uint32_t CachedTokens(const Timeline& timeline) const;
  KvTransaction Begin(TimePoint now);
  // Tokens [0, tokens) are computed: their whole timeline blocks become immutable and shareable (first writer wins).
  void Publish(Sequence& sequence, uint32_t tokens, TimePoint now);
  // A second sequence on the same blocks.
  std::unique_ptr<Sequence> Fork(const Sequence& sequence);
  // No step in flight may name the sequence. `poisoned`: its uncommitted and own committed blocks are freed, not cached.
  void Close(std::unique_ptr<Sequence> sequence, TimePoint now, bool poisoned = false);
  void FlushIdle();
  KvStats stats() const;
  // free + held + idle = capacity; partition sums; references equal edges counted from sequences; every indexed block
  // committed; no block owned twice. Called by every test and by the admin API.
  absl::Status CheckInvariants() const;
};

}  // namespace saccade
