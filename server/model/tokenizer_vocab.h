#pragma once
// The tokens of a tokenizer.json by id and by text.
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace saccade {

// Ids of outside files are below this: an id costs memory whether it has a token or not.
constexpr int64_t kMaxTokenIds = 1 << 20;

class Vocabulary {
 public:
  struct Token {
    std::string text;
    bool present = false;
    bool in_model = false;  // of model.vocab, so text can merge to it
    bool control = false;   // special
    bool guarded = false;   // never comes of a client's words; EncodeOptions::allow_special
  };

  // The token with `text` gets `id`, in [0, kMaxTokenIds); false: the id has a token already.
  bool Add(std::string_view text, int32_t id, bool in_model);
  // Of a token that is there.
  void Mark(int32_t id, bool control, bool guarded);

  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  // nullptr: the id has no token.
  const Token* Find(int32_t id) const;
  std::optional<int32_t> Find(std::string_view text) const;
  // Among the tokens that text can merge to.
  std::optional<int32_t> FindInModel(std::string_view text) const;

 private:
  std::deque<Token> tokens_;                           // by id; growing moves none
  std::unordered_map<std::string_view, int32_t> ids_;  // keys point into tokens_
};

}  // namespace saccade
