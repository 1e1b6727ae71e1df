#pragma once
// The server's configuration: plain structs, filled from strict YAML. Units are in the names: _s
// seconds, _ms milliseconds, _mb 2^20 bytes, _bytes bytes. config/README.md documents every key;
// schema.h holds keys, ranges and meanings once. Immutable after loading, shared by value or const
// reference by every thread.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/logging.h"
#include "base/modality.h"
#include "base/policy.h"
#include "base/status.h"

namespace saccade {

// PEM files of the gRPC port; paths are joined to the file's folder on loading.
struct TlsConfig {
  std::string certificate;  // the server's own, with the chain up to the root
  std::string key;          // its private key
  std::string client_ca;  // clients must present a certificate signed by one of these; empty: none
};

struct ServerConfig {
  std::string listen = "127.0.0.1:50051";  // host:port of the gRPC API
  bool allow_insecure = false;             // listen beyond loopback without TLS and tokens
  std::optional<TlsConfig> tls;            // absent: the gRPC API is not encrypted
  std::string tokens_file;  // digests of the bearer tokens of clients; empty: no token is asked for
  std::string metrics_listen = "127.0.0.1:9090";  // host:port of GET /metrics; empty: not served
  double drain_s = 10;                            // after SIGTERM, longest time for admitted work
  uint64_t max_message_bytes = 20'971'520;        // three raw 1920x1080 frames are 18,662,400
  uint32_t max_sessions = 256;                    // open Session streams
  uint32_t max_streams_per_connection = 256;      // concurrent calls of one HTTP/2 connection
  double keepalive_s = 20;          // the server pings a peer that has been silent this long
  double keepalive_timeout_s = 10;  // and closes the connection when no answer came in this time
  double min_ping_interval_s = 5;   // clients' own pings at least this far apart are accepted
  uint32_t decode_threads = 0;      // decode and resize camera frames, 0: one per core
  LogOptions log;
};

struct LimitsConfig {
  uint64_t max_image_bytes = 8'388'608;  // one frame as sent, encoded or raw
  uint64_t max_pixels = 16'777'216;      // width x height, checked from the header before decoding
  uint32_t max_instruction_bytes = 4'096;  // UTF-8
  uint32_t max_instruction_tokens = 1'024;
  uint32_t max_state_values = 256;    // one state vector, and one executed action
  double acts_per_s = 200;            // act requests of one session, sustained
  double frames_per_s = 480;          // frames of one session over all its cameras, sustained
  double messages_per_s = 1'000;      // text, state, executed, reset and cancel of one session
  double pixels_per_s = 500'000'000;  // pixels of one session's frames, sustained; 0: no limit
  uint32_t sessions_per_peer = 64;    // open sessions of one peer address; 0: no limit
  uint32_t acts_in_flight = 16;       // unanswered act requests of one session
  double session_idle_s = 300;        // a session without any message for this long is closed
  uint32_t max_samples = 16;          // samples of one act request, sequences of one Generate call
  uint32_t max_new_tokens = 512;      // of each sequence of a Generate call
  uint32_t max_beams = 8;             // of one Generate call
  uint32_t outbox_messages = 1'024;   // answers left unread by a client before its stream ends
};

enum class BackendKind : uint8_t { kCpu, kRef };
// Instruction set to use; kAuto takes the fastest the CPU has. Asking for more than it has
// fails at start.
enum class IsaLevel : uint8_t { kAuto, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

struct BackendConfig {
  std::string name;
  BackendKind kind = BackendKind::kCpu;
  uint32_t threads = 0;  // computing threads, 0: min(affinity, cgroup quota)
  IsaLevel isa = IsaLevel::kAuto;
  bool guarded = false;  // ref only: device memory unreadable from the host (a test mode, slow)
};

struct ClassConfig {
  std::string name;
  double deadline_ms = 0;                  // from arrival, when the request brings none; 0: none
  uint32_t tier = 0;                       // 0 is served first
  Modality preferred = Modality::kAction;  // work of this modality goes first inside the class
  uint32_t shares = 1;                     // of the device, against classes of the same tier
  OnLate on_late = OnLate::kReject;        // what becomes of work predicted to miss its deadline
  uint32_t max_queued = 64;                // waiting plus running requests
};

enum class ComputeType : uint8_t { kF32, kBf16 };
enum class InvalidActionTokens : uint8_t { kFail, kClamp };

// Fractions of a pool's blocks.
struct PartitionConfig {
  double floor = 0;  // kept for this modality
  double cap = 1;    // never more than this
};

struct KvConfig {
  uint32_t block_tokens = 16;
  uint32_t memory_mb = 256;  // K/V bytes of this model on each backend
  uint32_t blocks = 0;       // that many blocks instead of memory_mb; 0: by memory_mb
  double headroom = 0.2;     // fraction of the blocks that lower tiers leave when they start
  std::array<PartitionConfig, kModalities> partitions{
      {{0.25, 1.0}, {0.05, 0.75}, {0.0, 0.25}, {0.05, 0.5}}};  // by Modality
};

struct ActionDimConfig {
  std::string name;
  std::string unit;
};

// What a checkpoint does not say about its own actions.
struct ActionSpaceConfig {
  uint32_t steps = 1;     // of one chunk; steps x dims values are decoded
  double dt_s = 0.1;      // between steps
  bool relative = false;  // to the state at the time of the frame
  std::vector<ActionDimConfig> dims;
};

// What no file of an OpenVLA-OFT checkpoint says.
struct OftConfig {
  OftPlatform platform = OftPlatform::kAuto;
  uint32_t chunk = 0;                // 0: the platform's
  std::vector<std::string> cameras;  // empty: the platform's
};

struct ModelConfig {
  std::string name;
  std::string path;                   // checkpoint folder; joined to the file's folder on loading
  std::vector<std::string> backends;  // names; empty: every configured backend
  ComputeType dtype = ComputeType::kF32;
  std::string default_class = "control";
  InvalidActionTokens invalid_action_tokens = InvalidActionTokens::kFail;
  uint32_t least_flow_steps = 0;  // 0: only what a request allows
  uint32_t max_sessions = 0;      // 0: only server.max_sessions bounds it
  KvConfig kv;
  uint32_t vision_cache_frames = 64;  // frames whose vision embeddings are kept per backend
  std::optional<OftConfig> oft;
  std::optional<ActionSpaceConfig> action_space;
};

struct SchedulerConfig {
  double step_ceiling_ms = 10;        // an urgent arrival waits for at most one step, this long
  uint32_t max_batch_rows = 1'024;    // token rows of one step over all sequences
  uint32_t max_batch_sequences = 32;  // sequences of one step
  uint32_t max_batch_frames = 8;      // camera frames encoded in one step
  uint32_t pipeline_depth = 2;        // steps handed to a worker: the running and the next one
  double max_wait_ms = 200;           // a lower tier that got nothing for this long goes first
  double ageing_share = 0.1;          // of a worker's time, at most, for work that goes first so
  double step_timeout_s = 30;         // a worker whose step takes this long is taken out
  double probe_after_ms = 1'000;      // idle this long, one request runs in spite of a prediction
  std::string
      cost_file;  // learned step times across restarts; empty: not kept; joined as paths are
};

// Who loads models while the server runs may name folders below one root only.
struct AdminConfig {
  std::string models_root;  // joined to the file's folder on loading; empty: no folder can be named
};

struct MemoryConfig {
  uint64_t budget_mb = 0;  // of anonymous memory; 0: four fifths of what cgroup and host allow
};

struct Config {
  ServerConfig server;
  MemoryConfig memory;
  AdminConfig admin;
  LimitsConfig limits;
  std::vector<BackendConfig> backends = {{.name = "cpu"}};
  std::vector<ClassConfig> classes = {
      {"control", 20, 0, Modality::kAction, 8, OnLate::kReject, 64},
      {"perception", 50, 1, Modality::kVision, 4, OnLate::kReject, 64},
      {"planning", 100, 1, Modality::kText, 2, OnLate::kReject, 64},
      {"best_effort", 0, 2, Modality::kAction, 1, OnLate::kRunLate, 256},
  };
  std::vector<ModelConfig> models;
  SchedulerConfig scheduler;
};

// Bounds of what is read before any meaning is given to it.
inline constexpr size_t kMaxConfigBytes = 262'144;
inline constexpr int kMaxConfigDepth = 16;

// INVALID_ARGUMENT "file:line: key.path: ..." on the first fault: bad YAML, unknown or repeated key
// (with the nearest valid name), wrong type, value out of range, settings that contradict each
// other. Relative paths are resolved against the folder of `file_name`. Never throws, never touches
// the file system.
absl::StatusOr<Config> ParseConfig(std::string_view text, std::string_view file_name);
// Reads and parses `path`: NOT_FOUND, PERMISSION_DENIED or FAILED_PRECONDITION when it is no
// readable regular file.
absl::StatusOr<Config> LoadConfig(const std::string& path);

// True when only this host can reach `listen`. A name other than localhost is not trusted to be it.
bool IsLoopback(std::string_view listen);

// The one on which ParseConfig agrees for a name of a model, class or backend.
bool IsConfigName(std::string_view text);

// The whole effective configuration as YAML that ParseConfig reads back to the same values.
std::string ToYaml(const Config& config);

// Lower-case names as they stand in YAML.
std::string_view Name(BackendKind kind);
std::string_view Name(IsaLevel level);
std::string_view Name(OnLate action);
std::string_view Name(ComputeType type);
std::string_view Name(OftPlatform platform);
std::string_view Name(InvalidActionTokens policy);

}  // namespace saccade
