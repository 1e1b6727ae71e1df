#include "base/status.h"

#include <array>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::string_view kPayloadUrl = "saccade.error_info";

constexpr std::array<std::string_view, kReasonCount> kReasonNames = {"unspecified",
                                                                     "invalid_input",
                                                                     "late",
                                                                     "expired",
                                                                     "queue_full",
                                                                     "never_fits",
                                                                     "no_frame",
                                                                     "stale_frame",
                                                                     "cancelled",
                                                                     "superseded",
                                                                     "draining",
                                                                     "rate_limited",
                                                                     "invalid_action_token",
                                                                     "non_finite",
                                                                     "worker_failed",
                                                                     "internal",
                                                                     "missing_input",
                                                                     "unauthenticated",
                                                                     "permission_denied",
                                                                     "out_of_memory",
                                                                     "model_unloaded"};

std::string EncodeMicros(const std::optional<std::chrono::microseconds>& value) {
  return value ? StrCat(value->count()) : std::string();
}

std::optional<std::chrono::microseconds> DecodeMicros(std::string_view text) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(ToAbsl(text), &value)) return std::nullopt;
  return std::chrono::microseconds(value);
}

}  // namespace

std::string_view ReasonName(Reason reason) { return kReasonNames[static_cast<size_t>(reason)]; }

absl::Status MakeError(absl::StatusCode code, std::string_view message, const ErrorInfo& info) {
  absl::Status status(code, ToAbsl(message));
  // The field comes last: it is the only part that may itself hold a separator.
  status.SetPayload(
      ToAbsl(kPayloadUrl),
      absl::Cord(StrCat(static_cast<int>(info.reason), "|", EncodeMicros(info.retry_after), "|",
                        EncodeMicros(info.deadline), "|", EncodeMicros(info.predicted_finish), "|",
                        info.field)));
  return status;
}

absl::Status InvalidField(std::string_view field, std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kInvalidInput;
  info.field = std::string(field);
  return MakeError(absl::StatusCode::kInvalidArgument, StrCat(field, ": ", message), info);
}

ErrorInfo GetErrorInfo(const absl::Status& status) {
  ErrorInfo info;
  const absl::optional<absl::Cord> payload = status.GetPayload(ToAbsl(kPayloadUrl));
  if (!payload) return info;
  const std::string text(*payload);
  const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('|', 4));
  int reason = 0;
  if (parts.size() != 5 || !absl::SimpleAtoi(parts[0], &reason)) return info;
  if (reason >= 0 && reason < kReasonCount) info.reason = static_cast<Reason>(reason);
  info.retry_after = DecodeMicros(parts[1]);
  info.deadline = DecodeMicros(parts[2]);
  info.predicted_finish = DecodeMicros(parts[3]);
  info.field = parts[4];
  return info;
}

}  // namespace saccade
