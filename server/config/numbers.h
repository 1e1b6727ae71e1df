#pragma once
// Numbers as the configuration writes them: decimal digits, no sign, no exponent, no leading zero.
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace saccade {

// Digits only; nullopt for anything else, and for what does not fit in 64 bits.
inline std::optional<uint64_t> ReadInteger(std::string_view text) {
  if (text.empty() || (text.size() > 1 && text.front() == '0')) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    if (__builtin_mul_overflow(value, uint64_t{10}, &value)) return std::nullopt;
    if (__builtin_add_overflow(value, static_cast<uint64_t>(c - '0'), &value)) return std::nullopt;
  }
  return value;
}

// Digits, optionally a point and more digits.
inline std::optional<double> ReadReal(std::string_view text) {
  const size_t point = text.find('.');
  const std::string_view whole = text.substr(0, point);
  if (!ReadInteger(whole)) return std::nullopt;
  if (point != std::string_view::npos) {
    const std::string_view fraction = text.substr(point + 1);
    if (fraction.empty() || fraction.find_first_not_of("0123456789") != std::string_view::npos)
      return std::nullopt;
  }
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The shortest text that reads back to the same value. `value` >= 0 and finite.
inline std::string WriteReal(double value) {
  char buffer[400];
  const auto [end, error] =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed);
  return error == std::errc() ? std::string(buffer, end) : std::string();
}

}  // namespace saccade
