#pragma once
// Errors across rooms are absl::Status. `ErrorInfo` is the typed part that a client acts on; it
// rides on the status as a payload, so that one mapping (rpc/) turns any error into a gRPC status
// with details.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace saccade {

// Why a request was not answered. Also the only values of the metric label `reason`.
enum class Reason : uint8_t {
  kUnspecified,
  kInvalidInput,        // a field is out of range, malformed, or names something unknown
  kLate,                // predicted to finish after its deadline; see predicted_finish
  kExpired,             // its deadline passed before it finished
  kQueueFull,           // the class's queue limit
  kNeverFits,           // needs more tokens or blocks than the cache or the model can hold
  kNoFrame,             // a required camera has no frame yet
  kStaleFrame,          // the newest frame is older than the request allows
  kCancelled,           // by the client, or the client is gone
  kSuperseded,          // replaced by a newer request of the same session
  kDraining,            // the server is shutting down
  kRateLimited,         // a configured limit on sessions, rate, pixels or bytes
  kInvalidActionToken,  // the model emitted a token outside the action range
  kNonFinite,           // NaN or Inf in logits or actions
  kWorkerFailed,        // the device or its worker failed
  kInternal,
  kMissingInput,      // an instruction or state the model needs has not been sent yet
  kUnauthenticated,   // no token, or an unknown one
  kPermissionDenied,  // the token's role does not reach this call
  kOutOfMemory,       // the memory budget holds no more
  kModelUnloaded,     // its model was unloaded, or another one took its place
};
inline constexpr int kReasonCount = static_cast<int>(Reason::kModelUnloaded) + 1;

// Lower-case name, e.g. "invalid_action_token"; used in metrics, logs and the wire's error detail.
std::string_view ReasonName(Reason reason);

struct ErrorInfo {
  Reason reason = Reason::kUnspecified;
  std::string field;                                     // the offending field, if one
  std::optional<std::chrono::microseconds> retry_after;  // earliest useful retry, from now
  std::optional<std::chrono::microseconds> deadline;     // the request's deadline, from its arrival
  std::optional<std::chrono::microseconds>
      predicted_finish;  // predicted completion, from its arrival
};

absl::Status MakeError(absl::StatusCode code, std::string_view message, const ErrorInfo& info);
// INVALID_ARGUMENT naming `field`.
absl::Status InvalidField(std::string_view field, std::string_view message);
// The payload of `status`, or {kUnspecified} when it carries none.
ErrorInfo GetErrorInfo(const absl::Status& status);

}  // namespace saccade

#define SACCADE_CONCAT_INNER(a, b) a##b
#define SACCADE_CONCAT(a, b) SACCADE_CONCAT_INNER(a, b)
#define RETURN_IF_ERROR(expr)                          \
  do {                                                 \
    absl::Status saccade_status_ = (expr);             \
    if (!saccade_status_.ok()) return saccade_status_; \
  } while (false)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)    \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL(SACCADE_CONCAT(saccade_statusor_, __LINE__), lhs, expr)
