#pragma once
// The commands around a running server.
#include <string>
#include <string_view>

namespace saccade {

// Serves until SIGTERM or SIGINT, then drains. 0 after a clean drain, 1 when it cannot start, 2 on
// a bad configuration.
int RunServe(const std::string& config_path, std::string_view version);

// Checks a configuration and prints the effective one. 0 good, 2 bad.
int RunCheckConfig(const std::string& config_path);

// Asks grpc.health.v1 at `address` once. 0 SERVING, else 1.
int RunHealth(const std::string& address);

}  // namespace saccade
