#include "rpc/grpc_log.h"

#include <grpc/support/log.h>

#include <string_view>

#include "base/logging.h"

namespace saccade {
namespace {

void Write(gpr_log_func_args* args) {
  if (!LogEnabled(LogLevel::kDebug)) return;
  LogDebug("grpc", {{"severity", gpr_log_severity_string(args->severity)},
                    {"file", args->file},
                    {"line", args->line},
                    {"text", args->message}});
}

}  // namespace

void RouteGrpcLog() { gpr_set_log_function(Write); }

}  // namespace saccade
