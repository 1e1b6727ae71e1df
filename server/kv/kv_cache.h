#pragma once
// KvCache: all metadata of one K/V pool (one model on one worker). The engine thread is the only
// caller; no lock, no clock, no device. Bytes are the worker's: it sees block ids and the copies a
// transaction lists.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/modality.h"
#include "base/policy.h"
#include "base/status.h"
#include "kv/timeline.h"

namespace saccade {

// Quota of one partition, in blocks: the floor is kept for it, the cap is never passed. Idle blocks
// of a partition count as its own; others may evict them down to the floor.
struct PartitionQuota {
  uint32_t floor = 0;
  uint32_t cap = 0;
};

struct KvCacheOptions {
  uint32_t num_blocks = 0;     // 1 .. 2^24
  uint32_t block_tokens = 16;  // 1 .. 65535; timelines must be cut with the same
  std::array<PartitionQuota, kModalities>
      partitions{};  // floor <= cap; floors sum to num_blocks at most
  // Watermark, in blocks: work that can wait starts only when as many are left that nobody holds
  // (free or idle), so that urgent work finds blocks at once. Fewer than num_blocks.
  uint32_t headroom = 0;
};

struct PartitionStats {
  uint32_t held = 0;  // blocks named by an open sequence
  uint32_t idle = 0;  // committed, in the prefix index, named by nobody
  uint32_t floor = 0;
  uint32_t cap = 0;
  // Prompt tokens found cached at Open, since start. An opened sequence counts once, when it gets
  // its first blocks, so that one which is given up for lack of blocks and opened again later does
  // not count twice; forks do not count.
  uint64_t hit_tokens = 0;
  uint64_t miss_tokens = 0;
  // Of hit / (hit + miss) of this partition: 0.9 * ema + 0.1 * this, for every sequence that has
  // tokens of it; starts at 0.
  double hit_rate_ema = 0;
  std::array<uint64_t, kEvictionReasons> evictions{};  // blocks; indexed by EvictionReason
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

// Whole blocks to copy on the device before the step runs, in the order listed.
struct BlockCopy {
  BlockId from;
  BlockId to;
};

class BlockPool;
class KvCache;

// Blocks set aside for the answers of a group of forks that grow one token at a time and are
// dropped again (beams). Taken all at once by SetAside, so that no member of the group waits for a
// block later; given back when this is destroyed.
class KvReserve {
 public:
  ~KvReserve();
  KvReserve(const KvReserve&) = delete;
  KvReserve& operator=(const KvReserve&) = delete;
  // Blocks that no sequence names.
  uint32_t blocks() const { return static_cast<uint32_t>(blocks_.size()); }

 private:
  friend class KvCache;
  KvReserve(KvCache* cache, Modality modality) : cache_(cache), modality_(modality) {}
  KvCache* cache_;  // null once the cache is gone
  const Modality modality_;
  size_t index_ = 0;  // in the cache's list of reserves
  std::vector<BlockId> blocks_;
};

// The K/V of one token sequence: references to blocks. Made by Open or Fork, given back by Close.
// One that is destroyed instead is closed all the same.
class Sequence {
 public:
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  const Timeline& timeline() const { return *timeline_; }
  uint32_t cached_tokens() const { return cached_tokens_; }  // prefix found at Open
  std::array<uint32_t, kModalities> cached_by_modality() const { return cached_by_modality_; }
  uint32_t reserved_tokens() const { return reserved_tokens_; }  // tokens that have a place
  uint32_t committed_tokens() const {
    return committed_tokens_;
  }  // tokens whose K/V is valid and immutable
  // Page table covering tokens [0, upto); upto <= reserved_tokens() (more is cut). Blocks planned
  // by an open transaction appear once it is committed.
  std::vector<PageRef> PageTable(uint32_t upto) const;
  void PageTable(uint32_t upto, std::vector<PageRef>& table) const;  // in the memory of `table`

 private:
  friend class KvCache;
  friend class KvTransaction;
  struct Page {
    BlockId block;
    uint32_t begin = 0;  // first token
  };
  Sequence(KvCache* cache, std::shared_ptr<const Timeline> timeline);

  KvCache* cache_;    // null once closed
  size_t index_ = 0;  // in the cache's list of open sequences
  std::shared_ptr<const Timeline> timeline_;
  // Page i is block i of the timeline; the pages after those hold the answer's tokens, block_tokens
  // each.
  std::vector<Page> pages_;
  uint32_t cached_tokens_ = 0;
  std::array<uint32_t, kModalities> cached_by_modality_{};
  bool counted_ = false;  // in hit and miss tokens
  uint32_t reserved_tokens_ = 0;
  uint32_t committed_tokens_ = 0;
  uint32_t published_blocks_ = 0;  // timeline blocks that Publish has seen whole
  // What they will be when the open transaction commits; equal to the present without one.
  uint32_t planned_tokens_ = 0;
  uint32_t planned_pages_ = 0;
};

// Plans the blocks of one step on a copy of capacity; the cache changes in Commit only. All or
// nothing: either Commit is called, or the transaction is dropped and nothing happened. One at a
// time: Begin drops one that is still open.
//
// While it is open the cache may be used as ever. Open does not match blocks whose eviction is
// planned; a sequence that is closed takes its part of the plan with it.
class KvTransaction {
 public:
  KvTransaction(KvTransaction&& other) noexcept;
  KvTransaction& operator=(KvTransaction&& other) noexcept;
  ~KvTransaction();

  // Plans room for tokens [reserved, upto) of `sequence`; tokens past the timeline are the
  // answer's. May plan evictions of idle blocks. RESOURCE_EXHAUSTED leaves the plan as it was
  // before the call. Copy-on-write: a part-full last block that is shared gets a private copy.
  // FAILED_PRECONDITION: the transaction is over, the sequence is another cache's, or its timeline
  // is cut otherwise.
  absl::Status Reserve(Sequence& sequence, uint32_t upto);
  // Marks for undoing later Reserve calls of this transaction.
  size_t Savepoint() const;
  void RollbackTo(size_t savepoint);
  // Applies the plan and returns the copies the worker must do first. Cannot fail.
  std::vector<BlockCopy> Commit() &&;

 private:
  friend class KvCache;
  KvTransaction(KvCache* cache, uint64_t number) : cache_(cache), number_(number) {}
  bool live() const;
  void Drop();

  KvCache* cache_;   // null when moved from
  uint64_t number_;  // of the plan it stands for
};

class KvCache {
 public:
  // INVALID_ARGUMENT naming the field.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const KvCacheOptions& options);
  ~KvCache();  // sequences that are still open become empty shells
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // OK when the request could run on an empty cache; else RESOURCE_EXHAUSTED, kNeverFits, with both
  // numbers. `answer_tokens`: tokens past the timeline that get a place, for each of `samples`
  // forks of one prompt.
  absl::Status CheckFits(const Timeline& timeline, uint32_t answer_tokens, uint32_t samples) const;
  // Takes references on the longest cached prefix of whole timeline blocks, as far as the timeline
  // lets it. Content is compared after the hash.
  // `timeline` is not null.
  std::unique_ptr<Sequence> Open(std::shared_ptr<const Timeline> timeline, TimePoint now);
  // Prompt tokens that Open would find, without taking them.
  uint32_t CachedTokens(const Timeline& timeline) const;
  // Where the K/V of the frames of `sequence` comes from, in the order of its prompt, in the memory
  // of `runs`. Right until its first rows are published.
  void FrameRuns(const Sequence& sequence, std::vector<KvRun>& runs) const;
  // Whether work that can wait may take `blocks` more than are held now. Also when nothing at all
  // is held but `held_by_it`: waiting would bring nothing.
  bool LeavesHeadroom(uint32_t blocks, uint32_t held_by_it) const;
  KvTransaction Begin(TimePoint now);
  // Tokens [0, tokens) are computed (more than reserved is cut, less than before is nothing): their
  // whole timeline blocks become immutable and shareable. First writer wins: where another block
  // holds the same content already, this sequence keeps its own copy, which is freed with it.
  // The answer's tokens are never shared by content.
  void Publish(Sequence& sequence, uint32_t tokens, TimePoint now);
  // A second sequence on the same blocks, reserved and committed as the first is now. Tokens that
  // are reserved but not yet computed are computed once, by a step of either.
  std::unique_ptr<Sequence> Fork(const Sequence& sequence);
  // Takes `blocks` blocks for answers of modality `m`; null when they cannot be had, and nothing
  // happened. Drops an open transaction.
  std::unique_ptr<KvReserve> SetAside(Modality m, uint32_t blocks, TimePoint now);
  // Room for tokens [reserved, upto) of `sequence`, which holds its prompt, out of `reserve`, at
  // once and without a transaction. Appends the copies that must be made before the next step.
  // RESOURCE_EXHAUSTED: the reserve is too small, and nothing happened. FAILED_PRECONDITION: the
  // prompt is not reserved, a transaction plans for the sequence, the reserve is of another
  // modality than the timeline's answer, or something is another cache's.
  absl::Status Extend(Sequence& sequence, uint32_t upto, KvReserve& reserve,
                      std::vector<BlockCopy>& copies);
  // As Close, but blocks of the answer that nobody else names go to `reserve`.
  void Drop(std::unique_ptr<Sequence> sequence, KvReserve& reserve);
  // No step in flight may name the sequence. Its indexed blocks stay as idle prefix pages, deepest
  // first in line for eviction; others are freed. `poisoned` (non-finite values): none of its
  // blocks is found again, not even those it found cached at Open, since it is unknown where the
  // values came from; other sequences keep what they hold.
  void Close(std::unique_ptr<Sequence> sequence, TimePoint now, bool poisoned = false);
  // Evicts every idle block, except those that the open transaction will.
  void FlushIdle();
  // Counts, once, what the cache had of the prompt of a sequence that may be read without ever
  // reserving anything. Committing a reservation does the same.
  void CountUse(Sequence& sequence);
  KvStats stats() const;
  // free + held + idle = capacity; partition sums, floors and caps; references equal edges counted
  // from sequences and reserves; every indexed block committed and found by its key; no block owned
  // twice; page tables without holes; an open transaction's plan consistent. Called by every test
  // and by the admin API. INTERNAL naming what is broken.
  absl::Status CheckInvariants() const;

 private:
  friend class Sequence;
  friend class KvReserve;
  friend class KvTransaction;
  friend class KvCacheTestPeer;
  struct Plan;
  struct Traffic {
    uint64_t hit_tokens = 0;
    uint64_t miss_tokens = 0;
    double hit_rate_ema = 0;
  };

  explicit KvCache(const KvCacheOptions& options);
  template <class Visit>
  void VisitCachedPrefix(const Timeline& timeline, Visit&& visit) const;
  std::unique_ptr<Sequence> Register(std::unique_ptr<Sequence> sequence);
  // `reserve` (may be null) gets the answer's blocks that become free.
  void Release(Sequence& sequence, bool poisoned, KvReserve* reserve = nullptr);
  void Release(KvReserve& reserve);
  absl::Status Reserve(Sequence& sequence, uint32_t upto);
  void RollbackTo(size_t savepoint);
  std::vector<BlockCopy> Commit();

  KvCacheOptions options_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<Plan> plan_;
  std::vector<Sequence*> open_;       // not owned
  std::vector<KvReserve*> reserves_;  // not owned
  std::array<Traffic, kModalities> traffic_{};
};

}  // namespace saccade
