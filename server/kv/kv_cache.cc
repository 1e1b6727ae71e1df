#include "kv/kv_cache.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kv/block_pool.h"

namespace saccade {
namespace {

constexpr uint32_t kMaxBlocks = 1u << 24;
constexpr double kEmaKeep = 0.9;

std::string Name(size_t m) { return std::string(kModalityNames[m]); }

// Tokens [begin, end) that page `index` of a sequence has room for.
struct PageSpan {
  uint64_t begin = 0;
  uint64_t end = 0;
  Modality modality = Modality::kText;
};

PageSpan SpanOfPage(const Timeline& timeline, uint32_t index) {
  const std::span<const TimelineBlock> blocks = timeline.blocks();
  if (index < blocks.size()) {
    const TimelineBlock& b = blocks[index];
    return {b.begin, uint64_t{b.begin} + b.len, timeline.segments()[b.segment].modality};
  }
  const uint64_t begin =
      timeline.num_tokens() + (index - blocks.size()) * uint64_t{timeline.block_tokens()};
  return {begin, begin + timeline.block_tokens(), timeline.answer()};
}

}  // namespace

// The open transaction. One object for all, so that a step plans without allocating.
struct KvCache::Plan {
  struct Record {                  // one Reserve that planned something
    Sequence* sequence = nullptr;  // null when it was closed meanwhile
    uint32_t tokens_before = 0;
    uint32_t pages_before = 0;
    uint32_t tokens_after = 0;
    uint32_t pages_after = 0;
    BlockId departs;  // shared block that the sequence leaves for a copy; invalid without one
    size_t victims_before = 0;
    BlockPool::Capacity capacity_before;
  };
  uint64_t number = 0;
  bool open = false;
  BlockPool::Capacity capacity;
  std::vector<Record> records;
  std::vector<BlockPool::Victim> victims;
};

Sequence::Sequence(KvCache* cache, std::shared_ptr<const Timeline> timeline)
    : cache_(cache), timeline_(std::move(timeline)) {
  pages_.reserve(timeline_->blocks().size() + 1);
}

Sequence::~Sequence() {
  if (cache_ != nullptr) cache_->Release(*this, false);
}

std::vector<PageRef> Sequence::PageTable(uint32_t upto) const {
  std::vector<PageRef> table;
  PageTable(upto, table);
  return table;
}

void Sequence::PageTable(uint32_t upto, std::vector<PageRef>& table) const {
  upto = std::min(upto, reserved_tokens_);
  table.clear();
  table.reserve(pages_.size());
  for (size_t i = 0; i < pages_.size() && pages_[i].begin < upto; ++i) {
    const uint32_t end = i + 1 < pages_.size() ? std::min(pages_[i + 1].begin, upto) : upto;
    table.push_back(
        {pages_[i].block, static_cast<uint16_t>(end - pages_[i].begin), pages_[i].begin});
  }
}

KvTransaction::KvTransaction(KvTransaction&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)), number_(other.number_) {}

KvTransaction& KvTransaction::operator=(KvTransaction&& other) noexcept {
  if (this != &other) {
    Drop();
    cache_ = std::exchange(other.cache_, nullptr);
    number_ = other.number_;
  }
  return *this;
}

KvTransaction::~KvTransaction() { Drop(); }

bool KvTransaction::live() const {
  return cache_ != nullptr && cache_->plan_->open && cache_->plan_->number == number_;
}

void KvTransaction::Drop() {
  if (!live()) return;
  cache_->RollbackTo(0);
  cache_->plan_->open = false;
}

absl::Status KvTransaction::Reserve(Sequence& sequence, uint32_t upto) {
  if (!live()) return absl::FailedPreconditionError("kv: the transaction is over");
  if (sequence.cache_ != cache_) {
    return absl::FailedPreconditionError("kv: the sequence belongs to another cache");
  }
  return cache_->Reserve(sequence, upto);
}

size_t KvTransaction::Savepoint() const { return live() ? cache_->plan_->records.size() : 0; }

void KvTransaction::RollbackTo(size_t savepoint) {
  if (live()) cache_->RollbackTo(savepoint);
}

std::vector<BlockCopy> KvTransaction::Commit() && {
  if (!live()) return {};
  return cache_->Commit();
}

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(const KvCacheOptions& options) {
  if (options.num_blocks == 0 || options.num_blocks > kMaxBlocks) {
    return InvalidField("num_blocks",
                        absl::StrCat("is ", options.num_blocks, ", allowed is 1 to ", kMaxBlocks));
  }
  if (options.block_tokens == 0 || options.block_tokens > std::numeric_limits<uint16_t>::max()) {
    return InvalidField("block_tokens",
                        absl::StrCat("is ", options.block_tokens, ", allowed is 1 to ",
                                     std::numeric_limits<uint16_t>::max()));
  }
  if (options.headroom >= options.num_blocks) {
    return InvalidField("headroom", absl::StrCat("is ", options.headroom, ", the pool has ",
                                                 options.num_blocks, " blocks"));
  }
  uint64_t floors = 0;
  for (size_t m = 0; m < kModalities; ++m) {
    const PartitionQuota& quota = options.partitions[m];
    if (quota.floor > quota.cap) {
      return InvalidField(absl::StrCat("partitions.", Name(m), ".floor"),
                          absl::StrCat("is ", quota.floor, ", above the cap ", quota.cap));
    }
    floors += quota.floor;
  }
  if (floors > options.num_blocks) {
    return InvalidField("partitions", absl::StrCat("floors add up to ", floors,
                                                   " blocks, the pool has ", options.num_blocks));
  }
  return std::unique_ptr<KvCache>(new KvCache(options));
}

KvCache::KvCache(const KvCacheOptions& options)
    : options_(options),
      pool_(std::make_unique<BlockPool>(options.num_blocks, options.partitions)),
      plan_(std::make_unique<Plan>()) {}

KvCache::~KvCache() {
  for (Sequence* sequence : open_) sequence->cache_ = nullptr;
  for (KvReserve* reserve : reserves_) reserve->cache_ = nullptr;
}

absl::Status KvCache::CheckFits(const Timeline& timeline, uint32_t answer_tokens,
                                uint32_t samples) const {
  if (timeline.block_tokens() != options_.block_tokens) {
    return absl::FailedPreconditionError(
        absl::StrCat("kv: timeline cut into blocks of ", timeline.block_tokens(),
                     " tokens, the cache has ", options_.block_tokens));
  }
  const auto never = [](auto&&... parts) {
    ErrorInfo info;
    info.reason = Reason::kNeverFits;
    return MakeError(absl::StatusCode::kResourceExhausted,
                     absl::StrCat("the request needs ", parts...), info);
  };
  std::array<uint64_t, kModalities> need{};
  for (const TimelineBlock& b : timeline.blocks()) {
    ++need[static_cast<size_t>(timeline.segments()[b.segment].modality)];
  }
  const uint64_t per_sample =
      (uint64_t{answer_tokens} + options_.block_tokens - 1) / options_.block_tokens;
  need[static_cast<size_t>(timeline.answer())] += per_sample * std::max(samples, 1u);
  // The floors of the others stay theirs, used or not.
  uint64_t total = 0;
  uint64_t kept = 0;
  for (size_t m = 0; m < kModalities; ++m) {
    const PartitionQuota& quota = options_.partitions[m];
    if (need[m] > quota.cap) {
      return never(need[m], " ", Name(m), " blocks, its partition has at most ", quota.cap);
    }
    total += need[m];
    kept += std::max<uint64_t>(quota.floor, need[m]) - need[m];
  }
  if (total + kept > options_.num_blocks) {
    return never(total, " blocks, the cache has ", options_.num_blocks, " and keeps ", kept,
                 " of them for other modalities");
  }
  return absl::OkStatus();
}

// Calls visit(i, block) for the blocks of the longest cached prefix, in order. A block is taken
// only when its content and that of everything before it equal `timeline`'s: keys alone decide
// nothing.
template <class Visit>
void KvCache::VisitCachedPrefix(const Timeline& timeline, Visit&& visit) const {
  const std::span<const TimelineBlock> blocks = timeline.blocks();
  if (timeline.block_tokens() != options_.block_tokens) return;
  size_t most = blocks.size();
  if (timeline.reuse() == PrefixReuse::kNone) most = 0;
  if (timeline.reuse() == PrefixReuse::kAllButLast && most > 0) --most;
  const Timeline* verified = &timeline;  // equal to `timeline` in blocks [0, i), and in its group
  for (uint32_t i = 0; i < most; ++i) {
    const BlockId id = pool_->Find(blocks[i].key);
    if (!id.valid()) return;
    const BlockPool::Block& block = pool_->block(id);
    const Timeline* origin = block.timeline.get();
    if (block.position != i) return;
    if (origin != &timeline) {
      const bool known = origin == verified;
      const uint32_t last = known ? i : std::max(i + 1, timeline.group_blocks()) - 1;
      for (uint32_t j = known ? i : 0; j <= last; ++j) {
        if (!Timeline::SameContent(*origin, timeline, j)) return;
      }
    }
    verified = origin;
    visit(i, id);
  }
}

std::unique_ptr<Sequence> KvCache::Register(std::unique_ptr<Sequence> sequence) {
  sequence->index_ = open_.size();
  open_.push_back(sequence.get());
  return sequence;
}

std::unique_ptr<Sequence> KvCache::Open(std::shared_ptr<const Timeline> timeline,
                                        TimePoint /*now*/) {
  const Timeline& t = *timeline;
  auto sequence = Register(std::unique_ptr<Sequence>(new Sequence(this, std::move(timeline))));
  Sequence& s = *sequence;
  VisitCachedPrefix(t, [&](uint32_t i, BlockId id) {
    const TimelineBlock& b = t.blocks()[i];
    pool_->Ref(id);
    s.pages_.push_back({id, b.begin});
    s.cached_tokens_ += b.len;
    s.cached_by_modality_[static_cast<size_t>(t.segments()[b.segment].modality)] += b.len;
  });
  s.reserved_tokens_ = s.committed_tokens_ = s.planned_tokens_ = s.cached_tokens_;
  s.published_blocks_ = s.planned_pages_ = static_cast<uint32_t>(s.pages_.size());
  return sequence;
}

void KvCache::CountUse(Sequence& s) {
  if (s.cache_ != this || s.counted_) return;
  s.counted_ = true;
  std::array<uint32_t, kModalities> prompt{};
  for (const Segment& segment : s.timeline_->segments()) {
    prompt[static_cast<size_t>(segment.modality)] += segment.end - segment.begin;
  }
  for (size_t m = 0; m < kModalities; ++m) {
    if (prompt[m] == 0) continue;
    Traffic& traffic = traffic_[m];
    const uint32_t hit = s.cached_by_modality_[m];
    traffic.hit_tokens += hit;
    traffic.miss_tokens += prompt[m] - hit;
    traffic.hit_rate_ema = kEmaKeep * traffic.hit_rate_ema + (1 - kEmaKeep) * hit / prompt[m];
  }
}

uint32_t KvCache::CachedTokens(const Timeline& timeline) const {
  uint32_t tokens = 0;
  VisitCachedPrefix(timeline, [&](uint32_t i, BlockId) { tokens += timeline.blocks()[i].len; });
  return tokens;
}

void KvCache::FrameRuns(const Sequence& sequence, std::vector<KvRun>& runs) const {
  runs.clear();
  const Timeline& t = *sequence.timeline_;
  for (const TimelineBlock& block : t.blocks()) {
    const Segment& segment = t.segments()[block.segment];
    if (segment.modality != Modality::kVision) continue;
    const KvSource source = block.begin < sequence.cached_tokens_ ? KvSource::kReused
                            : t.reuse() != PrefixReuse::kNone && pool_->Knew(block.key)
                                ? KvSource::kEvicted
                                : KvSource::kComputed;
    if (!runs.empty() && runs.back().source == source && block.begin != segment.begin) {
      runs.back().rows += block.len;
    } else {
      runs.push_back({segment.camera, source, block.len});
    }
  }
}

bool KvCache::LeavesHeadroom(uint32_t blocks, uint32_t held_by_it) const {
  uint64_t held = 0;
  for (size_t m = 0; m < kModalities; ++m) held += pool_->partition(m).held;
  return held <= held_by_it || held + blocks + options_.headroom <= pool_->num_blocks();
}

KvTransaction KvCache::Begin(TimePoint /*now*/) {
  if (plan_->open) RollbackTo(0);
  plan_->open = true;
  plan_->capacity = pool_->capacity();
  return {this, ++plan_->number};
}

absl::Status KvCache::Reserve(Sequence& s, uint32_t upto) {
  const Timeline& t = *s.timeline_;
  if (t.block_tokens() != options_.block_tokens) {
    return absl::FailedPreconditionError(absl::StrCat("kv: timeline cut into blocks of ",
                                                      t.block_tokens(), " tokens, the cache has ",
                                                      options_.block_tokens));
  }
  if (upto <= s.planned_tokens_) return absl::OkStatus();
  Plan::Record record;
  record.sequence = &s;
  record.tokens_before = s.planned_tokens_;
  record.pages_before = s.planned_pages_;
  record.tokens_after = upto;
  record.pages_after = s.planned_pages_;
  record.victims_before = plan_->victims.size();
  record.capacity_before = plan_->capacity;
  const auto take = [&](Modality m) {
    if (pool_->Take(plan_->capacity, m, plan_->victims)) return absl::OkStatus();
    pool_->Unclaim(plan_->victims, record.victims_before);
    plan_->capacity = record.capacity_before;
    return absl::ResourceExhaustedError(
        absl::StrCat("kv: no ", Name(static_cast<size_t>(m)), " block to take"));
  };

  uint64_t end = 0;  // of the planned pages
  if (s.planned_pages_ > 0) {
    const PageSpan last = SpanOfPage(t, s.planned_pages_ - 1);
    end = last.end;
    // A last page that this transaction has extended already is the sequence's own.
    if (s.planned_tokens_ == s.reserved_tokens_ && s.reserved_tokens_ < end) {
      const BlockId id = s.pages_.back().block;
      const BlockPool::Block& block = pool_->block(id);
      if (block.refs - block.departures > 1) {
        RETURN_IF_ERROR(take(last.modality));
        record.departs = id;
      }
    }
  }
  while (end < upto) {
    const PageSpan span = SpanOfPage(t, record.pages_after);
    RETURN_IF_ERROR(take(span.modality));
    ++record.pages_after;
    end = span.end;
  }
  if (record.departs.valid()) pool_->PlanDeparture(record.departs);
  s.planned_tokens_ = record.tokens_after;
  s.planned_pages_ = record.pages_after;
  plan_->records.push_back(record);
  return absl::OkStatus();
}

void KvCache::RollbackTo(size_t savepoint) {
  while (plan_->records.size() > savepoint) {
    const Plan::Record& record = plan_->records.back();
    if (record.sequence != nullptr) {
      record.sequence->planned_tokens_ = record.tokens_before;
      record.sequence->planned_pages_ = record.pages_before;
      if (record.departs.valid()) pool_->CancelDeparture(record.departs);
    }
    pool_->Unclaim(plan_->victims, record.victims_before);
    plan_->capacity = record.capacity_before;
    plan_->records.pop_back();
  }
}

std::vector<BlockCopy> KvCache::Commit() {
  std::vector<BlockCopy> copies;
  for (const BlockPool::Victim& victim : plan_->victims) pool_->Evict(victim);
  for (const Plan::Record& record : plan_->records) {
    if (record.sequence == nullptr) continue;
    Sequence& s = *record.sequence;
    CountUse(s);
    if (record.departs.valid()) {
      Sequence::Page& page = s.pages_.back();
      page.block = pool_->Allocate(pool_->block(record.departs).modality);
      copies.push_back({record.departs, page.block});
    }
    while (s.pages_.size() < record.pages_after) {
      const PageSpan span = SpanOfPage(*s.timeline_, static_cast<uint32_t>(s.pages_.size()));
      s.pages_.push_back({pool_->Allocate(span.modality), static_cast<uint32_t>(span.begin)});
    }
    s.reserved_tokens_ = record.tokens_after;
  }
  // Only now, so that no source of a copy is given out in this very step.
  for (const Plan::Record& record : plan_->records) {
    if (record.sequence == nullptr || !record.departs.valid()) continue;
    pool_->CancelDeparture(record.departs);
    pool_->Unref(record.departs);
  }
  plan_->victims.clear();
  plan_->records.clear();
  plan_->open = false;
  return copies;
}

void KvCache::Publish(Sequence& s, uint32_t tokens, TimePoint /*now*/) {
  if (s.cache_ != this) return;
  tokens = std::min(tokens, s.reserved_tokens_);
  if (tokens <= s.committed_tokens_) return;
  s.committed_tokens_ = tokens;
  const std::span<const TimelineBlock> blocks = s.timeline_->blocks();
  for (uint32_t& i = s.published_blocks_;
       i < blocks.size() && blocks[i].begin + blocks[i].len <= tokens; ++i) {
    const BlockId id = s.pages_[i].block;
    if (pool_->block(id).state == BlockPool::State::kCommitted) continue;  // a fork was here before
    pool_->MarkCommitted(id);
    if (s.timeline_->reuse() != PrefixReuse::kNone) pool_->Index(id, s.timeline_, i);
  }
}

std::unique_ptr<Sequence> KvCache::Fork(const Sequence& other) {
  if (other.cache_ != this) return nullptr;
  auto sequence = Register(std::unique_ptr<Sequence>(new Sequence(this, other.timeline_)));
  Sequence& s = *sequence;
  s.pages_ = other.pages_;
  for (const Sequence::Page& page : s.pages_) pool_->Ref(page.block);
  s.cached_tokens_ = other.cached_tokens_;
  s.cached_by_modality_ = other.cached_by_modality_;
  s.counted_ = true;
  s.reserved_tokens_ = s.planned_tokens_ = other.reserved_tokens_;
  s.committed_tokens_ = other.committed_tokens_;
  s.published_blocks_ = other.published_blocks_;
  s.planned_pages_ = static_cast<uint32_t>(s.pages_.size());
  return sequence;
}

std::unique_ptr<KvReserve> KvCache::SetAside(Modality m, uint32_t blocks, TimePoint now) {
  const KvTransaction transaction = Begin(now);  // dropped in the end: its plan stays empty
  for (uint32_t i = 0; i < blocks; ++i) {
    if (pool_->Take(plan_->capacity, m, plan_->victims)) continue;
    pool_->Unclaim(plan_->victims, 0);
    return nullptr;
  }
  for (const BlockPool::Victim& victim : plan_->victims) pool_->Evict(victim);
  plan_->victims.clear();
  auto reserve = std::unique_ptr<KvReserve>(new KvReserve(this, m));
  for (uint32_t i = 0; i < blocks; ++i) reserve->blocks_.push_back(pool_->Allocate(m));
  reserve->index_ = reserves_.size();
  reserves_.push_back(reserve.get());
  return reserve;
}

absl::Status KvCache::Extend(Sequence& s, uint32_t upto, KvReserve& reserve,
                             std::vector<BlockCopy>& copies) {
  if (s.cache_ != this || reserve.cache_ != this || s.planned_tokens_ != s.reserved_tokens_ ||
      s.reserved_tokens_ < s.timeline_->num_tokens() || s.pages_.empty() ||
      reserve.modality_ != s.timeline_->answer()) {
    return absl::FailedPreconditionError("kv: a sequence cannot grow out of this reserve");
  }
  if (upto <= s.reserved_tokens_) return absl::OkStatus();
  const Timeline& t = *s.timeline_;
  const auto pages = static_cast<uint32_t>(s.pages_.size());
  const uint64_t end = SpanOfPage(t, pages - 1).end;
  const BlockId last = s.pages_.back().block;
  const bool copy = s.reserved_tokens_ < end && pool_->block(last).refs > 1;
  const uint64_t more = upto <= end ? 0 : (upto - end + t.block_tokens() - 1) / t.block_tokens();
  if (more + (copy ? 1 : 0) > reserve.blocks_.size()) {
    return absl::ResourceExhaustedError("kv: a reserve is too small");
  }
  const auto take = [&reserve] {
    const BlockId block = reserve.blocks_.back();
    reserve.blocks_.pop_back();
    return block;
  };
  if (copy) {
    s.pages_.back().block = take();
    copies.push_back({last, s.pages_.back().block});
    pool_->Unref(last);
  }
  for (uint64_t i = 0; i < more; ++i) {
    const PageSpan span = SpanOfPage(t, static_cast<uint32_t>(s.pages_.size()));
    s.pages_.push_back({take(), static_cast<uint32_t>(span.begin)});
  }
  s.reserved_tokens_ = s.planned_tokens_ = upto;
  s.planned_pages_ = static_cast<uint32_t>(s.pages_.size());
  return absl::OkStatus();
}

void KvCache::Drop(std::unique_ptr<Sequence> sequence, KvReserve& reserve) {
  if (sequence == nullptr || sequence->cache_ != this) return;
  const bool fits = reserve.cache_ == this && reserve.modality_ == sequence->timeline_->answer();
  Release(*sequence, false, fits ? &reserve : nullptr);
}

KvReserve::~KvReserve() {
  if (cache_ != nullptr) cache_->Release(*this);
}

void KvCache::Release(KvReserve& reserve) {
  for (const BlockId block : reserve.blocks_) pool_->Unref(block);
  reserves_[reserve.index_] = reserves_.back();
  reserves_[reserve.index_]->index_ = reserve.index_;
  reserves_.pop_back();
}

void KvCache::Close(std::unique_ptr<Sequence> sequence, TimePoint /*now*/, bool poisoned) {
  if (sequence != nullptr && sequence->cache_ == this) Release(*sequence, poisoned);
}

void KvCache::Release(Sequence& s, bool poisoned, KvReserve* reserve) {
  for (Plan::Record& record : plan_->records) {
    if (record.sequence != &s) continue;
    if (record.departs.valid()) pool_->CancelDeparture(record.departs);
    record.sequence = nullptr;
  }
  // Backwards: the deepest block becomes idle first, so it is evicted before what it builds on.
  for (auto page = s.pages_.rbegin(); page != s.pages_.rend(); ++page) {
    if (poisoned) pool_->Unindex(page->block);
    if (reserve != nullptr && page->begin >= s.timeline_->num_tokens() &&
        pool_->block(page->block).refs == 1) {
      reserve->blocks_.push_back(page->block);
    } else {
      pool_->Unref(page->block);
    }
  }
  open_[s.index_] = open_.back();
  open_[s.index_]->index_ = s.index_;
  open_.pop_back();
  s.pages_.clear();
  s.cache_ = nullptr;
}

void KvCache::FlushIdle() { pool_->FlushIdle(); }

KvStats KvCache::stats() const {
  KvStats stats;
  stats.num_blocks = pool_->num_blocks();
  stats.free_blocks = pool_->free_blocks();
  for (size_t m = 0; m < kModalities; ++m) {
    const BlockPool::Partition& p = pool_->partition(m);
    PartitionStats& out = stats.partitions[m];
    out.held = p.held;
    out.idle = p.idle;
    out.floor = p.quota.floor;
    out.cap = p.quota.cap;
    out.hit_tokens = traffic_[m].hit_tokens;
    out.miss_tokens = traffic_[m].miss_tokens;
    out.hit_rate_ema = traffic_[m].hit_rate_ema;
    out.evictions = p.evictions;
  }
  return stats;
}

absl::Status KvCache::CheckInvariants() const {
  const auto broken = [](auto&&... parts) {
    return absl::InternalError(absl::StrCat("kv: ", parts...));
  };
  std::vector<uint32_t> edges(pool_->num_blocks(), 0);
  std::vector<size_t> seen(pool_->num_blocks(), 0);  // 1 + the last sequence that names the block
  for (size_t k = 0; k < open_.size(); ++k) {
    const Sequence& s = *open_[k];
    if (s.cache_ != this || s.index_ != k) return broken("sequence ", k, " is not where it says");
    const std::span<const TimelineBlock> blocks = s.timeline_->blocks();
    if (s.committed_tokens_ > s.reserved_tokens_ || s.cached_tokens_ > s.committed_tokens_) {
      return broken("sequence ", k, " has committed more than reserved");
    }
    uint64_t end = 0;
    for (uint32_t i = 0; i < s.pages_.size(); ++i) {
      const Sequence::Page& page = s.pages_[i];
      const PageSpan span = SpanOfPage(*s.timeline_, i);
      if (page.begin != end || page.begin != span.begin || page.begin >= s.reserved_tokens_) {
        return broken("sequence ", k, " has page ", i, " at token ", page.begin);
      }
      end = span.end;
      if (!page.block.valid() || static_cast<uint32_t>(page.block.value()) >= pool_->num_blocks()) {
        return broken("sequence ", k, " names block ", page.block.value());
      }
      const auto b = static_cast<size_t>(page.block.value());
      if (seen[b] == k + 1) return broken("sequence ", k, " names block ", b, " twice");
      seen[b] = k + 1;
      ++edges[b];
      const BlockPool::Block& block = pool_->block(page.block);
      if (block.modality != span.modality)
        return broken("page ", i, " of sequence ", k, " is in another partition");
      if (i >= blocks.size() && block.state == BlockPool::State::kCommitted) {
        return broken("sequence ", k, " has shared answer block ", b);
      }
      const bool whole = i < blocks.size() && span.end <= s.committed_tokens_;
      if (whole && block.state != BlockPool::State::kCommitted) {
        return broken("whole block ", b, " of sequence ", k, " is not committed");
      }
      if (whole != (i < s.published_blocks_))
        return broken("sequence ", k, " has not published page ", i);
    }
    if (end < s.reserved_tokens_)
      return broken("sequence ", k, " has reserved tokens without a page");
    if (s.planned_tokens_ < s.reserved_tokens_ || s.planned_pages_ < s.pages_.size()) {
      return broken("sequence ", k, " is planned to shrink");
    }
  }
  for (size_t k = 0; k < reserves_.size(); ++k) {
    if (reserves_[k]->cache_ != this || reserves_[k]->index_ != k) {
      return broken("reserve ", k, " is not where it says");
    }
    for (const BlockId block : reserves_[k]->blocks_) {
      if (++edges[static_cast<size_t>(block.value())] > 1) {
        return broken("reserve ", k, " holds block ", block.value(), ", which is in use");
      }
    }
  }
  RETURN_IF_ERROR(pool_->Check(edges, plan_->victims));

  // What the plan says must add up to what its sequences and blocks say.
  std::vector<uint32_t> departures(pool_->num_blocks(), 0);
  size_t planned = 0;
  for (const Plan::Record& record : plan_->records) {
    if (record.sequence == nullptr) continue;
    if (!plan_->open) return broken("a plan without a transaction");
    if (record.departs.valid()) ++departures[static_cast<size_t>(record.departs.value())];
    if (record.tokens_before == record.sequence->reserved_tokens_) ++planned;
    if (record.tokens_after > record.sequence->planned_tokens_)
      return broken("a plan ends past its sequence's");
  }
  for (uint32_t b = 0; b < pool_->num_blocks(); ++b) {
    if (pool_->block(BlockId(static_cast<int32_t>(b))).departures != departures[b]) {
      return broken("block ", b, " has departures that no plan holds");
    }
  }
  const auto unplanned =
      static_cast<size_t>(std::count_if(open_.begin(), open_.end(), [](const Sequence* s) {
        return s->planned_tokens_ == s->reserved_tokens_ && s->planned_pages_ == s->pages_.size();
      }));
  if (unplanned + planned != open_.size())
    return broken("a sequence is planned to grow, no plan says so");
  return absl::OkStatus();
}

}  // namespace saccade
