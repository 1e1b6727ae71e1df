// Actions at 50 Hz over vision at 5 Hz: how evenly pushed actions of a flow policy arrive while the
// frames they are computed from are refreshed.
//
// One session of the real server with a golden-size SmolVLA: frames of two cameras at 5 Hz, a class
// for refreshes, a push at 50 Hz, a new state every 20 ms. Judged: the 99th percentile of how far
// the time between two answers is from 20 ms, below 3 ms; a turn that is left out counts with its
// whole gap. For a quiet machine.
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "saccade/v1/admin.grpc.pb.h"
#include "saccade/v1/inference.grpc.pb.h"
#include "tests/bench/server_process.h"

namespace saccade::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kActionHz = 50;
constexpr double kVisionHz = 5;
constexpr double kBarMs = 3;

// One answer: when it came, and where its time went as it says itself.
struct Turn {
  double at_ms = 0;   // since the one before
  double end_ms = 0;  // since the first
  v1::Timings timings;
  bool refreshed = false;  // the first of new frames
};

struct Answers {
  std::vector<Turn> turns;
  size_t chunks = 0;
  size_t errors = 0;
  size_t versions = 0;     // of observations, seen
  size_t refreshed = 0;    // computed from frames that were encoded before
  uint64_t oldest_us = 0;  // frame that an answer was computed from
};

v1::SessionRequest Frame(const std::string& camera, uint32_t width, uint32_t height,
                         std::minstd_rand& random) {
  v1::SessionRequest message;
  v1::VisionFrame& frame = *message.mutable_vision();
  frame.set_camera(camera);
  v1::RawImage& raw = *frame.mutable_raw();
  raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
  raw.set_width(width);
  raw.set_height(height);
  std::string pixels(size_t{width} * height * 3, '\0');
  for (char& pixel : pixels) pixel = static_cast<char>(random());
  raw.set_data(std::move(pixels));
  return message;
}

Answers Drive(const std::shared_ptr<grpc::Channel>& channel, double seconds) {
  const auto stub = v1::Inference::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->Session(&context);
  std::mutex writing;  // one write at a time
  const auto send = [&](const v1::SessionRequest& request) {
    const std::lock_guard lock(writing);
    return stream->Write(request);
  };
  v1::SessionRequest request;
  request.mutable_open()->set_instruction("pick up the red block");
  request.mutable_open()->mutable_options()->set_refresh_class("best_effort");
  send(request);
  std::minstd_rand random(1);
  // Made beforehand: the client has its share of the cores too. Pictures differ in their first
  // pixels, so no cache knows one.
  std::array<v1::SessionRequest, 2> pictures = {Frame("top", 160, 96, random),
                                                Frame("wrist", 128, 128, random)};
  const auto frames = [&](int64_t number) {
    for (v1::SessionRequest& picture : pictures) {
      v1::VisionFrame& frame = *picture.mutable_vision();
      frame.set_capture_time_ns(number);
      std::memcpy(frame.mutable_raw()->mutable_data()->data(), &number, sizeof(number));
      send(picture);
    }
  };
  const auto state = [&](int i) {
    v1::SessionRequest message;
    for (int k = 0; k < 7; ++k) {
      message.mutable_state()->add_values(0.1F * static_cast<float>(std::sin(0.05 * i + k)));
    }
    send(message);
  };
  state(0);
  frames(1);
  request.Clear();
  request.mutable_push()->set_hz(kActionHz);
  send(request);

  std::atomic<bool> stop{false};
  std::thread robot([&] {
    const Clock::time_point begin = Clock::now();
    const int per_frame = static_cast<int>(kActionHz / kVisionHz);
    for (int i = 1; !stop; ++i) {
      std::this_thread::sleep_until(begin + std::chrono::duration_cast<Clock::duration>(
                                                std::chrono::duration<double>(i / kActionHz)));
      state(i);
      if (i % per_frame == 0) frames(1 + i / per_frame);
    }
    request.Clear();
    request.mutable_push()->set_hz(0);
    send(request);
    const std::lock_guard lock(writing);
    stream->WritesDone();
  });
  Answers answers;
  uint64_t version = 0;
  Clock::time_point first{};
  Clock::time_point last{};
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  v1::SessionResponse response;
  while (stream->Read(&response)) {
    const Clock::time_point now = Clock::now();
    if (now > end) stop = true;
    if (response.has_error()) ++answers.errors;
    if (!response.has_chunk() || stop) continue;
    const v1::ActionChunk& chunk = response.chunk();
    ++answers.chunks;
    answers.refreshed += chunk.frames_cached() ? 1 : 0;
    const bool news = chunk.observation_version() != version;
    answers.versions += news ? 1 : 0;
    version = chunk.observation_version();
    for (const v1::FrameUsed& used : chunk.frames()) {
      answers.oldest_us = std::max(answers.oldest_us, used.age_us());
    }
    // The first second is the server's and the caches' to warm up.
    if (last != Clock::time_point{} && answers.chunks > kActionHz) {
      using Milliseconds = std::chrono::duration<double, std::milli>;
      if (first == Clock::time_point{}) first = now;
      answers.turns.push_back({Milliseconds(now - last).count(), Milliseconds(now - first).count(),
                               chunk.timings(), news});
    }
    last = now;
  }
  stop = true;
  robot.join();
  const grpc::Status status = stream->Finish();
  if (!status.ok()) std::fprintf(stderr, "the stream ended: %s\n", status.error_message().c_str());
  return answers;
}

double Percentile(std::vector<double> values, double part) {
  if (values.empty()) return HUGE_VAL;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(part * static_cast<double>(values.size())))];
}

double JitterOf(const Turn& turn) { return std::abs(turn.at_ms - 1000 / kActionHz); }

// The turns that were the farthest from even, and where their time went.
void PrintWorst(std::vector<Turn> turns, size_t count) {
  count = std::min(count, turns.size());
  std::partial_sort(turns.begin(), turns.begin() + static_cast<std::ptrdiff_t>(count), turns.end(),
                    [](const Turn& a, const Turn& b) { return JitterOf(a) > JitterOf(b); });
  turns.resize(count);
  std::sort(turns.begin(), turns.end(),
            [](const Turn& a, const Turn& b) { return a.end_ms < b.end_ms; });
  for (const Turn& turn : turns) {
    const auto ms = [](uint64_t us) { return static_cast<double>(us) / 1000; };
    std::printf(
        "  at %9.1f ms: %5.1f ms after the one before; queue %5.2f encode %5.2f prefill %5.2f act "
        "%5.2f total %5.2f ms%s\n",
        turn.end_ms, turn.at_ms, ms(turn.timings.queue_us()), ms(turn.timings.encode_us()),
        ms(turn.timings.prefill_us()), ms(turn.timings.act_us()), ms(turn.timings.total_us()),
        turn.refreshed ? ", first of new frames" : "");
  }
}

// What the server's recorder remembers at the end.
void SaveTrace(const std::shared_ptr<grpc::Channel>& channel, const std::string& path) {
  grpc::ClientContext context;
  v1::GetTraceResponse trace;
  const grpc::Status status = v1::Admin::NewStub(channel)->GetTrace(&context, {}, &trace);
  if (!status.ok()) std::fprintf(stderr, "no trace: %s\n", status.error_message().c_str());
  std::ofstream(path) << trace.json();
}

int Main(int argc, char** argv) {
  CLI::App app("Pushed actions at 50 Hz over vision at 5 Hz.");
  bool check = false;
  double minutes = 1;
  std::string binary = "build/release/saccade-server";
  size_t worst = 0;
  std::string trace;
  double ceiling_ms = 0;
  app.add_flag("--check", check, "exit 0 only where the bar holds");
  app.add_option("--minutes", minutes, "how long")->check(CLI::Range(0.05, 10'000.0));
  app.add_option("--server", binary, "the server's binary");
  app.add_option("--worst", worst, "print that many of the least even turns");
  app.add_option("--trace", trace, "write the server's last steps there, as a Chrome trace");
  app.add_option("--ceiling", ceiling_ms, "the server's step ceiling in ms, if not its default");
  CLI11_PARSE(app, argc, argv);

  ServerProcess server(
      binary,
      ceiling_ms > 0 ? "scheduler: {step_ceiling_ms: " + std::to_string(ceiling_ms) + "}\n" : "",
      "  - name: smolvla\n    path: " +
          std::filesystem::absolute("tests/golden/data/smolvla/checkpoint").string() +
          "\n    default_class: control\n    kv: {memory_mb: 16}\n");
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
  const Answers answers = Drive(channel, 60 * minutes);
  if (!trace.empty()) SaveTrace(channel, trace);
  const int code = server.Stop();

  std::vector<double> jitter;
  for (const Turn& turn : answers.turns) jitter.push_back(JitterOf(turn));
  const double p50 = Percentile(jitter, 0.5);
  const double p99 = Percentile(jitter, 0.99);
  const double most = Percentile(jitter, 1);
  const double expected = 60 * minutes * kActionHz;
  // The refresh must have happened, and most turns must have been taken.
  const bool ok = p99 < kBarMs && answers.errors == 0 && code == 0 &&
                  static_cast<double>(answers.chunks) > 0.97 * expected &&
                  static_cast<double>(answers.versions) > 0.8 * 60 * minutes * kVisionHz;
  std::printf(
      "%.1f minutes: %zu of %.0f answers, %zu errors, %zu observations, %zu answers on frames "
      "encoded "
      "before\njitter of 20 ms: p50 %.2f ms, p99 %.2f ms (bar %.0f), most %.2f ms; oldest frame "
      "%.0f "
      "ms: %s\n",
      minutes, answers.chunks, expected, answers.errors, answers.versions, answers.refreshed, p50,
      p99, kBarMs, most, static_cast<double>(answers.oldest_us) / 1000, ok ? "held" : "MISSED");
  PrintWorst(answers.turns, worst);
  const nlohmann::json json = {{"bench", "rates"},
                               {"minutes", minutes},
                               {"answers", answers.chunks},
                               {"errors", answers.errors},
                               {"versions", answers.versions},
                               {"refreshed", answers.refreshed},
                               {"jitter_p50_ms", p50},
                               {"jitter_p99_ms", p99},
                               {"jitter_max_ms", most},
                               {"ok", ok}};
  std::printf("%s\n", json.dump().c_str());
  return check && !ok ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) { return saccade::bench::Main(argc, argv); }
