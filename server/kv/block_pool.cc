#include "kv/block_pool.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"

namespace saccade {
namespace {

std::string Name(size_t m) { return std::string(kModalityNames[m]); }

}  // namespace

BlockPool::BlockPool(uint32_t num_blocks, const std::array<PartitionQuota, kModalities>& quotas)
    : blocks_(num_blocks),
      buckets_(std::bit_ceil(std::max<size_t>(num_blocks, 1)), kNone),
      evicted_(4 * buckets_.size()) {
  for (size_t m = 0; m < kModalities; ++m) partitions_[m].quota = quotas[m];
  for (int32_t i = static_cast<int32_t>(num_blocks) - 1; i >= 0; --i) PushFree(i);
}

BlockPool::Capacity BlockPool::capacity() const {
  Capacity capacity;
  capacity.free = free_;
  for (size_t m = 0; m < kModalities; ++m)
    capacity.used[m] = partitions_[m].held + partitions_[m].idle;
  return capacity;
}

bool BlockPool::Take(Capacity& capacity, Modality modality, std::vector<Victim>& victims) {
  const auto m = static_cast<size_t>(modality);
  // Free blocks that the floors of the others still have a claim on.
  uint64_t promised = 0;
  for (size_t j = 0; j < kModalities; ++j) {
    const uint32_t floor = partitions_[j].quota.floor;
    if (j != m && floor > capacity.used[j]) promised += floor - capacity.used[j];
  }
  if (BelowCap(capacity, m) && capacity.free > promised) {
    --capacity.free;
    ++capacity.used[m];
    return true;
  }
  Victim victim;
  if (partitions_[m].oldest != kNone) {
    victim = {partitions_[m].oldest, EvictionReason::kOwnPartition};
  } else if (BelowCap(capacity, m)) {
    for (size_t j = 0; j < kModalities; ++j) {
      const int32_t i = partitions_[j].oldest;
      if (i == kNone || capacity.used[j] <= partitions_[j].quota.floor) continue;
      if (victim.block == kNone || at(i).idle_since < at(victim.block).idle_since) {
        victim = {i, EvictionReason::kOtherPartition};
      }
    }
    if (victim.block == kNone) return false;
    --capacity.used[static_cast<size_t>(at(victim.block).modality)];
    ++capacity.used[m];
  } else {
    return false;
  }
  Unlink(victim.block);
  at(victim.block).claimed = true;
  victims.push_back(victim);
  return true;
}

void BlockPool::Unclaim(std::vector<Victim>& victims, size_t from) {
  while (victims.size() > from) {
    const int32_t i = victims.back().block;
    at(i).claimed = false;
    PushOldest(i);
    victims.pop_back();
  }
}

void BlockPool::Evict(const Victim& victim) {
  at(victim.block).claimed = false;
  EvictIdle(victim.block, victim.reason);
}

BlockId BlockPool::Allocate(Modality m) {
  const int32_t i = free_head_;
  Block& b = at(i);
  free_head_ = b.next;
  --free_;
  b.next = kNone;
  b.refs = 1;
  b.modality = m;
  b.state = State::kFilling;
  ++PartitionOf(b).held;
  return BlockId(i);
}

void BlockPool::Ref(BlockId id) {
  Block& b = at(id);
  if (b.refs++ > 0) return;
  Unlink(id.value());
  Partition& p = PartitionOf(b);
  --p.idle;
  ++p.held;
}

void BlockPool::Unref(BlockId id) {
  Block& b = at(id);
  if (--b.refs > 0) return;
  Partition& p = PartitionOf(b);
  --p.held;
  if (b.indexed) {
    ++p.idle;
    b.idle_since = ++idle_clock_;
    PushNewest(id.value());
  } else {
    PushFree(id.value());
  }
}

int32_t BlockPool::Lookup(const Digest128& key) const {
  int32_t i = buckets_[Bucket(key)];
  while (i != kNone && at(i).key != key) i = at(i).chain;
  return i;
}

BlockId BlockPool::Find(const Digest128& key) const {
  const int32_t i = Lookup(key);
  return i == kNone || at(i).claimed ? BlockId() : BlockId(i);
}

bool BlockPool::Index(BlockId id, const std::shared_ptr<const Timeline>& timeline,
                      uint32_t position) {
  const Digest128& key = timeline->blocks()[position].key;
  if (Lookup(key) != kNone) return false;
  Block& b = at(id);
  b.key = key;
  b.timeline = timeline;
  b.position = position;
  b.indexed = true;
  int32_t& head = buckets_[Bucket(key)];
  b.chain = head;
  head = id.value();
  return true;
}

void BlockPool::Unindex(BlockId id) {
  if (block(id).indexed) RemoveFromIndex(id.value());
}

void BlockPool::FlushIdle() {
  for (Partition& p : partitions_) {
    while (p.oldest != kNone) {
      const int32_t i = p.oldest;
      Unlink(i);
      EvictIdle(i, EvictionReason::kFlush);
    }
  }
}

void BlockPool::EvictIdle(int32_t i, EvictionReason reason) {
  Partition& p = PartitionOf(at(i));
  ++p.evictions[static_cast<size_t>(reason)];
  --p.idle;
  const Digest128& key = at(i).key;
  evicted_[key.low & (evicted_.size() - 1)] = Mark(key);
  RemoveFromIndex(i);
  PushFree(i);
}

void BlockPool::RemoveFromIndex(int32_t i) {
  Block& b = at(i);
  int32_t* link = &buckets_[Bucket(b.key)];
  while (*link != i) link = &at(*link).chain;
  *link = b.chain;
  b.chain = kNone;
  b.indexed = false;
  b.timeline.reset();
}

void BlockPool::PushFree(int32_t i) {
  Block& b = at(i);
  b.state = State::kFree;
  b.prev = kNone;
  b.next = free_head_;
  free_head_ = i;
  ++free_;
}

void BlockPool::PushNewest(int32_t i) {
  Block& b = at(i);
  Partition& p = PartitionOf(b);
  b.prev = p.newest;
  b.next = kNone;
  (p.newest == kNone ? p.oldest : at(p.newest).next) = i;
  p.newest = i;
}

void BlockPool::PushOldest(int32_t i) {
  Block& b = at(i);
  Partition& p = PartitionOf(b);
  b.prev = kNone;
  b.next = p.oldest;
  (p.oldest == kNone ? p.newest : at(p.oldest).prev) = i;
  p.oldest = i;
}

void BlockPool::Unlink(int32_t i) {
  Block& b = at(i);
  Partition& p = PartitionOf(b);
  (b.prev == kNone ? p.oldest : at(b.prev).next) = b.next;
  (b.next == kNone ? p.newest : at(b.next).prev) = b.prev;
  b.prev = kNone;
  b.next = kNone;
}

absl::Status BlockPool::Check(std::span<const uint32_t> edges,
                              std::span<const Victim> claimed) const {
  const auto broken = [](auto&&... parts) {
    return absl::InternalError(absl::StrCat("kv: ", parts...));
  };
  const auto n = static_cast<int32_t>(num_blocks());
  // 0: in no list, 1: free, 2: in an LRU, 3: claimed.
  std::vector<uint8_t> where(blocks_.size(), 0);
  const auto place = [&](int32_t i, uint8_t list) {
    if (i < 0 || i >= n || where[static_cast<size_t>(i)] != 0) return false;
    where[static_cast<size_t>(i)] = list;
    return true;
  };

  uint32_t free = 0;
  for (int32_t i = free_head_; i != kNone; i = at(i).next, ++free) {
    if (!place(i, 1)) return broken("block ", i, " is in the free list and in another list");
    const Block& b = at(i);
    if (b.state != State::kFree || b.refs != 0 || b.indexed || b.timeline != nullptr || b.claimed) {
      return broken("free block ", i, " is in use");
    }
  }
  if (free != free_) return broken("free list holds ", free, " blocks, counted ", free_);

  std::array<uint32_t, kModalities> idle{};
  for (size_t m = 0; m < kModalities; ++m) {
    const Partition& p = partitions_[m];
    int32_t last = kNone;
    for (int32_t i = p.oldest; i != kNone; last = i, i = at(i).next) {
      if (!place(i, 2)) return broken("block ", i, " is in an LRU and in another list");
      const Block& b = at(i);
      if (static_cast<size_t>(b.modality) != m)
        return broken("idle block ", i, " is in another partition's LRU");
      if (b.prev != last) return broken("LRU links of block ", i, " disagree");
      if (last != kNone && at(last).idle_since >= b.idle_since)
        return broken("LRU out of order at block ", i);
      if (b.claimed) return broken("block ", i, " is claimed and in an LRU");
      ++idle[m];
    }
    if (p.newest != last) return broken("LRU of ", Name(m), " ends elsewhere");
  }
  for (const Victim& v : claimed) {
    if (!place(v.block, 3)) return broken("claimed block ", v.block, " is in another list");
    const Block& b = at(v.block);
    if (!b.claimed) return broken("planned victim ", v.block, " is not claimed");
    ++idle[static_cast<size_t>(b.modality)];
  }

  std::array<uint32_t, kModalities> held{};
  size_t indexed = 0;
  for (int32_t i = 0; i < n; ++i) {
    const Block& b = at(i);
    const uint8_t list = where[static_cast<size_t>(i)];
    if (b.refs != edges[static_cast<size_t>(i)]) {
      return broken("block ", i, " has ", b.refs, " references, sequences name it ",
                    edges[static_cast<size_t>(i)], " times");
    }
    if (b.departures > b.refs) return broken("block ", i, " has more departures than references");
    if (b.claimed != (list == 3)) return broken("block ", i, " is claimed by no transaction");
    if (b.refs > 0) {
      if (list != 0) return broken("held block ", i, " is in a list");
      if (b.state == State::kFree) return broken("held block ", i, " is marked free");
      ++held[static_cast<size_t>(b.modality)];
    } else if (list == 0) {
      return broken("block ", i, " is lost: not free, held or idle");
    } else if (list != 1 && (!b.indexed || b.state != State::kCommitted)) {
      return broken("idle block ", i, " is not in the index");
    }
    if (!b.indexed) {
      if (b.timeline != nullptr) return broken("block ", i, " keeps a timeline outside the index");
      continue;
    }
    ++indexed;
    if (b.state != State::kCommitted) return broken("indexed block ", i, " is not committed");
    if (b.timeline == nullptr || b.position >= b.timeline->blocks().size()) {
      return broken("indexed block ", i, " has no timeline block");
    }
    const TimelineBlock& origin = b.timeline->blocks()[b.position];
    if (origin.key != b.key) return broken("key of block ", i, " differs from its timeline's");
    if (b.timeline->segments()[origin.segment].modality != b.modality) {
      return broken("block ", i, " holds another modality than its partition's");
    }
    if (Lookup(b.key) != i) return broken("block ", i, " cannot be found by its key");
  }

  size_t chained = 0;
  for (const int32_t head : buckets_) {
    for (int32_t i = head; i != kNone && chained <= indexed; i = at(i).chain) {
      if (!at(i).indexed) return broken("block ", i, " is in the index by mistake");
      ++chained;
    }
  }
  if (chained != indexed)
    return broken("the index holds ", chained, " blocks, marked are ", indexed);

  uint64_t total = free_;
  uint64_t promised = 0;
  for (size_t m = 0; m < kModalities; ++m) {
    const Partition& p = partitions_[m];
    if (p.held != held[m] || p.idle != idle[m]) {
      return broken(Name(m), ": counted ", p.held, " held and ", p.idle, " idle, found ", held[m],
                    " and ", idle[m]);
    }
    const uint32_t used = p.held + p.idle;
    if (used > p.quota.cap)
      return broken(Name(m), " holds ", used, " blocks, its cap is ", p.quota.cap);
    if (used < p.quota.floor) promised += p.quota.floor - used;
    total += used;
  }
  if (total != num_blocks())
    return broken("free + held + idle = ", total, " of ", num_blocks(), " blocks");
  if (promised > free_)
    return broken("floors are promised ", promised, " blocks, free are ", free_);
  return absl::OkStatus();
}

}  // namespace saccade
