#include "config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "base/strings.h"
#include "config/numbers.h"
#include "config/schema.h"

namespace saccade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kModels = "models:\n  - {name: m, path: ck}\n";

absl::StatusOr<Config> Parse(std::string_view text) { return ParseConfig(text, "conf/s.yaml"); }

// The message of the refusal.
std::string Refusal(std::string_view text) {
  const absl::StatusOr<Config> config = Parse(text);
  if (config.ok()) return "accepted";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(config.status().message());
}

std::string WithModel(std::string_view text) { return StrCat(text, "\n", kModels); }

// A file in a folder of its own, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "saccade_config_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string operator/(std::string_view name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(ConfigTest, DefaultsWhenOnlyAModelIsNamed) {
  const absl::StatusOr<Config> config = Parse(kModels);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->server.listen, "127.0.0.1:50051");
  EXPECT_GE(config->server.max_message_bytes, 3u * 1920 * 1080 * 3);
  ASSERT_EQ(config->backends.size(), 1u);
  EXPECT_EQ(config->backends[0].kind, BackendKind::kCpu);
  ASSERT_EQ(config->classes.size(), 4u);
  const std::map<std::string, double> deadlines = {
      {"control", 20}, {"perception", 50}, {"planning", 100}, {"best_effort", 0}};
  for (const ClassConfig& c : config->classes)
    EXPECT_EQ(deadlines.at(c.name), c.deadline_ms) << c.name;
  EXPECT_EQ(config->classes[0].preferred, Modality::kAction);
  EXPECT_EQ(config->classes[1].preferred, Modality::kVision);
  EXPECT_EQ(config->classes[2].preferred, Modality::kText);
  EXPECT_EQ(config->models[0].path, "conf/ck");
  EXPECT_FALSE(config->models[0].action_space.has_value());
}

TEST(ConfigTest, ReadsEveryKindOfValue) {
  const absl::StatusOr<Config> config = Parse(R"(
server: {listen: "[::1]:6000", metrics_listen: "", drain_s: 2.5, decode_threads: 3, log: {level: debug, format: json}}
backends:
  - {name: slow, kind: ref, guarded: true}
  - {name: fast, kind: cpu, threads: 3, isa: avx512_bf16}
classes:
  - {name: urgent, deadline_ms: 12.5, tier: 0, preferred: state, shares: 3, on_late: run_late, max_queued: 9}
models:
  - name: a
    path: /abs/./ck
    backend: [slow, fast]
    dtype: bf16
    default_class: urgent
    invalid_action_tokens: clamp
    kv: {blocks: 77, block_tokens: 8, headroom: 0.125, partitions: {vision: {floor: 0.5, cap: 0.5}, action: {floor: 0, cap: 0.125}}}
    vision_cache_frames: 5
    oft: {platform: aloha, chunk: 10, cameras: [top, left]}
    action_space: {steps: 2, dt_s: 0.05, relative: true, dims: [{name: x, unit: m}, {name: grip}]}
  - {name: b, path: ../b, backend: fast, default_class: "urgent"}
limits: {messages_per_s: 12.5}
scheduler: {step_ceiling_ms: 0.5, max_batch_rows: 64, pipeline_depth: 1, max_wait_ms: 50,
            ageing_share: 0.5, probe_after_ms: 2000,
            cost_file: state/costs}
)");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->server.listen, "[::1]:6000");
  EXPECT_EQ(config->server.metrics_listen, "");
  EXPECT_DOUBLE_EQ(config->server.drain_s, 2.5);
  EXPECT_EQ(config->server.log.level, LogLevel::kDebug);
  EXPECT_EQ(config->server.log.format, LogFormat::kJson);
  EXPECT_EQ(config->server.decode_threads, 3u);
  EXPECT_DOUBLE_EQ(config->limits.messages_per_s, 12.5);
  EXPECT_DOUBLE_EQ(config->scheduler.max_wait_ms, 50);
  EXPECT_DOUBLE_EQ(config->scheduler.ageing_share, 0.5);
  EXPECT_DOUBLE_EQ(config->scheduler.probe_after_ms, 2000);
  EXPECT_TRUE(config->scheduler.cost_file.ends_with("state/costs")) << config->scheduler.cost_file;
  ASSERT_EQ(config->backends.size(), 2u);
  EXPECT_TRUE(config->backends[0].guarded);
  EXPECT_EQ(config->backends[1].isa, IsaLevel::kAvx512Bf16);
  EXPECT_EQ(config->backends[1].threads, 3u);
  ASSERT_EQ(config->classes.size(), 1u);
  EXPECT_EQ(config->classes[0].on_late, OnLate::kRunLate);
  EXPECT_EQ(config->classes[0].preferred, Modality::kState);
  const ModelConfig& a = config->models[0];
  EXPECT_EQ(a.path, "/abs/ck");
  EXPECT_THAT(a.backends, ::testing::ElementsAre("slow", "fast"));
  EXPECT_EQ(a.dtype, ComputeType::kBf16);
  EXPECT_EQ(a.invalid_action_tokens, InvalidActionTokens::kClamp);
  EXPECT_EQ(a.kv.blocks, 77u);
  EXPECT_DOUBLE_EQ(a.kv.headroom, 0.125);
  EXPECT_DOUBLE_EQ(a.kv.partitions[0].floor, 0.5);
  EXPECT_DOUBLE_EQ(a.kv.partitions[3].cap, 0.125);
  ASSERT_TRUE(a.oft.has_value());
  EXPECT_EQ(a.oft->platform, OftPlatform::kAloha);
  EXPECT_EQ(a.oft->chunk, 10u);
  EXPECT_THAT(a.oft->cameras, ::testing::ElementsAre("top", "left"));
  EXPECT_FALSE(config->models[1].oft.has_value());
  ASSERT_TRUE(a.action_space.has_value());
  EXPECT_EQ(a.action_space->dims[1].name, "grip");
  EXPECT_EQ(a.action_space->dims[1].unit, "");
  EXPECT_EQ(config->models[1].path, "b");
  EXPECT_THAT(config->models[1].backends, ::testing::ElementsAre("fast"));
}

TEST(ConfigTest, UnknownKeysNameTheNearestOrWhereTheyBelong) {
  EXPECT_EQ(Refusal(WithModel("server:\n  lisen: a:1")),
            "conf/s.yaml:2: server.lisen: unknown key; nearest valid name: listen");
  EXPECT_EQ(
      Refusal(WithModel("scheduler:\n  max_bacth_rows: 4")),
      "conf/s.yaml:2: scheduler.max_bacth_rows: unknown key; nearest valid name: max_batch_rows");
  EXPECT_THAT(Refusal(WithModel("limits: {max_que: 1}")), HasSubstr("limits.max_que: unknown key"));
  // In another case.
  EXPECT_THAT(Refusal(WithModel("server: {Drain_S: 1}")), HasSubstr("nearest valid name: drain_s"));
  // Valid, but elsewhere.
  EXPECT_THAT(Refusal(WithModel("server: {max_queued: 1}")),
              HasSubstr("it belongs elsewhere: classes[].max_queued"));
  EXPECT_THAT(
      Refusal("models:\n- name: m\n  path: p\n  kv:\n    partitions:\n      visoin: {cap: 1}\n"),
      HasSubstr(
          "s.yaml:6: models[0].kv.partitions.visoin: unknown key; nearest valid name: vision"));
  // A misspelt required key is reported as itself, not as missing.
  EXPECT_THAT(Refusal("models:\n- name: m\n  pth: p\n"),
              HasSubstr("models[0].pth: unknown key; nearest valid name: path"));
  EXPECT_THAT(Refusal(StrCat("server: {\"", std::string(900, 'x'), "\": 1}\n", kModels)),
              AllOf(HasSubstr("unknown key"),
                    ::testing::ResultOf([](const std::string& s) { return s.size(); },
                                        ::testing::Lt(400u))));
}

TEST(ConfigTest, IntegersArePlainDecimalDigitsInRange) {
  for (const char* bad : {"-1",
                          "+1",
                          "010",
                          "00",
                          "0x10",
                          "1e3",
                          "1.0",
                          "4.5",
                          "99999999999",
                          "18446744073709551616",
                          "340282366920938463463374607431768211456",
                          "\"8\"",
                          "'8'",
                          "~",
                          "",
                          "null",
                          "[1]",
                          "{a: 1}",
                          "true",
                          "8a",
                          "1_000",
                          ".inf",
                          ".nan",
                          "1,000",
                          "!!int 8",
                          "!!str 8"}) {
    const std::string message =
        Refusal(WithModel(StrCat("scheduler:\n  max_batch_sequences: ", bad)));
    EXPECT_THAT(message, StartsWith("conf/s.yaml:2: ")) << bad;
    if (!std::string_view(bad).starts_with("!!")) {
      EXPECT_THAT(message, HasSubstr("scheduler.max_batch_sequences: got ")) << bad;
    }
  }
  EXPECT_THAT(Refusal(WithModel("scheduler: {max_batch_sequences: 0}")),
              HasSubstr("got the value 0; allowed are the integers 1..1024"));
  EXPECT_TRUE(Parse(WithModel("scheduler: {max_batch_sequences: 1}")).ok());
  EXPECT_TRUE(Parse(WithModel("scheduler: {max_batch_sequences: 1024}")).ok());
  EXPECT_THAT(Refusal(WithModel("scheduler: {max_batch_sequences: 1025}")),
              HasSubstr("got the value 1025"));
}

TEST(ConfigTest, NumbersArePlainDecimalsInRange) {
  for (const char* bad :
       {"-1",   "-0",    "+1",   "01.5", "1.",    ".5",    "1e3",
        ".nan", ".NaN",  "nan",  ".inf", "-.inf", "inf",   "\"1.5\"",
        "~",    "[1.5]", "1.5s", "1..5", "1.5.5", "0x1p3", "99999999999999999999999.0"}) {
    EXPECT_THAT(Refusal(WithModel(StrCat("server:\n  drain_s: ", bad))),
                StartsWith("conf/s.yaml:2: server.drain_s: got "))
        << bad;
  }
  EXPECT_THAT(
      Refusal("models:\n- {name: m, path: p, kv: {partitions: {vision: {cap: 1.5}}}}"),
      HasSubstr(
          "models[0].kv.partitions.vision.cap: got the value 1.5; allowed are the numbers 0..1"));
  EXPECT_TRUE(Parse(WithModel("server: {drain_s: 0}")).ok());
  EXPECT_TRUE(Parse(WithModel("server: {drain_s: 3600.0}")).ok());
}

TEST(ConfigTest, SchedulingKeysHaveSensibleRanges) {
  for (const char* bad : {"scheduler: {max_wait_ms: 0}", "scheduler: {max_wait_ms: 600001}",
                          "scheduler: {ageing_share: 0}", "scheduler: {ageing_share: 1.5}",
                          "scheduler: {probe_after_ms: 0}", "scheduler: {probe_after_ms: 1000000}",
                          "limits: {messages_per_s: 0}", "server: {decode_threads: 257}"}) {
    EXPECT_THAT(Refusal(WithModel(bad)), HasSubstr("; allowed are the ")) << bad;
  }
  EXPECT_TRUE(Parse(WithModel("scheduler: {ageing_share: 1, max_wait_ms: 1}")).ok());
}

TEST(ConfigTest, OtherTypesAreCheckedToo) {
  for (const char* bad : {"yes", "on", "True", "1", "\"true\"", "~", "[true]"}) {
    EXPECT_THAT(Refusal(WithModel(StrCat("backends:\n- {name: r, kind: ref, guarded: ", bad, "}"))),
                HasSubstr("backends[0].guarded: got "))
        << bad;
  }
  EXPECT_THAT(
      Refusal(WithModel("server: {log: {level: verbose}}")),
      HasSubstr(
          "server.log.level: got the value verbose; allowed are trace, debug, info, warn, error"));
  EXPECT_THAT(Refusal(WithModel("server: []")),
              HasSubstr("server: expected a section of keys, got a list"));
  EXPECT_THAT(Refusal(WithModel("server:")),
              HasSubstr("server: expected a section of keys, got nothing (null)"));
  EXPECT_THAT(Refusal(WithModel("backends: {name: a}")),
              HasSubstr("backends: got a section of keys; expected a list"));
  EXPECT_THAT(Refusal(WithModel("backends: []")), HasSubstr("expected a list of 1..16 entries"));
  EXPECT_THAT(Refusal(WithModel("server: {listen: [a]}")),
              HasSubstr("server.listen: got a list; expected text"));
  EXPECT_THAT(Refusal("models:\n- {name: \"bad name\", path: p}"),
              HasSubstr("models[0].name: got the quoted text"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: \"\"}"), HasSubstr("models[0].path"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, backend: [cpu, [cpu]]}"),
              HasSubstr("models[0].backend"));
  EXPECT_THAT(Refusal("models:\n- {name: m}"),
              HasSubstr("models[0].path: the key is required and missing"));
  EXPECT_THAT(Refusal("server: {}"), HasSubstr("models: the key is required and missing"));
}

TEST(ConfigTest, AddressesNeedAHostAndAPort) {
  for (const char* bad : {"127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:080",
                          "127.0.0.1:80a", ":80", "127.0.0.1:-1", "127.0.0.1:", "a b:80", "::1:80",
                          "[]:80", "[zz]:80", "999.1.1.1:80", "1.2.3:80", "50051", ""}) {
    EXPECT_THAT(Refusal(WithModel(StrCat("server: {listen: \"", bad, "\"}"))),
                HasSubstr("server.listen: got"))
        << bad;
  }
  for (const char* good : {"0.0.0.0:1", "localhost:65535", "[::]:50051", "[fe80::1]:80",
                           "10.0.0.1:7", "vla-1.example.org:443"}) {
    EXPECT_TRUE(
        Parse(WithModel(StrCat("server: {allow_insecure: true, listen: \"", good, "\"}"))).ok())
        << good;
  }
  EXPECT_THAT(Refusal(WithModel("server: {listen: \"a:1\", metrics_listen: \"a:1\"}")),
              HasSubstr("server.metrics_listen: is the same address as server.listen"));
}

TEST(ConfigTest, SettingsMustNotContradictEachOther) {
  EXPECT_THAT(Refusal("models:\n- name: m\n  path: p\n  kv:\n    partitions:\n"
                      "      vision: {floor: 0.6}\n      text: {floor: 0.5}\n"),
              AllOf(StartsWith("conf/s.yaml:6: models[0].kv.partitions: "),
                    HasSubstr("allowed is at most 1")));
  EXPECT_THAT(Refusal("models:\n- name: m\n  path: p\n  kv:\n    partitions:\n"
                      "      vision: {floor: 0.6,\n        cap: 0.5}\n"),
              HasSubstr("the cap 0.5 is below the floor 0.6"));
  EXPECT_THAT(Refusal(WithModel("limits:\n  max_image_bytes: 20971520")),
              StartsWith("conf/s.yaml:2: limits.max_image_bytes: "));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, backend: gpu}"),
              HasSubstr("gpu is no configured backend, allowed are cpu"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, backend: [cpu, cpu]}"),
              HasSubstr("cpu is named twice"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, default_class: contrl}"),
              HasSubstr("allowed are control, perception, planning, best_effort"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p}\n- {name: m, path: q}"),
              HasSubstr("s.yaml:3: models[1].name: the name m is repeated"));
  EXPECT_THAT(Refusal(WithModel("backends:\n- {name: c, kind: cpu, guarded: true}")),
              HasSubstr("only the ref backend"));
  EXPECT_THAT(Refusal(WithModel("backends:\n- {name: c, kind: ref, isa: avx2}")),
              HasSubstr("backends[0].isa"));
  EXPECT_THAT(Refusal(WithModel("backends:\n- {name: c, kind: ref, threads: 4}")),
              HasSubstr("backends[0].threads"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, action_space: {steps: 1, dt_s: 1, dims: "
                      "[{name: x}, {name: x}]}}"),
              HasSubstr("models[0].action_space.dims[1].name: the name x is repeated"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, oft: {cameras: [a, b, a]}}"),
              HasSubstr("models[0].oft.cameras: a name is repeated"));
  EXPECT_THAT(Refusal("models:\n- {name: m, path: p, oft: {platform: mars}}"),
              HasSubstr("models[0].oft.platform"));
}

TEST(ConfigTest, BeyondLoopbackNeedsTlsAndTokensOrSayingSo) {
  const std::string tls = "tls: {certificate: c.pem, key: k.pem}";
  const std::string far = "server:\n  metrics_listen: ''\n  listen: \"0.0.0.0:1\"\n  ";
  EXPECT_THAT(Refusal(WithModel(far)),
              AllOf(StartsWith("conf/s.yaml:3: server.listen: 0.0.0.0:1 is beyond loopback"),
                    HasSubstr("set server.tls and server.tokens_file, or server.allow_insecure")));
  EXPECT_THAT(Refusal(WithModel(StrCat(far, tls))), HasSubstr("set server.tokens_file, or"));
  EXPECT_THAT(Refusal(WithModel(StrCat(far, "tokens_file: t"))), HasSubstr("set server.tls, or"));
  EXPECT_EQ(Refusal(WithModel(StrCat(far, tls, "\n  tokens_file: t"))), "accepted");
  EXPECT_EQ(Refusal(WithModel(StrCat(far, "allow_insecure: true"))), "accepted");
  for (const char* near : {"127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(IsLoopback(near)) << near;
    EXPECT_EQ(Refusal(WithModel(StrCat("server: {listen: \"", near, "\"}"))), "accepted") << near;
  }
  // Names are not trusted by their looks.
  for (const char* other : {"127.example.com:1", "localhost.example.com:1", "[::]:1", "10.0.0.1:1",
                            "[::ffff:10.0.0.1]:1", "robot:1"}) {
    EXPECT_FALSE(IsLoopback(other)) << other;
    EXPECT_THAT(Refusal(WithModel(StrCat("server: {listen: \"", other, "\"}"))),
                HasSubstr("is beyond loopback"));
  }
}

TEST(ConfigTest, CredentialPathsStartAtTheFile) {
  const absl::StatusOr<Config> config =
      Parse(WithModel("server:\n  tokens_file: tokens\n"
                      "  tls: {certificate: ../c.pem, key: /etc/k.pem, client_ca: ca/a.pem}"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->server.tokens_file, "conf/tokens");
  EXPECT_EQ(config->server.tls->certificate, "c.pem");
  EXPECT_EQ(config->server.tls->key, "/etc/k.pem");
  EXPECT_EQ(config->server.tls->client_ca, "conf/ca/a.pem");
  const absl::StatusOr<Config> again = ParseConfig(ToYaml(*config), "x.yaml");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ToYaml(*again), ToYaml(*config));
  const absl::StatusOr<Config> none = Parse(kModels);
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->server.tls.has_value());
  EXPECT_EQ(none->server.tokens_file, "");
  EXPECT_THAT(Refusal(WithModel("server: {tls: {certificate: c.pem}}")),
              HasSubstr("server.tls.key: the key is required"));
  EXPECT_THAT(Refusal(WithModel("server: {tls: {certificate: '', key: k}}")),
              HasSubstr("server.tls.certificate: "));
}

TEST(ConfigTest, YamlItselfIsBounded) {
  EXPECT_THAT(Refusal(""), HasSubstr("the file is empty"));
  EXPECT_THAT(Refusal("# only a comment\n"), HasSubstr("s.yaml:1: "));
  EXPECT_THAT(Refusal("~"), HasSubstr("expected a section of keys"));
  EXPECT_THAT(Refusal("hello"), HasSubstr("expected a section of keys"));
  EXPECT_THAT(Refusal(WithModel("server: {drain_s: 1}\nserver: {drain_s: 2}")),
              HasSubstr("s.yaml:2: server: the key is repeated, first seen on line 1"));
  EXPECT_THAT(Refusal(WithModel("server: {drain_s: 1, \"drain_s\": 2}")),
              HasSubstr("drain_s: the key is repeated"));
  EXPECT_THAT(Refusal(StrCat(kModels, "---\n", kModels)), HasSubstr("more than one YAML document"));
  EXPECT_THAT(Refusal(WithModel("server: &a {drain_s: 1}")), HasSubstr("anchors"));
  EXPECT_THAT(Refusal("a: &a [x]\nb: *a\n"), HasSubstr("anchors"));
  EXPECT_THAT(Refusal("b: *a\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(Refusal("? [a]\n: b\n"), HasSubstr("a key must be text"));
  EXPECT_THAT(Refusal("~: b\n"), HasSubstr("a key must be text"));
  EXPECT_THAT(Refusal("server:\n\tdrain_s: 1\n"), HasSubstr("s.yaml:2: not valid YAML"));
  EXPECT_THAT(Refusal("server: {drain_s: 1\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(Refusal("server: \"unterminated"), HasSubstr("not valid YAML"));
  EXPECT_THAT(Refusal(std::string(100'000, '[')), StartsWith("conf/s.yaml:1: "));
  EXPECT_THAT(Refusal(std::string(100'000, '{')), StartsWith("conf/s.yaml:1: "));
  EXPECT_THAT(Refusal(StrCat(std::string(17, '['), std::string(17, ']'))),
              HasSubstr("nested deeper than 16 levels"));
  EXPECT_THAT(Refusal(std::string(kMaxConfigBytes + 1, ' ')),
              HasSubstr("at most 262144 are accepted"));
  std::string nested;
  for (int i = 0; i < 400; ++i) nested.append(static_cast<size_t>(i), ' ').append("a:\n");
  EXPECT_THAT(Refusal(nested), HasSubstr("nested deeper than 16 levels"));
}

// Neither a crash nor an exception, whatever the bytes: mutations of a good file.
TEST(ConfigTest, SurvivesDamagedFiles) {
  const std::string good = ReadFile(SACCADE_SOURCE_DIR "/config/server.yaml");
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    for (int edits = 1 + static_cast<int>(random() % 4); edits > 0; --edits) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, random() % 20);
          break;
        case 2:
          text.insert(at, 1, "\t\n:-[]{}&*!|>'\"%@`#,?\0\xff"[random() % 23]);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 40));
      }
      if (text.empty()) text.push_back('x');
    }
    const absl::StatusOr<Config> config = Parse(text);
    if (config.ok()) {
      EXPECT_TRUE(ParseConfig(ToYaml(*config), "").ok()) << text;
    } else {
      EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(config.status().message()), StartsWith("conf/s.yaml:"));
    }
  }
}

TEST(ConfigTest, EffectiveConfigurationReadsBackTheSame) {
  absl::StatusOr<Config> config = LoadConfig(SACCADE_SOURCE_DIR "/config/server.yaml");
  ASSERT_TRUE(config.ok()) << config.status();
  config->models[0].path = "/odd \"path\"\\\n\x01é";
  config->models[0].kv.partitions[0].floor = 0.1;
  config->server.drain_s = 1.0 / 3;
  config->models[0].oft = OftConfig{OftPlatform::kBridge, 4, {"left", "right"}};
  const std::string text = ToYaml(*config);
  const absl::StatusOr<Config> again = ParseConfig(text, "elsewhere/x.yaml");
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << text;
  EXPECT_EQ(ToYaml(*again), text);
  EXPECT_EQ(again->models[0].path, config->models[0].path);
  EXPECT_EQ(again->server.drain_s, 1.0 / 3);
  EXPECT_EQ(again->models[0].kv.partitions[0].floor, 0.1);
  EXPECT_EQ(again->models[0].action_space->dims[1].unit, "m/s^2");
  EXPECT_EQ(again->models[0].oft->platform, OftPlatform::kBridge);
  EXPECT_THAT(again->models[0].oft->cameras, ::testing::ElementsAre("left", "right"));
}

TEST(ConfigTest, EveryShippedFileIsAccepted) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SACCADE_SOURCE_DIR "/config")) {
    if (entry.path().extension() != ".yaml") continue;
    ++files;
    EXPECT_TRUE(LoadConfig(entry.path().string()).ok())
        << LoadConfig(entry.path().string()).status();
  }
  EXPECT_GE(files, 1);
  const absl::StatusOr<Config> config = LoadConfig(SACCADE_SOURCE_DIR "/config/server.yaml");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->models[0].name, "highway_demo");
  EXPECT_TRUE(std::filesystem::exists(config->models[0].path + "/config.json"))
      << config->models[0].path;
  EXPECT_TRUE(config->server.listen.starts_with("127.0.0.1:"));
}

TEST(ConfigTest, FilesThatCannotBeReadAreNamed) {
  const TempDir dir;
  const auto code = [](const std::string& path) {
    const absl::Status status = LoadConfig(path).status();
    EXPECT_THAT(std::string(status.message()), StartsWith(path));
    return status.code();
  };
  EXPECT_EQ(code(dir / "missing.yaml"), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(dir / "."), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(code(dir / "pipe"), absl::StatusCode::kFailedPrecondition);
  std::ofstream(dir / "secret.yaml") << kModels;
  ASSERT_EQ(::chmod((dir / "secret.yaml").c_str(), 0), 0);
  if (::geteuid() != 0) {
    EXPECT_EQ(code(dir / "secret.yaml"), absl::StatusCode::kPermissionDenied);
  }
  std::ofstream(dir / "big.yaml") << std::string(kMaxConfigBytes + 1, '#');
  EXPECT_EQ(code(dir / "big.yaml"), absl::StatusCode::kInvalidArgument);
}

TEST(NumbersTest, WriteRealReadsBack) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 1000; ++i) {
    const double value = std::generate_canonical<double, 53>(random) * (i % 2 == 0 ? 1.0 : 1e6);
    ASSERT_EQ(ReadReal(WriteReal(value)), value) << WriteReal(value);
  }
  EXPECT_EQ(WriteReal(20), "20");
  EXPECT_EQ(WriteReal(0.05), "0.05");
}

// config/README.md has one row per key: | `path` | type | allowed | default | meaning |
TEST(SchemaTest, ReadmeDocumentsEveryKeyOnce) {
  std::map<std::string, int> documented;
  std::istringstream readme(ReadFile(SACCADE_SOURCE_DIR "/config/README.md"));
  for (std::string line; std::getline(readme, line);) {
    if (line.starts_with("| `")) ++documented[line];
  }
  std::set<std::string> expected;
  for (const KeyDoc& doc : Schema()) {
    const std::string row = StrCat("| `", doc.path, "` | ", doc.type, " | ", doc.allowed, " | ",
                                   doc.initial, " | ", doc.meaning, " |");
    EXPECT_TRUE(expected.insert(row).second) << "twice in the schema: " << row;
    EXPECT_EQ(documented[row], 1) << "config/README.md needs this row once:\n" << row;
  }
  for (const auto& [row, count] : documented) {
    if (!expected.contains(row)) {
      EXPECT_EQ(count, 0) << "config/README.md documents what is not in the schema:\n" << row;
    }
  }
}

}  // namespace
}  // namespace saccade
