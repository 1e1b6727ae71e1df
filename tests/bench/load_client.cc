#include "tests/bench/load_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <queue>
#include <random>
#include <thread>

#include "saccade/v1/inference.grpc.pb.h"

namespace saccade::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kSide = 224;  // pixels of a frame

// A stream that writes what it is given in order and notes when each answer came.
class Robot final : public grpc::ClientBidiReactor<v1::SessionRequest, v1::SessionResponse> {
 public:
  Robot(const std::string& address, const ClientKind& kind, uint32_t seed)
      : kind_(kind), pixels_(size_t{kSide} * kSide * 3, '\0') {
    std::mt19937 random(seed);
    for (char& pixel : pixels_) pixel = static_cast<char>(random());
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    stub_ = v1::Inference::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    stub_->async()->Session(&context_, this);
    v1::SessionRequest open;
    open.mutable_open()->set_instruction("drive to the red sign");
    open.mutable_open()->set_latency_class(kind.latency_class);
    StartRead(&response_);
    StartCall();
    Send(std::move(open));
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return opened_ || done_; });
    if (done_) {
      std::fprintf(stderr, "bench: no session: %s\n", status_.error_message().c_str());
      std::exit(2);
    }
  }
  ~Robot() override {
    context_.TryCancel();
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return done_; });
  }

  void Ask(Clock::time_point now, bool new_frame) {
    if (new_frame || asked_.empty()) {
      const uint64_t number = ++frames_;
      for (size_t i = 0; i < sizeof(number); ++i) {
        pixels_[i] = static_cast<char>(number >> (8 * i));
      }
      v1::SessionRequest frame;
      v1::RawImage& raw = *frame.mutable_vision()->mutable_raw();
      raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
      raw.set_width(kSide);
      raw.set_height(kSide);
      raw.set_data(pixels_);
      Send(std::move(frame));
    }
    v1::SessionRequest act;
    {
      const std::lock_guard lock(mu_);
      asked_.push_back({now, now, Asked::End::kUnanswered});
      act.mutable_act()->set_id(asked_.size());
    }
    act.mutable_act()->set_samples(kind_.samples);
    if (kind_.samples > 1) act.mutable_act()->set_temperature(1);
    Send(std::move(act));
  }
  bool AwaitAnswers(Clock::time_point until) {
    std::unique_lock lock(mu_);
    return changed_.wait_until(lock, until, [this] { return done_ || answered_ == asked_.size(); });
  }

  struct Question {
    Clock::time_point sent;
    Clock::time_point ended;
    Asked::End end;
  };
  std::vector<Question> questions() {
    const std::lock_guard lock(mu_);
    return asked_;
  }

 private:
  void Send(v1::SessionRequest request) {
    const std::lock_guard lock(mu_);
    if (done_) return;
    outbox_.push_back(std::move(request));
    if (outbox_.size() == 1) StartWrite(&outbox_.front());
  }
  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mu_);
    outbox_.pop_front();
    if (ok && !outbox_.empty()) StartWrite(&outbox_.front());
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    {
      const std::lock_guard lock(mu_);
      const Clock::time_point now = Clock::now();
      opened_ = opened_ || response_.has_opened();
      if (response_.has_chunk()) End(response_.chunk().act_id(), now, Asked::End::kAnswered);
      if (response_.has_error() && response_.error().act_id() != 0) {
        const auto reason = response_.error().detail().reason();
        const bool refused = reason == v1::ERROR_REASON_LATE ||
                             reason == v1::ERROR_REASON_QUEUE_FULL ||
                             reason == v1::ERROR_REASON_RATE_LIMITED;
        End(response_.error().act_id(), now, refused ? Asked::End::kRefused : Asked::End::kFailed);
      }
      changed_.notify_all();
    }
    StartRead(&response_);
  }
  void End(uint64_t id, Clock::time_point now, Asked::End end) {
    if (id == 0 || id > asked_.size()) return;
    asked_[id - 1].ended = now;
    asked_[id - 1].end = end;
    ++answered_;
  }
  void OnDone(const grpc::Status& status) override {
    const std::lock_guard lock(mu_);
    status_ = status;
    done_ = true;
    changed_.notify_all();
  }

  const ClientKind kind_;
  std::unique_ptr<v1::Inference::Stub> stub_;
  grpc::ClientContext context_;
  v1::SessionResponse response_;
  std::string pixels_;
  uint64_t frames_ = 0;

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<v1::SessionRequest> outbox_;  // the front is being written
  std::vector<Question> asked_;            // by id - 1
  size_t answered_ = 0;
  bool opened_ = false;
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace

std::vector<Asked> RunLoad(const std::string& address, const std::vector<ClientKind>& kinds,
                           double scale, double seconds, uint32_t seed) {
  struct Client {
    size_t kind;
    std::unique_ptr<Robot> robot;
  };
  std::vector<Client> clients;
  for (size_t k = 0; k < kinds.size(); ++k) {
    for (int i = 0; i < kinds[k].count; ++i) {
      clients.push_back(
          {k, std::make_unique<Robot>(address, kinds[k],
                                      seed * 1000 + static_cast<uint32_t>(clients.size()))});
    }
  }
  std::mt19937 random(seed);
  const auto gap = [&](const ClientKind& kind) {
    const double mean = 1 / (kind.hz * scale);
    return kind.poisson ? std::exponential_distribution<double>(1 / mean)(random)
                        : mean * std::uniform_real_distribution<double>(0.8, 1.2)(random);
  };
  std::priority_queue<std::pair<double, size_t>, std::vector<std::pair<double, size_t>>,
                      std::greater<>>
      due;
  for (size_t c = 0; c < clients.size(); ++c) {
    const double mean = 1 / (kinds[clients[c].kind].hz * scale);
    due.emplace(std::uniform_real_distribution<double>(0, mean)(random), c);
  }
  const Clock::time_point begin = Clock::now();
  while (due.top().first < seconds) {
    const auto [at, c] = due.top();
    due.pop();
    const ClientKind& kind = kinds[clients[c].kind];
    std::this_thread::sleep_until(
        begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(at)));
    clients[c].robot->Ask(Clock::now(),
                          std::uniform_real_distribution<double>(0, 1)(random) < kind.new_frame);
    due.emplace(at + gap(kind), c);
  }
  const Clock::time_point until = Clock::now() + std::chrono::seconds(3);
  std::vector<Asked> out;
  for (const Client& client : clients) {
    client.robot->AwaitAnswers(until);
    for (const Robot::Question& q : client.robot->questions()) {
      out.push_back({client.kind, std::chrono::duration<double>(q.sent - begin).count(),
                     std::chrono::duration<double>(q.ended - q.sent).count(), q.end});
    }
  }
  std::sort(out.begin(), out.end(),
            [](const Asked& a, const Asked& b) { return a.sent_s < b.sent_s; });
  return out;
}

std::vector<double> SoloSeconds(const std::string& address, const std::vector<ClientKind>& kinds,
                                int requests) {
  std::vector<double> out;
  for (const ClientKind& kind : kinds) {
    ClientKind patient = kind;
    patient.latency_class = "best_effort";  // nothing is refused
    Robot robot(address, patient, 1);
    double fresh = 0;
    const int warm_up = 3;
    Clock::time_point begin;
    for (int i = -warm_up; i < requests; ++i) {
      if (i == 0) begin = Clock::now();
      fresh += kind.new_frame;
      const bool new_frame = fresh >= 1;
      if (new_frame) fresh -= 1;
      robot.Ask(Clock::now(), new_frame);
      robot.AwaitAnswers(Clock::now() + std::chrono::seconds(60));
    }
    out.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / requests);
  }
  return out;
}

double MetShare(const std::vector<Asked>& asked, const std::vector<ClientKind>& kinds,
                size_t kind) {
  size_t all = 0;
  size_t met = 0;
  for (const Asked& a : asked) {
    if (a.kind != kind) continue;
    ++all;
    const double deadline_s = kinds[kind].deadline_ms / 1000;
    if (a.end == Asked::End::kAnswered && (deadline_s <= 0 || a.took_s <= deadline_s)) ++met;
  }
  return all == 0 ? 1 : static_cast<double>(met) / static_cast<double>(all);
}

}  // namespace saccade::bench
