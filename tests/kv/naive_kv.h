#pragma once
// NaiveKv: a K/V cache that is obviously right and slow. It keeps what was done (who holds which
// block, which blocks are idle since when, what the open transaction has taken) in maps and lists,
// and works out everything else anew whenever it is asked.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/kv/kv_geometries.h"

namespace saccade {

class NaiveKv {
 public:
  struct Block {
    size_t modality = 0;
    int refs = 0;
    bool committed = false;
    bool indexed = false;
    int prefix = -1;       // while indexed
    bool claimed = false;  // idle, and the open transaction will evict it
  };
  struct Sequence {
    size_t prompt = 0;
    std::vector<int> pages;
    uint32_t reserved = 0;
    uint32_t committed = 0;
    uint32_t cached = 0;
    bool counted = false;
  };
  struct Reserve {
    size_t modality = 0;
    std::vector<int> blocks;
  };
  struct Partition {
    std::array<uint64_t, kEvictionReasons> evictions{};
    uint64_t hit = 0;
    uint64_t miss = 0;
    double ema = 0;
  };
  using Copies = std::vector<std::pair<int, int>>;

  NaiveKv(const Geometry& g, const std::vector<std::shared_ptr<const Timeline>>& prompts) : g_(g) {
    std::map<std::vector<int64_t>, int> names;
    for (const auto& t : prompts) {
      Prompt p;
      p.tokens = t->num_tokens();
      p.answer = static_cast<size_t>(t->answer());
      for (uint32_t i = 0; i < t->blocks().size(); ++i) {
        const TimelineBlock& b = t->blocks()[i];
        p.modality.push_back(static_cast<size_t>(t->segments()[b.segment].modality));
        p.end.push_back(b.begin + b.len);
        p.prefix.push_back(
            names.emplace(Spell(*t, i), static_cast<int>(names.size())).first->second);
      }
      prompts_.push_back(p);
    }
  }

  // ------------------------------------------------------------------------------ what there is
  const std::map<int, Block>& blocks() const { return blocks_; }
  const std::map<int, Sequence>& sequences() const { return sequences_; }
  const std::map<int, Reserve>& reserves() const { return reserves_; }
  const Partition& partition(size_t m) const { return partitions_[m]; }
  uint32_t Free() const { return g_.num_blocks - static_cast<uint32_t>(blocks_.size()); }
  uint32_t Used(size_t m) const {
    return static_cast<uint32_t>(std::count_if(
        blocks_.begin(), blocks_.end(), [&](const auto& b) { return b.second.modality == m; }));
  }
  uint32_t Idle(size_t m) const {
    return static_cast<uint32_t>(std::count_if(idle_.begin(), idle_.end(),
                                               [&](int b) { return blocks_.at(b).modality == m; }));
  }
  size_t prompts() const { return prompts_.size(); }
  // Tokens that Open would find.
  uint32_t CachedTokens(size_t prompt) const {
    const size_t found = Cached(prompt).size();
    return found == 0 ? 0 : prompts_[prompt].end[found - 1];
  }
  uint32_t PageEnd(const Sequence& s, size_t page) const {
    const Prompt& p = prompts_[s.prompt];
    if (page < p.end.size()) return p.end[page];
    return p.tokens + static_cast<uint32_t>(page + 1 - p.end.size()) * g_.block_tokens;
  }

  // --------------------------------------------------------------------------------- sequences
  void Open(int id, size_t prompt) {
    Sequence s;
    s.prompt = prompt;
    s.pages = Cached(prompt);
    s.reserved = s.committed = s.cached = CachedTokens(prompt);
    for (const int b : s.pages) Ref(b);
    sequences_[id] = s;
  }
  void Fork(int id, int from) {
    sequences_[id] = sequences_[from];
    sequences_[id].counted = true;
    for (const int b : sequences_[id].pages) Ref(b);
  }
  void Publish(int id, uint32_t tokens) {
    Sequence& s = sequences_[id];
    s.committed = std::max(s.committed, std::min(tokens, s.reserved));
    const Prompt& p = prompts_[s.prompt];
    for (size_t i = 0; i < p.end.size() && p.end[i] <= s.committed; ++i) {
      Block& b = blocks_[s.pages[i]];
      if (std::exchange(b.committed, true) || index_.count(p.prefix[i]) > 0) continue;
      b.indexed = true;
      b.prefix = p.prefix[i];
      index_[b.prefix] = s.pages[i];
    }
  }
  void Close(int id, bool poisoned) {
    const std::vector<int> pages = Forget(id).pages;
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
      if (poisoned && blocks_[*page].indexed) Unindex(*page);
      Unref(*page);
    }
  }
  void Flush() {
    const std::vector<int> idle = idle_;
    for (const int b : idle) {
      if (!blocks_[b].claimed) Evict(b, EvictionReason::kFlush);
    }
  }

  // ------------------------------------------------------------------------------- transactions
  void Begin() {
    Abandon();
    open_ = true;
    free_ = Free();
    for (size_t m = 0; m < kModalities; ++m) used_[m] = Used(m);
  }
  bool open() const { return open_; }
  size_t Savepoint() const { return open_ ? records_.size() : 0; }
  void RollbackTo(size_t savepoint) {
    while (open_ && records_.size() > savepoint) {
      for (const Taken& taken : records_.back().taken) Unclaim(taken);
      records_.pop_back();
    }
  }
  void Abandon() {
    RollbackTo(0);
    open_ = false;
  }
  // False, and nothing changed, when the blocks are not there.
  bool Plan(int id, uint32_t upto) {
    const Sequence& s = sequences_[id];
    const Prompt& p = prompts_[s.prompt];
    if (upto <= Planned(id)) return true;
    Record record{id, upto, -1, {}};
    records_.push_back(record);
    const auto take = [&](size_t m) {
      std::optional<Taken> taken = Take(m);
      if (!taken) {
        RollbackTo(records_.size() - 1);
        return false;
      }
      if (taken->victim >= 0) blocks_[taken->victim].claimed = true;
      records_.back().taken.push_back(*taken);
      return true;
    };
    // A part-full last page that others share is left for a copy; whoever is last writes in place.
    size_t pages = s.pages.size();
    for (const Record& r : records_) pages += r.sequence == id ? r.pages() : 0;
    const bool untouched =
        pages == s.pages.size() && Planned(id, records_.size() - 1) == s.reserved;
    if (untouched && pages > 0 && s.reserved < PageEnd(s, pages - 1)) {
      const int last = s.pages.back();
      if (blocks_[last].refs - Leaving(last) > 1) {
        if (!take(blocks_[last].modality)) return false;
        records_.back().departs = last;
      }
    }
    for (; (pages == 0 ? 0 : PageEnd(s, pages - 1)) < upto; ++pages) {
      if (!take(pages < p.end.size() ? p.modality[pages] : p.answer)) return false;
    }
    return true;
  }
  // The copies it makes.
  Copies Commit() {
    Copies copies;
    for (const Record& record : records_) {
      for (const Taken& taken : record.taken) {
        if (taken.victim >= 0) Evict(taken.victim, taken.reason);
      }
    }
    for (const Record& record : records_) {
      if (record.sequence < 0) continue;
      Sequence& s = sequences_[record.sequence];
      Count(s);
      for (const Taken& taken : record.taken) {
        const int b = New(taken.modality);
        if (record.departs >= 0 && &taken == &record.taken.front()) {
          copies.emplace_back(record.departs, b);
          s.pages.back() = b;
        } else {
          s.pages.push_back(b);
        }
      }
      s.reserved = record.upto;
    }
    for (const auto& [from, to] : copies) Unref(from);
    records_.clear();
    open_ = false;
    return copies;
  }

  // -------------------------------------------------------------------------------------- beams
  // False, and no block changed, when they are not there.
  bool SetAside(int id, size_t modality, uint32_t count) {
    Begin();
    records_.push_back({-1, 0, -1, {}});
    for (uint32_t i = 0; i < count; ++i) {
      const std::optional<Taken> taken = Take(modality);
      if (!taken) {
        Abandon();
        return false;
      }
      if (taken->victim >= 0) blocks_[taken->victim].claimed = true;
      records_.back().taken.push_back(*taken);
    }
    Commit();
    Reserve reserve{modality, {}};
    for (uint32_t i = 0; i < count; ++i) reserve.blocks.push_back(New(modality));
    reserves_[id] = reserve;
    return true;
  }
  bool MayExtend(int id, int reserve) const {
    const Sequence& s = sequences_.at(id);
    const Prompt& p = prompts_[s.prompt];
    return s.reserved >= p.tokens && !s.pages.empty() && Planned(id) == s.reserved &&
           reserves_.at(reserve).modality == p.answer;
  }
  // The copies it makes; nothing, and nothing changed, when the reserve is too small.
  std::optional<Copies> Extend(int id, uint32_t upto, int from) {
    Sequence& s = sequences_[id];
    std::vector<int>& spare = reserves_[from].blocks;
    if (upto <= s.reserved) return Copies();
    const int last = s.pages.back();
    const bool copy = s.reserved < PageEnd(s, s.pages.size() - 1) && blocks_[last].refs > 1;
    size_t pages = s.pages.size();
    while (PageEnd(s, pages - 1) < upto) ++pages;
    if (pages - s.pages.size() + (copy ? 1 : 0) > spare.size()) return std::nullopt;
    const auto take = [&spare] {
      const int b = spare.back();
      spare.pop_back();
      return b;
    };
    Copies copies;
    if (copy) {
      s.pages.back() = take();
      copies.emplace_back(last, s.pages.back());
      Unref(last);
    }
    while (s.pages.size() < pages) s.pages.push_back(take());
    s.reserved = upto;
    return copies;
  }
  void Drop(int id, int to) {
    const Sequence s = Forget(id);
    const Prompt& p = prompts_[s.prompt];
    Reserve& reserve = reserves_[to];
    for (size_t i = s.pages.size(); i-- > 0;) {
      const int b = s.pages[i];
      if (i >= p.end.size() && reserve.modality == p.answer && blocks_[b].refs == 1) {
        reserve.blocks.push_back(b);
      } else {
        Unref(b);
      }
    }
  }
  void Return(int id) {
    for (const int b : reserves_[id].blocks) Unref(b);
    reserves_.erase(id);
  }

 private:
  struct Prompt {
    std::vector<size_t> modality;  // of each block
    std::vector<uint32_t> end;
    std::vector<int> prefix;  // equal numbers: equal content so far
    uint32_t tokens = 0;
    size_t answer = 0;  // modality
  };
  // A block that the open transaction has for sure: a free one, or that of a victim.
  struct Taken {
    size_t modality = 0;
    int victim = -1;
    EvictionReason reason = EvictionReason::kOwnPartition;
  };
  struct Record {
    int sequence = -1;  // -1: it was closed meanwhile; what is taken stays taken
    uint32_t upto = 0;
    int departs = -1;  // the block it leaves for a copy
    std::vector<Taken> taken;
    size_t pages() const { return taken.size() - (departs >= 0 ? 1 : 0); }
  };

  // What a block's content and everything before it are, spelled out.
  static std::vector<int64_t> Spell(const Timeline& t, uint32_t block) {
    std::vector<int64_t> out = {static_cast<int64_t>(t.salt().low)};
    for (uint32_t i = 0; i <= block; ++i) {
      const TimelineBlock& b = t.blocks()[i];
      const Segment& s = t.segments()[b.segment];
      out.insert(out.end(), {-1, b.begin, b.len});
      for (uint32_t k = b.begin; k < b.begin + b.len; ++k) {
        if (s.modality == Modality::kVision) {
          out.insert(out.end(), {-2, s.content->rgb[0], s.camera, k - s.begin, s.end - s.begin});
        } else {
          out.insert(out.end(), {-3, t.tokens()[k]});
        }
      }
    }
    return out;
  }

  std::vector<int> Cached(size_t prompt) const {
    std::vector<int> found;
    const Prompt& p = prompts_[prompt];
    for (size_t i = 0; i + 1 < p.prefix.size(); ++i) {
      const auto it = index_.find(p.prefix[i]);
      if (it == index_.end() || blocks_.at(it->second).claimed) break;
      found.push_back(it->second);
    }
    return found;
  }
  uint32_t Planned(int id) const { return Planned(id, records_.size()); }
  uint32_t Planned(int id, size_t records) const {
    uint32_t tokens = sequences_.at(id).reserved;
    for (size_t i = 0; i < records; ++i) {
      if (records_[i].sequence == id) tokens = records_[i].upto;
    }
    return tokens;
  }
  int Leaving(int block) const {
    return static_cast<int>(std::count_if(records_.begin(), records_.end(), [&](const Record& r) {
      return r.sequence >= 0 && r.departs == block;
    }));
  }

  // One more block for `m` out of what was there at Begin and is not taken yet.
  std::optional<Taken> Take(size_t m) const {
    uint32_t free = free_;
    std::array<uint32_t, kModalities> used = used_;
    for (const Record& record : records_) {
      for (const Taken& taken : record.taken) {
        if (taken.victim < 0) {
          --free;
        } else {
          --used[blocks_.at(taken.victim).modality];
        }
        ++used[taken.modality];
      }
    }
    uint32_t promised = 0;
    for (size_t j = 0; j < kModalities; ++j) {
      if (j != m && g_.quotas[j].floor > used[j]) promised += g_.quotas[j].floor - used[j];
    }
    const bool below_cap = used[m] < g_.quotas[m].cap;
    if (below_cap && free > promised) return Taken{m, -1, {}};
    for (const int b : idle_) {
      const Block& block = blocks_.at(b);
      if (!block.claimed && block.modality == m) return Taken{m, b, EvictionReason::kOwnPartition};
    }
    if (!below_cap) return std::nullopt;
    for (const int b : idle_) {
      const Block& block = blocks_.at(b);
      if (!block.claimed && used[block.modality] > g_.quotas[block.modality].floor) {
        return Taken{m, b, EvictionReason::kOtherPartition};
      }
    }
    return std::nullopt;
  }
  void Unclaim(const Taken& taken) {
    if (taken.victim >= 0) blocks_[taken.victim].claimed = false;
  }
  // The sequence leaves; its part of the open plan goes with it.
  Sequence Forget(int id) {
    const Sequence s = sequences_[id];
    sequences_.erase(id);
    for (Record& record : records_) {
      if (record.sequence == id) record.sequence = -1;
    }
    return s;
  }
  void Count(Sequence& s) {
    if (std::exchange(s.counted, true)) return;
    const Prompt& p = prompts_[s.prompt];
    std::array<uint32_t, kModalities> hit{};
    std::array<uint32_t, kModalities> all{};
    for (size_t i = 0; i < p.end.size(); ++i) {
      const uint32_t len = p.end[i] - (i == 0 ? 0 : p.end[i - 1]);
      all[p.modality[i]] += len;
      if (p.end[i] <= s.cached) hit[p.modality[i]] += len;
    }
    for (size_t m = 0; m < kModalities; ++m) {
      if (all[m] == 0) continue;
      partitions_[m].hit += hit[m];
      partitions_[m].miss += all[m] - hit[m];
      partitions_[m].ema = 0.9 * partitions_[m].ema + 0.1 * hit[m] / all[m];
    }
  }
  int New(size_t m) {
    blocks_[next_block_] = {m, 1, false, false, -1, false};
    return next_block_++;
  }
  void Evict(int b, EvictionReason reason) {
    ++partitions_[blocks_[b].modality].evictions[static_cast<size_t>(reason)];
    idle_.erase(std::find(idle_.begin(), idle_.end(), b));
    Unindex(b);
    blocks_.erase(b);
  }
  void Unindex(int b) {
    index_.erase(blocks_[b].prefix);
    blocks_[b].indexed = false;
  }
  void Ref(int b) {
    if (blocks_[b].refs++ == 0) idle_.erase(std::find(idle_.begin(), idle_.end(), b));
  }
  void Unref(int b) {
    if (--blocks_[b].refs > 0) return;
    if (blocks_[b].indexed) {
      idle_.push_back(b);
    } else {
      blocks_.erase(b);
    }
  }

  const Geometry& g_;
  std::vector<Prompt> prompts_;
  std::map<int, Block> blocks_;  // held and idle
  std::vector<int> idle_;        // oldest first, all partitions
  std::map<int, int> index_;     // prefix -> block
  std::map<int, Sequence> sequences_;
  std::map<int, Reserve> reserves_;
  std::array<Partition, kModalities> partitions_{};
  int next_block_ = 0;
  // The open transaction: what there was to take at Begin, and what it has taken.
  bool open_ = false;
  uint32_t free_ = 0;
  std::array<uint32_t, kModalities> used_{};
  std::vector<Record> records_;
};

}  // namespace saccade
