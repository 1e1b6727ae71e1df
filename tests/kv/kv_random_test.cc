// Random operations on the K/V cache, twice.
//
// NaiveModel: a cache that is obviously right and slow (value semantics: a transaction is a copy of
// everything, a rollback is the older copy) runs beside the real one; every count, hit, eviction,
// refusal and every sharing of a block must agree.
//
// Pipeline: a device with real memory and a queue of steps, two deep, whose newest step may be
// taken back. A token's value is a digest of everything before it, so a read through a page table
// tells whether the right bytes are there, whatever was shared, copied, evicted or cancelled on the
// way.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "tests/kv/kv_random.h"
#include "tests/kv/kv_testing.h"

namespace saccade {
namespace {

// Where the choices come from: a seed, or the bytes of a fuzzer, one each, until there are none.
class Choices {
 public:
  explicit Choices(uint32_t seed) : rng_(seed) {}
  explicit Choices(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint32_t operator()() {
    if (!bytes_) return static_cast<uint32_t>(rng_());
    if (bytes_->empty()) return 0;
    const uint8_t byte = bytes_->front();
    bytes_ = bytes_->subspan(1);
    return byte;
  }
  bool done() const { return bytes_ && bytes_->empty(); }

 private:
  std::mt19937 rng_;
  std::optional<std::span<const uint8_t>> bytes_;
};

struct Geometry {
  const char* name;
  uint32_t num_blocks;
  uint32_t block_tokens;
  std::array<PartitionQuota, kModalities> quotas;  // vision, text, state, action
};

const std::vector<Geometry>& Geometries() {
  static const std::vector<Geometry> geometries = {
      {"one block", 1, 4, {{{0, 1}, {0, 1}, {0, 1}, {0, 1}}}},
      {"three blocks", 3, 2, {{{0, 3}, {0, 3}, {0, 0}, {0, 3}}}},
      {"single tokens", 24, 1, {{{2, 16}, {3, 20}, {0, 1}, {1, 8}}}},
      {"all floors", 12, 3, {{{5, 8}, {4, 8}, {1, 1}, {2, 4}}}},
      {"tight caps", 16, 4, {{{0, 5}, {0, 6}, {0, 0}, {0, 3}}}},
      {"no quotas", 20, 4, {{{0, 20}, {0, 20}, {0, 20}, {0, 20}}}},
      {"roomy", 64, 16, {{{16, 64}, {4, 48}, {0, 16}, {4, 32}}}},
  };
  return geometries;
}

// Prompts that share prefixes in many ways; lengths follow the block size.
std::vector<std::shared_ptr<const Timeline>> Prompts(const Geometry& g, Choices& rng) {
  const std::vector<ContentRef> frames = {Frame(1), Frame(2), Frame(3)};
  std::vector<std::shared_ptr<const Timeline>> prompts;
  for (int i = 0; i < 14; ++i) {
    TimelineBuilder builder(Salt(i % 7 == 6 ? "n" : "m"), g.block_tokens);
    if (rng() % 2 == 0) builder.AddText(Ids(1, 1 + rng() % (2 * g.block_tokens)));
    const uint32_t cameras = rng() % 3;
    for (uint32_t c = 0; c < cameras; ++c) {
      builder.AddVision(c, frames[rng() % 3], 2 * g.block_tokens + (g.block_tokens + 1) / 2);
    }
    auto ids = Ids(100, 1 + rng() % (3 * g.block_tokens));
    if (rng() % 3 == 0) ids[rng() % ids.size()] = 7;
    builder.AddText(ids);
    prompts.push_back(builder.Build());
  }
  return prompts;
}

// What a block's content and everything before it are, spelled out.
std::vector<int64_t> Spell(const Timeline& t, uint32_t block) {
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

// ---------------------------------------------------------------- the naive model

struct ModelBlock {
  size_t modality = 0;
  int refs = 0;
  bool committed = false;
  bool indexed = false;
  int prefix = -1;  // while indexed
};

struct ModelSequence {
  size_t prompt = 0;
  std::vector<int> pages;
  uint32_t reserved = 0;
  uint32_t committed = 0;
  uint32_t cached = 0;
  bool counted = false;
};

struct ModelPrompt {
  std::vector<size_t> modality;  // of each block
  std::vector<uint32_t> end;
  std::vector<int> prefix;  // equal numbers: equal content so far
  uint32_t tokens = 0;
};

struct ModelState {
  std::map<int, ModelBlock> blocks;  // held and idle
  std::vector<int> idle;             // oldest first, all partitions
  std::map<int, int> index;          // prefix -> block
  std::map<int, ModelSequence> sequences;
  std::array<std::array<uint64_t, kEvictionReasons>, kModalities> evictions{};
  std::array<uint64_t, kModalities> hit{}, miss{};
  std::array<double, kModalities> ema{};
  std::vector<int> departed;  // blocks left by copy-on-write in this transaction
  int next_block = 0;
  size_t copies = 0;  // of this transaction
};

class NaiveModel {
 public:
  NaiveModel(const Geometry& g, const std::vector<std::shared_ptr<const Timeline>>& prompts)
      : g_(g) {
    std::map<std::vector<int64_t>, int> names;
    for (const auto& t : prompts) {
      ModelPrompt p;
      p.tokens = t->num_tokens();
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

  ModelState state;

  const ModelPrompt& prompt(size_t i) const { return prompts_[i]; }

  uint32_t Used(size_t m) const {
    return static_cast<uint32_t>(
        std::count_if(state.blocks.begin(), state.blocks.end(),
                      [&](const auto& b) { return b.second.modality == m; }));
  }
  uint32_t Free() const { return g_.num_blocks - static_cast<uint32_t>(state.blocks.size()); }

  std::vector<int> Cached(size_t prompt) const {
    std::vector<int> found;
    const ModelPrompt& p = prompts_[prompt];
    for (size_t i = 0; i + 1 < p.prefix.size(); ++i) {
      const auto it = state.index.find(p.prefix[i]);
      if (it == state.index.end()) break;
      found.push_back(it->second);
    }
    return found;
  }

  void Open(int id, size_t prompt) {
    const ModelPrompt& p = prompts_[prompt];
    ModelSequence s;
    s.prompt = prompt;
    s.pages = Cached(prompt);
    for (const int b : s.pages) Ref(b);
    if (!s.pages.empty()) s.reserved = s.committed = s.cached = p.end[s.pages.size() - 1];
    state.sequences[id] = s;
  }

  void Fork(int id, int from) {
    state.sequences[id] = state.sequences[from];
    state.sequences[id].counted = true;
    for (const int b : state.sequences[id].pages) Ref(b);
  }

  // False, and nothing changed, when the blocks are not there.
  bool Reserve(int id, uint32_t upto) {
    const ModelState before = state;
    ModelSequence& s = state.sequences[id];
    if (upto <= s.reserved) return true;
    if (!s.pages.empty() && s.reserved < End(s, s.pages.size() - 1)) {
      const int last = s.pages.back();
      const auto leaving = std::count(state.departed.begin(), state.departed.end(), last);
      if (state.blocks[last].refs - leaving > 1) {
        const int own = Allocate(state.blocks[last].modality);
        if (own < 0) {
          state = before;
          return false;
        }
        state.sequences[id].pages.back() = own;
        state.departed.push_back(last);
        ++state.copies;
      }
    }
    while ((s.pages.empty() ? 0 : End(s, s.pages.size() - 1)) < upto) {
      const ModelPrompt& p = prompts_[s.prompt];
      const size_t i = s.pages.size();
      const int b =
          Allocate(i < p.end.size() ? p.modality[i] : static_cast<size_t>(Modality::kAction));
      if (b < 0) {
        state = before;
        return false;
      }
      s.pages.push_back(b);
    }
    s.reserved = upto;
    if (!s.counted) Count(s);
    return true;
  }

  void Commit() {
    for (const int b : state.departed) Unref(b);
    state.departed.clear();
    state.copies = 0;
  }

  void Publish(int id, uint32_t tokens) {
    ModelSequence& s = state.sequences[id];
    s.committed = std::max(s.committed, std::min(tokens, s.reserved));
    const ModelPrompt& p = prompts_[s.prompt];
    for (size_t i = 0; i < p.end.size() && p.end[i] <= s.committed; ++i) {
      ModelBlock& b = state.blocks[s.pages[i]];
      if (b.committed) continue;
      b.committed = true;
      if (state.index.count(p.prefix[i]) > 0) continue;
      b.indexed = true;
      b.prefix = p.prefix[i];
      state.index[b.prefix] = s.pages[i];
    }
  }

  void Close(int id, bool poisoned) {
    const ModelSequence s = state.sequences[id];
    state.sequences.erase(id);
    for (auto page = s.pages.rbegin(); page != s.pages.rend(); ++page) {
      if (poisoned && state.blocks[*page].indexed) Unindex(*page);
      Unref(*page);
    }
  }

  void Flush() {
    while (!state.idle.empty()) Evict(state.idle.front(), EvictionReason::kFlush);
  }

  uint32_t End(const ModelSequence& s, size_t page) const {
    const ModelPrompt& p = prompts_[s.prompt];
    if (page < p.end.size()) return p.end[page];
    return p.tokens + static_cast<uint32_t>(page + 1 - p.end.size()) * g_.block_tokens;
  }

 private:
  void Count(ModelSequence& s) {
    s.counted = true;
    const ModelPrompt& p = prompts_[s.prompt];
    std::array<uint32_t, kModalities> hit{}, all{};
    for (size_t i = 0; i < p.end.size(); ++i) {
      const uint32_t len = p.end[i] - (i == 0 ? 0 : p.end[i - 1]);
      all[p.modality[i]] += len;
      if (p.end[i] <= s.cached) hit[p.modality[i]] += len;
    }
    for (size_t m = 0; m < kModalities; ++m) {
      if (all[m] == 0) continue;
      state.hit[m] += hit[m];
      state.miss[m] += all[m] - hit[m];
      state.ema[m] = 0.9 * state.ema[m] + 0.1 * hit[m] / all[m];
    }
  }
  int Allocate(size_t m) {
    const auto below_cap = Used(m) < g_.quotas[m].cap;
    uint32_t promised = 0;
    for (size_t j = 0; j < kModalities; ++j) {
      if (j != m && g_.quotas[j].floor > Used(j)) promised += g_.quotas[j].floor - Used(j);
    }
    if (!below_cap || Free() <= promised) {
      std::optional<int> victim;
      auto reason = EvictionReason::kOwnPartition;
      for (const int b : state.idle) {
        if (!victim && state.blocks[b].modality == m) victim = b;
      }
      if (!victim && below_cap) {
        reason = EvictionReason::kOtherPartition;
        for (const int b : state.idle) {
          const size_t v = state.blocks[b].modality;
          if (!victim && Used(v) > g_.quotas[v].floor) victim = b;
        }
      }
      if (!victim) return -1;
      Evict(*victim, reason);
    }
    const int b = state.next_block++;
    state.blocks[b] = {m, 1, false, false, -1};
    return b;
  }
  void Evict(int b, EvictionReason reason) {
    ++state.evictions[state.blocks[b].modality][static_cast<size_t>(reason)];
    state.idle.erase(std::find(state.idle.begin(), state.idle.end(), b));
    Unindex(b);
    state.blocks.erase(b);
  }
  void Unindex(int b) {
    state.index.erase(state.blocks[b].prefix);
    state.blocks[b].indexed = false;
  }
  void Ref(int b) {
    if (state.blocks[b].refs++ == 0)
      state.idle.erase(std::find(state.idle.begin(), state.idle.end(), b));
  }
  void Unref(int b) {
    if (--state.blocks[b].refs > 0) return;
    if (state.blocks[b].indexed) {
      state.idle.push_back(b);
    } else {
      state.blocks.erase(b);
    }
  }

  const Geometry& g_;
  std::vector<ModelPrompt> prompts_;
};

void Compare(const KvCache& cache, const NaiveModel& model,
             const std::map<int, std::unique_ptr<Sequence>>& live) {
  ASSERT_OK(cache.CheckInvariants());
  const KvStats stats = cache.stats();
  ASSERT_EQ(stats.free_blocks, model.Free());
  for (size_t m = 0; m < kModalities; ++m) {
    uint32_t idle = 0;
    for (const int b : model.state.idle) idle += model.state.blocks.at(b).modality == m ? 1 : 0;
    ASSERT_EQ(stats.partitions[m].idle, idle) << kModalityNames[m];
    ASSERT_EQ(stats.partitions[m].held, model.Used(m) - idle) << kModalityNames[m];
    ASSERT_EQ(stats.partitions[m].evictions, model.state.evictions[m]) << kModalityNames[m];
    ASSERT_EQ(stats.partitions[m].hit_tokens, model.state.hit[m]);
    ASSERT_EQ(stats.partitions[m].miss_tokens, model.state.miss[m]);
    ASSERT_NEAR(stats.partitions[m].hit_rate_ema, model.state.ema[m], 1e-12);
  }
  // The same pages are shared by the same sequences.
  std::map<int, BlockId> real_of;
  std::map<BlockId, int> model_of;
  ASSERT_EQ(live.size(), model.state.sequences.size());
  for (const auto& [id, s] : live) {
    const ModelSequence& expected = model.state.sequences.at(id);
    ASSERT_EQ(s->reserved_tokens(), expected.reserved);
    ASSERT_EQ(s->committed_tokens(), expected.committed);
    ASSERT_EQ(s->cached_tokens(), expected.cached);
    const std::vector<PageRef> table = s->PageTable(expected.reserved);
    ASSERT_EQ(table.size(), expected.pages.size());
    uint32_t position = 0;
    for (size_t i = 0; i < table.size(); ++i) {
      ASSERT_EQ(table[i].position, position);
      position = std::min(model.End(expected, i), expected.reserved);
      ASSERT_EQ(table[i].len, position - table[i].position);
      const auto real = real_of.emplace(expected.pages[i], table[i].block).first->second;
      ASSERT_EQ(real, table[i].block);
      const auto back = model_of.emplace(table[i].block, expected.pages[i]).first->second;
      ASSERT_EQ(back, expected.pages[i]);
    }
  }
}

void RunNaiveModel(const Geometry& g, Choices rng, int operations) {
  SCOPED_TRACE(g.name);
  const auto prompts = Prompts(g, rng);
  KvCacheOptions options;
  options.num_blocks = g.num_blocks;
  options.block_tokens = g.block_tokens;
  options.partitions = g.quotas;
  auto created = KvCache::Create(options);
  ASSERT_TRUE(created.ok()) << Message(created.status());
  KvCache& cache = **created;
  NaiveModel model(g, prompts);
  std::map<int, std::unique_ptr<Sequence>> live;
  int next_id = 0;
  const auto any = [&] {
    return std::next(live.begin(), static_cast<std::ptrdiff_t>(rng() % live.size()));
  };

  for (int op = 0; op < operations && !rng.done(); ++op) {
    SCOPED_TRACE(testing::Message() << "operation " << op);
    const uint32_t kind = rng() % 16;
    if (kind < 3 && live.size() < 8) {
      const size_t prompt = rng() % prompts.size();
      const auto found = model.Cached(prompt);
      ASSERT_EQ(cache.CachedTokens(*prompts[prompt]),
                found.empty() ? 0 : model.prompt(prompt).end[found.size() - 1]);
      model.Open(next_id, prompt);
      live[next_id++] = cache.Open(prompts[prompt], kNow);
    } else if (kind == 3 && !live.empty() && live.size() < 8) {
      const auto source = any();
      model.Fork(next_id, source->first);
      live[next_id++] = cache.Fork(*source->second);
    } else if (kind < 6 && !live.empty()) {
      const auto it = any();
      const bool poisoned = rng() % 8 == 0;
      model.Close(it->first, poisoned);
      cache.Close(std::move(it->second), kNow, poisoned);
      live.erase(it);
    } else if (kind < 9 && !live.empty()) {
      const auto it = any();
      const uint32_t tokens = rng() % (it->second->reserved_tokens() + 2);
      model.Publish(it->first, tokens);
      cache.Publish(*it->second, tokens, kNow);
    } else if (kind == 9 && rng() % 16 == 0) {
      model.Flush();
      cache.FlushIdle();
    } else if (!live.empty()) {
      const ModelState before = model.state;
      KvTransaction transaction = cache.Begin(kNow);
      std::vector<std::pair<size_t, ModelState>> savepoints;
      const uint32_t calls = rng() % 6;
      for (uint32_t c = 0; c < calls; ++c) {
        if (rng() % 4 == 0) savepoints.emplace_back(transaction.Savepoint(), model.state);
        if (rng() % 8 == 0 && !savepoints.empty()) {
          const size_t k = rng() % savepoints.size();
          transaction.RollbackTo(savepoints[k].first);
          model.state = savepoints[k].second;
          savepoints.resize(k);
          continue;
        }
        const auto it = any();
        const uint32_t upto =
            model.state.sequences[it->first].reserved + rng() % (2 * g.block_tokens + 2);
        const absl::Status status = transaction.Reserve(*it->second, upto);
        ASSERT_EQ(status.ok(), model.Reserve(it->first, upto)) << Message(status);
        if (!status.ok()) {
          ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
        }
      }
      ASSERT_OK(cache.CheckInvariants());
      if (rng() % 4 == 0) {
        model.state = before;
      } else {
        const size_t copies = model.state.copies;
        model.Commit();
        ASSERT_EQ(std::move(transaction).Commit().size(), copies);
      }
    }
    Compare(cache, model, live);
    if (testing::Test::HasFatalFailure()) return;
  }
  while (!live.empty()) {
    const auto it = live.begin();
    model.Close(it->first, false);
    cache.Close(std::move(it->second), kNow);
    live.erase(it);
    Compare(cache, model, live);
  }
  cache.FlushIdle();
  ASSERT_EQ(cache.stats().free_blocks, g.num_blocks);
}

class NaiveModelTest : public testing::TestWithParam<size_t> {};

TEST_P(NaiveModelTest, EverythingAgrees) {
  for (uint32_t seed = 1; seed <= 8 && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RunNaiveModel(Geometries()[GetParam()], Choices(seed), 2000);
  }
}

std::string GeometryName(const testing::TestParamInfo<size_t>& info) {
  std::string name = Geometries()[info.param].name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Geometries, NaiveModelTest, testing::Range<size_t>(0, 7), GeometryName);

// ---------------------------------------------------------------- the pipeline

uint64_t Mix(uint64_t a, uint64_t b) {
  return DigestBuilder("test.kv").Field(a).Field(b).Finish().low;
}

struct Stream {
  std::unique_ptr<Sequence> sequence;
  std::vector<uint64_t> value;  // what the device must hold for each token planned so far
  uint32_t scheduled = 0;  // tokens [0, scheduled) are computed, or a step in flight computes them
  uint32_t done = 0;       // of these, computed
  int in_flight = 0;
};

struct Item {
  int stream = 0;
  uint32_t begin = 0;
  uint32_t end = 0;  // begin == end: a fork that waits for what its source computes
  std::vector<PageRef> pages;
};

struct Step {
  std::vector<BlockCopy> copies;
  std::vector<Item> items;
};

void RunPipeline(const Geometry& g, Choices rng, int operations) {
  SCOPED_TRACE(g.name);
  const auto prompts = Prompts(g, rng);
  KvCacheOptions options;
  options.num_blocks = g.num_blocks;
  options.block_tokens = g.block_tokens;
  options.partitions = g.quotas;
  auto created = KvCache::Create(options);
  ASSERT_TRUE(created.ok()) << Message(created.status());
  KvCache& cache = **created;

  std::vector<uint64_t> memory(size_t{g.num_blocks} * g.block_tokens, 0);
  std::map<int, Stream> streams;
  std::deque<Step> queue;  // front: running, it cannot be taken back
  int next_id = 0;
  const auto slot = [&](const PageRef& page, uint32_t token) -> uint64_t& {
    return memory[static_cast<size_t>(page.block.value()) * g.block_tokens +
                  (token - page.position)];
  };
  const auto any = [&] {
    return std::next(streams.begin(), static_cast<std::ptrdiff_t>(rng() % streams.size()));
  };
  const auto extend = [&](Stream& s, uint32_t upto) {
    const Timeline& t = s.sequence->timeline();
    while (s.value.size() < upto) {
      const auto k = static_cast<uint32_t>(s.value.size());
      uint64_t token = rng();  // an action token: this sample's own
      for (const Segment& segment : t.segments()) {
        if (k < segment.begin || k >= segment.end) continue;
        token = segment.modality == Modality::kVision
                    ? Mix(segment.content->rgb[0], Mix(segment.camera, k - segment.begin))
                    : static_cast<uint64_t>(t.tokens()[k]);
      }
      s.value.push_back(Mix(k == 0 ? t.salt().low : s.value.back(), token));
    }
  };
  const auto open = [&] {
    if (streams.size() >= 8) return;
    const auto& prompt = prompts[rng() % prompts.size()];
    Stream s;
    s.sequence = cache.Open(prompt, kNow);
    s.scheduled = s.done = s.sequence->cached_tokens();
    extend(s, s.scheduled);
    streams[next_id++] = std::move(s);
  };
  const auto close = [&] {
    if (streams.empty()) return;
    const auto it = any();
    if (it->second.in_flight > 0) return;
    cache.Close(std::move(it->second.sequence), kNow, rng() % 16 == 0);
    streams.erase(it);
  };
  const auto fork = [&] {
    if (streams.empty() || streams.size() >= 8) return;
    const auto it = any();
    Stream& source = it->second;
    int started = 0;
    if (!queue.empty()) {
      for (const Item& item : queue.front().items) started += item.stream == it->first ? 1 : 0;
    }
    if (source.in_flight != started || source.scheduled != source.sequence->reserved_tokens())
      return;
    Stream s;
    s.sequence = cache.Fork(*source.sequence);
    s.value = source.value;
    s.scheduled = source.scheduled;
    s.done = source.done;
    if (started > 0) {
      queue.front().items.push_back({next_id, s.scheduled, s.scheduled, {}});
      ++s.in_flight;
    }
    streams[next_id++] = std::move(s);
  };
  const auto publish = [&] {
    if (streams.empty()) return;
    const auto it = any();
    cache.Publish(*it->second.sequence, it->second.done, kNow);
  };

  for (int op = 0; op < operations && !rng.done(); ++op) {
    SCOPED_TRACE(testing::Message() << "operation " << op);
    switch (rng() % 8) {
      case 0:
        open();
        break;
      case 1:
        close();
        break;
      case 2:
        publish();
        break;
      case 3:
        if (rng() % 2 == 0) fork();
        if (rng() % 64 == 0) cache.FlushIdle();
        break;
      case 4:
      case 5: {  // plan
        if (queue.size() >= 2) break;
        KvTransaction transaction = cache.Begin(kNow);
        std::map<int, uint32_t> planned;
        std::vector<std::pair<size_t, std::map<int, uint32_t>>> savepoints;
        for (uint32_t c = rng() % 5; c > 0; --c) {
          switch (rng() % 12) {
            case 0:
              open();
              break;
            case 1:
              close();
              break;
            case 2:
              publish();
              break;
            case 3:
              fork();
              break;
            case 4:
              cache.FlushIdle();
              break;
            case 5:
              savepoints.emplace_back(transaction.Savepoint(), planned);
              break;
            case 6:
              if (savepoints.empty()) break;
              transaction.RollbackTo(savepoints.back().first);
              planned = savepoints.back().second;
              savepoints.pop_back();
              break;
            default: {
              if (streams.empty()) break;
              const auto it = any();
              const auto known = planned.find(it->first);
              const uint32_t from = known == planned.end() ? it->second.scheduled : known->second;
              const uint32_t upto = from + 1 + rng() % (2 * g.block_tokens);
              if (transaction.Reserve(*it->second.sequence, upto).ok()) planned[it->first] = upto;
            }
          }
          ASSERT_OK(cache.CheckInvariants());
        }
        if (rng() % 4 == 0) break;  // dropped
        Step step;
        step.copies = std::move(transaction).Commit();
        ASSERT_OK(cache.CheckInvariants());
        for (const auto& [id, upto] : planned) {
          const auto it = streams.find(id);
          if (it == streams.end()) continue;  // closed meanwhile
          Stream& s = it->second;
          ASSERT_GE(s.sequence->reserved_tokens(), upto);
          extend(s, upto);
          step.items.push_back({id, s.scheduled, upto, s.sequence->PageTable(upto)});
          s.scheduled = upto;
          ++s.in_flight;
        }
        queue.push_back(std::move(step));
        break;
      }
      case 6: {  // the running step ends
        if (queue.empty()) break;
        const Step step = std::move(queue.front());
        queue.pop_front();
        for (const BlockCopy& copy : step.copies) {
          std::copy_n(
              memory.begin() + static_cast<std::ptrdiff_t>(copy.from.value()) * g.block_tokens,
              g.block_tokens,
              memory.begin() + static_cast<std::ptrdiff_t>(copy.to.value()) * g.block_tokens);
        }
        for (const Item& item : step.items) {
          Stream& s = streams.at(item.stream);
          uint32_t covered = 0;
          for (const PageRef& page : item.pages) {
            ASSERT_EQ(page.position, covered);
            for (; covered < page.position + page.len; ++covered) {
              if (covered >= item.begin) {
                slot(page, covered) = s.value[covered];
              } else {
                ASSERT_EQ(slot(page, covered), s.value[covered])
                    << "stream " << item.stream << " reads token " << covered;
              }
            }
          }
          s.done = std::max(s.done, item.end);
          --s.in_flight;
          if (rng() % 2 == 0) cache.Publish(*s.sequence, s.done, kNow);
        }
        break;
      }
      case 7: {  // the queued step is taken back
        if (queue.size() < 2 || rng() % 2 == 0) break;
        const Step step = std::move(queue.back());
        queue.pop_back();
        cache.ReturnCopies(step.copies);
        for (const Item& item : step.items) {
          Stream& s = streams.at(item.stream);
          s.scheduled = item.begin;
          --s.in_flight;
        }
        break;
      }
    }
    ASSERT_OK(cache.CheckInvariants());
  }
}

class PipelineTest : public testing::TestWithParam<size_t> {};

TEST_P(PipelineTest, TheDeviceReadsWhatWasComputed) {
  for (uint32_t seed = 1; seed <= 8 && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RunPipeline(Geometries()[GetParam()], Choices(seed), 4000);
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, PipelineTest, testing::Range<size_t>(0, 7), GeometryName);

}  // namespace

void RunKvOperations(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  const Geometry& g = Geometries()[(bytes[0] >> 1) % Geometries().size()];
  (bytes[0] & 1 ? RunPipeline : RunNaiveModel)(g, Choices(bytes.subspan(1)), 1'000);
}

}  // namespace saccade
