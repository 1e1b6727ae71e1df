#pragma once
// The commands around a running server.
#include <string>
#include <string_view>

#include "rpc/health_probe.h"
#include "stop_signals.h"

namespace saccade {

// Serves until SIGTERM or SIGINT, then drains. 0 after a clean drain, or when the signal came while
// it was starting; 1 when it cannot start, 2 on a bad configuration. `signals` must live as long as
// the process.
int RunServe(const std::string& config_path, std::string_view version, const StopSignals& signals);

// Checks a configuration and prints the effective one. 0 good, 2 bad.
int RunCheckConfig(const std::string& config_path);

// Asks grpc.health.v1 at `address` once. 0 SERVING, else 1.
int RunHealth(const std::string& address, const ProbeTls& tls);

}  // namespace saccade
