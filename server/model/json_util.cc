#include "model/json_util.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/strings.h"

namespace saccade {
namespace {

// Builds a document while it checks what nlohmann's own builder does not: depth and repeated keys.
// Returning false stops the parser without an exception.
class BoundedBuilder : public nlohmann::json_sax<Json> {
 public:
  explicit BoundedBuilder(int max_depth) : max_depth_(max_depth) {}

  bool null() override { return Value(Json(nullptr)); }
  bool boolean(bool value) override { return Value(Json(value)); }
  bool number_integer(number_integer_t value) override { return Value(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Value(Json(value)); }
  bool number_float(number_float_t value, const string_t& /*text*/) override {
    return Value(Json(value));
  }
  bool string(string_t& value) override { return Value(Json(std::move(value))); }
  bool binary(binary_t& /*value*/) override { return Fail("binary value"); }

  bool start_object(size_t /*elements*/) override { return Open(Json::object()); }
  bool start_array(size_t /*elements*/) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& key) override {
    Json& object = *stack_.back();
    if (object.contains(key)) return Fail(StrCat("the key \"", key, "\" appears twice"));
    slot_ = &object[key];
    return true;
  }
  bool parse_error(size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..." without its tag.
    std::string_view what = error.what();
    const size_t tag = what.find("] ");
    if (tag != std::string_view::npos) what.remove_prefix(tag + 2);
    return Fail(StrCat("not valid JSON at byte ", position, ": ", what));
  }

  const std::string& error() const { return error_; }
  Json Take() { return std::move(root_); }

 private:
  bool Fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }
  Json* Place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (stack_.back()->is_array()) {
      stack_.back()->push_back(std::move(value));
      return &stack_.back()->back();
    }
    *slot_ = std::move(value);
    return slot_;
  }
  bool Value(Json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json value) {
    if (static_cast<int>(stack_.size()) >= max_depth_) {
      return Fail(StrCat("nested deeper than ", max_depth_, " levels"));
    }
    stack_.push_back(Place(std::move(value)));
    return true;
  }
  bool Close() {
    stack_.pop_back();
    return true;
  }

  int max_depth_;
  Json root_;
  // Open containers, outermost first. A container only grows at its end while it is the innermost,
  // so these pointers stay valid.
  std::vector<Json*> stack_;
  Json* slot_ = nullptr;  // the member that the last key named
  std::string error_;
};

// The value as it stands in the file, short enough for an error line. It came out of the parser, so
// its strings are valid UTF-8 and dump() has nothing to refuse.
std::string Excerpt(const Json& value) {
  constexpr size_t kMax = 60;
  if (value.is_object()) return "an object";
  if (value.is_array()) return StrCat("an array of ", value.size());
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kMax) text = StrCat(text.substr(0, kMax), "...");
  return text;
}

std::optional<int64_t> IntegerOf(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto u = value.get<uint64_t>();
    if (u > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(u);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const double d = value.get<double>();
    if (d == std::floor(d) && std::abs(d) < 9007199254740992.0) return static_cast<int64_t>(d);
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view origin,
                               const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(
        StrCat(origin, ": ", text.size(), " bytes, more than the limit of ", limits.max_bytes));
  }
  BoundedBuilder builder(limits.max_depth);
  bool ok = false;
  try {
    ok = Json::sax_parse(text.begin(), text.end(), &builder);
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(StrCat(origin, ": ", e.what()));
  }
  if (!ok) return absl::InvalidArgumentError(StrCat(origin, ": ", builder.error()));
  return builder.Take();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    if (error == ENOENT) return absl::NotFoundError(StrCat(path, ": no such file"));
    return absl::InvalidArgumentError(StrCat(path, ": ", std::strerror(error)));
  }
  std::string content;
  absl::Status status;
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(StrCat(path, ": not a regular file"));
  } else if (static_cast<uint64_t>(info.st_size) > max_bytes) {
    status = absl::InvalidArgumentError(
        StrCat(path, ": ", info.st_size, " bytes, more than the limit of ", max_bytes));
  } else {
    content.resize(static_cast<size_t>(info.st_size));
    size_t done = 0;
    while (done < content.size()) {
      const ssize_t n = read(fd, content.data() + done, content.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      done += static_cast<size_t>(n);
    }
    if (done != content.size()) {
      status = absl::InvalidArgumentError(StrCat(path, ": could not be read to its end"));
    }
  }
  close(fd);
  if (!status.ok()) return status;
  return content;
}

absl::StatusOr<Json> ReadJsonFile(const std::string& path, const JsonLimits& limits) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, limits.max_bytes));
  return ParseJson(text, path, limits);
}

absl::Status JsonView::Error(std::string_view message) const {
  return absl::InvalidArgumentError(
      StrCat(origin_, ": ", path_, path_.empty() ? "" : ": ", message));
}

absl::Status JsonView::TypeError(std::string_view expected) const {
  return Error(StrCat("expected ", expected, ", got ", Excerpt(*value_)));
}

bool JsonView::Has(std::string_view key) const {
  if (!value_->is_object()) return false;
  const auto it = value_->find(key);
  return it != value_->end() && !it->is_null();
}

absl::StatusOr<JsonView> JsonView::Get(std::string_view key) const {
  if (!value_->is_object()) return TypeError("an object");
  const auto it = value_->find(key);
  if (it == value_->end() || it->is_null()) {
    return absl::InvalidArgumentError(
        StrCat(origin_, ": ", path_, path_.empty() ? "" : ".", key,
               it == value_->end() ? ": missing" : ": expected a value, got null"));
  }
  JsonView child(*it, origin_);
  child.path_ = StrCat(path_, path_.empty() ? "" : ".", key);
  return child;
}

absl::StatusOr<JsonView> JsonView::At(size_t index) const {
  ASSIGN_OR_RETURN(const size_t size, ArraySize());
  if (index >= size) {
    return Error(StrCat("expected at least ", index + 1, " elements, got ", size));
  }
  JsonView child((*value_)[index], origin_);
  child.path_ = StrCat(path_, "[", index, "]");
  return child;
}

absl::StatusOr<size_t> JsonView::ArraySize() const {
  if (!value_->is_array()) return TypeError("an array");
  return value_->size();
}

absl::StatusOr<int64_t> JsonView::AsInt(int64_t min, int64_t max) const {
  const std::optional<int64_t> value = IntegerOf(*value_);
  if (value && *value >= min && *value <= max) return *value;
  if (min == 1 && max == std::numeric_limits<int64_t>::max()) {
    return TypeError("a positive integer");
  }
  return TypeError(StrCat("an integer in [", min, ", ", max, "]"));
}

absl::StatusOr<double> JsonView::AsDouble() const {
  if (!value_->is_number() || !std::isfinite(value_->get<double>())) {
    return TypeError("a finite number");
  }
  return value_->get<double>();
}

absl::StatusOr<bool> JsonView::AsBool() const {
  if (!value_->is_boolean()) return TypeError("true or false");
  return value_->get<bool>();
}

absl::StatusOr<std::string> JsonView::AsString() const {
  if (!value_->is_string()) return TypeError("a string");
  return value_->get_ref<const std::string&>();
}

absl::StatusOr<std::vector<double>> JsonView::AsDoubles() const {
  ASSIGN_OR_RETURN(const size_t size, ArraySize());
  std::vector<double> values(size);
  for (size_t i = 0; i < size; ++i) {
    ASSIGN_OR_RETURN(const JsonView element, At(i));
    ASSIGN_OR_RETURN(values[i], element.AsDouble());
  }
  return values;
}

absl::StatusOr<std::vector<int64_t>> JsonView::AsInts(int64_t min, int64_t max) const {
  ASSIGN_OR_RETURN(const size_t size, ArraySize());
  std::vector<int64_t> values(size);
  for (size_t i = 0; i < size; ++i) {
    ASSIGN_OR_RETURN(const JsonView element, At(i));
    ASSIGN_OR_RETURN(values[i], element.AsInt(min, max));
  }
  return values;
}

absl::StatusOr<std::vector<bool>> JsonView::AsBools() const {
  ASSIGN_OR_RETURN(const size_t size, ArraySize());
  std::vector<bool> values(size);
  for (size_t i = 0; i < size; ++i) {
    ASSIGN_OR_RETURN(const JsonView element, At(i));
    ASSIGN_OR_RETURN(const bool value, element.AsBool());
    values[i] = value;
  }
  return values;
}

absl::StatusOr<std::vector<std::string>> JsonView::AsStrings() const {
  ASSIGN_OR_RETURN(const size_t size, ArraySize());
  std::vector<std::string> values(size);
  for (size_t i = 0; i < size; ++i) {
    ASSIGN_OR_RETURN(const JsonView element, At(i));
    ASSIGN_OR_RETURN(values[i], element.AsString());
  }
  return values;
}

absl::StatusOr<int64_t> JsonView::Int(std::string_view key, int64_t min, int64_t max) const {
  ASSIGN_OR_RETURN(const JsonView value, Get(key));
  return value.AsInt(min, max);
}

absl::StatusOr<int64_t> JsonView::Int(std::string_view key, int64_t min, int64_t max,
                                      int64_t fallback) const {
  if (value_->is_object() && !Has(key)) return fallback;
  return Int(key, min, max);
}

absl::StatusOr<double> JsonView::Double(std::string_view key) const {
  ASSIGN_OR_RETURN(const JsonView value, Get(key));
  return value.AsDouble();
}

absl::StatusOr<double> JsonView::Double(std::string_view key, double fallback) const {
  if (value_->is_object() && !Has(key)) return fallback;
  return Double(key);
}

absl::StatusOr<bool> JsonView::Bool(std::string_view key) const {
  ASSIGN_OR_RETURN(const JsonView value, Get(key));
  return value.AsBool();
}

absl::StatusOr<bool> JsonView::Bool(std::string_view key, bool fallback) const {
  if (value_->is_object() && !Has(key)) return fallback;
  return Bool(key);
}

absl::StatusOr<std::string> JsonView::String(std::string_view key) const {
  ASSIGN_OR_RETURN(const JsonView value, Get(key));
  return value.AsString();
}

absl::StatusOr<std::string> JsonView::String(std::string_view key,
                                             std::string_view fallback) const {
  if (value_->is_object() && !Has(key)) return std::string(fallback);
  return String(key);
}

}  // namespace saccade
