// What the server adds to an act request: everything around a model that costs nothing.
//
// A request is a 640x480 JPEG of about 150 KB and an act request behind it, on one stream; the
// answer is a chunk of 7 action tokens, decoded one by one (8 model steps of zero cost: encode and
// prefill, then the tokens). It is compared with a plain gRPC echo of the same bytes, a
// bidirectional callback stream, plus the same decode and resize. Both servers live in one process,
// all clients in another; the ways are measured in turns, in one run.
//
// - echo: both messages come back as they are.
// - decode: JPEG decode and resize to 224x224 by the client itself: CPU time of its thread.
// - echo+decode: the echo whose handler decodes and resizes before it answers.
// - saccade: the real server; `engine` is the part of it from the first step to the last token.
// - +cpu: CPU time of the server's process for a request of saccade above one of echo+decode.
//
// Judged: how much the median of saccade is above the sum of the medians of echo and decode, for
// one client that sends as fast as it is answered, and for eight that send 10 frames a second each,
// as robots do, at times of their own. Eight clients that send as fast as they are answered only
// show how the cores are shared: there, every way waits for the cores, and the row says what the
// server takes more of them than the echo that decodes.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/sync_stream.h>
#include <sys/wait.h>
#include <turbojpeg.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>
#include <random>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "metrics/metrics.h"
#include "model/resize.h"
#include "rpc/server.h"
#include "saccade/v1/inference.pb.h"
#include "timing.h"

namespace saccade::bench {
namespace {

constexpr uint32_t kInput = 224;  // pixels, side of the model's input
constexpr int kWidth = 640;
constexpr int kHeight = 480;
constexpr size_t kJpegBytes = 150'000;
constexpr size_t kImages = 32;         // different ones, so that nothing is cached
constexpr uint32_t kActionTokens = 7;  // as OpenVLA
constexpr double kBarMs = 0.3;

constexpr const char* kSession = "/saccade.v1.Inference/Session";
constexpr const char* kEcho = "/bench/Echo";
constexpr const char* kEchoDecode = "/bench/EchoDecode";
enum Way : size_t { kWayEcho, kWayEchoDecode, kWaySaccade, kWays };
constexpr std::array<const char*, kWays> kMethods = {kEcho, kEchoDecode, kSession};
constexpr std::array<const char*, kWays> kWayNames = {"echo", "echo+decode", "saccade"};
// And decoding without a server.
constexpr size_t kTurns = kWays + 1;

// How many clients, and how often each sends; 0: as soon as it is answered.
struct Load {
  size_t clients = 1;
  double hz = 0;
};
constexpr std::array<Load, 3> kLoads = {Load{1, 0}, Load{8, 10}, Load{8, 0}};

// ------------------------------------------------------------------------------------------------
// the free model

class FreeModel final : public Model {
 public:
  FreeModel() {
    spec_.family = "free";
    spec_.cameras = {{"front", kInput, kInput}};
    spec_.statistics = {{"robot", kActionTokens}};
    spec_.kv.layers = 1;
    spec_.kv.kv_heads = 1;
    spec_.kv.head_dim = 2;
    spec_.hidden = 4;
    spec_.vocab_size = 32'064;
    spec_.max_positions = 512;
    spec_.vision_tokens = 256;
    spec_.max_action_tokens = kActionTokens;
  }
  const ModelSpec& spec() const override { return spec_; }
  absl::StatusOr<Prompt> BuildPrompt(const PromptInput&) const override {
    return BuildPromptFromTokens(std::vector<int32_t>(30, 5), 0);
  }
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                               uint64_t) const override {
    return Prompt{
        {{Modality::kText, {1}}, {Modality::kVision}, {Modality::kText, {ids.begin(), ids.end()}}}};
  }
  absl::StatusOr<ModelImage> Preprocess(uint32_t, ImageRows& rows) const override {
    return Resize(rows, kInput, kInput, ResizeFilter::kBicubic);
  }
  bool IsActionToken(int32_t) const override { return true; }
  absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens, std::string_view,
                                            InvalidTokenPolicy) const override {
    ActionChunk chunk;
    chunk.tokens.assign(tokens.begin(), tokens.end());
    chunk.normalized.assign(tokens.size(), 0.5F);
    chunk.values.assign(tokens.size(), 1.0);
    return chunk;
  }
  size_t WorkspaceBytes(uint32_t, uint32_t, uint32_t) const override { return 4096; }
  // The sampled ids are what the memory held when it was made: zeros.
  absl::Status Encode(ExecContext&, const EncodeBatch&) const override { return absl::OkStatus(); }
  absl::Status Forward(ExecContext&, const TrunkBatch&) const override { return absl::OkStatus(); }

 private:
  ModelSpec spec_;
};

// -----------------------------------------------------------------------------------------------------------
// data

// A picture whose JPEG has about the wanted size: smooth shapes under noise.
std::string MakeJpeg(uint32_t seed) {
  std::vector<uint8_t> rgb(size_t{kWidth} * kHeight * 3);
  uint64_t state = seed * 977 + 1;
  for (size_t i = 0; i < rgb.size(); ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const double x = static_cast<double>(i / 3 % kWidth) / kWidth;
    const double y = static_cast<double>(i / 3 / kWidth) / kHeight;
    const double wave = std::sin(2 * std::numbers::pi *
                                 (3 * x + 2 * y + 0.1 * seed + 0.3 * static_cast<double>(i % 3)));
    rgb[i] = static_cast<uint8_t>(110 + 70 * wave + static_cast<double>(state >> 40 & 63));
  }
  tjhandle handle = tjInitCompress();
  std::string best;
  for (int quality = 90; quality >= 30; quality -= 2) {
    unsigned char* bytes = nullptr;
    unsigned long size = 0;
    tjCompress2(handle, rgb.data(), kWidth, 0, kHeight, TJPF_RGB, &bytes, &size, TJSAMP_420,
                quality, 0);
    best.assign(reinterpret_cast<char*>(bytes), size);
    tjFree(bytes);
    if (best.size() <= kJpegBytes) break;
  }
  tjDestroy(handle);
  return best;
}

absl::StatusOr<Rgb8Image> DecodeAndResize(const std::string& jpeg) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageRows> rows,
                   OpenImage({reinterpret_cast<const uint8_t*>(jpeg.data()), jpeg.size()}, {}));
  return Resize(*rows, kInput, kInput, ResizeFilter::kBicubic);
}

std::string VisionMessage(const std::string& jpeg) {
  v1::SessionRequest request;
  request.mutable_vision()->set_encoded(jpeg);
  return request.SerializeAsString();
}

std::string ActMessage() {
  v1::SessionRequest request;
  request.mutable_act()->set_id(1);
  return request.SerializeAsString();
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

// ------------------------------------------------------------------------------------------------------
// echo server

class EchoReactor final : public grpc::ServerGenericBidiReactor {
 public:
  explicit EchoReactor(bool decode) : decode_(decode) { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::OK);
      return;
    }
    if (decode_ && message_.Length() > 1000) Decode();
    StartWrite(&message_);
  }
  void OnWriteDone(bool) override { StartRead(&message_); }
  void OnDone() override { delete this; }

 private:
  void Decode() {
    grpc::ByteBuffer copy(message_);
    grpc::ProtoBufferReader reader(&copy);
    if (!request_.ParseFromZeroCopyStream(&reader) ||
        !DecodeAndResize(request_.vision().encoded()).ok()) {
      std::fprintf(stderr, "overhead: the echo server cannot decode\n");
      std::abort();
    }
  }
  const bool decode_;
  grpc::ByteBuffer message_;
  v1::SessionRequest request_;
};

class EchoService final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    return new EchoReactor(context->method() == kEchoDecode);
  }
};

// ----------------------------------------------------------------------------------------------------------
// clients

using RawStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

class Client {
 public:
  Client(const std::array<int, kWays>& ports, const std::vector<std::string>& visions, size_t first)
      : act_(ToBuffer(ActMessage())), next_(first) {
    for (const std::string& vision : visions) visions_.push_back(ToBuffer(vision));
    for (size_t way = 0; way < kWays; ++way) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      const auto channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(ports[way]),
                                                     grpc::InsecureChannelCredentials(), arguments);
      const grpc::internal::RpcMethod method(kMethods[way],
                                             grpc::internal::RpcMethod::BIDI_STREAMING);
      Line& line = lines_[way];
      line.context = std::make_unique<grpc::ClientContext>();
      line.stream.reset(
          grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
              channel.get(), method, line.context.get()));
      line.channel = channel;
    }
    v1::SessionRequest open;
    open.mutable_open()->set_instruction("drive to the red sign");
    lines_[kWaySaccade].stream->Write(ToBuffer(open.SerializeAsString()));
    Answer(kWaySaccade);
  }
  ~Client() {
    for (Line& line : lines_) {
      line.stream->WritesDone();
      line.context->TryCancel();
      line.stream->Finish();
    }
  }

  // Seconds from the first byte sent to the whole answer.
  double Request(Way way) {
    const grpc::ByteBuffer& vision = visions_[next_++ % visions_.size()];
    return Seconds([&] {
      RawStream& stream = *lines_[way].stream;
      stream.Write(vision);
      stream.Write(act_);
      if (way != kWaySaccade) Answer(way);  // the echo of the frame
      Answer(way);
    });
  }

  // Of the last answer: from the start of its first step to its last token.
  double engine_seconds() const { return engine_seconds_; }

 private:
  struct Line {
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<RawStream> stream;
  };
  void Answer(Way way) {
    grpc::ByteBuffer answer;
    if (!lines_[way].stream->Read(&answer)) {
      std::fprintf(stderr, "overhead: no answer from %s\n", kWayNames[way]);
      std::abort();
    }
    if (way != kWaySaccade) return;
    v1::SessionResponse response;
    grpc::ProtoBufferReader reader(&answer);
    if (!response.ParseFromZeroCopyStream(&reader) || response.has_error() ||
        response.has_notice()) {
      std::fprintf(stderr, "overhead: %s\n", response.ShortDebugString().c_str());
      std::abort();
    }
    if (!response.has_chunk()) return;
    const v1::Timings& timings = response.chunk().timings();
    engine_seconds_ =
        1e-6 * static_cast<double>(timings.encode_us() + timings.prefill_us() + timings.act_us());
  }

  std::array<Line, kWays> lines_;
  std::vector<grpc::ByteBuffer> visions_;
  grpc::ByteBuffer act_;
  size_t next_;
  double engine_seconds_ = 0;
};

// CPU time that all threads of the server's process, the parent of this one, have had, in seconds.
double ServerCpuSeconds() {
  double seconds = 0;
  std::error_code none;
  const std::string tasks = "/proc/" + std::to_string(getppid()) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks, none)) {
    double ns = 0;
    if (std::ifstream(task.path() / "schedstat") >> ns) seconds += 1e-9 * ns;
  }
  return seconds;
}

struct Measured {
  std::array<double, kWays> server_cpu{};  // of all requests
  std::array<std::vector<double>, kWays> seconds;
  std::vector<double> decode;
  std::vector<double> engine;
};

// When a client sends: at once, or once a period, a phase of its own after the start.
class Pace {
 public:
  Pace(double hz, uint32_t seed) : period_(hz > 0 ? 1 / hz : 0), random_(seed) {}
  void Start() {
    next_ = Clock::now() + Span(std::uniform_real_distribution<double>(0, 1)(random_));
  }
  void Wait() {
    if (period_ <= 0) return;
    std::this_thread::sleep_until(next_);
    next_ += Span(1);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::duration Span(double periods) const {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(periods * period_));
  }
  const double period_;  // seconds
  std::mt19937 random_;
  Clock::time_point next_;
};

// Every client takes every turn, all clients the same one at a time.
Measured RunClients(const std::array<int, kWays>& ports, const std::vector<std::string>& jpegs,
                    const std::vector<std::string>& visions, const Load& load, int rounds,
                    int requests) {
  std::vector<Measured> all(load.clients);
  std::barrier barrier(static_cast<std::ptrdiff_t>(load.clients));
  std::vector<std::thread> threads;
  for (size_t c = 0; c < load.clients; ++c) {
    threads.emplace_back([&, c] {
      Client client(ports, visions, c * kImages / load.clients);
      Pace pace(load.hz, static_cast<uint32_t>(c));
      Measured& mine = all[c];
      size_t next_jpeg = c;
      for (int round = -1; round < rounds; ++round) {  // the first warms up
        for (size_t t = 0; t < kTurns; ++t) {
          const size_t turn = (t + static_cast<size_t>(round + 1)) % kTurns;
          barrier.arrive_and_wait();
          const double cpu = c == 0 ? ServerCpuSeconds() : 0;
          barrier.arrive_and_wait();
          pace.Start();
          for (int i = 0; i < requests; ++i) {
            pace.Wait();
            const bool decode = turn == kWays;
            const std::string& jpeg = jpegs[next_jpeg++ % jpegs.size()];
            const double seconds =
                decode ? CpuSeconds([&] { static_cast<void>(DecodeAndResize(jpeg)); })
                       : client.Request(static_cast<Way>(turn));
            if (round < 0) continue;
            (decode ? mine.decode : mine.seconds[turn]).push_back(seconds);
            if (turn == kWaySaccade) mine.engine.push_back(client.engine_seconds());
          }
          barrier.arrive_and_wait();
          if (c == 0 && round >= 0 && turn < kWays) {
            mine.server_cpu[turn] += ServerCpuSeconds() - cpu;
          }
        }
      }
      barrier.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Measured sum;
  const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (const Measured& one : all) {
    append(sum.engine, one.engine);
    append(sum.decode, one.decode);
    for (size_t way = 0; way < kWays; ++way) {
      append(sum.seconds[way], one.seconds[way]);
      sum.server_cpu[way] += one.server_cpu[way];
    }
  }
  return sum;
}

// One row of the result, in milliseconds.
struct Row {
  std::array<double, kWays> p50{};
  std::array<double, kWays> p10{};
  std::array<double, kWays> cpu{};  // of the server, mean per request
  double decode = 0;
  double engine = 0;  // of saccade: from the start of the first step to the last token
};
using Rows = std::array<Row, kLoads.size()>;

Rows ClientProcess(const std::array<int, kWays>& ports, const std::vector<std::string>& jpegs,
                   int rounds, int requests) {
  std::vector<std::string> visions;
  for (const std::string& jpeg : jpegs) visions.push_back(VisionMessage(jpeg));
  Rows rows;
  for (size_t i = 0; i < kLoads.size(); ++i) {
    const Load& load = kLoads[i];
    const Measured measured = RunClients(ports, jpegs, visions, load, rounds,
                                         std::max(8, requests / static_cast<int>(load.clients)));
    rows[i].decode = Summary(measured.decode).median * 1e3;
    rows[i].engine = Summary(measured.engine).median * 1e3;
    for (size_t way = 0; way < kWays; ++way) {
      const Summary summary(measured.seconds[way]);
      rows[i].p50[way] = summary.median * 1e3;
      rows[i].p10[way] = summary.p10 * 1e3;
      rows[i].cpu[way] =
          measured.server_cpu[way] / static_cast<double>(measured.seconds[way].size()) * 1e3;
    }
  }
  return rows;
}

// ------------------------------------------------------------------------------------------------------------
// servers

absl::StatusOr<std::unique_ptr<Engine>> StartEngine(const Config& config, const Clock& clock,
                                                    Metrics* metrics) {
  std::vector<std::unique_ptr<Backend>> backends;
  CpuOptions options;
  options.threads = 1;
  ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeCpuBackend(options));
  backends.push_back(std::move(backend));
  ServedModel served;
  served.name = "free";
  served.instances.push_back(std::make_unique<FreeModel>());
  served.workers = {WorkerId(0)};
  served.kv.num_blocks = 256;  // fewer prompts than images: none is found again
  for (PartitionQuota& quota : served.kv.partitions) quota.cap = served.kv.num_blocks;
  served.embedding_slots = kImages / 2;  // fewer than the images in turn: every frame is encoded
  served.max_sequences = 32;
  std::vector<ServedModel> models;
  models.push_back(std::move(served));
  EngineOptions engine;
  for (const ClassConfig& klass : config.classes) {
    engine.classes.push_back({klass.name, Micros(static_cast<int64_t>(klass.deadline_ms * 1000)),
                              klass.tier, klass.preferred, klass.shares, klass.on_late,
                              klass.max_queued});
  }
  return Engine::Start(engine, std::move(backends), std::move(models), clock, metrics);
}

bool WriteAll(int fd, const void* data, size_t size) {
  return write(fd, data, size) == static_cast<ssize_t>(size);
}
bool ReadAll(int fd, void* data, size_t size) {
  size_t got = 0;
  while (got < size) {
    const ssize_t n = read(fd, static_cast<char*>(data) + got, size - got);
    if (n <= 0) return false;
    got += static_cast<size_t>(n);
  }
  return true;
}

absl::StatusOr<Rows> ServerProcess(int to_clients, int from_clients) {
  Config config;
  config.server.listen = "127.0.0.1:0";
  config.limits.acts_per_s = 1e6;
  config.limits.frames_per_s = 1e6;
  config.models.resize(1);
  config.models[0].name = "free";
  config.models[0].default_class = "best_effort";
  MetricsOptions names;
  for (const ClassConfig& klass : config.classes) names.classes.push_back(klass.name);
  names.models = {"free"};
  names.backends = {"cpu"};
  Metrics metrics(names);
  const SteadyClock clock;
  ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, StartEngine(config, clock, &metrics));
  ASSIGN_OR_RETURN(const std::unique_ptr<RpcServer> rpc,
                   RpcServer::Start(config, clock, &metrics, "bench"));
  RETURN_IF_ERROR(rpc->Serve(*engine));

  EchoService echo;
  grpc::ServerBuilder builder;
  int echo_port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &echo_port);
  builder.RegisterCallbackGenericService(&echo);
  const std::unique_ptr<grpc::Server> echo_server = builder.BuildAndStart();
  if (echo_server == nullptr) return absl::UnavailableError("the echo server does not start");

  const std::array<int, kWays> ports = {echo_port, echo_port, rpc->port()};
  Rows rows;
  if (!WriteAll(to_clients, ports.data(), sizeof(ports)) ||
      !ReadAll(from_clients, rows.data(), sizeof(rows))) {
    return absl::AbortedError("the clients failed");
  }
  return rows;
}

int Report(const Rows& rows, bool check) {
  std::printf("640x480 JPEG of about %zu KB, 8 steps of a free model; milliseconds, medians\n\n",
              kJpegBytes / 1000);
  std::printf("%-16s %8s %8s %12s %9s %8s %7s | %20s %17s %8s\n", "clients", "echo", "decode",
              "echo+decode", "saccade", "engine", "+cpu", "over echo and decode",
              "over echo+decode", "bar");
  nlohmann::json json;
  json["bench"] = "overhead";
  bool ok = true;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const Load& load = kLoads[i];
    const double alone = row.p50[kWaySaccade] - row.p50[kWayEcho] - row.decode;
    const double loaded = row.p50[kWaySaccade] - row.p50[kWayEchoDecode];
    const bool judged = load.clients == 1 || load.hz > 0;
    const bool held = alone <= kBarMs;
    ok = ok && (held || !judged);
    const std::string pace =
        load.hz > 0 ? std::to_string(static_cast<int>(load.hz)) + " Hz" : "full speed";
    std::printf("%-2zu %-13s %8.3f %8.3f %12.3f %9.3f %8.3f %7.3f | %20.3f %17.3f %8s\n",
                load.clients, pace.c_str(), row.p50[kWayEcho], row.decode, row.p50[kWayEchoDecode],
                row.p50[kWaySaccade], row.engine, row.cpu[kWaySaccade] - row.cpu[kWayEchoDecode],
                alone, loaded,
                !judged ? ""
                : held  ? "held"
                        : "missed");
    json["rows"].push_back({{"clients", load.clients},
                            {"hz", load.hz},
                            {"echo_ms", row.p50[kWayEcho]},
                            {"decode_ms", row.decode},
                            {"echo_decode_ms", row.p50[kWayEchoDecode]},
                            {"saccade_ms", row.p50[kWaySaccade]},
                            {"engine_ms", row.engine},
                            {"echo_decode_cpu_ms", row.cpu[kWayEchoDecode]},
                            {"saccade_cpu_ms", row.cpu[kWaySaccade]},
                            {"echo_p10_ms", row.p10[kWayEcho]},
                            {"echo_decode_p10_ms", row.p10[kWayEchoDecode]},
                            {"saccade_p10_ms", row.p10[kWaySaccade]},
                            {"added_over_echo_and_decode_ms", alone},
                            {"added_over_echo_decode_ms", loaded},
                            {"judged", judged},
                            {"held", held}});
  }
  std::printf("\nbar: at most %.1f ms over echo and decode\n", kBarMs);
  json["bar_ms"] = kBarMs;
  json["ok"] = ok;
  std::printf("%s\n", json.dump().c_str());
  return check && !ok ? 1 : 0;
}

int Main(int argc, char** argv) {
  CLI::App app("Added latency of the server around a model that costs nothing");
  bool check = false;
  int rounds = 12;
  int requests = 100;
  app.add_flag("--check", check, "exit 0 only when the bar holds");
  app.add_option("--rounds", rounds, "turns of each way")->check(CLI::Range(1, 10'000));
  app.add_option("--requests", requests, "requests of each turn, over all clients")
      ->check(CLI::Range(1, 10'000));
  CLI11_PARSE(app, argc, argv);

  std::vector<std::string> jpegs;
  for (uint32_t i = 0; i < kImages; ++i) jpegs.push_back(MakeJpeg(i));

  int down[2];
  int up[2];
  if (pipe(down) != 0 || pipe(up) != 0) return 2;
  const pid_t child = fork();  // before gRPC has made a thread
  if (child < 0) return 2;
  if (child == 0) {
    std::array<int, kWays> ports{};
    if (!ReadAll(down[0], ports.data(), sizeof(ports))) _exit(2);
    const Rows rows = ClientProcess(ports, jpegs, rounds, requests);
    const bool sent = WriteAll(up[1], rows.data(), sizeof(rows));
    _exit(sent ? 0 : 2);
  }
  close(up[1]);  // so that the end of the child is seen
  const absl::StatusOr<Rows> rows = ServerProcess(down[1], up[0]);
  close(down[1]);
  waitpid(child, nullptr, 0);
  if (!rows.ok()) {
    std::fprintf(stderr, "overhead: %s\n", rows.status().ToString().c_str());
    return 2;
  }
  return Report(*rows, check);
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) { return saccade::bench::Main(argc, argv); }
