#pragma once
// A stream against a transport that the test completes by itself, without gRPC.
#include <gtest/gtest.h>

#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rpc/session_core.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {

// Keeps what is asked of it; the test completes it.
class FakePort final : public StreamPort {
 public:
  void Read() override {
    const std::lock_guard lock(mu_);
    EXPECT_FALSE(reading_);
    reading_ = true;
  }
  void Write(const std::string& bytes) override {
    const std::lock_guard lock(mu_);
    EXPECT_FALSE(writing_) << "two writes at once";
    writing_ = true;
    EXPECT_TRUE(written_.emplace_back().ParseFromString(bytes));
  }
  void Finish(const absl::Status& status) override {
    const std::lock_guard lock(mu_);
    EXPECT_FALSE(finished_) << "finished twice";
    EXPECT_FALSE(writing_) << "finished during a write";
    finished_ = status;
  }
  void Abort() override {
    const std::lock_guard lock(mu_);
    aborted_ = true;
  }

  bool TakeRead() {
    const std::lock_guard lock(mu_);
    return std::exchange(reading_, false);
  }
  bool TakeWrite() {
    const std::lock_guard lock(mu_);
    return std::exchange(writing_, false);
  }
  size_t written() const {
    const std::lock_guard lock(mu_);
    return written_.size();
  }
  v1::SessionResponse last() const {
    const std::lock_guard lock(mu_);
    return written_.back();
  }
  std::optional<absl::Status> finished() const {
    const std::lock_guard lock(mu_);
    return finished_;
  }
  bool aborted() const {
    const std::lock_guard lock(mu_);
    return aborted_;
  }

 private:
  mutable std::mutex mu_;
  bool reading_ = false;
  bool writing_ = false;
  bool aborted_ = false;
  std::vector<v1::SessionResponse> written_;
  std::optional<absl::Status> finished_;
};

class SessionCoreTest : public ::testing::Test {
 protected:
  void Make(uint32_t outbox, FakeModelOptions model = {}) {
    model.gate = gate_;
    server_ = std::make_unique<TestServer>(ServerOptions{.model = std::move(model),
                                                         .config =
                                                             [&](Config& config) {
                                                               config.limits.outbox_messages =
                                                                   outbox;
                                                               config.limits.session_idle_s = 60;
                                                             },
                                                         .serve = false});
    serving_ = Serving::Create(server_->config(), server_->engine(), *decoding_, clock_,
                               &server_->metrics())
                   .value();
    core_ =
        std::make_shared<SessionCore>(serving_, serving_->sessions().Admit("a").value(), kNever);
    core_->Start(&port_);
  }
  void TearDown() override {
    gate_->Open();
    ReleaseDecoding();
    core_->OnCancelled();
    if (port_.TakeWrite()) core_->OnWriteDone(false);
    EXPECT_TRUE(port_.finished().has_value());
    core_->Detach();
    server_->ExpectIdleSoon();
    EXPECT_EQ(serving_->sessions().open(), 0U);
    core_ = nullptr;
    decoding_ = nullptr;  // what its jobs hold must not outlive the engine
    serving_ = nullptr;
  }

  // False when the stream does not read.
  bool Send(v1::SessionRequest request) {
    if (!port_.TakeRead()) return false;
    core_->OnMessage(std::move(request), clock_.Now());
    return true;
  }
  void Open(bool tokens = false) {
    v1::SessionRequest request;
    request.mutable_open()->set_instruction("go");
    request.mutable_open()->mutable_options()->set_stream_tokens(tokens);
    ASSERT_TRUE(Send(request));
    ASSERT_TRUE(port_.TakeWrite());
    ASSERT_TRUE(port_.last().has_opened());
    core_->OnWriteDone(true);
    v1::SessionRequest frame;
    v1::RawImage& raw = *frame.mutable_vision()->mutable_raw();
    raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
    raw.set_width(1);
    raw.set_height(1);
    raw.set_data("abc");
    ASSERT_TRUE(Send(frame));
    std::latch decoded(1);
    decoding_->Run(std::make_shared<FairExecutor::Account>(), FairExecutor::Size::kMedium,
                   [&] { decoded.count_down(); });
    decoded.wait();
  }
  bool SendAct(uint64_t id) {
    v1::SessionRequest request;
    request.mutable_act()->set_id(id);
    return Send(request);
  }

  // Until the engine has nothing left and has delivered everything.
  void AwaitAnswers() {
    EXPECT_TRUE(Eventually([this] {
      const SchedulerStats stats = server_->engine().Stats().value();
      return stats.classes[3].running + stats.classes[3].queued == 0;
    }));
    EXPECT_TRUE(server_->engine().Stats().ok());  // the turn after the last delivery
  }

  // Takes the one place for decoding, so that frames wait.
  void HoldDecoding() {
    decoding_->Run(std::make_shared<FairExecutor::Account>(), FairExecutor::Size::kMedium, [this] {
      held_.count_down();
      release_.wait();
    });
    held_.wait();
  }
  void ReleaseDecoding() {
    if (!release_.try_wait()) release_.count_down();
  }
  bool SendFrame(int64_t capture_time_ns, std::string_view pixel) {
    v1::SessionRequest request;
    request.mutable_vision()->set_capture_time_ns(capture_time_ns);
    v1::RawImage& raw = *request.mutable_vision()->mutable_raw();
    raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
    raw.set_width(1);
    raw.set_height(1);
    raw.set_data(std::string(pixel));
    return Send(request);
  }
  double Superseded() const { return server_->metrics().model("fake").frames_superseded->Value(); }
  // The next message to the client.
  v1::SessionResponse Next() {
    if (!Eventually([this] { return port_.TakeWrite(); })) {
      ADD_FAILURE() << "nothing comes";
      return {};
    }
    v1::SessionResponse response = port_.last();
    core_->OnWriteDone(true);
    return response;
  }

  SteadyClock clock_;
  std::unique_ptr<FairExecutor> decoding_ = FairExecutor::Create(1).value();
  std::latch held_{1};
  std::latch release_{1};
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::unique_ptr<TestServer> server_;
  std::shared_ptr<Serving> serving_;
  FakePort port_;
  std::shared_ptr<SessionCore> core_;
};

}  // namespace saccade::testing
