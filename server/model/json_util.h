#pragma once
// JSON from outside, read without an exception escaping and without unbounded memory or recursion.
// Errors name the file and the key path: `config.json: text_config.hidden_size: expected an integer
// in [1, 65536], got "x"`.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/status.h"

namespace saccade {

using Json = nlohmann::json;

struct JsonLimits {
  size_t max_bytes = 32 << 20;
  int max_depth = 32;  // of nested objects and arrays
};

// `origin` is what errors call the text, usually the file's name. INVALID_ARGUMENT: too large, too
// deep, malformed, not UTF-8, or an object that names a key twice.
absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view origin,
                               const JsonLimits& limits = {});

// A regular file of at most max_bytes. NOT_FOUND, or INVALID_ARGUMENT when it is not a regular file
// or too large.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes);
absl::StatusOr<Json> ReadJsonFile(const std::string& path, const JsonLimits& limits = {});

// A place inside a parsed document that knows its name. Holds a pointer: the document must outlive
// it.
class JsonView {
 public:
  JsonView(const Json& root, std::string_view origin) : value_(&root), origin_(origin) {}

  const Json& json() const { return *value_; }
  const std::string& origin() const { return origin_; }
  const std::string& path() const { return path_; }
  // INVALID_ARGUMENT "<origin>: <path>: <message>".
  absl::Status Error(std::string_view message) const;

  // True when this is an object with a member `key` that is not null.
  bool Has(std::string_view key) const;
  // Member of an object, element of an array; missing members and null are errors.
  absl::StatusOr<JsonView> Get(std::string_view key) const;
  absl::StatusOr<JsonView> At(size_t index) const;
  absl::StatusOr<size_t> ArraySize() const;

  // This value as a type. A number with a zero fraction is an integer; no other conversion is made.
  absl::StatusOr<int64_t> AsInt(int64_t min = std::numeric_limits<int64_t>::min(),
                                int64_t max = std::numeric_limits<int64_t>::max()) const;
  absl::StatusOr<double> AsDouble() const;  // finite
  absl::StatusOr<bool> AsBool() const;
  absl::StatusOr<std::string> AsString() const;
  absl::StatusOr<std::vector<double>> AsDoubles() const;
  absl::StatusOr<std::vector<int64_t>> AsInts(int64_t min, int64_t max) const;
  absl::StatusOr<std::vector<bool>> AsBools() const;
  absl::StatusOr<std::vector<std::string>> AsStrings() const;

  // Shorthand for Get(key) and the conversion; with `fallback`, a missing or null member gives it.
  absl::StatusOr<int64_t> Int(std::string_view key, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> Int(std::string_view key, int64_t min, int64_t max,
                              int64_t fallback) const;
  absl::StatusOr<double> Double(std::string_view key) const;
  absl::StatusOr<double> Double(std::string_view key, double fallback) const;
  absl::StatusOr<bool> Bool(std::string_view key) const;
  absl::StatusOr<bool> Bool(std::string_view key, bool fallback) const;
  absl::StatusOr<std::string> String(std::string_view key) const;
  absl::StatusOr<std::string> String(std::string_view key, std::string_view fallback) const;

 private:
  absl::Status TypeError(std::string_view expected) const;

  const Json* value_;
  std::string origin_;
  std::string path_;
};

}  // namespace saccade
