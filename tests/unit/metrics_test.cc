#include "metrics/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "base/strings.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

MetricsOptions Options() {
  static const MemoryBudget memory(1000);
  return {.version = "1.2.3",
          .classes = {"control", "best_effort"},
          .class_deadlines_s = {0.02, 0},
          .models = {"a", "b.2"},
          .backends = {"cpu"},
          .memory = &memory};
}

// Every sample of the exposition: "name{labels}" -> value.
std::map<std::string, double> Samples(const Metrics& metrics) {
  std::map<std::string, double> samples;
  std::istringstream text(metrics.Serialize());
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with('#')) continue;
    const size_t space = line.rfind(' ');
    samples[line.substr(0, space)] = std::strtod(line.c_str() + space, nullptr);
  }
  return samples;
}

std::string Exchange(int port, const std::string& request) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string reply;
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      ::send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) {
      reply.append(buffer, static_cast<size_t>(got));
    }
  }
  ::close(fd);
  return reply;
}

TEST(MetricsTest, RequestsAreCountedByClassAndReason) {
  Metrics metrics(Options());
  ClassMetrics& control = metrics.klass(ClassId(0));
  control.admitted->Increment();
  control.Reject(Reason::kLate);
  control.Reject(Reason::kLate);
  control.Fail(Reason::kWorkerFailed);
  metrics.klass(ClassId(1)).met->Increment();
  metrics.Refuse(Reason::kRateLimited);
  auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("saccade_requests_admitted_total{class=\"control\"}"), 1);
  EXPECT_EQ(samples.at("saccade_requests_admitted_total{class=\"best_effort\"}"), 0);
  EXPECT_EQ(samples.at("saccade_requests_rejected_total{class=\"control\",reason=\"late\"}"), 2);
  EXPECT_EQ(samples.at("saccade_requests_failed_total{class=\"control\",reason=\"worker_failed\"}"),
            1);
  EXPECT_EQ(samples.at("saccade_requests_met_total{class=\"best_effort\"}"), 1);
  EXPECT_EQ(samples.at("saccade_requests_refused_total{reason=\"rate_limited\"}"), 1);
}

TEST(MetricsTest, LatencyBucketsResolveTheDeadlines) {
  Metrics metrics(Options());
  ClassMetrics& control = metrics.klass(ClassId(0));
  for (const double ms : {0.4, 1.5, 19.0, 20.0, 21.0, 499.0, 600.0})
    control.end_to_end_seconds->Observe(ms / 1000);
  auto samples = Samples(metrics);
  const auto below = [&](std::string_view bound) {
    return samples.at(
        StrCat("saccade_end_to_end_seconds_bucket{class=\"control\",le=\"", bound, "\"}"));
  };
  EXPECT_EQ(below("0.0005"), 1);
  EXPECT_EQ(below("0.015"), 2);
  EXPECT_EQ(below("0.02"), 4);  // a bound is inclusive: 20 ms is in time for a 20 ms deadline
  EXPECT_EQ(below("0.03"), 5);
  EXPECT_EQ(below("0.5"), 6);
  EXPECT_EQ(below("+Inf"), 7);
  EXPECT_EQ(samples.at("saccade_end_to_end_seconds_count{class=\"best_effort\"}"), 0);
}

TEST(MetricsTest, HitRateIsAMovingAverageOfLookups) {
  Metrics metrics(Options());
  PartitionMetrics& vision = metrics.model("a").partition(Modality::kVision);
  vision.RecordLookup(256, 0);
  EXPECT_DOUBLE_EQ(vision.hit_rate->Value(), 0.1);
  vision.RecordLookup(64, 192);
  EXPECT_DOUBLE_EQ(vision.hit_rate->Value(), 0.9 * 0.1 + 0.1 * 0.25);
  vision.RecordLookup(0, 0);
  EXPECT_DOUBLE_EQ(vision.hit_rate->Value(), 0.9 * 0.1 + 0.1 * 0.25);
  vision.RecordLookup(0, 10);
  EXPECT_DOUBLE_EQ(vision.hit_rate->Value(), 0.9 * (0.9 * 0.1 + 0.1 * 0.25));
  auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("saccade_kv_hit_tokens_total{model=\"a\",partition=\"vision\"}"), 320);
  EXPECT_EQ(samples.at("saccade_kv_miss_tokens_total{model=\"a\",partition=\"vision\"}"), 202);
  EXPECT_EQ(samples.at("saccade_kv_hit_tokens_total{model=\"b.2\",partition=\"vision\"}"), 0);
}

TEST(MetricsTest, PartitionsStepsFramesAndBackends) {
  Metrics metrics(Options());
  ModelMetrics& model = metrics.model("b.2");
  model.partition(Modality::kAction).SetBlocks(5, 6, 7);
  model.partition(Modality::kText).Evict(EvictionReason::kOtherPartition, 3);
  model.RecordStep(StepKind::kPrefill, std::chrono::microseconds(4000),
                   std::chrono::microseconds(6000), 3, 316);
  model.RejectFrame(Reason::kInvalidInput);
  metrics.backend(WorkerId(0)).worker_up->Set(1);
  metrics.SetBackendInfo(WorkerId(0), "cpu", "avx2, 2 threads, \"quoted\"\n");
  auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("saccade_kv_blocks{model=\"b.2\",partition=\"action\",state=\"free\"}"), 5);
  EXPECT_EQ(samples.at("saccade_kv_blocks{model=\"b.2\",partition=\"action\",state=\"held\"}"), 6);
  EXPECT_EQ(samples.at("saccade_kv_blocks{model=\"b.2\",partition=\"action\",state=\"idle\"}"), 7);
  EXPECT_EQ(samples.at("saccade_kv_evicted_blocks_total{model=\"b.2\",partition=\"text\",reason="
                       "\"other_partition\"}"),
            3);
  EXPECT_DOUBLE_EQ(samples.at("saccade_step_predicted_seconds_sum{kind=\"prefill\",model=\"b.2\"}"),
                   0.004);
  EXPECT_DOUBLE_EQ(samples.at("saccade_step_taken_seconds_sum{kind=\"prefill\",model=\"b.2\"}"),
                   0.006);
  EXPECT_EQ(samples.at("saccade_batch_sequences_sum{model=\"b.2\"}"), 3);
  EXPECT_EQ(samples.at("saccade_batch_rows_sum{model=\"b.2\"}"), 316);
  EXPECT_EQ(samples.at("saccade_frames_rejected_total{model=\"b.2\",reason=\"invalid_input\"}"), 1);
  EXPECT_EQ(samples.at("saccade_worker_up{backend=\"cpu\"}"), 1);
  EXPECT_THAT(metrics.Serialize(), HasSubstr("description=\"avx2, 2 threads, \\\"quoted\\\"\\n\""));
  EXPECT_THAT(metrics.Serialize(), HasSubstr("version=\"1.2.3\""));
}

TEST(MetricsTest, ProcessMemoryAndDeadlinesAreReadWhenAsked) {
  MemoryBudget memory(1000);
  MetricsOptions options = Options();
  options.memory = &memory;
  Metrics metrics(options);
  const auto held = memory.Hold(MemoryKind::kWeights, 70);
  auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("saccade_memory_limit_bytes"), 1000);
  EXPECT_EQ(samples.at("saccade_memory_held_bytes{kind=\"weights\"}"), 70);
  EXPECT_EQ(samples.at("saccade_memory_held_bytes{kind=\"frames\"}"), 0);
  EXPECT_GT(samples.at("process_resident_memory_bytes"), 1 << 20);
  EXPECT_GT(samples.at("process_open_fds"), 2);
  EXPECT_GE(samples.at("process_cpu_seconds_total"), 0);
  EXPECT_GT(samples.at("process_start_time_seconds"), 1.6e9);
  EXPECT_DOUBLE_EQ(samples.at("saccade_class_deadline_seconds{class=\"control\"}"), 0.02);
  EXPECT_EQ(samples.at("saccade_class_deadline_seconds{class=\"best_effort\"}"), 0);
}

TEST(MetricsTest, AModelsSeriesComeOnceAndStay) {
  Metrics metrics(Options());
  const size_t before = Samples(metrics).size();
  metrics.model("new").frames_received->Increment();
  const size_t after = Samples(metrics).size();
  EXPECT_GT(after, before);
  metrics.model("new").frames_received->Increment();
  EXPECT_EQ(Samples(metrics).size(), after);
  EXPECT_EQ(Samples(metrics).at("saccade_frames_received_total{model=\"new\"}"), 2);
}

TEST(MetricsTest, TheNumberOfSeriesIsFixedAtStart) {
  Metrics metrics(Options());
  const size_t before = Samples(metrics).size();
  metrics.klass(ClassId(0)).Reject(Reason::kInternal);
  metrics.model("a").partition(Modality::kState).RecordLookup(1, 2);
  EXPECT_EQ(Samples(metrics).size(), before);
}

TEST(MetricsTest, ReadmeListsEveryMetric) {
  Metrics metrics(Options());
  metrics.SetBackendInfo(WorkerId(0), "cpu", "avx2");
  std::set<std::string> exported;
  std::istringstream text(metrics.Serialize());
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("# HELP ")) exported.insert(line.substr(7, line.find(' ', 7) - 7));
  }
  std::set<std::string> documented;
  std::ifstream readme(SACCADE_SOURCE_DIR "/server/metrics/README.md");
  for (std::string line; std::getline(readme, line);) {
    if (line.starts_with("| `")) documented.insert(line.substr(3, line.find('`', 3) - 3));
  }
  EXPECT_EQ(exported, documented);
}

TEST(MetricsTest, ExpositionPassesPromtool) {
  if (std::system("command -v promtool > /dev/null 2>&1") != 0)
    GTEST_SKIP() << "promtool is not installed";
  Metrics metrics(Options());
  metrics.SetBackendInfo(WorkerId(0), "cpu", "avx2");
  FILE* promtool = ::popen("promtool check metrics 2>&1", "w");
  ASSERT_NE(promtool, nullptr);
  const std::string text = metrics.Serialize();
  ASSERT_EQ(std::fwrite(text.data(), 1, text.size(), promtool), text.size());
  EXPECT_EQ(::pclose(promtool), 0);
}

TEST(MetricsExposerTest, ServesOnlyTheMetrics) {
  Metrics metrics(Options());
  metrics.klass(ClassId(0)).admitted->Increment();
  auto exposer = MetricsExposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  const int port = (*exposer)->port();
  ASSERT_GT(port, 0);
  const std::string reply =
      Exchange(port, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(reply, ::testing::StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(reply, HasSubstr("saccade_requests_admitted_total{class=\"control\"} 1"));
  EXPECT_THAT(Exchange(port, "GET /etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
              ::testing::StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(
      Exchange(port, "GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
      Not(HasSubstr("root:")));
  EXPECT_THAT(Exchange(port, std::string("\0\xff garbage\r\n\r\n", 14)), Not(HasSubstr("200 OK")));
}

TEST(MetricsExposerTest, ATakenPortIsAnError) {
  Metrics metrics(Options());
  auto first = MetricsExposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(first.ok());
  const std::string taken = StrCat("127.0.0.1:", (*first)->port());
  auto second = MetricsExposer::Start(taken, metrics);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(taken));
  EXPECT_FALSE(MetricsExposer::Start("192.0.2.1:9", metrics).ok());  // not an address of this host
}

}  // namespace
}  // namespace saccade
