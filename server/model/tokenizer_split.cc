#include "model/tokenizer_split.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "model/tokenizer_bytes.h"
#include "model/tokenizer_parse.h"
#include "model/tokenizer_regex.h"
#include "model/unicode_class.h"

namespace saccade {
namespace {

struct Span {
  size_t begin = 0;
  size_t end = 0;
  bool match = false;
};

// Joins the spans of a whole text as `behavior` says; what is left are the pieces.
std::vector<Span> Join(const std::vector<Span>& spans, SplitBehavior behavior) {
  std::vector<Span> out;
  const auto extends = [&](const Span& previous, const Span& next) {
    switch (behavior) {
      case SplitBehavior::kMergedWithPrevious:
        return next.match && !previous.match;
      case SplitBehavior::kMergedWithNext:
        return previous.match && !next.match;
      case SplitBehavior::kContiguous:
        return previous.match == next.match;
      case SplitBehavior::kRemoved:
      case SplitBehavior::kIsolated:
        break;
    }
    return false;
  };
  for (size_t i = 0; i < spans.size(); ++i) {
    if (behavior == SplitBehavior::kRemoved && spans[i].match) continue;
    if (i > 0 && extends(spans[i - 1], spans[i])) {
      out.back().end = spans[i].end;
    } else {
      out.push_back(spans[i]);
    }
  }
  return out;
}

void Cut(const TextPiece& piece, const std::vector<Span>& spans, SplitBehavior behavior,
         std::vector<TextPiece>& out) {
  for (const Span& span : Join(spans, behavior)) {
    if (span.begin == span.end) continue;
    out.push_back(
        {piece.text.substr(span.begin, span.end - span.begin), piece.at_start && span.begin == 0});
  }
}

std::vector<Span> FindAll(std::string_view text, std::string_view pattern) {
  std::vector<Span> spans;
  size_t begin = 0;
  for (size_t at = text.find(pattern); at != std::string_view::npos;
       at = text.find(pattern, begin)) {
    if (begin < at) spans.push_back({begin, at, false});
    begin = at + pattern.size();
    spans.push_back({at, begin, true});
  }
  if (begin < text.size()) spans.push_back({begin, text.size(), false});
  return spans;
}

std::vector<Span> MatchAll(std::string_view text, RegexMatch match) {
  std::vector<Span> spans;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = match(text, begin);
    spans.push_back({begin, end, true});
    begin = end;
  }
  return spans;
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Parse(const JsonView& view) {
  PreTokenizer result;
  RETURN_IF_ERROR(result.Add(view));
  return result;
}

absl::Status PreTokenizer::Add(const JsonView& view) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("pretokenizers"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(Add(item));
    }
    return absl::OkStatus();
  }
  size_t growth = 1;
  if (type == "Metaspace") {
    growth = 8;  // a mark of up to four bytes for a space, and one in front
    ASSIGN_OR_RETURN(Step step, ParseMetaspace(view));
    steps_.push_back(std::move(step));
  } else if (type == "Split") {
    ASSIGN_OR_RETURN(Step step, ParseSplit(view));
    steps_.push_back(std::move(step));
  } else if (type == "Digits") {
    Digits step;
    ASSIGN_OR_RETURN(step.individual, view.Bool("individual_digits", false));
    steps_.emplace_back(step);
  } else if (type == "ByteLevel") {
    growth = 4;  // two for a byte, and a space in front
    ByteLevel step;
    ASSIGN_OR_RETURN(step.add_prefix_space, view.Bool("add_prefix_space", true));
    ASSIGN_OR_RETURN(step.use_regex, view.Bool("use_regex", true));
    steps_.emplace_back(step);
  } else {
    return UnsupportedPart(view, StrCat("the pre-tokenizer ", type));
  }
  return budget_.Add(view, growth);
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ParseMetaspace(const JsonView& view) {
  Metaspace step;
  ASSIGN_OR_RETURN(step.mark, view.String("replacement"));
  if (step.mark.empty() || CharacterAt(step.mark, 0).size != step.mark.size()) {
    return view.Error("replacement: expected one character");
  }
  ASSIGN_OR_RETURN(const bool prefix, view.Bool("add_prefix_space", true));
  ASSIGN_OR_RETURN(const std::string scheme,
                   view.String("prepend_scheme", prefix ? "always" : "never"));
  if (scheme == "first") {
    step.scheme = PrependScheme::kFirst;
  } else if (scheme == "never") {
    step.scheme = PrependScheme::kNever;
  } else if (scheme != "always") {
    return view.Error(StrCat("prepend_scheme: unknown value \"", scheme, "\""));
  }
  ASSIGN_OR_RETURN(step.split, view.Bool("split", true));
  return Step(std::move(step));
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ParseSplit(const JsonView& view) {
  StringSplit step;
  ASSIGN_OR_RETURN(const std::string behavior, view.String("behavior"));
  ASSIGN_OR_RETURN(step.invert, view.Bool("invert", false));
  if (behavior == "Removed") {
    step.behavior = SplitBehavior::kRemoved;
  } else if (behavior == "Isolated") {
    step.behavior = SplitBehavior::kIsolated;
  } else if (behavior == "MergedWithPrevious") {
    step.behavior = SplitBehavior::kMergedWithPrevious;
  } else if (behavior == "MergedWithNext") {
    step.behavior = SplitBehavior::kMergedWithNext;
  } else if (behavior == "Contiguous") {
    step.behavior = SplitBehavior::kContiguous;
  } else {
    return view.Error(StrCat("behavior: unknown value \"", behavior, "\""));
  }
  ASSIGN_OR_RETURN(const JsonView pattern, view.Get("pattern"));
  if (pattern.Has("Regex")) {
    ASSIGN_OR_RETURN(const std::string regex, pattern.String("Regex"));
    const RegexMatch match = FindRegex(regex);
    if (match == nullptr) {
      return UnsupportedPart(pattern, StrCat("the regular expression ", regex.substr(0, 200)));
    }
    // The expressions known here match everything, so there is nothing between the matches.
    const SplitBehavior wanted = step.invert ? SplitBehavior::kRemoved : SplitBehavior::kIsolated;
    if (step.behavior != wanted) {
      return UnsupportedPart(view, StrCat(behavior, step.invert ? " inverted" : ""));
    }
    return Step(RegexSplit{match});
  }
  ASSIGN_OR_RETURN(step.pattern, StringPattern(view));
  return Step(std::move(step));
}

std::vector<TextPiece> PreTokenizer::Split(std::string_view text, bool at_start) const {
  std::vector<TextPiece> pieces;
  pieces.push_back({std::string(text), at_start});
  for (const Step& step : steps_) {
    std::vector<TextPiece> next;
    for (TextPiece& piece : pieces) {
      std::visit([&](const auto& kind) { Apply(kind, std::move(piece), next); }, step);
    }
    pieces = std::move(next);
  }
  return pieces;
}

void PreTokenizer::Apply(const Metaspace& step, TextPiece piece, std::vector<TextPiece>& out) {
  piece.text = ReplaceAll(piece.text, " ", step.mark);
  const bool wanted = step.scheme == PrependScheme::kAlways ||
                      (step.scheme == PrependScheme::kFirst && piece.at_start);
  if (wanted && !piece.text.starts_with(step.mark)) piece.text.insert(0, step.mark);
  if (step.split) {
    Cut(piece, FindAll(piece.text, step.mark), SplitBehavior::kMergedWithNext, out);
  } else {
    out.push_back(std::move(piece));
  }
}

void PreTokenizer::Apply(const StringSplit& step, TextPiece piece, std::vector<TextPiece>& out) {
  std::vector<Span> spans = FindAll(piece.text, step.pattern);
  if (step.invert) {
    for (Span& span : spans) span.match = !span.match;
  }
  Cut(piece, spans, step.behavior, out);
}

void PreTokenizer::Apply(const RegexSplit& step, TextPiece piece, std::vector<TextPiece>& out) {
  Cut(piece, MatchAll(piece.text, step.match), SplitBehavior::kIsolated, out);
}

void PreTokenizer::Apply(const Digits& step, TextPiece piece, std::vector<TextPiece>& out) {
  std::vector<Span> spans;
  for (size_t begin = 0; begin < piece.text.size();) {
    const Character c = CharacterAt(piece.text, begin);
    const CharClass kind = ClassOf(c.code);
    const bool digit = kind == CharClass::kNumber || kind == CharClass::kLateNumber;
    const size_t end = begin + c.size;
    if (!spans.empty() && spans.back().match == digit && !(digit && step.individual)) {
      spans.back().end = end;
    } else {
      spans.push_back({begin, end, digit});
    }
    begin = end;
  }
  Cut(piece, spans, SplitBehavior::kIsolated, out);
}

void PreTokenizer::Apply(const ByteLevel& step, TextPiece piece, std::vector<TextPiece>& out) {
  if (step.add_prefix_space && !piece.text.starts_with(' ')) piece.text.insert(0, 1, ' ');
  const size_t first = out.size();
  if (step.use_regex) {
    Cut(piece, MatchAll(piece.text, MatchGpt2), SplitBehavior::kIsolated, out);
  } else {
    out.push_back(std::move(piece));
  }
  for (size_t i = first; i < out.size(); ++i) out[i].text = BytesToAlphabet(out[i].text);
}

}  // namespace saccade
