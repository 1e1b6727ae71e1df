#pragma once
// Logging through spdlog's default logger (its own process-wide registry; we keep no global of our
// own). Set up once, before threads start; afterwards any thread may log.
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "base/ids.h"
#include "base/status.h"

namespace saccade {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarn, kError };
enum class LogFormat : uint8_t { kText, kJson };

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
};

// Sends every record to standard error, one line each, escaped so that no client text can forge a
// line.
//   text: 2026-01-31T12:00:00.000Z info  accepted request=17 class="control"
//   json:
//   {"time":"2026-01-31T12:00:00.000Z","level":"info","message":"accepted","request":17,"class":"control"}
absl::Status InitLogging(const LogOptions& options);

// One structured field of a record: a number prints bare, text prints quoted and escaped.
class LogField {
 public:
  LogField(std::string_view key, std::string_view value)
      : key_(key), value_(value), quoted_(true) {}
  LogField(std::string_view key, const char* value) : LogField(key, std::string_view(value)) {}
  LogField(std::string_view key, const std::string& value)
      : LogField(key, std::string_view(value)) {}
  LogField(std::string_view key, bool value) : key_(key), value_(value ? "true" : "false") {}
  LogField(std::string_view key, double value);  // non-finite values print as text
  template <std::integral T>
  LogField(std::string_view key, T value) : key_(key), value_(std::to_string(value)) {}
  explicit LogField(RequestId id) : LogField("request", id.value()) {}
  explicit LogField(SessionId id) : LogField("session", id.value()) {}

  std::string_view key() const { return key_; }
  const std::string& value() const { return value_; }
  bool quoted() const { return quoted_; }

 private:
  std::string_view key_;  // a literal of ours
  std::string value_;
  bool quoted_ = false;
};

// True when a record of `level` would be written: ask before building costly fields.
bool LogEnabled(LogLevel level);
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

inline void LogDebug(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarn(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarn, message, fields);
}
inline void LogError(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// One formatted record without its line end; what InitLogging's sink writes. For tests and other
// sinks.
std::string FormatLogRecord(LogFormat format, std::string_view time, LogLevel level,
                            std::string_view message, std::initializer_list<LogField> fields);

}  // namespace saccade
