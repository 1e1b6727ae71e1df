#pragma once
// The schema, once: every key with its type, range and meaning, next to the struct field it fills.
// Readers, writers and documentation are visitors of these functions:
//   Text(key, string&, TextKind)      Integer(key, unsigned&, min, max)   Real(key, double&, min,
//   max) Bool(key, bool&)                  Enum(key, E&)                       Names(key,
//   vector<string>&) Section(key, T&)                  List(key, vector<T>&, min, max)
//   Optional(key, optional<T>&)
// A new key is one line here, one field in config.h and one row in config/README.md (a test
// compares them).
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace saccade {

struct Key {
  const char* name;
  const char* meaning;    // one sentence for config/README.md
  bool required = false;  // inside its section
};
inline constexpr bool kRequired = true;

enum class TextKind : uint8_t {
  kName,             // letters, digits and _ . - ; starts with a letter or digit; at most 63
  kAddress,          // host:port
  kOptionalAddress,  // the same, or empty
  kPath,             // not empty
  kOptionalPath,     // the same, or empty
  kUnit,             // at most 32 bytes
};

template <class E>
struct EnumTable;  // kNames: by value
template <>
struct EnumTable<LogLevel> {
  static constexpr std::array<std::string_view, 5> kNames = {"trace", "debug", "info", "warn",
                                                             "error"};
};
template <>
struct EnumTable<LogFormat> {
  static constexpr std::array<std::string_view, 2> kNames = {"text", "json"};
};
template <>
struct EnumTable<BackendKind> {
  static constexpr std::array<std::string_view, 2> kNames = {"cpu", "ref"};
};
template <>
struct EnumTable<IsaLevel> {
  static constexpr std::array<std::string_view, 5> kNames = {"auto", "avx2", "avx512",
                                                             "avx512_bf16", "amx_bf16"};
};
template <>
struct EnumTable<Modality> {
  static constexpr std::array<std::string_view, kModalities> kNames = kModalityNames;
};
template <>
struct EnumTable<OnLate> {
  static constexpr std::array<std::string_view, 3> kNames = {"reject", "run_late", "degrade"};
};
template <>
struct EnumTable<ComputeType> {
  static constexpr std::array<std::string_view, 2> kNames = {"f32", "bf16"};
};
template <>
struct EnumTable<OftPlatform> {
  static constexpr std::array<std::string_view, 4> kNames = kOftPlatformNames;
};
template <>
struct EnumTable<InvalidActionTokens> {
  static constexpr std::array<std::string_view, 2> kNames = {"fail", "clamp"};
};

template <class V>
void Describe(V& v, LogOptions& c) {
  v.Enum(Key{"level", "Least severe record that is written."}, c.level);
  v.Enum(Key{"format", "One line per record, as text or as a JSON object."}, c.format);
}

template <class V>
void Describe(V& v, TlsConfig& c) {
  v.Text(Key{"certificate", "The server's certificate and the chain above it, PEM.", kRequired},
         c.certificate, TextKind::kPath);
  v.Text(
      Key{"key", "Its private key, PEM, not encrypted. Refused when everybody may read the file.",
          kRequired},
      c.key, TextKind::kPath);
  v.Text(Key{"client_ca",
             "Clients must present a certificate signed by one of these, PEM; empty: they need "
             "none."},
         c.client_ca, TextKind::kOptionalPath);
}

template <class V>
void Describe(V& v, ServerConfig& c) {
  v.Text(Key{"listen",
             "Address of the gRPC API. Loopback by default: other hosts reach it only when told so "
             "here."},
         c.listen, TextKind::kAddress);
  v.Bool(Key{"allow_insecure",
             "Allow `listen` beyond loopback without both `tls` and `tokens_file`: whoever reaches "
             "the port may then use it."},
         c.allow_insecure);
  v.Optional(Key{"tls",
                 "Encryption of the gRPC API, TLS 1.2 or newer; absent: none. The files are "
                 "read again when they change."},
             c.tls);
  v.Text(Key{"tokens_file",
             "Digests and roles of the bearer tokens that clients must bring, see SECURITY.md; "
             "empty: no token is asked for."},
         c.tokens_file, TextKind::kOptionalPath);
  v.Text(Key{"metrics_listen", "Address of `GET /metrics`; empty: not served."}, c.metrics_listen,
         TextKind::kOptionalAddress);
  v.Real(Key{"drain_s", "After SIGTERM, the longest time that admitted work may take to finish."},
         c.drain_s, 0, 3600);
  v.Integer(
      Key{"max_message_bytes",
          "Largest gRPC message. The default holds three raw 1920x1080 frames (18,662,400 bytes)."},
      c.max_message_bytes, 65'536, 1'073'741'824);
  v.Integer(Key{"max_sessions", "Open sessions over all models; one more is refused."},
            c.max_sessions, 1, 1'000'000);
  v.Integer(Key{"max_streams_per_connection", "Concurrent calls on one HTTP/2 connection."},
            c.max_streams_per_connection, 1, 1'000'000);
  v.Real(Key{"keepalive_s", "A silent peer is pinged after this time."}, c.keepalive_s, 1, 7200);
  v.Real(Key{"keepalive_timeout_s",
             "Its connection is closed when the ping is not answered in this time."},
         c.keepalive_timeout_s, 1, 600);
  v.Real(Key{"min_ping_interval_s",
             "Pings of clients at least this far apart are accepted, also without calls."},
         c.min_ping_interval_s, 0.1, 600);
  v.Integer(Key{"decode_threads", "Threads that decode and resize camera frames; 0: one per core."},
            c.decode_threads, 0, 256);
  v.Section(Key{"log", "Logging to standard error."}, c.log);
}

template <class V>
void Describe(V& v, LimitsConfig& c) {
  v.Integer(Key{"max_image_bytes", "One frame as sent, encoded or raw."}, c.max_image_bytes, 1'024,
            1'073'741'824);
  v.Integer(Key{"max_pixels",
                "Width x height of one frame, checked from its header before a byte is "
                "decoded."},
            c.max_pixels, 1'024, 268'435'456);
  v.Integer(Key{"max_instruction_bytes", "One instruction in UTF-8."}, c.max_instruction_bytes, 1,
            1'048'576);
  v.Integer(Key{"max_instruction_tokens", "One instruction sent as token ids."},
            c.max_instruction_tokens, 1, 1'048'576);
  v.Integer(Key{"max_state_values", "Numbers in one state vector, and in one executed action."},
            c.max_state_values, 1, 65'536);
  v.Real(Key{"acts_per_s", "Act requests of one session, sustained."}, c.acts_per_s, 0.01, 100'000);
  v.Real(
      Key{"frames_per_s",
          "Frames of one session over all its cameras, sustained; one that a newer frame replaces "
          "before it is decoded does not count."},
      c.frames_per_s, 0.01, 100'000);
  v.Real(
      Key{"messages_per_s",
          "Text, state, executed, reset and cancel messages of one session together, sustained."},
      c.messages_per_s, 0.01, 100'000);
  v.Real(Key{"pixels_per_s",
             "Pixels of one session's frames, sustained; of one peer address for Predict and "
             "Generate calls. 0: "
             "no limit. The default is three 1920x1080 cameras at 80 Hz."},
         c.pixels_per_s, 0, 1e12);
  v.Integer(Key{"sessions_per_peer",
                "Open sessions and running Predict and Generate calls of one peer address (IPv6: "
                "of one /64 "
                "network); 0: only `server.max_sessions` bounds them."},
            c.sessions_per_peer, 0, 1'000'000);
  v.Integer(Key{"acts_in_flight", "Unanswered act requests of one session."}, c.acts_in_flight, 1,
            4'096);
  v.Real(Key{"session_idle_s", "A session that sends nothing for this long is closed."},
         c.session_idle_s, 1, 604'800);
  v.Integer(
      Key{"max_samples", "Samples one act request, and sequences one Generate call, may ask for."},
      c.max_samples, 1, 256);
  v.Integer(Key{"max_new_tokens", "Tokens of each sequence that a Generate call may ask for."},
            c.max_new_tokens, 1, 65'536);
  v.Integer(Key{"max_beams", "Beams of one Generate call."}, c.max_beams, 1, 64);
  v.Integer(Key{"outbox_messages", "Answers a client may leave unread before its stream is ended."},
            c.outbox_messages, 4, 65'536);
}

template <class V>
void Describe(V& v, BackendConfig& c) {
  v.Text(Key{"name", "Its name for `models[].backend`, in metrics and in logs.", kRequired}, c.name,
         TextKind::kName);
  v.Enum(
      Key{"kind", "`cpu` is the fast one, `ref` the scalar reference that checks it.", kRequired},
      c.kind);
  v.Integer(
      Key{"threads",
          "Computing threads; 0: as many cores as affinity and cgroup quota allow. `ref` has one."},
      c.threads, 0, 1'024);
  v.Enum(Key{"isa",
             "Instruction set used; `auto`: the fastest the CPU has. More than it has fails "
             "at start."},
         c.isa);
  v.Bool(Key{"guarded",
             "`ref` only: device memory that the host cannot read outside operations; a slow test "
             "mode."},
         c.guarded);
}

template <class V>
void Describe(V& v, ClassConfig& c) {
  v.Text(Key{"name", "The name that clients send.", kRequired}, c.name, TextKind::kName);
  v.Real(Key{"deadline_ms",
             "From arrival, for a request that brings no deadline of its own; 0: none."},
         c.deadline_ms, 0, 600'000);
  v.Integer(
      Key{"tier", "0 is served first; earliest deadline first over all classes of the top tier."},
      c.tier, 0, 15);
  v.Enum(Key{"preferred", "Work of this modality goes first inside the class."}, c.preferred);
  v.Integer(Key{"shares", "Weight against the other classes of its tier."}, c.shares, 1, 1'000);
  v.Enum(Key{"on_late",
             "What becomes of a request predicted to miss its deadline. `degrade`: it gets fewer "
             "denoise steps, as far as it or `least_flow_steps` of its model allows, else it is "
             "refused."},
         c.on_late);
  v.Integer(Key{"max_queued", "Requests waiting or running; one more is refused at once."},
            c.max_queued, 1, 100'000);
}

template <class V>
void Describe(V& v, PartitionConfig& c) {
  v.Real(Key{"floor", "Fraction of the blocks kept for this modality."}, c.floor, 0, 1);
  v.Real(Key{"cap", "Fraction of the blocks it may take at most."}, c.cap, 0, 1);
}

template <class V>
void Describe(V& v, std::array<PartitionConfig, kModalities>& c) {
  v.Section(Key{"vision", "Tokens of camera frames."}, c[static_cast<size_t>(Modality::kVision)]);
  v.Section(Key{"text", "Tokens of prompts and instructions."},
            c[static_cast<size_t>(Modality::kText)]);
  v.Section(Key{"state", "Tokens of the robot's state."}, c[static_cast<size_t>(Modality::kState)]);
  v.Section(Key{"action", "Tokens of actions."}, c[static_cast<size_t>(Modality::kAction)]);
}

template <class V>
void Describe(V& v, KvConfig& c) {
  v.Integer(Key{"block_tokens", "Tokens of one block."}, c.block_tokens, 1, 256);
  v.Integer(Key{"memory_mb", "Memory for keys and values on each backend (2^20 bytes)."},
            c.memory_mb, 1, 4'194'304);
  v.Integer(Key{"blocks", "That many blocks in place of `memory_mb`; 0: as many as fit in it."},
            c.blocks, 0, 16'777'216);
  v.Real(Key{"headroom",
             "Fraction of the blocks that a request below tier 0 leaves free, or idle, when it "
             "starts: tier 0 finds them at once."},
         c.headroom, 0, 0.9);
  v.Section(Key{"partitions", "Quotas of the modalities in one pool of blocks."}, c.partitions);
}

template <class V>
void Describe(V& v, ActionDimConfig& c) {
  v.Text(Key{"name", "Told to clients.", kRequired}, c.name, TextKind::kName);
  v.Text(Key{"unit", "Told to clients, for example `rad`; empty: none."}, c.unit, TextKind::kUnit);
}

template <class V>
void Describe(V& v, ActionSpaceConfig& c) {
  v.Integer(Key{"steps", "Actions of one chunk; steps x dims must be what the checkpoint decodes.",
                kRequired},
            c.steps, 1, 1'024);
  v.Real(Key{"dt_s", "Time between two actions of a chunk.", kRequired}, c.dt_s, 0.0001, 3600);
  v.Bool(Key{"relative", "Actions are relative to the state at the time of the frame."},
         c.relative);
  v.List(Key{"dims", "One entry per number of one action, in order.", kRequired}, c.dims, 1, 256);
}

template <class V>
void Describe(V& v, OftConfig& c) {
  v.Enum(Key{"platform",
             "Whose constants it was trained with: chunk, cameras, and bounds of the statistics "
             "(`aloha`: min and max, else q01 and q99). `auto`: the first of libero, aloha and "
             "bridge whose actions and state are as wide as the checkpoint's."},
         c.platform);
  v.Integer(Key{"chunk", "Actions of one answer; 0: the platform's 8, 25 or 5."}, c.chunk, 0,
            1'024);
  v.Names(Key{"cameras", "Names of its images in the order of training; empty: the platform's."},
          c.cameras, "at most 16 different names");
}

template <class V>
void Describe(V& v, ModelConfig& c) {
  v.Text(Key{"name", "The name that clients send.", kRequired}, c.name, TextKind::kName);
  v.Text(Key{"path", "Checkpoint folder; a relative one starts at the folder of this file.",
             kRequired},
         c.path, TextKind::kPath);
  v.Names(
      Key{"backend", "Where it runs: a name or a list of names from `backends`; empty: on all."},
      c.backends, "configured names");
  v.Enum(Key{"dtype", "Type of weights and matrix products."}, c.dtype);
  v.Text(Key{"default_class", "Latency class of a request that names none."}, c.default_class,
         TextKind::kName);
  v.Enum(Key{"invalid_action_tokens",
             "A decoded token outside the action range fails the request, or is clamped as the "
             "reference code does."},
         c.invalid_action_tokens);
  v.Integer(
      Key{"least_flow_steps",
          "Denoise steps that a class with `on_late: degrade` may cut a request to that would "
          "be late; 0: only what the request itself allows."},
      c.least_flow_steps, 0, 1'000);
  v.Integer(Key{"max_sessions",
                "Open sessions of this model; 0: only `server.max_sessions` bounds them."},
            c.max_sessions, 0, 1'000'000);
  v.Section(Key{"kv", "The K/V cache of this model."}, c.kv);
  v.Integer(Key{"vision_cache_frames", "Frames whose vision embeddings are kept on each backend."},
            c.vision_cache_frames, 1, 65'536);
  v.Optional(Key{"oft",
                 "What no file of an OpenVLA-OFT checkpoint says. Absent: read from what it has. "
                 "Needed where it has no heads of its own: it looks like OpenVLA then."},
             c.oft);
  v.Optional(
      Key{"action_space", "What a checkpoint does not say about its actions; clients are told."},
      c.action_space);
}

template <class V>
void Describe(V& v, SchedulerConfig& c) {
  v.Real(Key{"step_ceiling_ms",
             "Longest model step: what an urgent arrival waits for at most. Work is cut to fit, by "
             "rows and, where one row or frame is longer, by layers."},
         c.step_ceiling_ms, 0.1, 10'000);
  v.Integer(Key{"max_batch_rows", "Token rows of one step over all its sequences."},
            c.max_batch_rows, 1, 65'536);
  v.Integer(Key{"max_batch_sequences", "Sequences of one step."}, c.max_batch_sequences, 1, 1'024);
  v.Integer(Key{"max_batch_frames", "Camera frames encoded in one step."}, c.max_batch_frames, 1,
            256);
  v.Integer(Key{"pipeline_depth",
                "Steps given to a worker: 1, or 2 to plan the next, revocable one meanwhile."},
            c.pipeline_depth, 1, 2);
  v.Real(Key{"max_wait_ms",
             "A request below tier 0 that got nothing for this long goes first in a step."},
         c.max_wait_ms, 1, 600'000);
  v.Real(
      Key{"ageing_share",
          "Fraction of a device's time, at most, for requests that go first after `max_wait_ms`."},
      c.ageing_share, 0.001, 1);
  v.Real(
      Key{"step_timeout_s",
          "A worker whose step takes this long hangs: its requests fail, it gets no more work, and "
          "the server is not ready without another one for the model."},
      c.step_timeout_s, 0.1, 3'600);
  v.Real(Key{"probe_after_ms",
             "A model idle for this long admits one request that is predicted to be late: an old "
             "prediction must not refuse for ever."},
         c.probe_after_ms, 1, 600'000);
  v.Text(
      Key{"cost_file",
          "Where learned step times are kept, so that admission is right from the first request "
          "after a restart; a relative path starts at the folder of this file; empty: not kept."},
      c.cost_file, TextKind::kOptionalPath);
}

template <class V>
void Describe(V& v, MemoryConfig& c) {
  v.Integer(
      Key{"budget_mb",
          "Memory the process may hold (2^20 bytes), clean pages of mapped files not counted; 0: "
          "four fifths of what its control group and the host allow. What does not fit is "
          "refused."},
      c.budget_mb, 0, 67'108'864);
}

template <class V>
void Describe(V& v, AdminConfig& c) {
  v.Text(Key{"models_root",
             "Folder whose subfolders may be loaded by `Admin.LoadModel` and `ReloadModel`; empty: "
             "only the paths of `models`."},
         c.models_root, TextKind::kOptionalPath);
}

template <class V>
void Describe(V& v, Config& c) {
  v.Section(Key{"server", "Network, life cycle, logging."}, c.server);
  v.Section(Key{"memory", "The memory budget of the process."}, c.memory);
  v.Section(Key{"admin", "What the Admin service may do."}, c.admin);
  v.Section(Key{"limits", "What one client may ask for."}, c.limits);
  v.List(Key{"backends", "Devices. Default: one `cpu`."}, c.backends, 1, 16);
  v.List(Key{"classes", "Latency classes, replacing the four shipped ones."}, c.classes, 1, 32);
  v.List(Key{"models", "What is served.", kRequired}, c.models, 1, 64);
  v.Section(Key{"scheduler", "Steps and batches."}, c.scheduler);
}

// One key for documentation, e.g. {"models[].kv.memory_mb", "integer", "1..4194304", "256", "Memory
// ..."}.
struct KeyDoc {
  std::string path;
  std::string type;     // section, list, text, integer, number, true/false, enum, name(s)
  std::string allowed;  // range or values
  std::string initial;  // the default; "required"; empty for sections
  std::string meaning;
};
std::vector<KeyDoc> Schema();

}  // namespace saccade
