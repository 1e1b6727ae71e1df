// Many streams and calls at once on a transport in this process, whose threads call the cores as
// gRPC's would: any of them, several at a time. All that gRPC would hide from the thread sanitizer
// is in its sight here.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "rpc/predict_core.h"
#include "rpc/session_core.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The transport's threads.
class Callbacks {
 public:
  explicit Callbacks(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
  }
  ~Callbacks() {
    {
      const std::lock_guard lock(mu_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void Post(std::function<void()> job) {
    {
      const std::lock_guard lock(mu_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

 private:
  void Loop() {
    std::unique_lock lock(mu_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// Both ends of one stream: a client's calls, and the port that the core sees. What it is asked for
// happens later, on a thread of the transport.
class Stream final : public StreamPort, public std::enable_shared_from_this<Stream> {
 public:
  Stream(Callbacks& callbacks, const Clock& clock, std::shared_ptr<SessionCore> core)
      : callbacks_(callbacks), clock_(clock), core_(std::move(core)) {}
  void Start() { core_->Start(this); }

  // The client.
  void Send(v1::SessionRequest request) {
    const std::lock_guard lock(mu_);
    sent_.push_back(std::move(request));
    ServeReadLocked();
  }
  void HalfClose() {
    const std::lock_guard lock(mu_);
    half_closed_ = true;
    ServeReadLocked();
  }
  void Leave() {
    {
      const std::lock_guard lock(mu_);
      gone_ = true;
      ServeReadLocked();
    }
    callbacks_.Post([self = shared_from_this()] { self->core_->OnCancelled(); });
  }
  // The next message; none at the end of the stream.
  std::optional<v1::SessionResponse> Receive() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return !received_.empty() || over_; });
    if (received_.empty()) return std::nullopt;
    v1::SessionResponse response = std::move(received_.front());
    received_.pop_front();
    return response;
  }
  // Waits for the end.
  absl::Status End() {
    while (Receive()) continue;
    const std::lock_guard lock(mu_);
    return *status_;
  }

  // The port.
  void Read() override {
    const std::lock_guard lock(mu_);
    reading_ = true;
    ServeReadLocked();
  }
  void Write(const std::string& bytes) override {
    callbacks_.Post([self = shared_from_this(), bytes] {
      bool ok = false;
      {
        const std::lock_guard lock(self->mu_);
        ok = !self->gone_;
        if (ok) {
          EXPECT_TRUE(self->received_.emplace_back().ParseFromString(bytes));
        }
      }
      self->changed_.notify_all();
      self->core_->OnWriteDone(ok);
    });
  }
  void Finish(const absl::Status& status) override {
    callbacks_.Post([self = shared_from_this(), status] {
      self->core_->Detach();
      {
        const std::lock_guard lock(self->mu_);
        self->status_ = status;
        self->over_ = true;
      }
      self->changed_.notify_all();
    });
  }
  void Abort() override { ADD_FAILURE() << "every client reads"; }

 private:
  void ServeReadLocked() {
    if (!reading_ || (sent_.empty() && !half_closed_ && !gone_)) return;
    reading_ = false;
    if (sent_.empty() || gone_) {
      callbacks_.Post([self = shared_from_this()] { self->core_->OnReadsDone(); });
      return;
    }
    callbacks_.Post([self = shared_from_this(), request = std::move(sent_.front())]() mutable {
      self->core_->OnMessage(std::move(request), self->clock_.Now());
    });
    sent_.pop_front();
  }

  Callbacks& callbacks_;
  const Clock& clock_;
  const std::shared_ptr<SessionCore> core_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<v1::SessionRequest> sent_;
  std::deque<v1::SessionResponse> received_;
  std::optional<absl::Status> status_;
  bool reading_ = false;
  bool half_closed_ = false;
  bool gone_ = false;
  bool over_ = false;
};

v1::VisionFrame FrameOf(int robot, int64_t number) {
  v1::VisionFrame frame;
  frame.set_capture_time_ns(number);
  v1::RawImage& raw = *frame.mutable_raw();
  raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
  raw.set_width(4);
  raw.set_height(4);
  std::string pixels(48, static_cast<char>(16 * robot));
  pixels[0] = static_cast<char>(number);
  raw.set_data(pixels);
  return frame;
}

class TransportTest : public ::testing::Test {
 protected:
  std::shared_ptr<Stream> Connect() {
    auto core =
        std::make_shared<SessionCore>(serving_, serving_->sessions().Admit("a").value(), kNever);
    auto stream = std::make_shared<Stream>(callbacks_, clock_, core);
    {
      const std::lock_guard lock(mu_);
      cores_.push_back(core);
    }
    stream->Start();
    return stream;
  }
  // As housekeeping does.
  void TickAll(TimePoint now) {
    const std::lock_guard lock(mu_);
    for (const std::weak_ptr<SessionCore>& weak : cores_) {
      if (const std::shared_ptr<SessionCore> core = weak.lock()) core->Tick(now);
    }
  }
  static v1::SessionRequest Open(int robot) {
    v1::SessionRequest request;
    request.mutable_open()->set_instruction(std::string(1 + static_cast<size_t>(robot % 3), 'a'));
    request.mutable_open()->mutable_options()->set_stream_tokens(robot % 2 == 1);
    return request;
  }
  // The token ids of one Predict call.
  std::vector<int32_t> Predict(int robot, int64_t number) {
    v1::PredictRequest request;
    request.mutable_text()->set_instruction(Open(robot).open().instruction());
    *request.add_frames() = FrameOf(robot, number);
    const auto promise = std::make_shared<std::promise<absl::StatusOr<v1::PredictResponse>>>();
    auto future = promise->get_future();
    auto core =
        std::make_shared<PredictCore>(serving_, serving_->sessions().Admit("b").value(),
                                      [promise](const absl::StatusOr<v1::PredictResponse>& answer) {
                                        promise->set_value(answer);  // a second one throws
                                      });
    callbacks_.Post([this, core, request = std::move(request)] {
      core->Start(request, 16, std::make_shared<FairExecutor::Account>(), clock_.Now(), kNever);
    });
    const absl::StatusOr<v1::PredictResponse> answer = future.get();
    EXPECT_TRUE(answer.ok()) << answer.status();
    if (!answer.ok()) return {};
    const auto& ids = answer->chunk().samples(0).token_ids();
    return {ids.begin(), ids.end()};
  }

  SteadyClock clock_;
  TestServer server_{{.config =
                          [](Config& config) {
                            config.limits.sessions_per_peer = 0;
                            config.limits.acts_in_flight = 64;
                          },
                      .serve = false}};
  std::unique_ptr<FairExecutor> decoding_ = FairExecutor::Create(2).value();
  std::shared_ptr<Serving> serving_ =
      Serving::Create(server_.config(), server_.engine(), *decoding_, clock_, &server_.metrics())
          .value();
  Callbacks callbacks_{4};
  std::mutex mu_;
  std::vector<std::weak_ptr<SessionCore>> cores_;
};

TEST_F(TransportTest, EveryRequestOfEveryStreamHasItsOwnAnswer) {
  constexpr int kRobots = 6;
  constexpr int64_t kActs = 12;
  std::vector<std::vector<std::vector<int32_t>>> alone(kRobots);
  for (int robot = 0; robot < kRobots; ++robot) {
    for (int64_t act = 1; act <= kActs; ++act)
      alone[static_cast<size_t>(robot)].push_back(Predict(robot, act));
  }
  const auto answer_of = [&](int robot, int64_t act) {
    return alone[static_cast<size_t>(robot)][static_cast<size_t>(act) - 1];
  };
  std::vector<std::thread> robots;
  for (int robot = 0; robot < kRobots; ++robot) {
    robots.emplace_back([&, robot] {
      const std::shared_ptr<Stream> stream = Connect();
      stream->Send(Open(robot));
      for (int64_t act = 1; act <= kActs; ++act) {
        v1::SessionRequest frame;
        *frame.mutable_vision() = FrameOf(robot, act);
        stream->Send(frame);
        v1::SessionRequest request;
        request.mutable_act()->set_id(static_cast<uint64_t>(act));
        stream->Send(request);
        if (act % 3 == 0) {
          EXPECT_EQ(Predict(robot, act), answer_of(robot, act));
        }
      }
      stream->HalfClose();
      std::set<uint64_t> answered;
      while (const std::optional<v1::SessionResponse> response = stream->Receive()) {
        ASSERT_FALSE(response->has_error()) << response->ShortDebugString();
        if (!response->has_chunk()) continue;
        const uint64_t act = response->chunk().act_id();
        EXPECT_TRUE(answered.insert(act).second) << act;
        const auto& ids = response->chunk().samples(0).token_ids();
        EXPECT_EQ(std::vector<int32_t>(ids.begin(), ids.end()),
                  answer_of(robot, static_cast<int64_t>(act)));
      }
      EXPECT_EQ(answered.size(), static_cast<size_t>(kActs));
      EXPECT_TRUE(stream->End().ok());
    });
  }
  for (std::thread& robot : robots) robot.join();
  server_.ExpectIdleSoon();
  EXPECT_EQ(serving_->sessions().open(), 0U);
}

TEST_F(TransportTest, ClientsThatLeaveAndAServerThatDrains) {
  constexpr int kRobots = 6;
  std::atomic<bool> over{false};
  std::thread housekeeping([&] {
    while (!over) {
      TickAll(clock_.Now());
      EXPECT_TRUE(server_.engine().CheckInvariants().ok());
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  std::vector<std::thread> robots;
  for (int robot = 0; robot < kRobots; ++robot) {
    robots.emplace_back([&, robot] {
      for (int round = 0; round < 8; ++round) {
        const std::shared_ptr<Stream> stream = Connect();
        stream->Send(Open(robot));
        for (int64_t act = 1; act <= 6; ++act) {
          v1::SessionRequest request;
          *request.mutable_vision() = FrameOf(robot, act);
          stream->Send(request);
          request.mutable_act()->set_id(static_cast<uint64_t>(act));
          request.mutable_act()->set_samples(1 + static_cast<uint32_t>(robot % 2));
          stream->Send(request);
          if (act != 4) continue;
          request.mutable_cancel()->set_all(true);
          stream->Send(request);
        }
        if (round % 2 == 0) {
          stream->Receive();
          stream->Leave();
          while (stream->Receive()) continue;
        } else {
          stream->HalfClose();
          EXPECT_TRUE(stream->End().ok());
        }
      }
    });
  }
  for (std::thread& robot : robots) robot.join();
  const std::shared_ptr<Stream> last = Connect();
  last->Send(Open(0));
  EXPECT_TRUE(last->Receive()->has_opened());
  {
    const std::lock_guard lock(mu_);
    for (const std::weak_ptr<SessionCore>& weak : cores_) {
      const std::shared_ptr<SessionCore> core = weak.lock();
      if (core == nullptr) continue;
      core->NotifyDraining();
      core->CloseWhenIdle(absl::UnavailableError("bye"));
    }
  }
  EXPECT_EQ(last->Receive()->notice().kind(), v1::NOTICE_KIND_DRAINING);
  EXPECT_EQ(last->End().code(), absl::StatusCode::kUnavailable);
  server_.ExpectIdleSoon();
  over = true;
  housekeeping.join();
  server_.engine().Drain(clock_.Now() + seconds(5));
  EXPECT_EQ(serving_->sessions().open(), 0U);
}

}  // namespace
}  // namespace saccade::testing
