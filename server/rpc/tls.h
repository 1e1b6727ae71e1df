#pragma once
// ServerTls: the certificates of the port. Read and checked at start-up, and again when the files
// change: what does not fit together is left alone, and connections go on with what was read
// before.
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "config/config.h"

namespace grpc {
class ServerCredentials;
}

namespace saccade {

// The texts of the files, known to fit together.
struct TlsPems {
  std::string certificate;
  std::string key;
  std::string client_ca;  // empty: clients need no certificate
};

// INVALID_ARGUMENT "server.tls.<key>: file: ..." on the first fault: not there, not readable, no
// PEM, an encrypted key, a key that everybody may read, a key of another certificate. A certificate
// that is out of date is a warning, because clocks of robots may be wrong at boot.
absl::StatusOr<TlsPems> LoadTls(const TlsConfig& config);

class ServerTls {
 public:
  static absl::StatusOr<std::unique_ptr<ServerTls>> Create(const TlsConfig& config);
  ServerTls(const ServerTls&) = delete;
  ServerTls& operator=(const ServerTls&) = delete;

  // TLS 1.2 or newer; asks for client certificates when there is a client_ca. This object outlives
  // every server that uses them.
  std::shared_ptr<grpc::ServerCredentials> Credentials();
  // Looks at the files and reads them when they changed. One thread.
  void Refresh();

 private:
  struct Stamp {
    int64_t ns = 0;  // of the last change
    off_t size = 0;
    ino_t inode = 0;
    bool operator==(const Stamp&) const = default;
  };
  using Stamps = std::array<Stamp, 3>;
  // gRPC's side of it: what a handshake asks.
  struct Fetcher;

  ServerTls(TlsConfig config, Stamps stamps, TlsPems pems);
  static Stamps StampsOf(const TlsConfig& config);

  const TlsConfig config_;
  Stamps stamps_;  // of the files as last looked at, good or bad
  std::mutex mu_;
  TlsPems pems_;
  bool fresh_ = true;  // not given to gRPC yet
};

}  // namespace saccade
