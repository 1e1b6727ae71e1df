#pragma once
// The regular expressions that byte-level tokenizers split text with, each matched by hand: linear
// in the text and without recursion, which no engine promises for an expression of a file. The
// classes of characters are those of unicode_class.h.
#include <cstddef>
#include <string_view>

namespace saccade {

// The end of the expression's match that begins at text[begin]; there always is one, of at least a
// character. `text` is valid UTF-8, `begin` inside it.
using RegexMatch = size_t (*)(std::string_view text, size_t begin);

// GPT-2's, which ByteLevel brings along.
size_t MatchGpt2(std::string_view text, size_t begin);

// The matcher of `regex` as it is spelled in tokenizer.json files; nullptr: not known.
RegexMatch FindRegex(std::string_view regex);

}  // namespace saccade
