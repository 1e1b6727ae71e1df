#pragma once
// The pre-tokenizer of a tokenizer.json: cuts a text into the pieces that are encoded on their own.
// Metaspace, Digits, Split, ByteLevel and sequences of them; Split with the regular expressions of
// tokenizer_regex.h only.
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "model/json_util.h"
#include "model/tokenizer_parse.h"
#include "model/tokenizer_regex.h"

namespace saccade {

// A part of the text that is encoded on its own.
struct TextPiece {
  std::string text;
  bool at_start = false;  // begins at the first byte of the input
};

// What becomes of the matches that a text is split at.
enum class SplitBehavior : uint8_t {
  kRemoved,
  kIsolated,
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous,
};

class PreTokenizer {
 public:
  // INVALID_ARGUMENT: malformed. UNIMPLEMENTED: a part is not supported.
  static absl::StatusOr<PreTokenizer> Parse(const JsonView& view);

  // `text` is valid UTF-8. Without a step it is one piece.
  std::vector<TextPiece> Split(std::string_view text, bool at_start) const;

 private:
  enum class PrependScheme : uint8_t { kAlways, kFirst, kNever };
  struct Metaspace {
    std::string mark;  // replaces a space
    PrependScheme scheme = PrependScheme::kAlways;
    bool split = true;  // before each mark
  };
  struct StringSplit {
    std::string pattern;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;
  };
  struct RegexSplit {
    RegexMatch match = nullptr;
  };
  struct Digits {
    bool individual = false;
  };
  struct ByteLevel {
    bool add_prefix_space = true;
    bool use_regex = true;
  };
  using Step = std::variant<Metaspace, StringSplit, RegexSplit, Digits, ByteLevel>;

  absl::Status Add(const JsonView& view);
  static absl::StatusOr<Step> ParseMetaspace(const JsonView& view);
  static absl::StatusOr<Step> ParseSplit(const JsonView& view);
  static void Apply(const Metaspace& step, TextPiece piece, std::vector<TextPiece>& out);
  static void Apply(const StringSplit& step, TextPiece piece, std::vector<TextPiece>& out);
  static void Apply(const RegexSplit& step, TextPiece piece, std::vector<TextPiece>& out);
  static void Apply(const Digits& step, TextPiece piece, std::vector<TextPiece>& out);
  static void Apply(const ByteLevel& step, TextPiece piece, std::vector<TextPiece>& out);

  std::vector<Step> steps_;
  StepBudget budget_;
};

}  // namespace saccade
