#include "model/tokenizer_parse.h"

#include "base/strings.h"

namespace saccade {
namespace {

constexpr size_t kMaxSteps = 16;
constexpr size_t kMaxGrowth = 100;

}  // namespace

absl::Status UnsupportedPart(const JsonView& at, std::string_view what) {
  return absl::UnimplementedError(
      StrCat(at.origin(), ": ", at.path(), ": ", what, " is not supported"));
}

absl::StatusOr<std::string> StringPattern(const JsonView& step) {
  ASSIGN_OR_RETURN(const JsonView pattern, step.Get("pattern"));
  if (!pattern.Has("String")) return UnsupportedPart(pattern, "a pattern that is not a String");
  ASSIGN_OR_RETURN(std::string text, pattern.String("String"));
  if (text.empty()) return pattern.Error("expected a pattern that is not empty");
  return text;
}

std::string ReplaceAll(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  for (size_t begin = 0;;) {
    const size_t at = text.find(from, begin);
    out.append(text.substr(begin, at - begin));  // npos - begin: the rest
    if (at == std::string_view::npos) return out;
    out.append(to);
    begin = at + from.size();
  }
}

absl::Status StepBudget::Add(const JsonView& step, size_t growth) {
  if (++steps_ > kMaxSteps) return step.Error(StrCat("more than ", kMaxSteps, " steps"));
  if (growth > kMaxGrowth / growth_) {
    return step.Error(StrCat("makes a text more than ", kMaxGrowth, " times as long"));
  }
  growth_ *= growth;
  return absl::OkStatus();
}

}  // namespace saccade
