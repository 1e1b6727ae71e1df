#include "model/tokenizer.h"

#include "base/strings.h"
#include "model/json_util.h"
#include "model/tokenizer_spm.h"
#include "model/tokenizer_vocab.h"
#include "model/unicode_class.h"

namespace saccade {
namespace {

constexpr size_t kMaxTokenizerBytes = 128 << 20;

absl::StatusOr<std::unique_ptr<const Tokenizer>> LoadSentencePiece(const std::string& dir,
                                                                   std::string_view model) {
  SentencePieceOptions options;
  const absl::StatusOr<Json> config = ReadJsonFile(dir + "/tokenizer_config.json");
  if (config.ok()) {
    const JsonView view(*config, "tokenizer_config.json");
    ASSIGN_OR_RETURN(options.add_bos, view.Bool("add_bos_token", true));
    ASSIGN_OR_RETURN(options.add_eos, view.Bool("add_eos_token", false));
  } else if (!absl::IsNotFound(config.status())) {
    return config.status();
  }
  const absl::StatusOr<Json> added = ReadJsonFile(dir + "/added_tokens.json");
  if (added.ok()) {
    const JsonView view(*added, "added_tokens.json");
    if (!added->is_object()) return view.Error("expected an object");
    for (const auto& item : added->items()) {
      ASSIGN_OR_RETURN(const int64_t id, view.Int(item.key(), 0, kMaxTokenIds - 1));
      options.added_tokens.emplace(item.key(), static_cast<int32_t>(id));
    }
  } else if (!absl::IsNotFound(added.status())) {
    return added.status();
  }
  return MakeSentencePieceTokenizer(model, options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Load(const std::string& dir) {
  const absl::StatusOr<std::string> json = ReadFile(dir + "/tokenizer.json", kMaxTokenizerBytes);
  if (json.ok()) return FromJson(*json);
  if (!absl::IsNotFound(json.status())) return json.status();
  const absl::StatusOr<std::string> model = ReadFile(dir + "/tokenizer.model", kMaxTokenizerBytes);
  if (model.ok()) return LoadSentencePiece(dir, *model);
  if (!absl::IsNotFound(model.status())) return model.status();
  return absl::NotFoundError(StrCat(dir, ": has neither tokenizer.json nor tokenizer.model"));
}

absl::StatusOr<int32_t> Tokenizer::EmptyTokenId() const {
  const std::optional<int32_t> id = TokenToId("\u2581");
  if (!id) return absl::NotFoundError("the tokenizer has no empty token \"\u2581\" (U+2581)");
  return *id;
}

bool IsNamed(std::string_view token) {
  for (size_t i = 0; i < token.size();) {
    const Character c = CharacterAt(token, i);
    const CharClass kind = ClassOf(c.code);
    if (kind != CharClass::kOther && kind != CharClass::kSpace) return true;
    i += c.size;
  }
  return false;
}

bool IsValidUtf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const unsigned char* const end = p + text.size();
  const auto tail = [&](size_t n, unsigned char low, unsigned char high) {
    // The second byte is restricted so that overlong forms, surrogates and values over U+10FFFF
    // have no spelling.
    if (static_cast<size_t>(end - p) <= n || p[1] < low || p[1] > high) return false;
    for (size_t i = 2; i <= n; ++i) {
      if ((p[i] & 0xC0) != 0x80) return false;
    }
    p += n + 1;
    return true;
  };
  while (p < end) {
    const unsigned char c = *p;
    if (c < 0x80) {
      ++p;
    } else if (c < 0xC2) {
      return false;
    } else if (c < 0xE0) {
      if (!tail(1, 0x80, 0xBF)) return false;
    } else if (c < 0xF0) {
      if (!tail(2, c == 0xE0 ? 0xA0 : 0x80, c == 0xED ? 0x9F : 0xBF)) return false;
    } else if (c < 0xF5) {
      if (!tail(3, c == 0xF0 ? 0x90 : 0x80, c == 0xF4 ? 0x8F : 0xBF)) return false;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace saccade
