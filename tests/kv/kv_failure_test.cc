// A step's plan that fails leaves no trace, wherever it fails: at every block of it (the pool is
// made one block smaller at a time), dropped after every part of it, and rolled back to every
// savepoint. Compared is everything: each block with its links, the lists, the page tables.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/kv/kv_twin.h"

namespace saccade {
namespace {

// All of a cache that any later call could see.
struct Snapshot {
  std::vector<std::tuple<uint32_t, uint32_t, int32_t, int32_t, int32_t>> blocks;
  std::vector<std::tuple<bool, bool, int, int, uint64_t>> marks;
  std::vector<std::tuple<uint32_t, uint32_t, std::array<uint64_t, kEvictionReasons>, uint64_t>>
      partitions;
  std::vector<std::vector<std::tuple<int32_t, uint16_t, uint32_t>>> pages;
  std::vector<std::pair<uint32_t, uint32_t>> tokens;
  uint32_t free = 0;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

Snapshot Look(KvTwin& twin) {
  Snapshot out;
  KvCache& cache = twin.cache();
  const KvStats stats = cache.stats();
  out.free = stats.free_blocks;
  for (uint32_t i = 0; i < stats.num_blocks; ++i) {
    const BlockPool::Block& b = KvCacheTestPeer::block(cache, BlockId(static_cast<int32_t>(i)));
    out.blocks.emplace_back(b.refs, b.departures, b.prev, b.next, b.chain);
    out.marks.emplace_back(b.indexed, b.claimed, static_cast<int>(b.state),
                           static_cast<int>(b.modality), b.idle_since);
  }
  for (const PartitionStats& p : stats.partitions) {
    out.partitions.emplace_back(p.held, p.idle, p.evictions, p.hit_tokens + p.miss_tokens);
  }
  for (const auto& [id, s] : twin.live()) {
    out.tokens.emplace_back(s->reserved_tokens(), s->committed_tokens());
    out.pages.emplace_back();
    for (const PageRef& page : s->PageTable(s->reserved_tokens())) {
      out.pages.back().emplace_back(page.block.value(), page.len, page.position);
    }
  }
  return out;
}

class Failure : public testing::TestWithParam<size_t> {
 protected:
  // Tokens up to which each sequence of a step wants to grow.
  using Wishes = std::vector<std::pair<Sequence*, uint32_t>>;
  void FailHere(KvTwin& twin, const Wishes& wishes, uint32_t block_tokens);
  std::map<size_t, int> failed_at_;  // how often a plan failed after so many savepoints
};

void Failure::FailHere(KvTwin& twin, const Wishes& wishes, uint32_t block_tokens) {
  KvCache& cache = twin.cache();
  const Snapshot before = Look(twin);
  // As the scheduler plans: a sequence at a time, all of it or nothing.
  {
    KvTransaction transaction = cache.Begin(kNow);
    for (const auto& [sequence, upto] : wishes) {
      const Snapshot planned = Look(twin);
      const size_t savepoint = transaction.Savepoint();
      if (transaction.Reserve(*sequence, upto).ok()) continue;
      ASSERT_EQ(transaction.Savepoint(), savepoint);
      ASSERT_EQ(Look(twin), planned);
    }
  }
  ASSERT_EQ(Look(twin), before);
  // In pieces of a block at most, so that there is a savepoint at every block.
  KvTransaction transaction = cache.Begin(kNow);
  std::vector<Snapshot> at = {before};
  bool failed = false;
  for (const auto& [sequence, upto] : wishes) {
    for (uint32_t t = sequence->reserved_tokens(); t < upto && !failed;) {
      t = std::min(upto, t + block_tokens);
      failed = !transaction.Reserve(*sequence, t).ok();
      if (!failed) at.push_back(Look(twin));
    }
  }
  ASSERT_EQ(Look(twin), at.back());
  ASSERT_OK(cache.CheckInvariants());
  if (failed) ++failed_at_[transaction.Savepoint()];
  for (size_t k = at.size(); k-- > 0;) {
    transaction.RollbackTo(k);
    ASSERT_EQ(transaction.Savepoint(), k);
    ASSERT_EQ(Look(twin), at[k]) << "rolled back to " << k << " of " << at.size();
  }
  // Dropped after every part of it; by Begin, by SetAside, and by its end.
  for (size_t parts = 0; parts < at.size(); ++parts) {
    KvTransaction dropped = cache.Begin(kNow);
    size_t done = 0;
    for (const auto& [sequence, upto] : wishes) {
      for (uint32_t t = sequence->reserved_tokens(); t < upto && done < parts; ++done) {
        t = std::min(upto, t + block_tokens);
        ASSERT_OK(dropped.Reserve(*sequence, t));
      }
    }
    ASSERT_EQ(Look(twin), at[parts]);
    if (parts % 3 == 0) {
      ASSERT_EQ(cache.SetAside(Modality::kText, 1'000'000, kNow), nullptr);
    } else if (parts % 3 == 1) {
      dropped = cache.Begin(kNow);
    } else {
      dropped = KvTransaction(std::move(dropped));
      KvTransaction(std::move(dropped)).RollbackTo(0);
    }
    ASSERT_EQ(Look(twin), before);
  }
  ASSERT_OK(cache.CheckInvariants());
}

TEST_P(Failure, AtEveryBlockOfAStepLeavesNoTrace) {
  const Geometry& g = Geometries()[GetParam()];
  for (uint32_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE(testing::Message() << g.name << ", seed " << seed);
    std::mt19937 rng(seed);
    KvTwin twin(g, seed);
    for (const KvOp& op : RandomOps(rng, 40 + rng() % 200)) ASSERT_EQ(twin.Apply(op), "");
    ASSERT_EQ(twin.Apply({KvOp::Kind::kAbandon, 0, 0}), "");
    Wishes wishes;
    for (const auto& [id, s] : twin.live()) {
      if (rng() % 3 == 0) continue;
      wishes.emplace_back(s.get(), std::max(s->timeline().num_tokens(), s->reserved_tokens()) +
                                       rng() % (2 * g.block_tokens));
    }
    // With one block less each time, whatever partition can still take one.
    std::vector<std::unique_ptr<KvReserve>> taken;
    for (bool more = true; more && !HasFatalFailure();) {
      FailHere(twin, wishes, g.block_tokens);
      more = false;
      for (size_t m = 0; m < kModalities && !more; ++m) {
        auto reserve =
            twin.cache().SetAside(static_cast<Modality>((m + seed) % kModalities), 1, kNow);
        more = reserve != nullptr;
        if (more) taken.push_back(std::move(reserve));
      }
    }
    ASSERT_OK(twin.cache().CheckInvariants());
  }
  // Failures at every block that a step of this pool has.
  EXPECT_GT(failed_at_[0], 0);
  const size_t last = failed_at_.rbegin()->first;
  for (size_t k = 0; k <= std::min<size_t>(last, g.num_blocks / 4); ++k) {
    EXPECT_GT(failed_at_[k], 0) << "no plan failed at block " << k;
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, Failure, testing::Range<size_t>(0, Geometries().size()),
                         GeometryName);

// Closing any sequence in the middle of a plan takes its part along, and nothing else.
TEST_P(Failure, ClosedInTheMiddleOfAPlan) {
  using Kind = KvOp::Kind;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    std::mt19937 rng(seed);
    const std::vector<KvOp> ops = RandomOps(rng, 60);
    const std::vector<KvOp> plan = RandomOps(rng, 6);
    for (uint32_t who = 0; who < 8; ++who) {
      for (const Kind how : {Kind::kClose, Kind::kPoison, Kind::kDestroy, Kind::kDrop}) {
        for (const Kind end : {Kind::kCommit, Kind::kAbandon, Kind::kBegin}) {
          KvCase list{GetParam(), seed, ops};
          list.ops.push_back({Kind::kBegin, 0, 0});
          for (const KvOp& op : plan) list.ops.push_back({Kind::kReserve, op.a, op.b});
          list.ops.push_back({how, who, 0});
          list.ops.push_back({Kind::kReserve, who, plan[0].b});
          list.ops.push_back({end, 0, 0});
          const std::string wrong = list.Run();
          ASSERT_EQ(wrong, "") << list.Print();
        }
      }
    }
  }
}

}  // namespace
}  // namespace saccade
