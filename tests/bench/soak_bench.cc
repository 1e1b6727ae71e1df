// The real server at 80 % of its capacity while clients, connections and messages go wrong at
// random.
//
// Faults, several a second: a client that vanishes in the middle of anything; a connection that is
// reset inside the handshake, inside a message, or after bytes that are no HTTP; a client that
// floods and never reads; messages that are none; an image that is none. Judged: the server lives,
// a fixed question is always answered with the same tokens, every invariant holds (asked of the
// Admin service), nothing is held at the end, and memory does not grow after the first third.
#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "saccade/v1/admin.grpc.pb.h"
#include "saccade/v1/inference.grpc.pb.h"
#include "saccade/v1/server.grpc.pb.h"
#include "tests/bench/load_mix.h"
#include "tests/bench/server_process.h"

namespace saccade::bench {
namespace {

constexpr double kGrowthMbPerHour = 16;
constexpr double kNoiseMb = 4;  // of a short run

std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

v1::VisionFrame Frame(uint8_t shade) {
  v1::VisionFrame frame;
  v1::RawImage& raw = *frame.mutable_raw();
  raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
  raw.set_width(224);
  raw.set_height(224);
  raw.set_data(std::string(size_t{224} * 224 * 3, static_cast<char>(shade)));
  return frame;
}

// A TCP connection that says `bytes` and is reset.
void SayAndReset(int port, const std::string& bytes) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    static_cast<void>(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }
  const linger at_once = {1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  ::close(fd);
}

class Faults {
 public:
  Faults(const ServerProcess& server, uint32_t seed)
      : address_(server.address()), port_(server.port()), random_(seed) {}

  void One() {
    switch (random_() % 5) {
      case 0:
      case 1:
        Vanish();
        break;
      case 2:
        SayAndReset(port_, Bytes(random_() % 2 == 0));
        break;
      case 3:
        Flood();
        break;
      default:
        Nonsense();
        break;
    }
    ++count_;
  }
  uint64_t count() const { return count_; }

 private:
  // The start of a HTTP/2 connection and a part of what follows, or nothing of the kind.
  std::string Bytes(bool http) {
    std::string bytes = http ? "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" : "";
    if (http) bytes += std::string("\0\0\0\4\0\0\0\0\0", 9);  // SETTINGS
    const size_t noise = random_() % 400;
    for (size_t i = 0; i < noise; ++i) bytes += static_cast<char>(random_());
    return bytes.substr(0, random_() % (bytes.size() + 1));
  }

  // Goes after some messages, without a word.
  void Vanish() {
    const auto stub = v1::Inference::NewStub(NewChannel(address_));
    grpc::ClientContext context;
    const auto stream = stub->Session(&context);
    v1::SessionRequest request;
    request.mutable_open()->set_instruction("drive to the red sign");
    request.mutable_open()->set_latency_class("best_effort");
    request.mutable_open()->mutable_options()->set_stream_tokens(random_() % 2 == 0);
    stream->Write(request);
    const uint64_t acts = random_() % 6;
    for (uint64_t id = 1; id <= acts; ++id) {
      *request.mutable_vision() = Frame(static_cast<uint8_t>(random_()));
      stream->Write(request);
      request.mutable_act()->set_id(id);
      request.mutable_act()->set_samples(1 + static_cast<uint32_t>(random_() % 8));
      request.mutable_act()->set_temperature(1);
      stream->Write(request);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 40));
    context.TryCancel();
    stream->Finish();
  }

  // Sends as fast as it may and reads nothing.
  void Flood() {
    const auto stub = v1::Inference::NewStub(NewChannel(address_));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
    const auto stream = stub->Session(&context);
    v1::SessionRequest request;
    request.mutable_open()->set_instruction("flood");
    for (int i = 0; i < 5000 && stream->Write(request); ++i) request.Clear();
    stream->Finish();
  }

  // An image that is none, a question nobody can answer; reads what comes.
  void Nonsense() {
    const auto stub = v1::Inference::NewStub(NewChannel(address_));
    v1::PredictRequest request;
    std::string image = "\xFF\xD8\xFF\xE0";
    for (uint64_t i = random_() % 2000; i > 0; --i) image += static_cast<char>(random_());
    request.add_frames()->set_encoded(image);
    request.mutable_text()->set_instruction(std::string(random_() % 5000, 'x'));
    request.mutable_act()->set_samples(static_cast<uint32_t>(random_() % 100));
    grpc::ClientContext context;
    v1::PredictResponse response;
    static_cast<void>(stub->Predict(&context, request, &response));
  }

  const std::string address_;
  const int port_;
  std::mt19937 random_;
  std::atomic<uint64_t> count_{0};
};

// The fixed question.
class Probe {
 public:
  explicit Probe(const std::string& address)
      : inference_(v1::Inference::NewStub(NewChannel(address))),
        admin_(v1::Admin::NewStub(NewChannel(address))) {}

  std::string Tokens() {
    v1::PredictRequest request;
    *request.add_frames() = Frame(120);
    request.mutable_text()->set_instruction("drive to the red sign");
    request.mutable_act()->set_latency_class("best_effort");
    grpc::ClientContext context;
    v1::PredictResponse response;
    const grpc::Status status = inference_->Predict(&context, request, &response);
    if (!status.ok()) return status.error_message();
    std::string out;
    for (const int32_t id : response.chunk().samples(0).token_ids()) {
      out += std::to_string(id) + " ";
    }
    return out;
  }
  // What is broken; empty: nothing. `held`: blocks that requests hold.
  std::string Broken(uint64_t& held) {
    v1::GetCacheRequest request;
    request.set_check_invariants(true);
    grpc::ClientContext context;
    v1::GetCacheResponse response;
    const grpc::Status status = admin_->GetCache(&context, request, &response);
    if (!status.ok()) return status.error_message();
    held = 0;
    for (const auto& cache : response.caches()) {
      for (const auto& partition : cache.partitions()) held += partition.held();
    }
    return response.broken_invariant();
  }

 private:
  std::unique_ptr<v1::Inference::Stub> inference_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// Megabytes an hour of the line that fits (hours, megabytes) best.
double Slope(const std::vector<std::pair<double, double>>& points) {
  double n = 0;
  double x = 0;
  double y = 0;
  double xx = 0;
  double xy = 0;
  for (const auto& [a, b] : points) {
    n += 1;
    x += a;
    y += b;
    xx += a * a;
    xy += a * b;
  }
  const double spread = n * xx - x * x;
  return spread > 0 ? (n * xy - x * y) / spread : 0;
}

int Main(int argc, char** argv) {
  CLI::App app("The real server under load and random faults");
  bool check = false;
  double minutes = 60;
  uint32_t seed = 1;
  std::string binary = "build/release/saccade-server";
  app.add_flag("--check", check, "exit 0 only when everything holds");
  app.add_option("--minutes", minutes, "how long")->check(CLI::Range(0.1, 10'000.0));
  app.add_option("--seed", seed, "of faults and arrivals");
  app.add_option("--server", binary, "the server's binary");
  CLI11_PARSE(app, argc, argv);

  ServerProcess server(binary, kLoadConfig);
  const std::vector<ClientKind> mix = LoadMix(10);
  const double scale = 0.8 * CapacityScale(mix, SoloSeconds(server.address(), mix, 40));
  Probe probe(server.address());
  const std::string expected = probe.Tokens();

  std::atomic<bool> stop{false};
  Faults faults(server, seed);
  std::thread breaking([&] {
    while (!stop) {
      faults.One();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  size_t asked = 0;
  size_t answered = 0;
  std::thread loading([&] {
    for (uint32_t round = 0; !stop; ++round) {
      for (const Asked& a : RunLoad(server.address(), mix, scale, 10, seed + round)) {
        ++asked;
        answered += a.end == Asked::End::kAnswered ? 1 : 0;
      }
    }
  });

  std::vector<std::string> faulty;
  std::vector<std::pair<double, double>> memory;  // hours, megabytes; after the first third
  uint64_t held = 0;
  size_t probes = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    const double spent =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (spent > 60 * minutes || !server.Alive() || faulty.size() > 10) break;
    if (const std::string tokens = probe.Tokens(); tokens != expected) {
      faulty.push_back("the fixed question was answered: " + tokens);
    }
    if (const std::string broken = probe.Broken(held); !broken.empty()) {
      faulty.push_back("invariant: " + broken);
    }
    ++probes;
    if (spent > 20 * minutes) memory.emplace_back(spent / 3600, server.RssMb());
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  stop = true;
  breaking.join();
  loading.join();
  bool given_back = false;
  for (int i = 0; i < 50 && server.Alive() && !given_back; ++i) {
    given_back = probe.Broken(held).empty() && held == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (!given_back) faulty.push_back("blocks are held though nobody asks");
  if (!server.Alive()) faulty.push_back("the server ended");
  const double grown = Slope(memory);
  const double span = memory.empty() ? 0 : memory.back().first - memory.front().first;
  if (grown > kGrowthMbPerHour && grown * span > kNoiseMb) faulty.push_back("memory grows");
  const double rss = server.RssMb();
  const int code = server.Stop();
  if (code != 0) faulty.push_back("exit code " + std::to_string(code));

  std::printf(
      "%.1f minutes: %zu requests, %zu answered, %llu faults, %zu probes; %.0f MB, %+.1f MB/h\n",
      minutes, asked, answered, static_cast<unsigned long long>(faults.count()), probes, rss,
      grown);
  for (const std::string& fault : faulty) std::printf("FAULT %s\n", fault.c_str());
  const nlohmann::json json = {
      {"bench", "soak"},      {"minutes", minutes},       {"requests", asked},
      {"answered", answered}, {"faults", faults.count()}, {"probes", probes},
      {"rss_mb", rss},        {"mb_per_hour", grown},     {"faulty", faulty},
      {"ok", faulty.empty()}};
  std::printf("%s\n", json.dump().c_str());
  return check && !faulty.empty() ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) { return saccade::bench::Main(argc, argv); }
