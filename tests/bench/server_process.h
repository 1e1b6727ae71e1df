#pragma once
// A saccade-server of the bench's own: the demo checkpoint, or others, on loopback, its own
// process.
#include <sys/types.h>

#include <string>

namespace saccade::bench {

class ServerProcess {
 public:
  // Starts `binary` and waits until it is ready; ends the process with a message when it is not
  // within a minute. `extra`: more top-level YAML; `models`: in place of the demo's entry.
  ServerProcess(const std::string& binary, const std::string& extra,
                const std::string& models = DemoModel());
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }  // of the gRPC API
  int port() const { return port_; }
  double RssMb() const;  // resident memory, 2^20 bytes; 0 when it is gone
  bool Alive();
  int Stop();  // SIGTERM; its exit code, -1 for a signal

 private:
  static std::string DemoModel();

  std::string folder_;
  std::string address_;
  int port_ = 0;
  pid_t pid_ = -1;
  int exit_code_ = -1;
};

}  // namespace saccade::bench
