// Any thread that submits may run the engine for a turn, and so may a worker: they never meet
// inside.
#include <atomic>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "base/turn.h"
#include "gtest/gtest.h"
#include "session/prompt_timeline.h"
#include "tests/rpc/harness.h"

namespace saccade {
namespace {

TEST(TurnTest, TheHolderLearnsThatSomebodyCame) {
  Turn turn;
  ASSERT_TRUE(turn.TryTake());
  EXPECT_FALSE(turn.Release());
  ASSERT_TRUE(turn.TryTake());
  EXPECT_FALSE(turn.TryTake());
  EXPECT_FALSE(turn.TryTake());
  EXPECT_TRUE(turn.Release());
  ASSERT_TRUE(turn.TryTake());  // the mark is gone
  EXPECT_FALSE(turn.Release());
}

TEST(TurnTest, NothingIsForgottenAndNobodyMeets) {
  constexpr int kThreads = 4;
  constexpr int kPuts = 20'000;
  Turn turn;
  std::atomic<int> put{0};
  int taken = 0;  // by the holder
  const auto work = [&] {
    for (int i = 0; i < kPuts; ++i) {
      put.fetch_add(1);
      while (turn.TryTake()) {
        taken += put.exchange(0);
        if (!turn.Release()) break;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(taken, kThreads * kPuts);
  EXPECT_EQ(put.load(), 0);
}

// What all answers of a test pass through.
struct Meeting {
  std::atomic<bool> inside{false};
  std::atomic<int> met{0};
  std::atomic<int> done{0};
  std::atomic<int> answered{0};
};

class CountingSink final : public ResponseSink {
 public:
  explicit CountingSink(Meeting& meeting) : meeting_(meeting) {}
  void OnToken(RequestId, uint32_t, uint32_t, int32_t) override { Enter(); }
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    Enter();
    if (done_.exchange(true)) meeting_.met.fetch_add(1);  // a second answer
    if (result.ok()) {
      meeting_.answered.fetch_add(1);
    } else if (result.status().code() != absl::StatusCode::kCancelled) {
      ADD_FAILURE() << result.status();
    }
    meeting_.done.fetch_add(1);
  }

 private:
  void Enter() {
    if (meeting_.inside.exchange(true)) meeting_.met.fetch_add(1);
    meeting_.inside.store(false);
  }
  Meeting& meeting_;
  std::atomic<bool> done_{false};
};

TEST(EngineTurnsTest, ManyThreadsSubmitCancelAndAsk) {
  testing::TestServer server({.serve = false});
  Engine& engine = server.engine();
  constexpr int kThreads = 4;
  constexpr int kRequests = 100;
  Meeting meeting;
  std::atomic<int> refused{0};
  const auto client = [&](int t) {
    const ModelRef served = engine.models().front();
    const Model& model = *served->instances[0];
    for (int i = 0; i < kRequests; ++i) {
      TimelineBuilder builder = served->NewTimeline();
      const absl::StatusOr<Prompt> prompt = model.BuildPrompt({"go " + std::to_string(i % 7)});
      ASSERT_TRUE(prompt.ok()) << prompt.status();
      const auto frame_of = [&](uint32_t index) -> ContentRef {
        const CameraSpec& camera = model.spec().cameras[index];
        auto frame = std::make_shared<Content>();
        frame->width = camera.width;
        frame->height = camera.height;
        frame->rgb.assign(size_t{camera.width} * camera.height * 3, static_cast<uint8_t>(i % 5));
        frame->digest = DigestBytes("frame.test", frame->rgb);
        return frame;
      };
      ASSERT_TRUE(AddPrompt(*prompt, model.spec(), frame_of, nullptr, builder).ok());
      ActRequest request;
      request.session = SessionId(static_cast<uint64_t>(t + 1));
      request.model = served->id;
      request.klass = ClassId(static_cast<int32_t>(engine.classes().size()) - 1);
      request.arrival = std::chrono::steady_clock::now();
      request.timeline = builder.Build();
      request.statistics_key = model.spec().statistics.front().key;
      request.sink = std::make_shared<CountingSink>(meeting);
      const absl::StatusOr<RequestId> id = engine.Submit(std::move(request));
      if (!id.ok()) {
        refused.fetch_add(1);
        continue;
      }
      if (i % 3 == 0) engine.Cancel(*id);
      if (i % 10 == 0) {
        EXPECT_TRUE(engine.Stats().ok());
      }
      if (i == kRequests / 2) engine.CancelSession(SessionId(static_cast<uint64_t>(t + 1)));
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(client, t);
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(testing::Eventually(
      [&] { return meeting.done.load() + refused.load() == kThreads * kRequests; }));
  EXPECT_EQ(refused.load(), 0);
  EXPECT_GT(meeting.answered.load(), 0);
  EXPECT_EQ(meeting.met.load(), 0);
  server.ExpectIdleSoon();
}

}  // namespace
}  // namespace saccade
