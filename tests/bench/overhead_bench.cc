// What the server adds to an act request: everything around a model that costs nothing.
//
// A request is a 640x480 JPEG of about 150 KB and an act request behind it, on one stream; the
// answer is a chunk of 7 action tokens, decoded one by one (8 model steps of zero cost: encode and
// prefill, then the tokens). It is compared with a plain gRPC echo of the same bytes, a
// bidirectional callback stream, plus the same decode and resize. Both servers live in one process,
// all clients in another; the ways are measured in turns, in one run.
//
// - echo: both messages come back as they are.
// - decode: JPEG decode and resize to 224x224, CPU time of one thread.
// - echo+decode: the echo whose handler decodes and resizes before it answers; the sum under load.
// - saccade: the real server; `engine` is the part of it from the first step to the last token.
//
// With one client the baseline is echo + decode, each alone, as medians. With eight clients on a
// few cores every way waits for the cores, so the sum of two things that were measured alone says
// nothing; there the baseline is echo+decode under the same eight clients. Both differences are
// printed for both. The bar: 0.3 ms at the median.
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
#include <nlohmann/json.hpp>
#include <numbers>
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
  absl::StatusOr<Prompt> BuildPrompt(std::string_view) const override {
    return BuildPromptFromTokens(std::vector<int32_t>(30, 5));
  }
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids) const override {
    return Prompt{{Modality::kText, {1}, 0},
                  {Modality::kVision, {}, 0},
                  {Modality::kText, {ids.begin(), ids.end()}, 0}};
  }
  absl::StatusOr<Rgb8Image> Preprocess(uint32_t, const Rgb8Image& image) const override {
    return Resize(image, kInput, kInput, ResizeFilter::kBicubic);
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
  ASSIGN_OR_RETURN(const Rgb8Image image,
                   DecodeImage({reinterpret_cast<const uint8_t*>(jpeg.data()), jpeg.size()}, {}));
  return Resize(image, kInput, kInput, ResizeFilter::kBicubic);
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

struct Measured {
  std::array<std::vector<double>, kWays> seconds;
  std::vector<double> engine;
};

// Every client runs every way in turns, all clients the same way at a time.
Measured RunClients(const std::array<int, kWays>& ports, const std::vector<std::string>& visions,
                    size_t clients, int rounds, int requests) {
  std::vector<Measured> all(clients);
  std::barrier barrier(static_cast<std::ptrdiff_t>(clients));
  std::vector<std::thread> threads;
  for (size_t c = 0; c < clients; ++c) {
    threads.emplace_back([&, c] {
      Client client(ports, visions, c * kImages / clients);
      for (int round = -1; round < rounds; ++round) {  // the first warms up
        for (size_t w = 0; w < kWays; ++w) {
          const auto way = static_cast<Way>((w + static_cast<size_t>(round + 1)) % kWays);
          barrier.arrive_and_wait();
          for (int i = 0; i < requests; ++i) {
            const double seconds = client.Request(way);
            if (round < 0) continue;
            all[c].seconds[way].push_back(seconds);
            if (way == kWaySaccade) all[c].engine.push_back(client.engine_seconds());
          }
        }
      }
      barrier.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Measured sum;
  for (const Measured& one : all) {
    sum.engine.insert(sum.engine.end(), one.engine.begin(), one.engine.end());
    for (size_t way = 0; way < kWays; ++way) {
      sum.seconds[way].insert(sum.seconds[way].end(), one.seconds[way].begin(),
                              one.seconds[way].end());
    }
  }
  return sum;
}

// One row of the result, in milliseconds.
struct Row {
  double clients = 0;
  std::array<double, kWays> p50{};
  std::array<double, kWays> p10{};
  double decode = 0;
  double engine = 0;  // of saccade: from the start of the first step to the last token
};

std::vector<Row> ClientProcess(const std::array<int, kWays>& ports,
                               const std::vector<std::string>& jpegs, int rounds, int requests) {
  std::vector<std::string> visions;
  for (const std::string& jpeg : jpegs) visions.push_back(VisionMessage(jpeg));
  std::vector<Row> rows;
  for (const size_t clients : {size_t{1}, size_t{8}}) {
    Row row;
    row.clients = static_cast<double>(clients);
    std::vector<double> decode;
    const auto measure_decode = [&] {
      for (size_t i = 0; i < 3 * kImages; ++i) {
        decode.push_back(
            CpuSeconds([&] { static_cast<void>(DecodeAndResize(jpegs[i % kImages])); }));
      }
    };
    measure_decode();
    decode.clear();
    measure_decode();
    const Measured measured = RunClients(ports, visions, clients, rounds,
                                         std::max(8, requests / static_cast<int>(clients)));
    measure_decode();
    row.decode = Summary(decode).median * 1e3;
    row.engine = Summary(measured.engine).median * 1e3;
    for (size_t way = 0; way < kWays; ++way) {
      const Summary summary(measured.seconds[way]);
      row.p50[way] = summary.median * 1e3;
      row.p10[way] = summary.p10 * 1e3;
    }
    rows.push_back(row);
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

absl::StatusOr<std::vector<Row>> ServerProcess(int to_clients, int from_clients) {
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
  std::vector<Row> rows(2);
  if (!WriteAll(to_clients, ports.data(), sizeof(ports)) ||
      !ReadAll(from_clients, rows.data(), rows.size() * sizeof(Row))) {
    return absl::AbortedError("the clients failed");
  }
  return rows;
}

int Report(const std::vector<Row>& rows, bool check) {
  std::printf("640x480 JPEG of about %zu KB, 8 steps of a free model; milliseconds, medians\n\n",
              kJpegBytes / 1000);
  std::printf("%8s %8s %8s %12s %9s %8s | %22s %20s %8s\n", "clients", "echo", "decode",
              "echo+decode", "saccade", "engine", "over echo and decode", "over echo+decode",
              "bar");
  nlohmann::json json;
  json["bench"] = "overhead";
  bool ok = true;
  for (const Row& row : rows) {
    const double alone = row.p50[kWaySaccade] - row.p50[kWayEcho] - row.decode;
    const double loaded = row.p50[kWaySaccade] - row.p50[kWayEchoDecode];
    const bool one = row.clients == 1;
    const bool held = (one ? alone : loaded) <= kBarMs;
    ok = ok && held;
    std::printf("%8.0f %8.3f %8.3f %12.3f %9.3f %8.3f | %21.3f%s %19.3f%s %8s\n", row.clients,
                row.p50[kWayEcho], row.decode, row.p50[kWayEchoDecode], row.p50[kWaySaccade],
                row.engine, alone, one ? "*" : " ", loaded, one ? " " : "*",
                held ? "held" : "missed");
    json["rows"].push_back({{"clients", row.clients},
                            {"echo_ms", row.p50[kWayEcho]},
                            {"decode_ms", row.decode},
                            {"echo_decode_ms", row.p50[kWayEchoDecode]},
                            {"saccade_ms", row.p50[kWaySaccade]},
                            {"engine_ms", row.engine},
                            {"echo_p10_ms", row.p10[kWayEcho]},
                            {"echo_decode_p10_ms", row.p10[kWayEchoDecode]},
                            {"saccade_p10_ms", row.p10[kWaySaccade]},
                            {"added_over_echo_and_decode_ms", alone},
                            {"added_over_echo_decode_ms", loaded},
                            {"held", held}});
  }
  std::printf("\n* judged: at most %.1f ms\n", kBarMs);
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
    const std::vector<Row> rows = ClientProcess(ports, jpegs, rounds, requests);
    const bool sent = WriteAll(up[1], rows.data(), rows.size() * sizeof(Row));
    _exit(sent ? 0 : 2);
  }
  close(up[1]);  // so that the end of the child is seen
  const absl::StatusOr<std::vector<Row>> rows = ServerProcess(down[1], up[0]);
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
