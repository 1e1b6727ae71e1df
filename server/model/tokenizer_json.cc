// Hugging Face tokenizer.json with a BPE model: added tokens, template and decoder here, the other
// parts in files of their own. The steps and their quirks follow the `tokenizers` crate (0.19 -
// 0.22): added_vocabulary.rs, processors/template.rs.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/json_util.h"
#include "model/tokenizer.h"
#include "model/tokenizer_added.h"
#include "model/tokenizer_bpe.h"
#include "model/tokenizer_normalize.h"
#include "model/tokenizer_parse.h"
#include "model/tokenizer_split.h"
#include "model/tokenizer_vocab.h"

namespace saccade {
namespace {

constexpr std::string_view kOrigin = "tokenizer.json";
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr size_t kMaxTextBytes = 16 << 20;

// What is not known here leaves the tokenizer without a way to write text; it reads as well as
// ever.
absl::Status ParseDecoder(const JsonView& view, Tokenizer::Decoding& out) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("decoders"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(ParseDecoder(item, out));
    }
  } else if (type == "Replace" && out.mark.empty()) {
    ASSIGN_OR_RETURN(const JsonView pattern, view.Get("pattern"));
    if (!pattern.Has("String")) {
      out.supported = false;
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(out.mark, pattern.String("String"));
    ASSIGN_OR_RETURN(out.space, view.String("content"));
  } else if (type == "Metaspace" && out.mark.empty()) {
    ASSIGN_OR_RETURN(out.mark, view.String("replacement"));
    ASSIGN_OR_RETURN(const bool prefix, view.Bool("add_prefix_space", true));
    ASSIGN_OR_RETURN(const std::string scheme,
                     view.String("prepend_scheme", prefix ? "always" : "never"));
    out.space.assign(1, ' ');
    out.bare_start = scheme != "never";
  } else if (type == "ByteFallback") {
    out.bytes = true;
  } else if (type == "Strip" && out.strip == 0) {
    ASSIGN_OR_RETURN(const std::string content, view.String("content"));
    ASSIGN_OR_RETURN(const int64_t start, view.Int("start", 0, 1 << 20));
    ASSIGN_OR_RETURN(const int64_t stop, view.Int("stop", 0, 1 << 20));
    out.strip = static_cast<uint32_t>(start);
    out.supported = out.supported && content == " " && stop == 0;
  } else if (type == "ByteLevel") {
    out.byte_level = true;
  } else if (type != "Fuse") {
    out.supported = false;
  }
  // Bytes as characters do not go with what changes characters.
  if (out.byte_level && (!out.mark.empty() || out.bytes || out.strip > 0)) out.supported = false;
  return absl::OkStatus();
}

class JsonTokenizer : public Tokenizer {
 public:
  absl::Status Init(const JsonView& root);

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override;
  std::optional<int32_t> TokenToId(std::string_view token) const override {
    return vocabulary_.Find(token);
  }
  std::optional<std::string_view> IdToToken(int32_t id) const override {
    const Vocabulary::Token* token = vocabulary_.Find(id);
    if (token == nullptr) return std::nullopt;
    return token->text;
  }
  int32_t vocab_size() const override { return vocabulary_.size(); }
  bool IsControl(int32_t id) const override {
    const Vocabulary::Token* token = vocabulary_.Find(id);
    return token != nullptr && token->control;
  }

 private:
  absl::Status ParseAddedToken(const JsonView& item);
  absl::Status ParsePostProcessor(const JsonView& view);
  absl::Status ParseTemplate(const JsonView& view);

  Vocabulary vocabulary_;
  BpeModel bpe_;
  TextNormalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  TokenMatcher raw_added_;         // matched in the text as it comes
  TokenMatcher normalized_added_;  // matched in normalised text
  std::vector<int32_t> prefix_;    // of the template, before and after the text
  std::vector<int32_t> suffix_;
  bool has_template_ = false;
};

absl::Status JsonTokenizer::Init(const JsonView& root) {
  ASSIGN_OR_RETURN(const JsonView model, root.Get("model"));
  if (root.Has("normalizer")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("normalizer"));
    ASSIGN_OR_RETURN(normalizer_, TextNormalizer::Parse(view));
  }
  if (root.Has("pre_tokenizer")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("pre_tokenizer"));
    ASSIGN_OR_RETURN(pre_tokenizer_, PreTokenizer::Parse(view));
  }
  ASSIGN_OR_RETURN(bpe_, BpeModel::Parse(model, vocabulary_));
  if (root.Has("added_tokens")) {
    ASSIGN_OR_RETURN(const JsonView list, root.Get("added_tokens"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(ParseAddedToken(item));
    }
  }
  if (root.Has("post_processor")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("post_processor"));
    RETURN_IF_ERROR(ParsePostProcessor(view));
  }
  if (root.Has("decoder")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("decoder"));
    decoding_.supported = true;
    RETURN_IF_ERROR(ParseDecoder(view, decoding_));
  }
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParseAddedToken(const JsonView& item) {
  ASSIGN_OR_RETURN(const std::string text, item.String("content"));
  ASSIGN_OR_RETURN(const int64_t wide_id, item.Int("id", 0, kMaxTokenIds - 1));
  ASSIGN_OR_RETURN(const bool special, item.Bool("special", false));
  ASSIGN_OR_RETURN(const bool normalized, item.Bool("normalized", !special));
  for (const std::string_view flag : {"single_word", "lstrip", "rstrip"}) {
    ASSIGN_OR_RETURN(const bool set, item.Bool(flag, false));
    if (set) return UnsupportedPart(item, StrCat(flag, ": true"));
  }
  if (text.size() > kMaxAddedTokenBytes) {
    return item.Error(StrCat("content: longer than ", kMaxAddedTokenBytes, " bytes"));
  }
  if (text.empty()) return absl::OkStatus();
  const auto id = static_cast<int32_t>(wide_id);
  const std::optional<int32_t> known = vocabulary_.Find(text);
  if (known && *known != id) {
    return item.Error(StrCat("\"", text, "\" has id ", id, ", but has ", *known, " already"));
  }
  if (!known && !vocabulary_.Add(text, id, /*in_model=*/false)) {
    return item.Error(StrCat("id ", id, " belongs to both \"", vocabulary_.Find(id)->text,
                             "\" and \"", text, "\""));
  }
  const bool guarded = special || IsNamed(text);
  vocabulary_.Mark(id, special, guarded);
  const bool room = normalized ? normalized_added_.Add(normalizer_.Normalize(text), id, guarded)
                               : raw_added_.Add(text, id, guarded);
  if (!room) return item.Error("too much text of added tokens");
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParsePostProcessor(const JsonView& view) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("processors"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(ParsePostProcessor(item));
    }
    return absl::OkStatus();
  }
  if (type == "ByteLevel") return absl::OkStatus();  // moves offsets, not ids
  if (type != "TemplateProcessing" || has_template_) {
    return UnsupportedPart(
        view, StrCat(has_template_ ? "a second template, " : "the post-processor ", type));
  }
  has_template_ = true;
  return ParseTemplate(view);
}

absl::Status JsonTokenizer::ParseTemplate(const JsonView& view) {
  ASSIGN_OR_RETURN(const JsonView single, view.Get("single"));
  ASSIGN_OR_RETURN(const size_t size, single.ArraySize());
  bool seen = false;
  for (size_t i = 0; i < size; ++i) {
    ASSIGN_OR_RETURN(const JsonView item, single.At(i));
    if (item.Has("Sequence")) {
      if (seen) return item.Error("the text appears twice");
      seen = true;
      continue;
    }
    ASSIGN_OR_RETURN(const JsonView special, item.Get("SpecialToken"));
    ASSIGN_OR_RETURN(const std::string name, special.String("id"));
    ASSIGN_OR_RETURN(const JsonView table, view.Get("special_tokens"));
    ASSIGN_OR_RETURN(const JsonView entry, table.Get(name));
    ASSIGN_OR_RETURN(const JsonView ids_view, entry.Get("ids"));
    ASSIGN_OR_RETURN(const std::vector<int64_t> ids, ids_view.AsInts(0, vocab_size() - 1));
    std::vector<int32_t>& side = seen ? suffix_ : prefix_;
    for (const int64_t id : ids) side.push_back(static_cast<int32_t>(id));
  }
  if (!seen) return single.Error("the text does not appear");
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> JsonTokenizer::Encode(std::string_view text,
                                                           const EncodeOptions& options) const {
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("text: not valid UTF-8");
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(StrCat("text: longer than ", kMaxTextBytes, " bytes"));
  }
  const bool guard = !options.allow_special;
  std::vector<int32_t> ids;
  if (options.add_special_tokens) ids = prefix_;
  const auto push = [&ids](int32_t id) { ids.push_back(id); };
  const auto encode_raw = [&](std::string_view raw) {
    const bool first = raw.data() == text.data();
    const std::string normalized = normalizer_.Normalize(raw);
    const auto encode_normalized = [&](std::string_view part) {
      const bool at_start = first && part.data() == normalized.data();
      for (const TextPiece& piece : pre_tokenizer_.Split(part, at_start)) {
        bpe_.Encode(vocabulary_, piece.text, guard, ids);
      }
    };
    normalized_added_.Split(normalized, guard, encode_normalized, push);
  };
  raw_added_.Split(text, guard, encode_raw, push);
  if (options.add_special_tokens) ids.insert(ids.end(), suffix_.begin(), suffix_.end());
  return ids;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::FromJson(std::string_view text) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(text, kOrigin, {.max_bytes = text.size()}));
  auto tokenizer = std::make_unique<JsonTokenizer>();
  RETURN_IF_ERROR(tokenizer->Init(JsonView(json, kOrigin)));
  return std::unique_ptr<const Tokenizer>(std::move(tokenizer));
}

}  // namespace saccade
