#include "tests/bench/server_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "saccade/v1/server.grpc.pb.h"

namespace saccade::bench {
namespace {

int FreePort() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ::bind(fd, reinterpret_cast<sockaddr*>(&address), size);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

bool Ready(const std::string& address) {
  const auto stub =
      v1::Server::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  v1::GetStatusResponse status;
  return stub->GetStatus(&context, {}, &status).ok() && status.ready();
}

}  // namespace

std::string ServerProcess::DemoModel() {
  return "  - name: demo\n    path: " +
         std::filesystem::absolute("deploy/demo/checkpoint").string() +
         "\n    dtype: bf16\n    invalid_action_tokens: clamp\n    kv: {memory_mb: 16}\n";
}

ServerProcess::ServerProcess(const std::string& binary, const std::string& extra,
                             const std::string& models) {
  std::string name = (std::filesystem::temp_directory_path() / "saccade-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) std::exit(2);
  folder_ = name;
  port_ = FreePort();
  address_ = "127.0.0.1:" + std::to_string(port_);
  const std::string config = folder_ + "/server.yaml";
  std::ofstream(config) << "server:\n  listen: \"" << address_
                        << "\"\n  metrics_listen: \"\"\n  log: {level: warn}\n"
                        << extra << "models:\n"
                        << models;
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::execl(binary.c_str(), binary.c_str(), "serve", "--config", config.c_str(), nullptr);
    _exit(127);
  }
  for (int i = 0; i < 600; ++i) {
    if (Ready(address_)) return;
    if (!Alive()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::fprintf(stderr, "bench: %s does not become ready\n", binary.c_str());
  if (Alive()) ::kill(pid_, SIGKILL);
  std::exit(2);
}

ServerProcess::~ServerProcess() {
  Stop();
  std::error_code none;
  std::filesystem::remove_all(folder_, none);
}

double ServerProcess::RssMb() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/statm");
  double total = 0;
  double resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

bool ServerProcess::Alive() {
  if (pid_ < 0) return false;
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) != pid_) return true;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  pid_ = -1;
  return false;
}

int ServerProcess::Stop() {
  if (pid_ > 0) {
    ::kill(pid_, SIGTERM);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    pid_ = -1;
  }
  return exit_code_;
}

}  // namespace saccade::bench
