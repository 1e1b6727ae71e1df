#pragma once
// Asks a server's grpc.health.v1 once; for the `health` command and container health checks.
#include <chrono>
#include <string>

#include "base/status.h"

namespace saccade {

// PEM files for a server that speaks TLS; all empty: it does not.
struct ProbeTls {
  std::string ca;           // what signed the server's certificate
  std::string certificate;  // of this client, with its key, when the server asks for one
  std::string key;
  std::string server_name;  // in the server's certificate, when it is not the address; empty: it is
};

// OK when the whole server is SERVING; UNAVAILABLE says what it is instead.
// INVALID_ARGUMENT names an option whose file cannot be used.
absl::Status ProbeHealth(const std::string& address, const ProbeTls& tls,
                         std::chrono::milliseconds timeout);

}  // namespace saccade
