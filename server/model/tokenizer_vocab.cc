#include "model/tokenizer_vocab.h"

namespace saccade {

bool Vocabulary::Add(std::string_view text, int32_t id, bool in_model) {
  if (id >= size()) tokens_.resize(static_cast<size_t>(id) + 1);
  Token& token = tokens_[static_cast<size_t>(id)];
  if (token.present) return false;
  token = {.text = std::string(text), .present = true, .in_model = in_model};
  ids_.emplace(token.text, id);
  return true;
}

void Vocabulary::Mark(int32_t id, bool control, bool guarded) {
  Token& token = tokens_[static_cast<size_t>(id)];
  token.control = control;
  token.guarded = guarded;
}

const Vocabulary::Token* Vocabulary::Find(int32_t id) const {
  if (id < 0 || id >= size()) return nullptr;
  const Token& token = tokens_[static_cast<size_t>(id)];
  return token.present ? &token : nullptr;
}

std::optional<int32_t> Vocabulary::Find(std::string_view text) const {
  const auto it = ids_.find(text);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

std::optional<int32_t> Vocabulary::FindInModel(std::string_view text) const {
  const std::optional<int32_t> id = Find(text);
  return id && tokens_[static_cast<size_t>(*id)].in_model ? id : std::nullopt;
}

}  // namespace saccade
