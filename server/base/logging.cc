#include "base/logging.h"

#include <spdlog/common.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <ctime>
#include <exception>
#include <memory>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::array<std::string_view, 5> kLevelNames = {"trace", "debug", "info", "warn", "error"};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  static constexpr std::array<spdlog::level::level_enum, 5> kLevels = {
      spdlog::level::trace, spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
      spdlog::level::err};
  return kLevels[static_cast<size_t>(level)];
}

// Length of the well-formed UTF-8 sequence at the start of `text`, 0 when there is none (RFC 3629).
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f) ||
      (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f)) {
    return 0;
  }
  return length;
}

// As the inside of a JSON string; bytes that are not UTF-8 become U+FFFD. Also used for text, where
// it keeps a record on one line.
void AppendEscaped(std::string& out, std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  while (!text.empty()) {
    const auto byte = static_cast<unsigned char>(text.front());
    const size_t length = Utf8Length(text);
    if (length == 0) {
      out += "\xef\xbf\xbd";
    } else if (byte == '"' || byte == '\\') {
      out += '\\';
      out += text.front();
    } else if (byte == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
}

std::string Timestamp(std::chrono::system_clock::time_point time) {
  const auto since_epoch =
      std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
  const std::time_t seconds = since_epoch / 1000;
  std::tm utc = {};
  gmtime_r(&seconds, &utc);
  std::array<char, 40> buffer{};
  const size_t size = std::strftime(buffer.data(), buffer.size(), "%Y-%m-%dT%H:%M:%S", &utc);
  const std::string millis = StrCat(since_epoch % 1000);
  return StrCat(std::string_view(buffer.data(), size), ".", std::string(3 - millis.size(), '0'),
                millis, "Z");
}

LogLevel FromSpdlog(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
      return LogLevel::kTrace;
    case spdlog::level::debug:
      return LogLevel::kDebug;
    case spdlog::level::info:
      return LogLevel::kInfo;
    case spdlog::level::warn:
      return LogLevel::kWarn;
    default:
      return LogLevel::kError;
  }
}

// spdlog's default logger while the server runs. Records from Log() and from plain spdlog calls
// take the same format.
class StructuredLogger final : public spdlog::logger {
 public:
  explicit StructuredLogger(LogFormat format)
      : spdlog::logger("saccade", std::make_shared<spdlog::sinks::stderr_sink_mt>()),
        format_(format) {
    set_pattern("%v");
  }

  void Write(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
    Emit(spdlog::log_clock::now(), ToSpdlog(level), message, fields);
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    Emit(message.time, message.level, {message.payload.data(), message.payload.size()}, {});
  }

  void Emit(spdlog::log_clock::time_point time, spdlog::level::level_enum level,
            std::string_view message, std::initializer_list<LogField> fields) {
    const std::string record =
        FormatLogRecord(format_, Timestamp(time), FromSpdlog(level), message, fields);
    spdlog::logger::sink_it_(spdlog::details::log_msg(time, {}, name(), level, record));
  }

  LogFormat format_;
};

// Fields in the text format: ` key=1 other="text"`.
void AppendTextFields(std::string& out, std::initializer_list<LogField> fields) {
  for (const LogField& field : fields) {
    StrAppend(&out, " ", field.key(), "=", field.quoted() ? "\"" : "");
    AppendEscaped(out, field.value());
    if (field.quoted()) out += '"';
  }
}

}  // namespace

LogField::LogField(std::string_view key, double value) : key_(key) {
  if (!std::isfinite(value)) {
    value_ = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    quoted_ = true;
    return;
  }
  std::array<char, 32> buffer{};
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  value_ = error == std::errc() ? std::string(buffer.data(), end) : "0";
}

absl::Status InitLogging(const LogOptions& options) {
  try {
    auto logger = std::make_shared<StructuredLogger>(options.format);
    logger->set_level(ToSpdlog(options.level));
    spdlog::set_default_logger(std::move(logger));
  } catch (const std::exception& e) {
    return absl::InternalError(StrCat("cannot set up logging: ", e.what()));
  }
  return absl::OkStatus();
}

bool LogEnabled(LogLevel level) {
  return spdlog::default_logger_raw()->should_log(ToSpdlog(level));
}

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  spdlog::logger* logger = spdlog::default_logger_raw();
  if (!logger->should_log(ToSpdlog(level))) return;
  if (auto* structured = dynamic_cast<StructuredLogger*>(logger)) {
    structured->Write(level, message, fields);
    return;
  }
  // Before InitLogging, and in tests: spdlog's own line.
  std::string text;
  AppendEscaped(text, message);
  AppendTextFields(text, fields);
  logger->log(ToSpdlog(level), spdlog::string_view_t(text));
}

std::string FormatLogRecord(LogFormat format, std::string_view time, LogLevel level,
                            std::string_view message, std::initializer_list<LogField> fields) {
  const std::string_view name = kLevelNames[static_cast<size_t>(level)];
  std::string out;
  if (format == LogFormat::kText) {
    StrAppend(&out, time, " ", name, std::string(6 - name.size(), ' '));
    AppendEscaped(out, message);
    AppendTextFields(out, fields);
    return out;
  }
  StrAppend(&out, R"({"time":")", time, R"(","level":")", name, R"(","message":")");
  AppendEscaped(out, message);
  out += '"';
  for (const LogField& field : fields) {
    StrAppend(&out, ",\"", field.key(), "\":", field.quoted() ? "\"" : "");
    AppendEscaped(out, field.value());
    if (field.quoted()) out += '"';
  }
  return out + "}";
}

}  // namespace saccade
