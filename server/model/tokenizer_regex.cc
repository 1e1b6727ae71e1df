#include "model/tokenizer_regex.h"

#include <array>
#include <iterator>
#include <utility>

#include "model/unicode_class.h"

namespace saccade {
namespace {

constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
                                   R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr size_t kUnlimited = static_cast<size_t>(-1);

// What the expressions tell apart; the end of the text is a class of its own.
enum class Kind { kEnd, kLetter, kNumber, kSpace, kOther };

Kind KindAt(std::string_view text, size_t at) {
  if (at >= text.size()) return Kind::kEnd;
  switch (ClassOf(CharacterAt(text, at).code)) {
    case CharClass::kLetter:
      return Kind::kLetter;
    case CharClass::kNumber:
      return Kind::kNumber;
    case CharClass::kSpace:
      return Kind::kSpace;
    case CharClass::kLateNumber:
    case CharClass::kOther:
      break;
  }
  return Kind::kOther;
}

// Skips characters of `kind`, `limit` at most.
size_t Skip(std::string_view text, size_t at, Kind kind, size_t limit = kUnlimited) {
  for (; limit > 0 && KindAt(text, at) == kind; --limit) at += CharacterAt(text, at).size;
  return at;
}

bool IsNewline(std::string_view text, size_t at) {
  return at < text.size() && (text[at] == '\r' || text[at] == '\n');
}

// 's|'t|'re|'ve|'m|'ll|'d at text[begin]: its end, or `begin`.
size_t SkipContraction(std::string_view text, size_t begin, bool any_case) {
  if (text[begin] != '\'') return begin;
  const std::string_view rest = text.substr(begin + 1);
  // Folding case makes a long s an s.
  if (any_case && rest.starts_with("\u017F")) return begin + 3;
  const auto lower = [&](size_t i) {
    const char c = i < rest.size() ? rest[i] : '\0';
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  switch (lower(0)) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return begin + 2;
    case 'r':
    case 'v':
      return lower(1) == 'e' ? begin + 3 : begin;
    case 'l':
      return lower(1) == 'l' ? begin + 3 : begin;
    default:
      return begin;
  }
}

// \s+(?!\S)|\s+ where a space is: all of a run but the last, which goes with what follows; the
// whole run at the end of the text, and a space that is alone.
size_t SkipSpaces(std::string_view text, size_t begin) {
  size_t last = begin;
  size_t end = begin;
  while (KindAt(text, end) == Kind::kSpace) {
    last = end;
    end += CharacterAt(text, end).size;
  }
  return end == text.size() || last == begin ? end : last;
}

// The expressions of Llama 3 and Qwen, which differ in how many numbers are a piece.
size_t MatchNewer(std::string_view text, size_t begin, size_t numbers) {
  if (const size_t end = SkipContraction(text, begin, /*any_case=*/true); end > begin) return end;
  const Kind kind = KindAt(text, begin);
  if (kind == Kind::kLetter) return Skip(text, begin, Kind::kLetter);
  if (kind == Kind::kNumber) return Skip(text, begin, Kind::kNumber, numbers);
  const size_t next = begin + CharacterAt(text, begin).size;
  if (!IsNewline(text, begin) && KindAt(text, next) == Kind::kLetter) {
    return Skip(text, next, Kind::kLetter);
  }
  if (kind == Kind::kOther || (text[begin] == ' ' && KindAt(text, next) == Kind::kOther)) {
    size_t end = Skip(text, next, Kind::kOther);
    while (IsNewline(text, end)) ++end;
    return end;
  }
  // White space with line ends: up to the last of these.
  size_t after_newline = begin;
  for (size_t i = begin; KindAt(text, i) == Kind::kSpace; i += CharacterAt(text, i).size) {
    if (IsNewline(text, i)) after_newline = i + 1;
  }
  return after_newline > begin ? after_newline : SkipSpaces(text, begin);
}

size_t MatchQwen(std::string_view text, size_t begin) { return MatchNewer(text, begin, 1); }
size_t MatchLlama3(std::string_view text, size_t begin) { return MatchNewer(text, begin, 3); }

}  // namespace

size_t MatchGpt2(std::string_view text, size_t begin) {
  if (const size_t end = SkipContraction(text, begin, /*any_case=*/false); end > begin) return end;
  const size_t at = begin + (text[begin] == ' ' ? 1 : 0);
  const Kind kind = KindAt(text, at);
  if (kind == Kind::kSpace || kind == Kind::kEnd) return SkipSpaces(text, begin);
  return Skip(text, at, kind);
}

RegexMatch FindRegex(std::string_view regex) {
  constexpr std::pair<std::string_view, RegexMatch> kKnown[] = {
      {kGpt2, MatchGpt2}, {kQwen, MatchQwen}, {kLlama3, MatchLlama3}};
  for (const auto& [text, match] : kKnown) {
    if (regex == text) return match;
  }
  return nullptr;
}

}  // namespace saccade
