// Random operations on the K/V cache in front of a device with real memory and a queue of steps,
// two deep, whose newest step may be taken back. A token's value is a digest of everything before
// it, so a read through a page table tells whether the right bytes are there, whatever was shared,
// copied, evicted or cancelled on the way.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "tests/kv/kv_geometries.h"
#include "tests/kv/kv_testing.h"

namespace saccade {
namespace {

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

class PipelineTest : public testing::TestWithParam<size_t> {
 protected:
  void Run(uint32_t seed, int operations);
};

void PipelineTest::Run(uint32_t seed, int operations) {
  const Geometry& g = Geometries()[GetParam()];
  SCOPED_TRACE(testing::Message() << g.name << ", seed " << seed);
  std::mt19937 rng(seed);
  const auto prompts = Prompts(g, rng);
  auto created = KvCache::Create(OptionsOf(g));
  ASSERT_TRUE(created.ok()) << Message(created.status());
  KvCache& cache = **created;

  std::vector<uint64_t> memory(size_t{g.num_blocks} * g.block_tokens, 0);
  std::map<int, Stream> streams;
  std::deque<Step> queue;           // front: running, it cannot be taken back
  std::vector<BlockCopy> returned;  // of a step that was taken back: the next one makes them first
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

  for (int op = 0; op < operations; ++op) {
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
        step.copies = std::exchange(returned, {});
        for (const BlockCopy& copy : std::move(transaction).Commit()) step.copies.push_back(copy);
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
        returned.insert(returned.begin(), step.copies.begin(), step.copies.end());
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

TEST_P(PipelineTest, TheDeviceReadsWhatWasComputed) {
  for (uint32_t seed = 1; seed <= 8 && !HasFailure(); ++seed) Run(seed, 4000);
}

INSTANTIATE_TEST_SUITE_P(Geometries, PipelineTest, testing::Range<size_t>(0, Geometries().size()),
                         GeometryName);

}  // namespace
}  // namespace saccade
