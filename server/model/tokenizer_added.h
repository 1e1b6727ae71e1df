#pragma once
// Finds fixed strings (added tokens, user-defined pieces) in a text: leftmost first, the longest at
// each place, without overlap. Immutable after the last Add.
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace saccade {

class TokenMatcher {
 public:
  struct Match {
    size_t size = 0;  // bytes; 0: nothing matches
    int32_t id = 0;
    bool special = false;
  };

  // Adding a pattern again replaces its id. Empty patterns are ignored. false: there is no room;
  // room is for half a million bytes that are not the beginning of another pattern, so that no file
  // takes memory without bound.
  bool Add(std::string_view pattern, int32_t id, bool special);
  bool empty() const { return nodes_.size() == 1; }
  // The longest pattern that begins at text[position].
  Match LongestAt(std::string_view text, size_t position) const;

  // Calls on_text(piece) and on_token(id) in order of the text; pieces are never empty. With
  // skip_special the matches of special patterns stay part of the text around them.
  template <class OnText, class OnToken>
  void Split(std::string_view text, bool skip_special, OnText&& on_text, OnToken&& on_token) const {
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
      const Match match = LongestAt(text, i);
      if (match.size == 0) {
        ++i;
        continue;
      }
      if (!(skip_special && match.special)) {
        if (begin < i) on_text(text.substr(begin, i - begin));
        on_token(match.id);
        begin = i + match.size;
      }
      i += match.size;
    }
    if (begin < text.size()) on_text(text.substr(begin));
  }

 private:
  struct Node {
    std::vector<std::pair<unsigned char, uint32_t>> children;
    bool terminal = false;
    bool special = false;
    int32_t id = 0;
  };
  std::vector<Node> nodes_ = std::vector<Node>(1);  // [0] is the root
  std::array<uint32_t, 256> first_{};               // node of the first byte; 0: none
};

}  // namespace saccade
