#pragma once
// Asks a server's grpc.health.v1 once; for the `health` command and container health checks.
#include <chrono>
#include <string>

#include "base/status.h"

namespace saccade {

// OK when the whole server is SERVING; UNAVAILABLE says what it is instead.
absl::Status ProbeHealth(const std::string& address, std::chrono::milliseconds timeout);

}  // namespace saccade
