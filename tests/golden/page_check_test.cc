// A step whose plan names a page that does not hold what the plan means fails, whatever is wrong
// with the page: foreign, stale, freed, never written, swapped, not copied. Without the check every
// one of these steps runs, and answers something.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/device_model.h"
#include "kv/kv_cache.h"
#include "session/prompt_timeline.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kBlocks = 96;
constexpr TimePoint kNow{};

const LoadedModel& Tiny() {
  static const absl::StatusOr<LoadedModel> loaded =
      LoadFrom(DataDir() + "/openvla/checkpoint", RefBackendConfig(false), DType::kF32);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  return *loaded;
}

ContentRef Frame(uint8_t value) {
  const CameraSpec& camera = Tiny().model->spec().cameras.front();
  auto frame = std::make_shared<Content>();
  frame->width = camera.width;
  frame->height = camera.height;
  frame->rgb.assign(size_t{frame->width} * frame->height * 3, value);
  frame->digest = DigestBytes("frame.v1", frame->rgb);
  return frame;
}

// A device and a cache, and requests that go through both by hand.
class Device {
 public:
  explicit Device(bool check) {
    const ModelSpec& spec = Tiny().model->spec();
    KvCacheOptions kv;
    kv.num_blocks = kBlocks;
    kv.block_tokens = spec.kv.block_tokens;
    for (PartitionQuota& quota : kv.partitions) quota = {0, kBlocks};
    cache_ = KvCache::Create(kv).value();
    stream_ = Tiny().backend->NewStream().value();
    DeviceModelOptions options;
    options.num_blocks = kBlocks;
    options.embedding_slots = 4;
    options.sequence_slots = 4;
    options.max_rows = 512;
    options.max_frames = 2;
    options.max_logit_rows = 8;
    options.check_pages = check;
    model_ =
        DeviceModel::Create(*Tiny().backend, *stream_, *Tiny().model, options, nullptr).value();
  }

  KvCache& cache() { return *cache_; }

  std::shared_ptr<const Timeline> Prompt(std::string_view words, const ContentRef& frame) const {
    const ModelSpec& spec = Tiny().model->spec();
    TimelineBuilder builder(DigestBuilder("test").Finish(), spec.kv.block_tokens);
    const saccade::Prompt pieces = Tiny().model->BuildPrompt({words}).value();
    EXPECT_TRUE(AddPrompt(
                    pieces, spec, [&](uint32_t) { return frame; }, nullptr, builder)
                    .ok());
    return builder.Build();
  }
  // Room for the prompt and `answer` tokens.
  std::unique_ptr<Sequence> Open(const std::shared_ptr<const Timeline>& prompt, uint32_t answer) {
    auto sequence = cache_->Open(prompt, kNow);
    EXPECT_TRUE(Grow(*sequence, prompt->num_tokens() + answer).empty());
    return sequence;
  }
  std::vector<BlockCopy> Grow(Sequence& sequence, uint32_t upto) {
    KvTransaction transaction = cache_->Begin(kNow);
    EXPECT_TRUE(transaction.Reserve(sequence, upto).ok());
    return std::move(transaction).Commit();
  }
  // The whole prompt, and the first token of the answer in `slot`.
  static StepPlan Prefill(const Sequence& sequence, uint64_t request, int32_t slot,
                          int32_t embedding) {
    const Timeline& t = sequence.timeline();
    StepPlan plan;
    TrunkItem item;
    item.request = RequestId(request);
    item.timeline = std::shared_ptr<const Timeline>(std::shared_ptr<void>(), &t);
    item.count = t.num_tokens();
    item.pages = sequence.PageTable(t.num_tokens());
    for (const Segment& s : t.segments()) {
      const bool vision = s.modality == Modality::kVision;
      item.embeddings.push_back(vision ? EmbeddingId(embedding) : EmbeddingId());
      if (vision)
        plan.encodes.push_back({item.request, s.content, s.camera, EmbeddingId(embedding), {}});
    }
    Sample(item, slot, 0);
    plan.trunk.push_back(item);
    return plan;
  }
  // The row of answer token `index`, and the next token.
  static StepPlan Decode(const Sequence& sequence, uint64_t request, int32_t slot, uint32_t index) {
    const Timeline& t = sequence.timeline();
    TrunkItem item;
    item.request = RequestId(request);
    item.timeline = std::shared_ptr<const Timeline>(std::shared_ptr<void>(), &t);
    item.begin = t.num_tokens() + index;
    item.count = 1;
    item.pages = sequence.PageTable(item.begin + 1);
    item.embeddings.resize(t.segments().size());
    item.slot = SequenceSlot(slot);
    Sample(item, slot, index + 1);
    StepPlan plan;
    plan.trunk.push_back(item);
    return plan;
  }
  absl::Status Run(const StepPlan& plan) {
    StepResult result;
    return model_->Run(plan, result);
  }

 private:
  static void Sample(TrunkItem& item, int32_t slot, uint32_t index) {
    SampleTarget target;
    target.slot = SequenceSlot(slot);
    target.index = index;
    target.temperature = 1;
    target.seed = static_cast<uint64_t>(slot) + 1;
    item.samples.push_back(target);
  }

  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceModel> model_;
};

// Runs `wrong` on a device that checks: it fails and says `what`. On one that does not, it runs.
void ExpectCaught(const std::function<StepPlan(Device&)>& wrong, std::string_view what) {
  Device checked(true);
  const absl::Status status = checked.Run(wrong(checked));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(what)));
  EXPECT_THAT(std::string(status.message()), HasSubstr("page check: request 1, "));
  Device blind(false);
  EXPECT_TRUE(blind.Run(wrong(blind)).ok());
}

void Ok(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

class PageCheck : public testing::Test {
 protected:
  static constexpr uint32_t kAnswer = 40;
  std::vector<std::unique_ptr<Sequence>> kept_;  // named by the plans of a test

  // A request that has its prompt and `rows` rows of the answer.
  Sequence& Started(Device& device, const std::shared_ptr<const Timeline>& prompt, uint64_t request,
                    uint32_t rows = 0) {
    const auto slot = static_cast<int32_t>(request);
    kept_.push_back(device.Open(prompt, kAnswer));
    Sequence& sequence = *kept_.back();
    Ok(device.Run(Device::Prefill(sequence, request, slot, slot)));
    for (uint32_t i = 0; i < rows; ++i) Ok(device.Run(Device::Decode(sequence, request, slot, i)));
    return sequence;
  }
  void TearDown() override { kept_.clear(); }
};

TEST_F(PageCheck, RightPlansRun) {
  Device device(true);
  const auto prompt = device.Prompt("pick up the block", Frame(9));
  Sequence& first = Started(device, prompt, 1, 35);
  // Another request on its prefix, the same frame in another slot, and a preempted one that goes on
  // in a slot of its own.
  device.cache().Publish(first, prompt->num_tokens(), kNow);
  kept_.push_back(device.Open(prompt, kAnswer));
  Sequence& second = *kept_.back();
  ASSERT_GT(second.cached_tokens(), 0u);
  StepPlan plan = Device::Prefill(second, 2, 2, 1);
  plan.encodes.clear();
  plan.trunk[0].begin = second.cached_tokens();
  plan.trunk[0].count -= second.cached_tokens();
  Ok(device.Run(plan));
  for (uint32_t i = 0; i < 5; ++i) Ok(device.Run(Device::Decode(second, 2, 2, i)));
  plan = Device::Decode(second, 2, 3, 0);
  plan.trunk[0].count = 3;
  plan.trunk[0].pages = second.PageTable(prompt->num_tokens() + 3);
  plan.trunk[0].known_tokens = {5, 6, 7};
  plan.trunk[0].samples[0].index = 3;
  Ok(device.Run(plan));
  Ok(device.Run(Device::Decode(second, 2, 3, 3)));
}

TEST_F(PageCheck, SwappedPages) {
  ExpectCaught(
      [&](Device& device) {
        Sequence& s = Started(device, device.Prompt("pick up the block", Frame(9)), 1, 1);
        StepPlan plan = Device::Decode(s, 1, 1, 1);
        std::swap(plan.trunk[0].pages[2].block, plan.trunk[0].pages[3].block);
        return plan;
      },
      "the page holds another prompt");
}

TEST_F(PageCheck, APageOfAnotherPrompt) {
  ExpectCaught(
      [&](Device& device) {
        Sequence& s = Started(device, device.Prompt("pick up the block", Frame(9)), 1, 1);
        Sequence& other = Started(device, device.Prompt("pick up the block", Frame(8)), 2);
        StepPlan plan = Device::Decode(s, 1, 1, 1);
        plan.trunk[0].pages[3].block = other.PageTable(other.reserved_tokens())[3].block;
        return plan;
      },
      "the page holds another prompt");
}

TEST_F(PageCheck, APageThatNobodyWrote) {
  ExpectCaught(
      [&](Device& device) {
        Sequence& s = Started(device, device.Prompt("pick up the block", Frame(9)), 1, 1);
        StepPlan plan = Device::Decode(s, 1, 1, 1);
        plan.trunk[0].pages[1].block = BlockId(kBlocks - 1);
        return plan;
      },
      "the page was never written");
}

TEST_F(PageCheck, AFreedPageThatAnotherTook) {
  ExpectCaught(
      [&](Device& device) {
        Sequence& s = Started(device, device.Prompt("pick up the block", Frame(9)), 1, 1);
        const StepPlan plan = Device::Decode(s, 1, 1, 1);  // kept past the end of its sequence
        const auto timeline = std::make_shared<Timeline>(s.timeline());
        device.cache().Close(std::move(kept_.back()), kNow);
        kept_.pop_back();
        Started(device, device.Prompt("open the drawer", Frame(7)), 2);
        StepPlan stale = plan;
        stale.trunk[0].timeline = timeline;
        return stale;
      },
      "the page holds another prompt");
}

TEST_F(PageCheck, ARowWithoutTheOneBefore) {
  ExpectCaught(
      [&](Device& device) {
        Sequence& s = Started(device, device.Prompt("pick up the block", Frame(9)), 1, 1);
        return Device::Decode(s, 1, 1, 2);
      },
      "nothing was written before it");
}

TEST_F(PageCheck, ACopyThatWasNotMade) {
  ExpectCaught(
      [&](Device& device) {
        const auto prompt = device.Prompt("pick up the block", Frame(9));
        kept_.push_back(device.Open(prompt, 1));
        Sequence& s = *kept_.back();
        Ok(device.Run(Device::Prefill(s, 1, 1, 1)));
        Ok(device.Run(Device::Decode(s, 1, 1, 0)));
        kept_.push_back(device.cache().Fork(s));
        // The last page is part-full, so the fork that grows gets a copy of it.
        EXPECT_EQ(device.Grow(*kept_.back(), prompt->num_tokens() + 2).size(), 1u);
        return Device::Decode(*kept_.back(), 1, 1, 1);
      },
      "nothing was written before it");
}

TEST_F(PageCheck, TheAnswerOfAnotherSample) {
  ExpectCaught(
      [&](Device& device) {
        const auto prompt = device.Prompt("pick up the block", Frame(9));
        kept_.push_back(device.Open(prompt, 0));
        Sequence& s = *kept_.back();
        StepPlan plan = Device::Prefill(s, 1, 1, 1);
        plan.trunk[0].samples.push_back(plan.trunk[0].samples[0]);
        plan.trunk[0].samples[1].slot = SequenceSlot(2);
        plan.trunk[0].samples[1].seed = 99;
        Ok(device.Run(plan));
        kept_.push_back(device.cache().Fork(s));
        Sequence& fork = *kept_.back();
        const uint32_t all = prompt->num_tokens() + kAnswer;
        const std::vector<BlockCopy> copies = device.Grow(fork, all);
        EXPECT_TRUE(device.Grow(s, all).empty());
        for (uint32_t i = 0; i < 3; ++i) {
          StepPlan both = Device::Decode(s, 1, 1, i);
          both.trunk.push_back(Device::Decode(fork, 1, 2, i).trunk[0]);
          if (i == 0) both.copies = copies;
          Ok(device.Run(both));
        }
        StepPlan wrong = Device::Decode(s, 1, 1, 3);
        wrong.trunk[0].pages = fork.PageTable(prompt->num_tokens() + 4);
        return wrong;
      },
      "the page holds the answer of another sample");
}

TEST_F(PageCheck, TheEmbeddingOfAnotherFrame) {
  ExpectCaught(
      [&](Device& device) {
        Started(device, device.Prompt("pick up the block", Frame(8)), 2);
        kept_.push_back(device.Open(device.Prompt("open the drawer", Frame(9)), kAnswer));
        StepPlan plan = Device::Prefill(*kept_.back(), 1, 1, 2);
        plan.encodes.clear();
        return plan;
      },
      "embedding slot 2: it holds another frame");
}

}  // namespace
}  // namespace saccade
