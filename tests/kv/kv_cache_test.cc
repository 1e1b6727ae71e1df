// The K/V cache, promise by promise. Invariants are checked after every call (CheckedCache).
#include "kv/kv_cache.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>
#include <tuple>

#include "tests/kv/kv_testing.h"

namespace saccade {
namespace {

using testing::Message;

std::shared_ptr<const Timeline> Text(int32_t first, uint32_t count, uint32_t block_tokens = 4,
                                     std::string_view salt = "m") {
  return TimelineBuilder(Salt(salt), block_tokens).AddText(Ids(first, count)).Build();
}

// ---------------------------------------------------------------- options and fit

TEST(KvCacheCreate, RefusesImpossibleOptions) {
  const auto field_of = [](const std::function<void(KvCacheOptions&)>& change) {
    KvCacheOptions options;
    options.num_blocks = 8;
    options.partitions = OpenQuotas(8);
    change(options);
    const auto cache = KvCache::Create(options);
    EXPECT_EQ(cache.status().code(), absl::StatusCode::kInvalidArgument);
    return GetErrorInfo(cache.status()).field;
  };
  EXPECT_EQ(field_of([](KvCacheOptions& o) { o.num_blocks = 0; }), "num_blocks");
  EXPECT_EQ(field_of([](KvCacheOptions& o) { o.num_blocks = (1u << 24) + 1; }), "num_blocks");
  EXPECT_EQ(field_of([](KvCacheOptions& o) { o.block_tokens = 0; }), "block_tokens");
  EXPECT_EQ(field_of([](KvCacheOptions& o) { o.block_tokens = 65536; }), "block_tokens");
  EXPECT_EQ(field_of([](KvCacheOptions& o) {
              Of(o.partitions, Modality::kState) = {3, 2};
            }),
            "partitions.state.floor");
  EXPECT_EQ(field_of([](KvCacheOptions& o) {
              for (PartitionQuota& q : o.partitions) q.floor = 2;
              o.partitions[3].floor = 3;
            }),
            "partitions");
  EXPECT_EQ(field_of([](KvCacheOptions& o) {  // would wrap in 32 bits
              o.partitions.fill({0x80000000u, 0x80000000u});
            }),
            "partitions");
}

TEST(KvCache, HeadroomCountsWhatNobodyHolds) {
  KvCacheOptions options;
  options.num_blocks = 10;
  options.block_tokens = 4;
  options.partitions = OpenQuotas(10);
  options.headroom = 3;
  const auto cache = KvCache::Create(options).value();
  EXPECT_TRUE(cache->LeavesHeadroom(10, 0));  // nothing is held
  const auto prompt = TimelineBuilder(Salt("m"), 4).AddText(Ids(1, 16)).Build();
  auto sequence = cache->Open(prompt, kNow);
  KvTransaction transaction = cache->Begin(kNow);
  ASSERT_OK(transaction.Reserve(*sequence, 16));
  std::move(transaction).Commit();
  EXPECT_TRUE(cache->LeavesHeadroom(3, 0));
  EXPECT_FALSE(cache->LeavesHeadroom(4, 0));
  EXPECT_TRUE(cache->LeavesHeadroom(4, 4));  // all that is held is its own
  cache->Publish(*sequence, 16, kNow);
  auto other = cache->Fork(*sequence);
  cache->Close(std::move(sequence), kNow);
  EXPECT_FALSE(cache->LeavesHeadroom(4, 0));
  cache->Close(std::move(other), kNow);
  EXPECT_TRUE(cache->LeavesHeadroom(10, 0));  // idle blocks are left
}

TEST(KvCacheFits, CountsQuotasFloorsAndSamples) {
  auto quotas = OpenQuotas(12);
  Of(quotas, Modality::kVision) = {3, 6};
  Of(quotas, Modality::kState) = {2, 12};
  CheckedCache cache(12, 4, quotas);
  const auto fits = [&](uint32_t vision, uint32_t text, uint32_t action, uint32_t samples) {
    const auto t =
        TimelineBuilder(Salt("m"), 4).AddVision(0, Frame(1), vision).AddText(Ids(1, text)).Build();
    absl::Status status = cache->CheckFits(*t, action, samples);
    if (!status.ok()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_EQ(GetErrorInfo(status).reason, Reason::kNeverFits);
    }
    return status;
  };
  // Two blocks stay state's, so ten are left; three of them are vision's, used or not.
  EXPECT_OK(fits(24, 16, 0, 1));  // 6 + 4
  EXPECT_FALSE(fits(24, 17, 0, 1).ok());
  EXPECT_FALSE(fits(25, 4, 0, 1).ok());  // 7 > cap
  EXPECT_OK(fits(0, 28, 0, 1));          // 7
  EXPECT_FALSE(fits(0, 29, 0, 1).ok());
  EXPECT_OK(fits(12, 4, 5, 3));  // 3 + 1 + 3 * 2
  EXPECT_FALSE(fits(12, 4, 5, 4).ok());
  EXPECT_FALSE(fits(12, 4, 9, 3).ok());
  EXPECT_OK(fits(12, 4, 5, 0));  // as one sample
  const std::string message = saccade::Message(fits(24, 17, 0, 1));
  EXPECT_NE(message.find("11 blocks"), std::string::npos) << message;
  EXPECT_NE(message.find("12"), std::string::npos) << message;
  EXPECT_FALSE(
      fits(4, 4, std::numeric_limits<uint32_t>::max(), std::numeric_limits<uint32_t>::max()).ok());
  EXPECT_EQ(cache->CheckFits(*Text(1, 4, 8), 0, 1).code(), absl::StatusCode::kFailedPrecondition);
}

// What CheckFits allows can be reserved on an empty cache, and nothing more.
TEST(KvCacheFits, AgreesWithReserve) {
  auto quotas = OpenQuotas(9);
  Of(quotas, Modality::kVision) = {2, 5};
  Of(quotas, Modality::kText) = {1, 4};
  Of(quotas, Modality::kState) = {1, 9};
  Of(quotas, Modality::kAction) = {2, 4};
  for (uint32_t vision = 0; vision <= 7; ++vision) {
    for (uint32_t text = 1; text <= 6; ++text) {
      for (uint32_t action = 0; action <= 5; ++action) {
        CheckedCache cache(9, 2, quotas);
        const auto t = TimelineBuilder(Salt("m"), 2)
                           .AddVision(0, Frame(1), 2 * vision)
                           .AddText(Ids(1, 2 * text))
                           .Build();
        auto sequence = cache.Open(t);
        EXPECT_EQ(cache.Reserve(*sequence, t->num_tokens() + 2 * action).ok(),
                  cache->CheckFits(*t, 2 * action, 1).ok())
            << vision << " " << text << " " << action;
      }
    }
  }
}

// ---------------------------------------------------------------- pages and transactions

TEST(KvCachePages, NeverMixModalitiesAndCarryLengthsAndPositions) {
  CheckedCache cache(16, 4);
  const auto t = TimelineBuilder(Salt("m"), 4)
                     .AddText(Ids(1, 1))
                     .AddVision(0, Frame(1), 6)
                     .AddText(Ids(9, 5))
                     .Build();
  auto s = cache.Open(t);
  EXPECT_EQ(s->reserved_tokens(), 0u);
  EXPECT_TRUE(s->PageTable(100).empty());
  ASSERT_OK(cache.Reserve(*s, 12 + 5));
  EXPECT_EQ(s->reserved_tokens(), 17u);
  EXPECT_EQ(s->committed_tokens(), 0u);
  using Shape = std::vector<std::pair<uint32_t, uint32_t>>;
  const auto shape = [&](uint32_t upto) {
    Shape pages;
    for (const PageRef& p : s->PageTable(upto)) pages.emplace_back(p.position, p.len);
    return pages;
  };
  EXPECT_EQ(shape(17), (Shape{{0, 1}, {1, 4}, {5, 2}, {7, 4}, {11, 1}, {12, 4}, {16, 1}}));
  EXPECT_EQ(shape(1000), shape(17));
  EXPECT_EQ(shape(6), (Shape{{0, 1}, {1, 4}, {5, 1}}));
  EXPECT_EQ(shape(5), (Shape{{0, 1}, {1, 4}}));
  EXPECT_EQ(shape(0), Shape{});
  EXPECT_EQ(cache.held(Modality::kText), 3u);
  EXPECT_EQ(cache.held(Modality::kVision), 2u);
  EXPECT_EQ(cache.held(Modality::kAction), 2u);
  EXPECT_EQ(cache.free_blocks(), 9u);
  const auto blocks = Blocks(*s);
  EXPECT_EQ(std::set<BlockId>(blocks.begin(), blocks.end()).size(), 7u);
  ASSERT_OK(cache.Reserve(*s, 17));  // there already
  ASSERT_OK(cache.Reserve(*s, 20));  // the last page has room
  EXPECT_EQ(Blocks(*s), blocks);
  cache.Close(std::move(s));
  EXPECT_EQ(cache.free_blocks(), 16u);
}

TEST(KvTransaction, ChangesNothingBeforeCommit) {
  CheckedCache cache(8, 4);
  auto a = cache.Open(Text(1, 8));
  auto b = cache.Open(Text(100, 8));
  KvTransaction transaction = cache->Begin(kNow);
  ASSERT_OK(transaction.Reserve(*a, 8));
  ASSERT_OK(transaction.Reserve(*b, 4));
  cache.Check();
  EXPECT_EQ(cache.free_blocks(), 8u);
  EXPECT_EQ(a->reserved_tokens(), 0u);
  EXPECT_TRUE(a->PageTable(8).empty());
  const size_t savepoint = transaction.Savepoint();
  ASSERT_OK(transaction.Reserve(*b, 8));
  ASSERT_OK(transaction.Reserve(*a, 24));
  EXPECT_FALSE(transaction.Reserve(*b, 16).ok());
  cache.Check();
  transaction.RollbackTo(savepoint);
  cache.Check();
  ASSERT_OK(transaction.Reserve(*b, 16));
  EXPECT_TRUE(std::move(transaction).Commit().empty());
  cache.Check();
  EXPECT_EQ(a->reserved_tokens(), 8u);
  EXPECT_EQ(b->reserved_tokens(), 16u);
  EXPECT_EQ(cache.free_blocks(), 2u);
}

TEST(KvTransaction, DroppedMeansNothingHappened) {
  CheckedCache cache(4, 4);
  cache.Warm(Text(1, 12));
  auto a = cache.Open(Text(100, 16));
  {
    KvTransaction transaction = cache->Begin(kNow);
    ASSERT_OK(transaction.Reserve(*a, 16));  // evicts all three
    KvTransaction moved = std::move(transaction);
    // NOLINTBEGIN(bugprone-use-after-move): an empty handle is harmless.
    EXPECT_EQ(transaction.Savepoint(), 0u);
    EXPECT_EQ(transaction.Reserve(*a, 16).code(), absl::StatusCode::kFailedPrecondition);
    // NOLINTEND(bugprone-use-after-move)
    EXPECT_EQ(cache.idle(Modality::kText), 3u);
  }
  cache.Check();
  EXPECT_EQ(cache->CachedTokens(*Text(1, 12)), 8u);
  EXPECT_EQ(cache.free_blocks(), 1u);
  EXPECT_EQ(cache.evictions(Modality::kText, EvictionReason::kOwnPartition), 0u);
  // The order of eviction is as it was: the deepest first.
  ASSERT_OK(cache.Reserve(*a, 8));
  EXPECT_EQ(cache->CachedTokens(*Text(1, 13)), 8u);
}

TEST(KvTransaction, OneAtATime) {
  CheckedCache cache(4, 4);
  auto a = cache.Open(Text(1, 16));
  KvTransaction first = cache->Begin(kNow);
  ASSERT_OK(first.Reserve(*a, 16));
  KvTransaction second = cache->Begin(kNow);
  cache.Check();
  EXPECT_EQ(first.Reserve(*a, 16).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::move(first).Commit().empty());
  EXPECT_EQ(a->reserved_tokens(), 0u);
  ASSERT_OK(second.Reserve(*a, 4));
  first = std::move(second);  // drops nothing: the first is over
  EXPECT_TRUE(std::move(first).Commit().empty());
  cache.Check();
  EXPECT_EQ(a->reserved_tokens(), 4u);
}

TEST(KvTransaction, RefusesStrangers) {
  CheckedCache cache(4, 4);
  CheckedCache other(4, 4);
  auto foreign = other.Open(Text(1, 8));
  auto cut = cache.Open(Text(1, 8, 8));
  EXPECT_EQ(cut->cached_tokens(), 0u);
  KvTransaction transaction = cache->Begin(kNow);
  EXPECT_EQ(transaction.Reserve(*foreign, 8).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(transaction.Reserve(*cut, 8).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache->Fork(*foreign), nullptr);
  cache->Publish(*foreign, 8, kNow);
  cache->Close(std::move(foreign), kNow);
  cache.Check();
  other.Check();
}

TEST(KvTransaction, AbsurdLengthsAreRefused) {
  CheckedCache cache(4, 65535);
  auto s = cache.Open(TimelineBuilder(Salt("m"), 65535).AddText(Ids(1, 4)).Build());
  EXPECT_EQ(cache.Reserve(*s, std::numeric_limits<uint32_t>::max()).code(),
            absl::StatusCode::kResourceExhausted);
  ASSERT_OK(cache.Reserve(*s, 4 + 3 * 65535));
  EXPECT_EQ(s->PageTable(4 + 3 * 65535).back().len, 65535u);
}

// The plan fails at every possible point, in every kind of take; each time nothing is left behind.
TEST(KvTransaction, AllocationFailureAtEveryPointIsAllOrNothing) {
  for (uint32_t blocks = 1; blocks <= 14; ++blocks) {
    for (uint32_t warm = 0; warm <= blocks; ++warm) {
      SCOPED_TRACE(Message() << blocks << " blocks, " << warm << " of them idle");
      CheckedCache cache(blocks, 2);
      if (warm > 0) cache.Warm(Text(1000, 2 * warm, 2));
      auto a = cache.Open(Text(1, 6, 2));
      auto b = cache.Open(Text(100, 7, 2));
      const KvStats before = cache->stats();
      KvTransaction transaction = cache->Begin(kNow);
      const bool first = transaction.Reserve(*a, 10).ok();  // 5
      EXPECT_EQ(first, blocks >= 5);
      const size_t savepoint = transaction.Savepoint();
      const bool second = transaction.Reserve(*b, 14).ok();  // 4 + 4
      EXPECT_EQ(second, blocks >= (first ? 13u : 8u));
      cache.Check();
      const KvStats planned = cache->stats();
      EXPECT_EQ(planned.free_blocks, before.free_blocks);
      EXPECT_EQ(Of(planned, Modality::kText).idle, warm);
      transaction.RollbackTo(savepoint);
      cache.Check();
      if (blocks % 2 == 0) {
        EXPECT_TRUE(std::move(transaction).Commit().empty());
        cache.Check();
        EXPECT_EQ(a->reserved_tokens(), first ? 10u : 0u);
        EXPECT_EQ(b->reserved_tokens(), 0u);
        EXPECT_EQ(cache.free_blocks() + cache.idle(Modality::kText), blocks - (first ? 5 : 0));
      } else {
        transaction = KvTransaction(std::move(transaction));
        const KvTransaction dropped = std::move(transaction);
      }
      cache.Check();
    }
  }
}

TEST(KvTransaction, CacheMayBeUsedWhileOneIsOpen) {
  CheckedCache cache(6, 4);
  const auto warm = Text(1, 12);
  cache.Warm(warm);
  auto other = cache.Open(Text(500, 4));
  ASSERT_OK(cache.Reserve(*other, 4));
  auto a = cache.Open(Text(100, 16));
  KvTransaction transaction = cache->Begin(kNow);
  ASSERT_OK(transaction.Reserve(*a, 16));  // two free ones, and evicts the two deepest of `warm`
  auto b = cache.Open(warm);               // finds what is left
  EXPECT_EQ(b->cached_tokens(), 4u);
  EXPECT_FALSE(transaction.Reserve(*b, 12).ok());
  cache.Check();
  cache.Publish(*other, 4);
  cache->FlushIdle();
  cache.Check();
  cache.Close(std::move(other));  // becomes idle
  ASSERT_OK(transaction.Reserve(*b, 8));
  auto fork = cache.Fork(*a);
  EXPECT_EQ(fork->reserved_tokens(), 0u);
  EXPECT_TRUE(std::move(transaction).Commit().empty());
  cache.Check();
  EXPECT_EQ(a->reserved_tokens(), 16u);
  EXPECT_EQ(b->reserved_tokens(), 8u);
  EXPECT_EQ(cache.free_blocks(), 0u);
  EXPECT_EQ(cache.idle(Modality::kText), 0u);
}

TEST(KvTransaction, SequenceClosedMeanwhileTakesItsPartAlong) {
  CheckedCache cache(8, 4);
  auto a = cache.Open(Text(1, 8));
  auto b = cache.Open(Text(100, 8));
  KvTransaction transaction = cache->Begin(kNow);
  ASSERT_OK(transaction.Reserve(*a, 8));
  const size_t savepoint = transaction.Savepoint();
  ASSERT_OK(transaction.Reserve(*b, 8));
  cache.Close(std::move(a));
  transaction.RollbackTo(savepoint);
  cache.Check();
  ASSERT_OK(transaction.Reserve(*b, 12));
  EXPECT_TRUE(std::move(transaction).Commit().empty());
  cache.Check();
  EXPECT_EQ(b->reserved_tokens(), 12u);
  EXPECT_EQ(cache.free_blocks(), 5u);
}

// ---------------------------------------------------------------- prefix reuse

TEST(KvCachePrefix, SharesWholeBlocksButNeverTheLast) {
  CheckedCache cache(16, 4);
  const ContentRef frame = Frame(1);
  const auto build = [&](std::vector<int32_t> text) {
    return TimelineBuilder(Salt("m"), 4)
        .AddText(Ids(1, 1))
        .AddVision(0, frame, 6)
        .AddText(text)
        .Build();
  };
  const auto t = build(Ids(10, 6));  // blocks of 1, 4, 2, 4, 2
  auto a = cache.Open(t);
  ASSERT_OK(cache.Reserve(*a, 13));
  EXPECT_EQ(cache->CachedTokens(*t), 0u);
  cache.Publish(*a, 6);  // the second vision block is not whole
  EXPECT_EQ(cache->CachedTokens(*t), 5u);
  cache.Publish(*a, 13);
  EXPECT_EQ(cache->CachedTokens(*t), 11u);

  auto b = cache.Open(t);  // while a is alive
  EXPECT_EQ(b->cached_tokens(), 11u);
  EXPECT_EQ(b->reserved_tokens(), 11u);
  EXPECT_EQ(b->committed_tokens(), 11u);
  EXPECT_EQ(b->cached_by_modality()[static_cast<size_t>(Modality::kVision)], 6u);
  EXPECT_EQ(b->cached_by_modality()[static_cast<size_t>(Modality::kText)], 5u);
  const auto blocks_a = Blocks(*a);
  EXPECT_EQ(Blocks(*b), std::vector<BlockId>(blocks_a.begin(), blocks_a.end() - 1));
  cache.Close(std::move(a));
  cache.Close(std::move(b));
  EXPECT_EQ(cache.idle(Modality::kVision), 2u);
  EXPECT_EQ(cache.idle(Modality::kText), 3u);

  auto ids = Ids(10, 6);
  ids[5] = 99;
  EXPECT_EQ(cache->CachedTokens(*build(ids)), 11u);
  ids[3] = 99;
  EXPECT_EQ(cache->CachedTokens(*build(ids)), 7u);
  EXPECT_EQ(cache->CachedTokens(*build(Ids(10, 7))), 11u);
  EXPECT_EQ(cache->CachedTokens(*build(Ids(10, 12))), 11u);  // the part-full block is another
  EXPECT_EQ(cache->CachedTokens(*TimelineBuilder(Salt("m"), 4).AddText(Ids(1, 1)).Build()), 0u);
  EXPECT_EQ(cache->CachedTokens(*TimelineBuilder(Salt("m"), 4).Build()), 0u);
  // The same block where it is not the last.
  const auto longer = TimelineBuilder(Salt("m"), 4)
                          .AddText(Ids(1, 1))
                          .AddVision(0, frame, 6)
                          .AddText(Ids(10, 6))
                          .AddText(Ids(50, 1))
                          .Build();
  EXPECT_EQ(cache->CachedTokens(*longer), 13u);
}

TEST(KvCachePrefix, SaltSeparatesModelsAndTenants) {
  CheckedCache cache(16, 4);
  const auto salt = [](std::string_view tenant, std::string_view adapter) {
    return DigestBuilder("kv.salt.v1").Field(tenant).Field(adapter).Finish();
  };
  const auto build = [&](const Digest128& s) {
    return TimelineBuilder(s, 4).AddText(Ids(1, 12)).Build();
  };
  cache.Warm(build(salt("ab", "")));
  EXPECT_EQ(cache->CachedTokens(*build(salt("ab", ""))), 8u);
  EXPECT_EQ(cache->CachedTokens(*build(salt("", "ab"))), 0u);
  EXPECT_EQ(cache->CachedTokens(*build(salt("a", "b"))), 0u);
}

TEST(KvCachePrefix, AHitStopsAtTheFirstMissingBlock) {
  CheckedCache cache(8, 4);
  const auto t = Text(1, 14);  // blocks 0..3
  cache.Warm(t);
  EXPECT_EQ(cache->CachedTokens(*t), 12u);
  KvCacheTestPeer::EvictIdle(*cache, KvCacheTestPeer::Find(*cache, t->blocks()[1].key));
  cache.Check();
  EXPECT_EQ(cache->CachedTokens(*t), 4u);
  KvCacheTestPeer::EvictIdle(*cache, KvCacheTestPeer::Find(*cache, t->blocks()[0].key));
  cache.Check();
  EXPECT_EQ(cache->CachedTokens(*t), 0u);
  auto s = cache.Open(t);
  EXPECT_EQ(s->cached_tokens(), 0u);
  // Recomputed, they make the rest of the chain reachable again.
  ASSERT_OK(cache.Reserve(*s, 8));
  cache.Publish(*s, 8);
  EXPECT_EQ(cache->CachedTokens(*t), 12u);
  cache.Close(std::move(s));
  EXPECT_EQ(cache.idle(Modality::kText), 4u);
}

// (camera, source, rows) of every run.
using Runs = std::vector<std::tuple<uint32_t, KvSource, uint32_t>>;
Runs RunsOf(CheckedCache& cache, const Sequence& sequence) {
  std::vector<KvRun> runs;
  cache->FrameRuns(sequence, runs);
  Runs all;
  for (const KvRun& run : runs) all.emplace_back(run.camera, run.source, run.rows);
  return all;
}

TEST(KvCachePrefix, SaysWhereTheRowsOfAFrameComeFrom) {
  CheckedCache cache(16, 4);
  const ContentRef a = Frame(1);
  const ContentRef b = Frame(2);
  const auto build = [&](const ContentRef& second) {
    return TimelineBuilder(Salt("m"), 4)
        .AddText(Ids(1, 1))
        .AddVision(0, a, 10)
        .AddVision(1, second, 10)
        .AddText(Ids(5, 5))
        .Build();
  };
  using enum KvSource;
  const auto t = build(b);
  const auto look = [&](const std::shared_ptr<const Timeline>& timeline) {
    auto sequence = cache.Open(timeline);
    const Runs runs = RunsOf(cache, *sequence);
    cache.Close(std::move(sequence));
    return runs;
  };
  EXPECT_EQ(look(t), (Runs{{0, kComputed, 10}, {1, kComputed, 10}}));
  cache.Warm(t);
  EXPECT_EQ(look(t), (Runs{{0, kReused, 10}, {1, kReused, 10}}));
  // Another second frame: it was never there.
  EXPECT_EQ(look(build(Frame(3))), (Runs{{0, kReused, 10}, {1, kComputed, 10}}));
  // Block 2 holds rows 4 to 7 of the first frame. What lies behind it is still there, out of reach.
  KvCacheTestPeer::EvictIdle(*cache, KvCacheTestPeer::Find(*cache, t->blocks()[2].key));
  EXPECT_EQ(look(t), (Runs{{0, kReused, 4}, {0, kEvicted, 6}, {1, kEvicted, 10}}));
  EXPECT_EQ(look(build(Frame(3))), (Runs{{0, kReused, 4}, {0, kEvicted, 6}, {1, kComputed, 10}}));
  cache->FlushIdle();
  EXPECT_EQ(look(t), (Runs{{0, kEvicted, 10}, {1, kEvicted, 10}}));
  // Computed again it is reused again.
  cache.Warm(t);
  EXPECT_EQ(look(t), (Runs{{0, kReused, 10}, {1, kReused, 10}}));
  // A prompt that nobody may take blocks of has nothing to lose.
  const auto never =
      TimelineBuilder(Salt("m"), 4).AddVision(0, a, 10).SetReuse(PrefixReuse::kNone).Build();
  cache.Warm(never);
  EXPECT_EQ(look(never), (Runs{{0, kComputed, 10}}));
}

// An orphan is matched under its own parent only, and ages like any idle block.
TEST(KvCachePrefix, OrphansAreNotGarbageForEver) {
  CheckedCache cache(4, 4);
  const auto t = Text(1, 13);
  cache.Warm(t);
  KvCacheTestPeer::EvictIdle(*cache, KvCacheTestPeer::Find(*cache, t->blocks()[0].key));
  auto ids = Ids(1, 13);
  ids[0] = 77;
  const auto other = TimelineBuilder(Salt("m"), 4).AddText(ids).Build();
  auto s = cache.Open(other);
  ASSERT_OK(cache.Reserve(*s, 4));
  cache.Publish(*s, 4);
  EXPECT_EQ(cache->CachedTokens(*other), 4u);
  ASSERT_OK(cache.Reserve(*s, 13));
  EXPECT_EQ(cache.idle(Modality::kText), 0u);
}

TEST(KvCachePrefix, FirstWriterWins) {
  CheckedCache cache(8, 4);
  const auto t = Text(1, 9);
  auto a = cache.Open(t);
  auto b = cache.Open(t);
  ASSERT_OK(cache.Reserve(*a, 9));
  ASSERT_OK(cache.Reserve(*b, 9));
  cache.Publish(*b, 4);
  cache.Publish(*a, 9);
  cache.Publish(*b, 9);
  EXPECT_EQ(KvCacheTestPeer::Find(*cache, t->blocks()[0].key), Blocks(*b)[0]);
  EXPECT_EQ(KvCacheTestPeer::Find(*cache, t->blocks()[1].key), Blocks(*a)[1]);
  cache.Close(std::move(b));
  EXPECT_EQ(cache.free_blocks(), 4u);  // b's copies of blocks 1 and 2
  EXPECT_EQ(cache.idle(Modality::kText), 1u);
  cache.Close(std::move(a));
  EXPECT_EQ(cache.free_blocks(), 5u);
  EXPECT_EQ(cache.idle(Modality::kText), 3u);
  EXPECT_EQ(cache->CachedTokens(*t), 8u);
}

TEST(KvCachePrefix, ActionBlocksAreFreed) {
  CheckedCache cache(8, 4);
  auto s = cache.Open(Text(1, 4));
  ASSERT_OK(cache.Reserve(*s, 13));
  cache.Publish(*s, 13);
  EXPECT_EQ(s->committed_tokens(), 13u);
  EXPECT_EQ(cache.held(Modality::kAction), 3u);
  cache.Close(std::move(s));
  EXPECT_EQ(cache.idle(Modality::kText), 1u);
  EXPECT_EQ(cache.free_blocks(), 7u);
}

TEST(KvCachePrefix, PublishIsMonotoneAndBounded) {
  CheckedCache cache(8, 4);
  const auto t = Text(1, 12);
  auto s = cache.Open(t);
  ASSERT_OK(cache.Reserve(*s, 8));
  cache.Publish(*s, 1000);
  EXPECT_EQ(s->committed_tokens(), 8u);
  cache.Publish(*s, 3);
  EXPECT_EQ(s->committed_tokens(), 8u);
  EXPECT_EQ(cache->CachedTokens(*t), 8u);
}

// Keys that collide in all 128 bits: content decides.
TEST(KvCacheCollision, InTheFirstBlock) {
  CheckedCache cache(8, 4);
  const auto a = Text(1, 8);
  const auto b = TimelineTestPeer::WithKey(*Text(100, 8), 0, a->blocks()[0].key);
  cache.Warm(a);
  EXPECT_EQ(cache->CachedTokens(*a), 4u);
  EXPECT_EQ(cache->CachedTokens(*b), 0u);
  cache.Warm(b);  // loses its first block, which the other holds
  EXPECT_EQ(cache->CachedTokens(*a), 4u);
  EXPECT_EQ(cache->CachedTokens(*b), 0u);
  cache->FlushIdle();
  cache.Warm(b);
  EXPECT_EQ(cache->CachedTokens(*a), 0u);
  EXPECT_EQ(cache->CachedTokens(*b), 4u);
}

// Block 1 has the same tokens and the same key in both, block 0 does not: its K/V differs all the
// same.
TEST(KvCacheCollision, BehindAnotherParent) {
  CheckedCache cache(16, 4);
  auto ids = Ids(1, 12);
  const auto a = TimelineBuilder(Salt("m"), 4).AddText(ids).Build();
  ids[0] = 77;
  const auto honest = TimelineBuilder(Salt("m"), 4).AddText(ids).Build();
  const auto b = TimelineTestPeer::WithKey(*honest, 1, a->blocks()[1].key);
  cache.Warm(a);
  {
    auto s = cache.Open(b);
    EXPECT_EQ(s->cached_tokens(), 0u);
    ASSERT_OK(cache.Reserve(*s, 4));
    cache.Publish(*s, 4);
    EXPECT_EQ(cache->CachedTokens(*b), 4u);  // and not a's block 1
    cache.Close(std::move(s));
  }
  cache.Warm(b);
  EXPECT_EQ(cache->CachedTokens(*b), 4u);
  EXPECT_EQ(cache->CachedTokens(*a), 8u);
}

// Block 0 of one has the key of block 1 of the other, and both begin alike.
TEST(KvCacheCollision, AtAnotherDepth) {
  CheckedCache cache(16, 4);
  const Digest128 key{1, 2};
  const auto a = TimelineTestPeer::WithKey(*Text(1, 12), 1, key);
  const auto b = TimelineTestPeer::WithKey(*Text(1, 12), 0, key);
  cache.Warm(a);
  EXPECT_EQ(cache->CachedTokens(*a), 8u);
  EXPECT_EQ(cache->CachedTokens(*b), 0u);
}

TEST(KvCacheStats, HitsMissesAndTheirAverage) {
  CheckedCache cache(16, 4);
  const ContentRef frame = Frame(1);
  const auto t = TimelineBuilder(Salt("m"), 4).AddVision(0, frame, 8).AddText(Ids(1, 8)).Build();
  const auto u = TimelineBuilder(Salt("m"), 4).AddVision(0, frame, 8).AddText(Ids(50, 2)).Build();
  cache.Warm(t);
  for (const auto& timeline : {t, t, u}) cache.Warm(timeline);
  cache.Warm(Text(900, 4));
  // Opened and given up, or forked: not counted.
  auto s = cache.Open(u);
  EXPECT_EQ(cache.Reserve(*s, 1000).code(), absl::StatusCode::kResourceExhausted);
  auto fork = cache.Fork(*s);
  ASSERT_OK(cache.Reserve(*fork, 10));
  const KvStats stats = cache->stats();
  const PartitionStats& vision = Of(stats, Modality::kVision);
  EXPECT_EQ(vision.hit_tokens, 24u);
  EXPECT_EQ(vision.miss_tokens, 8u);
  EXPECT_DOUBLE_EQ(vision.hit_rate_ema, 1 - 0.9 * 0.9 * 0.9);  // after 0, 1, 1, 1
  const PartitionStats& text = Of(stats, Modality::kText);
  EXPECT_EQ(text.hit_tokens, 8u);
  EXPECT_EQ(text.miss_tokens, 8u + 4 + 4 + 2 + 4);
  // After 0, 1/2, 1/2, 0, 0.
  EXPECT_DOUBLE_EQ(text.hit_rate_ema, (0.05 * 0.9 + 0.05) * 0.9 * 0.9);
  EXPECT_EQ(Of(stats, Modality::kState).hit_rate_ema, 0);
  EXPECT_EQ(stats.num_blocks, 16u);
}

// ---------------------------------------------------------------- forks

TEST(KvCacheFork, SamplesOfOnePromptNeedNoCopies) {
  CheckedCache cache(16, 4);
  auto main = cache.Open(Text(1, 6));
  ASSERT_OK(cache.Reserve(*main, 6));  // in flight: not published yet
  auto fork = cache.Fork(*main);
  EXPECT_EQ(fork->reserved_tokens(), 6u);
  EXPECT_EQ(fork->committed_tokens(), 0u);
  std::vector<BlockCopy> copies;
  ASSERT_OK(cache.Reserve(*main, 7, &copies));
  EXPECT_TRUE(copies.empty());
  ASSERT_OK(cache.Reserve(*fork, 7, &copies));
  EXPECT_TRUE(copies.empty());
  EXPECT_EQ(cache.held(Modality::kText), 2u);
  EXPECT_EQ(cache.held(Modality::kAction), 2u);
  cache.Publish(*main, 6);
  cache.Publish(*fork, 7);
  EXPECT_EQ(fork->committed_tokens(), 7u);
  EXPECT_EQ(Blocks(*main)[1], Blocks(*fork)[1]);
  EXPECT_NE(Blocks(*main)[2], Blocks(*fork)[2]);
  cache.Close(std::move(main));
  EXPECT_EQ(cache.held(Modality::kText), 2u);
  cache.Close(std::move(fork));
  EXPECT_EQ(cache.idle(Modality::kText), 2u);
  EXPECT_EQ(cache.free_blocks(), 14u);
}

TEST(KvCacheFork, CopiesASharedPartFullBlockForAllButTheLast) {
  CheckedCache cache(16, 4);
  auto a = cache.Open(Text(1, 4));
  ASSERT_OK(cache.Reserve(*a, 6));
  auto b = cache.Fork(*a);
  auto c = cache.Fork(*b);
  const BlockId shared = Blocks(*a)[1];
  KvTransaction transaction = cache->Begin(kNow);
  ASSERT_OK(transaction.Reserve(*a, 7));
  ASSERT_OK(transaction.Reserve(*b, 7));
  cache.Check();
  const size_t savepoint = transaction.Savepoint();
  ASSERT_OK(transaction.Reserve(*a, 8));  // its copy has room
  transaction.RollbackTo(savepoint);
  ASSERT_OK(transaction.Reserve(*c, 7));
  ASSERT_OK(transaction.Reserve(*b, 9));
  cache.Check();
  const std::vector<BlockCopy> copies = std::move(transaction).Commit();
  cache.Check();
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_EQ(copies[0].from, shared);
  EXPECT_EQ(copies[1].from, shared);
  EXPECT_EQ(copies[0].to, Blocks(*a)[1]);
  EXPECT_EQ(copies[1].to, Blocks(*b)[1]);
  EXPECT_EQ(Blocks(*c)[1], shared);
  EXPECT_EQ((std::set<BlockId>{shared, copies[0].to, copies[1].to}.size()), 3u);
  EXPECT_EQ(a->reserved_tokens(), 7u);
  EXPECT_EQ(b->reserved_tokens(), 9u);
  EXPECT_EQ(Blocks(*b).size(), 3u);
  // All are alone on their last block now.
  std::vector<BlockCopy> more;
  ASSERT_OK(cache.Reserve(*a, 8, &more));
  ASSERT_OK(cache.Reserve(*c, 8, &more));
  EXPECT_TRUE(more.empty());
}

TEST(KvCacheFork, PartFullPromptBlockIsCopiedToo) {
  CheckedCache cache(8, 4);
  const auto t = Text(1, 12);
  auto a = cache.Open(t);
  ASSERT_OK(cache.Reserve(*a, 6));
  cache.Publish(*a, 6);
  auto b = cache.Fork(*a);
  std::vector<BlockCopy> copies;
  ASSERT_OK(cache.Reserve(*b, 12, &copies));
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].from, Blocks(*a)[1]);
  ASSERT_OK(cache.Reserve(*a, 12, &copies));
  EXPECT_TRUE(copies.empty());
  cache.Publish(*a, 12);
  cache.Publish(*b, 12);  // duplicates
  cache.Close(std::move(a));
  cache.Close(std::move(b));
  EXPECT_EQ(cache.idle(Modality::kText), 3u);
  EXPECT_EQ(cache.free_blocks(), 5u);
}

// The copy needs a block; without one nothing changes.
TEST(KvCacheFork, CopyMayFail) {
  CheckedCache cache(2, 4);
  auto a = cache.Open(Text(1, 4));
  ASSERT_OK(cache.Reserve(*a, 6));
  auto b = cache.Fork(*a);
  EXPECT_EQ(cache.Reserve(*b, 7).code(), absl::StatusCode::kResourceExhausted);
  cache.Close(std::move(a));
  std::vector<BlockCopy> copies;
  ASSERT_OK(cache.Reserve(*b, 7, &copies));  // alone now
  EXPECT_TRUE(copies.empty());
}

TEST(KvCacheFork, SourceIsNotGivenOutInTheSameStep) {
  CheckedCache cache(4, 4);
  auto a = cache.Open(Text(1, 4));
  ASSERT_OK(cache.Reserve(*a, 6));
  auto b = cache.Fork(*a);
  const BlockId shared = Blocks(*a)[1];
  auto c = cache.Open(Text(100, 4));
  KvTransaction transaction = cache->Begin(kNow);
  ASSERT_OK(transaction.Reserve(*a, 7));
  ASSERT_OK(transaction.Reserve(*c, 4));
  cache.Close(std::move(b));  // a is the last on `shared`, and leaves it
  const std::vector<BlockCopy> copies = std::move(transaction).Commit();
  cache.Check();
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].from, shared);
  EXPECT_NE(Blocks(*c)[0], shared);
  EXPECT_EQ(cache.free_blocks(), 1u);
}

TEST(KvCacheReserve, BeamsShareThePromptAndTakeTheirOwnBlocks) {
  CheckedCache cache(16, 4);
  auto first = cache.Open(Text(1, 6));  // two prompt blocks
  ASSERT_OK(cache.Reserve(*first, 6));
  std::unique_ptr<KvReserve> reserve = cache->SetAside(Modality::kAction, 6, kNow);
  ASSERT_NE(reserve, nullptr);
  EXPECT_EQ(cache.held(Modality::kAction), 6u);
  std::vector<std::unique_ptr<Sequence>> beams;
  beams.push_back(std::move(first));
  for (int i = 0; i < 2; ++i) beams.push_back(cache.Fork(*beams[0]));
  std::vector<BlockCopy> copies;
  for (const auto& beam : beams) ASSERT_OK(cache->Extend(*beam, 7, *reserve, copies));
  EXPECT_TRUE(copies.empty());  // the prompt ends a block
  EXPECT_EQ(reserve->blocks(), 3u);
  EXPECT_EQ(cache.free_blocks(), 16u - 2 - 6);
  // Beam 1 wins twice: its block is copied for one of the two, the others' go back.
  std::vector<std::unique_ptr<Sequence>> next;
  for (const size_t parent : {1u, 1u, 2u}) next.push_back(cache.Fork(*beams[parent]));
  for (auto& beam : beams) cache->Drop(std::move(beam), *reserve);
  EXPECT_EQ(reserve->blocks(), 4u);
  for (const auto& beam : next) ASSERT_OK(cache->Extend(*beam, 8, *reserve, copies));
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].to, Blocks(*next[0])[2]);
  EXPECT_EQ(copies[0].from, Blocks(*next[1])[2]);
  EXPECT_EQ(reserve->blocks(), 3u);
  for (const auto& beam : next) ASSERT_OK(cache->Extend(*beam, 11, *reserve, copies));
  EXPECT_EQ(reserve->blocks(), 0u);
  EXPECT_EQ(cache->Extend(*next[0], 15, *reserve, copies).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache.held(Modality::kAction), 6u);
  for (auto& beam : next) cache.Close(std::move(beam));
  EXPECT_EQ(cache.held(Modality::kAction), 0u);
  reserve = nullptr;
  EXPECT_EQ(cache.free_blocks(), 16u);
}

TEST(KvCacheReserve, TakesAllOrNothingAndKeepsWhatOthersHold) {
  auto quotas = OpenQuotas(8);
  Of(quotas, Modality::kVision) = {2, 8};
  Of(quotas, Modality::kAction) = {0, 5};
  CheckedCache cache(8, 4, quotas);
  auto old = cache.Open(Text(1, 12));
  ASSERT_OK(cache.Reserve(*old, 12));
  cache.Publish(*old, 12);
  cache.Close(std::move(old));                                      // three idle blocks
  EXPECT_EQ(cache->SetAside(Modality::kAction, 6, kNow), nullptr);  // its cap
  EXPECT_EQ(cache->SetAside(Modality::kText, 7, kNow), nullptr);    // vision's floor
  EXPECT_EQ(cache->stats().partitions[static_cast<size_t>(Modality::kText)].idle, 3u);
  const auto reserve = cache->SetAside(Modality::kAction, 5, kNow);  // evicts two
  ASSERT_NE(reserve, nullptr);
  EXPECT_EQ(cache->stats().partitions[static_cast<size_t>(Modality::kText)].idle, 1u);
  auto other = cache.Open(Text(50, 4));
  ASSERT_OK(cache.Reserve(*other, 4));
  std::vector<BlockCopy> copies;
  EXPECT_EQ(cache->Extend(*cache.Fork(*other), 40, *reserve, copies).code(),
            absl::StatusCode::kResourceExhausted);
  auto half = cache.Open(Text(90, 4));
  EXPECT_EQ(cache->Extend(*half, 5, *reserve, copies).code(),
            absl::StatusCode::kFailedPrecondition);  // its prompt has no place yet
}

TEST(KvCacheReserve, AnswersOfTextAreTheTextPartitions) {
  CheckedCache cache(8, 4);
  TimelineBuilder builder(Salt("m"), 4);
  builder.AddText(Ids(1, 4)).SetAnswer(Modality::kText);
  auto a = cache.Open(builder.Build());
  ASSERT_OK(cache.Reserve(*a, 9));
  EXPECT_EQ(cache.held(Modality::kText), 3u);
  EXPECT_EQ(cache.held(Modality::kAction), 0u);
  cache.Publish(*a, 9);
  // The same prompt with another answer shares its blocks, whatever is asked of it.
  auto b = cache.Open(Text(1, 5));
  EXPECT_EQ(b->cached_tokens(), 4u);
  const auto reserve = cache->SetAside(Modality::kAction, 1, kNow);
  std::vector<BlockCopy> copies;
  EXPECT_EQ(cache->Extend(*a, 14, *reserve, copies).code(), absl::StatusCode::kFailedPrecondition);
}

// ---------------------------------------------------------------- closing

TEST(KvCacheClose, PoisonedBlocksAreNotFoundAgain) {
  CheckedCache cache(16, 4);
  const auto t = Text(1, 13);
  auto a = cache.Open(t);
  ASSERT_OK(cache.Reserve(*a, 13));
  cache.Publish(*a, 8);
  auto b = cache.Open(t);  // shares two blocks that may be bad
  EXPECT_EQ(b->cached_tokens(), 8u);
  ASSERT_OK(cache.Reserve(*b, 13));
  cache.Publish(*b, 13);
  cache.Close(std::move(a), true);
  EXPECT_EQ(cache->CachedTokens(*t), 0u);
  EXPECT_EQ(b->committed_tokens(), 13u);  // keeps what it holds
  EXPECT_EQ(cache.held(Modality::kText), 4u);
  cache.Close(std::move(b), true);
  EXPECT_EQ(cache.free_blocks(), 16u);
}

// Bad blocks of a sequence that was cancelled before anybody noticed: the next one that stumbles
// over them clears them.
TEST(KvCacheClose, PoisonReachesTheBlocksFoundAtOpen) {
  CheckedCache cache(16, 4);
  const auto t = Text(1, 13);
  cache.Warm(t);
  auto s = cache.Open(t);
  EXPECT_EQ(s->cached_tokens(), 12u);
  cache.Close(std::move(s), true);
  EXPECT_EQ(cache->CachedTokens(*t), 0u);
  cache.Warm(t);
  EXPECT_EQ(cache->CachedTokens(*t), 12u);
}

TEST(KvCacheClose, DestroyedSequencesLeakNothing) {
  CheckedCache cache(8, 4);
  {
    auto s = cache.Open(Text(1, 9));
    ASSERT_OK(cache.Reserve(*s, 12));
    cache.Publish(*s, 4);
    KvTransaction transaction = cache->Begin(kNow);
    ASSERT_OK(transaction.Reserve(*s, 16));
    s.reset();
    cache.Check();
    EXPECT_TRUE(std::move(transaction).Commit().empty());
  }
  cache.Check();
  EXPECT_EQ(cache.free_blocks() + cache.idle(Modality::kText), 8u);
  cache.Close(nullptr);
}

TEST(KvCacheClose, SequenceMayOutliveItsCache) {
  std::unique_ptr<Sequence> s;
  {
    CheckedCache cache(8, 4);
    s = cache.Open(Text(1, 9));
    ASSERT_OK(cache.Reserve(*s, 9));
  }
  EXPECT_EQ(s->timeline().num_tokens(), 9u);
}

TEST(KvCacheClose, IdleBlocksKeepTheirFramesAndFlushGivesThemBack) {
  CheckedCache cache(8, 4);
  ContentRef frame = Frame(1);
  cache.Warm(TimelineBuilder(Salt("m"), 4).AddVision(0, frame, 8).AddText(Ids(1, 1)).Build());
  EXPECT_GT(frame.use_count(), 1);
  cache->FlushIdle();
  cache.Check();
  EXPECT_EQ(frame.use_count(), 1);
  EXPECT_EQ(cache.free_blocks(), 8u);
  EXPECT_EQ(cache.evictions(Modality::kVision, EvictionReason::kFlush), 2u);
  EXPECT_EQ(cache.evictions(Modality::kText, EvictionReason::kFlush), 1u);
}

// ---------------------------------------------------------------- eviction and quotas

TEST(KvCacheEviction, LeastRecentlyUsedAndDeepestFirst) {
  CheckedCache cache(6, 4);
  const auto a = Text(1, 12);
  const auto b = Text(100, 12);
  cache.Warm(a);
  cache.Warm(b);
  cache.Close(
      cache.Open(TimelineBuilder(Salt("m"), 4).AddText(Ids(1, 5)).Build()));  // touches a's root
  auto s = cache.Open(Text(500, 24));
  const auto cached = [&] {
    return std::pair(cache->CachedTokens(*Text(1, 13)), cache->CachedTokens(*Text(100, 13)));
  };
  EXPECT_EQ(cached(), std::pair(12u, 12u));
  const std::vector<std::pair<uint32_t, uint32_t>> expected = {{8, 12}, {4, 12}, {4, 8},
                                                               {4, 4},  {4, 0},  {0, 0}};
  for (uint32_t i = 0; i < expected.size(); ++i) {
    ASSERT_OK(cache.Reserve(*s, 4 * (i + 1)));
    EXPECT_EQ(cached(), expected[i]) << i;
  }
  EXPECT_EQ(cache.evictions(Modality::kText, EvictionReason::kOwnPartition), 6u);
  EXPECT_FALSE(cache.Reserve(*s, 25).ok());  // held blocks are never evicted
}

TEST(KvCacheEviction, OwnPartitionFirstThenTheOldestOfOthers) {
  CheckedCache cache(8, 4);
  const auto vision = TimelineBuilder(Salt("m"), 4).AddVision(0, Frame(1), 12).Build();
  const auto text = Text(1, 12);
  cache.Warm(vision);
  cache.Warm(text);
  auto s = cache.Open(Text(500, 20));
  ASSERT_OK(cache.Reserve(*s, 8));   // two are free
  ASSERT_OK(cache.Reserve(*s, 20));  // text's own, though vision's are older
  EXPECT_EQ(cache.idle(Modality::kVision), 3u);
  EXPECT_EQ(cache.evictions(Modality::kText, EvictionReason::kOwnPartition), 3u);
  ASSERT_OK(cache.Reserve(*s, 28));  // action tokens: vision's two oldest
  EXPECT_EQ(cache.idle(Modality::kVision), 1u);
  EXPECT_EQ(cache.evictions(Modality::kVision, EvictionReason::kOtherPartition), 2u);
  EXPECT_EQ(cache->CachedTokens(*TimelineBuilder(Salt("m"), 4).AddVision(0, Frame(9), 12).Build()),
            0u);
}

TEST(KvCacheQuota, AFloorIsKeptWhetherUsedOrNot) {
  auto quotas = OpenQuotas(8);
  Of(quotas, Modality::kVision).floor = 3;
  Of(quotas, Modality::kAction).floor = 1;
  CheckedCache cache(8, 4, quotas);
  auto s = cache.Open(Text(1, 32));
  ASSERT_OK(cache.Reserve(*s, 16));
  EXPECT_FALSE(cache.Reserve(*s, 17).ok());
  EXPECT_EQ(cache.free_blocks(), 4u);
  // Vision takes its floor with every other free block gone, and no more.
  auto v = cache.Open(TimelineBuilder(Salt("m"), 4).AddVision(0, Frame(1), 20).Build());
  ASSERT_OK(cache.Reserve(*v, 12));
  EXPECT_FALSE(cache.Reserve(*v, 13).ok());
  // Idle blocks within the floor are safe from others too.
  cache.Publish(*v, 12);
  cache.Close(std::move(v));
  EXPECT_EQ(cache.idle(Modality::kVision), 3u);
  EXPECT_FALSE(cache.Reserve(*s, 17).ok());
  auto a = cache.Open(TimelineBuilder(Salt("m"), 4).Build());
  ASSERT_OK(cache.Reserve(*a, 4));
  EXPECT_FALSE(cache.Reserve(*a, 5).ok());
  EXPECT_EQ(cache.free_blocks(), 0u);
  EXPECT_EQ(cache.idle(Modality::kVision), 3u);
  // But not from vision itself.
  auto w = cache.Open(TimelineBuilder(Salt("m"), 4).AddVision(0, Frame(2), 12).Build());
  ASSERT_OK(cache.Reserve(*w, 12));
  EXPECT_EQ(cache.evictions(Modality::kVision, EvictionReason::kOwnPartition), 3u);
}

TEST(KvCacheQuota, OthersEvictDownToTheFloorOnly) {
  auto quotas = OpenQuotas(8);
  Of(quotas, Modality::kVision).floor = 2;
  CheckedCache cache(8, 4, quotas);
  cache.Warm(TimelineBuilder(Salt("m"), 4).AddVision(0, Frame(1), 20).Build());
  auto s = cache.Open(Text(1, 40));
  ASSERT_OK(cache.Reserve(*s, 24));
  EXPECT_EQ(cache.idle(Modality::kVision), 2u);
  EXPECT_FALSE(cache.Reserve(*s, 25).ok());
  EXPECT_EQ(cache.evictions(Modality::kVision, EvictionReason::kOtherPartition), 3u);
}

TEST(KvCacheQuota, ACapIsNeverPassed) {
  auto quotas = OpenQuotas(8);
  Of(quotas, Modality::kText).cap = 3;
  CheckedCache cache(8, 4, quotas);
  cache.Warm(Text(1, 12));
  EXPECT_EQ(cache.idle(Modality::kText), 3u);
  auto s = cache.Open(Text(100, 16));
  ASSERT_OK(cache.Reserve(*s, 8));  // five blocks are free, but the cap is reached
  EXPECT_EQ(cache.evictions(Modality::kText, EvictionReason::kOwnPartition), 2u);
  ASSERT_OK(cache.Reserve(*s, 12));
  EXPECT_EQ(cache.Reserve(*s, 13).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache.free_blocks(), 5u);
  EXPECT_EQ(Of(cache->stats(), Modality::kText).cap, 3u);
}

// ---------------------------------------------------------------- known failures of other servers

// BR-45: a small pool, shared prefixes, cancellations in mid-prefill, evictions, restarts. Counters
// return to the same place every cycle.
TEST(KvCacheScenario, TwoHundredCyclesOfCancelAndRestart) {
  CheckedCache cache(16, 16);
  std::vector<std::shared_ptr<const Timeline>> prompts;
  for (int32_t r = 0; r < 4; ++r) {
    auto ids = Ids(1, 64);
    const auto own = Ids(1000 * (r + 1), 20);
    ids.insert(ids.end(), own.begin(), own.end());
    prompts.push_back(TimelineBuilder(Salt("m"), 16).AddText(ids).Build());
  }
  for (int cycle = 0; cycle < 200; ++cycle) {
    SCOPED_TRACE(Message() << "cycle " << cycle);
    std::vector<std::unique_ptr<Sequence>> live;
    auto first = cache.Open(prompts[0]);
    ASSERT_OK(cache.Reserve(*first, 84));
    cache.Publish(*first, 64);
    live.push_back(std::move(first));
    for (size_t r = 1; r < 4; ++r) {
      live.push_back(cache.Open(prompts[r]));
      EXPECT_EQ(live[r]->cached_tokens(), 64u);
    }
    for (size_t r = 0; r < 2; ++r) {  // mid-prefill
      ASSERT_OK(cache.Reserve(*live[r], 84));
      cache.Publish(*live[r], 70);
      cache.Close(std::move(live[r]));
    }
    for (size_t r = 2; r < 4; ++r) {
      ASSERT_OK(cache.Reserve(*live[r], 84 + 7));
      cache.Publish(*live[r], 84 + 7);
      cache.Close(std::move(live[r]));
    }
    EXPECT_EQ(cache.held(Modality::kText) + cache.held(Modality::kAction), 0u);
    EXPECT_EQ(cache.idle(Modality::kText), 4u + 4u);
    // Evict everything with one large stranger.
    auto stranger = cache.Open(Text(900000 + 1000 * cycle, 256, 16));
    ASSERT_OK(cache.Reserve(*stranger, 256));
    EXPECT_EQ(cache->CachedTokens(*prompts[0]), 0u);
    EXPECT_FALSE(cache.Reserve(*stranger, 257).ok());
    cache.Close(std::move(stranger));
    EXPECT_EQ(cache.free_blocks(), 16u);
  }
}

// BR-35: a request ends in every phase it can be in; each time the pool is whole again.
TEST(KvCacheScenario, AbortInEveryPhase) {
  CheckedCache cache(12, 4);
  const auto t = Text(1, 10);
  for (int phase = 0; phase < 8; ++phase) {
    SCOPED_TRACE(Message() << "phase " << phase);
    for (int i = 0; i < 20; ++i) {
      auto s = cache.Open(t);
      std::unique_ptr<Sequence> fork;
      if (phase >= 1) {
        ASSERT_OK(cache.Reserve(*s, 6));
      }
      if (phase >= 2) cache.Publish(*s, 6);
      if (phase >= 3) {
        ASSERT_OK(cache.Reserve(*s, 10));
      }
      if (phase >= 4) fork = cache.Fork(*s);
      if (phase >= 5) cache.Publish(*s, 10);
      if (phase >= 6) {
        ASSERT_OK(cache.Reserve(*s, 13));
      }
      if (phase >= 7) {
        ASSERT_OK(cache.Reserve(*fork, 14));
      }
      cache.Close(std::move(s), i % 3 == 0);
      cache.Close(std::move(fork));
      EXPECT_EQ(cache.free_blocks() + cache.idle(Modality::kText), 12u);
    }
  }
}

// BR-54: a preempted sequence finds its prompt again; what was decoded is recomputed by its owner.
TEST(KvCacheScenario, PreemptedSequenceResumes) {
  CheckedCache cache(6, 4);
  const auto t = Text(1, 13);
  for (int i = 0; i < 200; ++i) {
    auto background = cache.Open(t);
    ASSERT_OK(cache.Reserve(*background, 16));
    cache.Publish(*background, 15);
    cache.Close(std::move(background));
    auto urgent = cache.Open(Text(1000 + 100 * i, 4));
    ASSERT_OK(cache.Reserve(*urgent, 8));
    cache.Close(std::move(urgent));
    background = cache.Open(t);
    EXPECT_EQ(background->cached_tokens(), 12u);
  }
}

// ---------------------------------------------------------------- the checker itself

TEST(KvCacheInvariants, FindsDamage) {
  const auto t = Text(1, 12);
  const auto damaged = [&](const std::function<void(KvCache&, Sequence&)>& damage) {
    KvCacheOptions options;
    options.num_blocks = 8;
    options.block_tokens = 4;
    options.partitions = OpenQuotas(8);
    auto cache = KvCache::Create(options).value();
    auto idle = cache->Open(Text(100, 8), kNow);
    KvTransaction transaction = cache->Begin(kNow);
    EXPECT_OK(transaction.Reserve(*idle, 8));
    EXPECT_TRUE(std::move(transaction).Commit().empty());
    cache->Publish(*idle, 8, kNow);
    cache->Close(std::move(idle), kNow);
    auto s = cache->Open(t, kNow);
    transaction = cache->Begin(kNow);
    EXPECT_OK(transaction.Reserve(*s, 14));
    EXPECT_TRUE(std::move(transaction).Commit().empty());
    cache->Publish(*s, 9, kNow);
    EXPECT_OK(cache->CheckInvariants());
    const BlockPool healthy = KvCacheTestPeer::pool(*cache);
    damage(*cache, *s);
    const absl::Status status = cache->CheckInvariants();
    KvCacheTestPeer::pool(*cache) = healthy;
    EXPECT_OK(cache->CheckInvariants());
    return status.code() == absl::StatusCode::kInternal;
  };
  using Peer = KvCacheTestPeer;
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) { ++Peer::block(c, Blocks(s)[0]).refs; }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) { --Peer::block(c, Blocks(s)[3]).refs; }));
  EXPECT_TRUE(
      damaged([](KvCache& c, Sequence& s) { Peer::block(c, Blocks(s)[0]).indexed = false; }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) { Peer::block(c, Blocks(s)[0]).key.low ^= 1; }));
  EXPECT_TRUE(
      damaged([](KvCache& c, Sequence& s) { Peer::block(c, Blocks(s)[0]).timeline.reset(); }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) { Peer::block(c, Blocks(s)[0]).position = 1; }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) {
    Peer::block(c, Blocks(s)[0]).state = BlockPool::State::kFilling;
  }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) {
    Peer::block(c, Blocks(s)[3]).state = BlockPool::State::kCommitted;
  }));
  EXPECT_TRUE(damaged(
      [](KvCache& c, Sequence& s) { Peer::block(c, Blocks(s)[0]).modality = Modality::kState; }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) { ++Peer::block(c, Blocks(s)[2]).departures; }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence&) { ++Peer::held(c, Modality::kText); }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence&) { --Peer::idle(c, Modality::kText); }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence&) { ++Peer::free_blocks(c); }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence&) {
    const auto idle = Peer::Find(c, Text(100, 8)->blocks()[0].key);
    Peer::block(c, idle).claimed = true;
  }));
  EXPECT_TRUE(damaged([](KvCache& c, Sequence&) {
    const auto idle = Peer::Find(c, Text(100, 8)->blocks()[0].key);
    Peer::block(c, idle).idle_since = 0;
  }));
  // A block that was given out is freed behind its owner's back.
  EXPECT_TRUE(damaged([](KvCache& c, Sequence& s) { Peer::pool(c).Unref(Blocks(s)[3]); }));
}

}  // namespace
}  // namespace saccade
