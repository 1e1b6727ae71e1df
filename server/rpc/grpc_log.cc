#include "rpc/grpc_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <string>
#include <string_view>

#include "base/logging.h"

namespace saccade {
namespace {

void WriteProtobuf(google::protobuf::LogLevel, const char* file, int line,
                   const std::string& text) {
  if (LogEnabled(LogLevel::kDebug))
    LogDebug("protobuf", {{"file", file}, {"line", line}, {"text", text}});
}

void WriteGrpc(gpr_log_func_args* args) {
  if (!LogEnabled(LogLevel::kDebug)) return;
  LogDebug("grpc", {{"severity", gpr_log_severity_string(args->severity)},
                    {"file", args->file},
                    {"line", args->line},
                    {"text", args->message}});
}

}  // namespace

void RouteGrpcLog() {
  gpr_set_log_function(WriteGrpc);
  google::protobuf::SetLogHandler(WriteProtobuf);
}

}  // namespace saccade
