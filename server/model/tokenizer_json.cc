// Hugging Face tokenizer.json with a BPE model. The steps and their quirks follow the `tokenizers`
// crate (0.19 - 0.22): added_vocabulary.rs, normalizers/, pre_tokenizers/metaspace.rs,
// models/bpe/{model,word}.rs, processors/template.rs.
#include <algorithm>
#include <array>
#include <queue>
#include <unordered_map>
#include <utility>

#include "base/strings.h"
#include "model/json_util.h"
#include "model/tokenizer.h"
#include "model/tokenizer_added.h"

namespace saccade {
namespace {

constexpr std::string_view kOrigin = "tokenizer.json";
constexpr int64_t kMaxTokenId = (1 << 22) - 1;
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr size_t kMaxTextBytes = 16 << 20;

absl::Status Unsupported(const JsonView& at, std::string_view what) {
  return absl::UnimplementedError(
      StrCat(at.origin(), ": ", at.path(), ": ", what, " is not supported"));
}

size_t Utf8Length(char lead) {
  const auto c = static_cast<unsigned char>(lead);
  return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
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

// ---------------------------------------------------------------------------------- normalizer

struct NormalizerStep {
  bool prepend = false;  // else replace
  std::string from;
  std::string to;
};

absl::StatusOr<std::string> StringPattern(const JsonView& step) {
  ASSIGN_OR_RETURN(const JsonView pattern, step.Get("pattern"));
  if (!pattern.Has("String")) return Unsupported(pattern, "a pattern that is not a String");
  ASSIGN_OR_RETURN(std::string text, pattern.String("String"));
  if (text.empty()) return pattern.Error("expected a pattern that is not empty");
  return text;
}

absl::Status ParseNormalizer(const JsonView& view, std::vector<NormalizerStep>& steps) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("normalizers"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(ParseNormalizer(item, steps));
    }
    return absl::OkStatus();
  }
  NormalizerStep step;
  if (type == "Prepend") {
    step.prepend = true;
    ASSIGN_OR_RETURN(step.to, view.String("prepend"));
  } else if (type == "Replace") {
    ASSIGN_OR_RETURN(step.from, StringPattern(view));
    ASSIGN_OR_RETURN(step.to, view.String("content"));
  } else {
    return Unsupported(view, StrCat("the normalizer ", type));
  }
  steps.push_back(std::move(step));
  return absl::OkStatus();
}

std::string Normalize(std::string_view text, const std::vector<NormalizerStep>& steps) {
  std::string out(text);
  for (const NormalizerStep& step : steps) {
    if (!step.prepend) {
      out = ReplaceAll(out, step.from, step.to);
    } else if (!out.empty()) {
      out.insert(0, step.to);
    }
  }
  return out;
}

// ------------------------------------------------------------------------------- pre-tokenizer

enum class PrependScheme : uint8_t { kAlways, kFirst, kNever };

struct PreTokenizerStep {
  bool metaspace = false;  // else split after each `mark`
  std::string mark;        // Metaspace: the replacement of a space
  PrependScheme scheme = PrependScheme::kAlways;
  bool split = true;  // Metaspace: split before each mark
};

// A part of the text that is encoded on its own.
struct Piece {
  std::string text;
  bool at_start = false;  // begins at the first byte of the input
};

absl::Status ParsePreTokenizer(const JsonView& view, std::vector<PreTokenizerStep>& steps) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("pretokenizers"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(ParsePreTokenizer(item, steps));
    }
    return absl::OkStatus();
  }
  PreTokenizerStep step;
  if (type == "Metaspace") {
    step.metaspace = true;
    ASSIGN_OR_RETURN(step.mark, view.String("replacement"));
    if (step.mark.empty() || Utf8Length(step.mark[0]) != step.mark.size()) {
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
  } else if (type == "Split") {
    ASSIGN_OR_RETURN(step.mark, StringPattern(view));
    ASSIGN_OR_RETURN(const std::string behavior, view.String("behavior"));
    ASSIGN_OR_RETURN(const bool invert, view.Bool("invert", false));
    if (behavior != "MergedWithPrevious" || invert) {
      return Unsupported(view, StrCat("Split with ", behavior, invert ? " inverted" : ""));
    }
  } else {
    return Unsupported(view, StrCat("the pre-tokenizer ", type));
  }
  steps.push_back(std::move(step));
  return absl::OkStatus();
}

void PreTokenize(const PreTokenizerStep& step, Piece piece, std::vector<Piece>& out) {
  std::string text = std::move(piece.text);
  if (step.metaspace) {
    text = ReplaceAll(text, " ", step.mark);
    const bool wanted = step.scheme == PrependScheme::kAlways ||
                        (step.scheme == PrependScheme::kFirst && piece.at_start);
    if (wanted && !text.starts_with(step.mark)) text.insert(0, step.mark);
    if (!step.split) {
      out.push_back({std::move(text), piece.at_start});
      return;
    }
  }
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = 0;
    if (step.metaspace) {  // merged with what follows: a part begins at each mark
      end = text.find(step.mark, text.compare(begin, step.mark.size(), step.mark) == 0
                                     ? begin + step.mark.size()
                                     : begin);
    } else {  // merged with what precedes: a part ends after each mark
      end = text.find(step.mark, begin);
      if (end != std::string::npos) end += step.mark.size();
    }
    end = std::min(end, text.size());
    out.push_back({text.substr(begin, end - begin), piece.at_start && begin == 0});
    begin = end;
  }
}

// ----------------------------------------------------------------------------------------- BPE

struct MergeRule {
  uint32_t rank = 0;
  int32_t id = 0;
};

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

struct Bpe {
  std::unordered_map<uint64_t, MergeRule> merges;
  bool byte_fallback = false;
  bool fuse_unk = false;
  bool ignore_merges = false;
  std::optional<int32_t> unk;
  std::array<int32_t, 256> byte_ids{};  // -1: the vocabulary lacks <0xXX>
};

struct Symbol {
  int32_t id = 0;
  int32_t previous = -1;
  int32_t next = -1;
  bool removed = false;
};

struct PendingMerge {
  uint32_t rank = 0;
  int32_t position = 0;
  int32_t id = 0;
  // The heap's top is the lowest rank, then the leftmost.
  friend bool operator<(const PendingMerge& a, const PendingMerge& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  }
};

const MergeRule* FindMerge(const Bpe& bpe, int32_t left, int32_t right) {
  const auto it = bpe.merges.find(PairKey(left, right));
  return it == bpe.merges.end() ? nullptr : &it->second;
}

void MergeAll(const Bpe& bpe, std::vector<Symbol>& symbols) {
  std::vector<PendingMerge> initial;
  initial.reserve(symbols.size());
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    const MergeRule* rule = FindMerge(bpe, symbols[i].id, symbols[i + 1].id);
    if (rule != nullptr) initial.push_back({rule->rank, static_cast<int32_t>(i), rule->id});
  }
  std::priority_queue<PendingMerge> queue(std::less<PendingMerge>(), std::move(initial));
  const auto at = [&symbols](int32_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  const auto offer = [&](int32_t left) {
    const MergeRule* rule = FindMerge(bpe, at(left).id, at(at(left).next).id);
    if (rule != nullptr) queue.push({rule->rank, left, rule->id});
  };
  while (!queue.empty()) {
    const PendingMerge top = queue.top();
    queue.pop();
    Symbol& left = at(top.position);
    if (left.removed || left.next < 0) continue;
    Symbol& right = at(left.next);
    const MergeRule* rule = FindMerge(bpe, left.id, right.id);
    if (rule == nullptr || rule->id != top.id) continue;  // one of the two has changed meanwhile
    left.id = top.id;
    right.removed = true;
    left.next = right.next;
    if (left.next >= 0) at(left.next).previous = top.position;
    if (left.previous >= 0) offer(left.previous);
    if (left.next >= 0) offer(top.position);
  }
}

// ------------------------------------------------------------------------------------- decoder

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
    out.space = " ";
    out.bare_start = scheme != "never";
  } else if (type == "ByteFallback") {
    out.bytes = true;
  } else if (type == "Strip" && out.strip == 0) {
    ASSIGN_OR_RETURN(const std::string content, view.String("content"));
    ASSIGN_OR_RETURN(const int64_t start, view.Int("start", 0, 1 << 20));
    ASSIGN_OR_RETURN(const int64_t stop, view.Int("stop", 0, 1 << 20));
    out.strip = static_cast<uint32_t>(start);
    out.supported = out.supported && content == " " && stop == 0;
  } else if (type != "Fuse") {
    out.supported = false;
  }
  return absl::OkStatus();
}

// ----------------------------------------------------------------------------------- tokenizer

class JsonTokenizer : public Tokenizer {
 public:
  absl::Status Init(const JsonView& root);

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override;
  std::optional<int32_t> TokenToId(std::string_view token) const override {
    const auto it = ids_.find(token);
    if (it == ids_.end()) return std::nullopt;
    return it->second;
  }
  std::optional<std::string_view> IdToToken(int32_t id) const override {
    if (id < 0 || id >= vocab_size() || !tokens_[static_cast<size_t>(id)].present) {
      return std::nullopt;
    }
    return tokens_[static_cast<size_t>(id)].text;
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(tokens_.size()); }
  bool IsControl(int32_t id) const override {
    return id >= 0 && id < vocab_size() && tokens_[static_cast<size_t>(id)].control;
  }

 private:
  struct Token {
    std::string text;
    bool present = false;
    bool in_model = false;  // of model.vocab, so text can merge to it
    bool control = false;
  };

  absl::Status AddToken(const JsonView& at, std::string_view text, int64_t id, bool in_model);
  absl::Status ParseVocab(const JsonView& model);
  absl::Status ParseMerges(const JsonView& model);
  absl::Status ParseModel(const JsonView& model);
  absl::Status ParseAddedTokens(const JsonView& root);
  absl::Status ParseTemplate(const JsonView& view);
  std::optional<int32_t> ModelId(std::string_view text) const;
  void EncodePiece(std::string_view text, std::vector<int32_t>& out) const;

  std::vector<Token> tokens_;                          // by id
  std::unordered_map<std::string_view, int32_t> ids_;  // keys point into tokens_
  Bpe bpe_;
  std::vector<NormalizerStep> normalizer_;
  std::vector<PreTokenizerStep> pre_tokenizer_;
  TokenMatcher raw_added_;         // matched in the text as it comes
  TokenMatcher normalized_added_;  // matched in normalised text
  std::vector<int32_t> prefix_;    // of the template, before and after the text
  std::vector<int32_t> suffix_;
};

absl::Status JsonTokenizer::Init(const JsonView& root) {
  ASSIGN_OR_RETURN(const JsonView model, root.Get("model"));
  if (root.Has("normalizer")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("normalizer"));
    RETURN_IF_ERROR(ParseNormalizer(view, normalizer_));
  }
  if (root.Has("pre_tokenizer")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("pre_tokenizer"));
    RETURN_IF_ERROR(ParsePreTokenizer(view, pre_tokenizer_));
  }
  RETURN_IF_ERROR(ParseModel(model));
  RETURN_IF_ERROR(ParseAddedTokens(root));
  if (root.Has("post_processor")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("post_processor"));
    RETURN_IF_ERROR(ParseTemplate(view));
  }
  if (root.Has("decoder")) {
    ASSIGN_OR_RETURN(const JsonView view, root.Get("decoder"));
    decoding_.supported = true;
    RETURN_IF_ERROR(ParseDecoder(view, decoding_));
  }
  return absl::OkStatus();
}

absl::Status JsonTokenizer::AddToken(const JsonView& at, std::string_view text, int64_t id,
                                     bool in_model) {
  Token& token = tokens_[static_cast<size_t>(id)];
  if (token.present) {
    return at.Error(StrCat("id ", id, " belongs to both \"", token.text, "\" and \"", text, "\""));
  }
  token = {std::string(text), true, in_model, false};
  ids_.emplace(token.text, static_cast<int32_t>(id));
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParseVocab(const JsonView& model) {
  ASSIGN_OR_RETURN(const JsonView vocab, model.Get("vocab"));
  if (!vocab.json().is_object()) return vocab.Error("expected an object");
  int64_t max_id = -1;
  for (const auto& item : vocab.json().items()) {
    ASSIGN_OR_RETURN(
        const int64_t id,
        JsonView(item.value(), StrCat(kOrigin, ": model.vocab")).AsInt(0, kMaxTokenId));
    max_id = std::max(max_id, id);
  }
  // All tokens at once: ids_ refers to their text, which must not move.
  tokens_.resize(static_cast<size_t>(max_id + 1));
  for (const auto& item : vocab.json().items()) {
    RETURN_IF_ERROR(AddToken(vocab, item.key(), item.value().get<int64_t>(), /*in_model=*/true));
  }
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParseMerges(const JsonView& model) {
  ASSIGN_OR_RETURN(const JsonView merges, model.Get("merges"));
  ASSIGN_OR_RETURN(const size_t size, merges.ArraySize());
  bpe_.merges.reserve(size);
  std::string merged;
  for (size_t i = 0; i < size; ++i) {
    const Json& item = merges.json()[i];
    std::string_view left;
    std::string_view right;
    if (item.is_string()) {
      const std::string_view pair = item.get_ref<const std::string&>();
      const size_t space = pair.find(' ');
      if (space != std::string_view::npos && pair.find(' ', space + 1) == std::string_view::npos) {
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      }
    } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      left = item[0].get_ref<const std::string&>();
      right = item[1].get_ref<const std::string&>();
    }
    const std::optional<int32_t> left_id = ModelId(left);
    const std::optional<int32_t> right_id = ModelId(right);
    merged = StrCat(left, right);
    const std::optional<int32_t> id = ModelId(merged);
    if (!left_id || !right_id || !id) {
      return merges.Error(StrCat("element ", i,
                                 ": expected two tokens of the vocabulary whose concatenation is "
                                 "one, as \"a b\" or [\"a\", \"b\"]"));
    }
    bpe_.merges.insert_or_assign(PairKey(*left_id, *right_id),
                                 MergeRule{static_cast<uint32_t>(i), *id});
  }
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParseModel(const JsonView& model) {
  ASSIGN_OR_RETURN(const std::string type, model.String("type", "BPE"));
  if (type != "BPE") return Unsupported(model, StrCat("the model ", type));
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    ASSIGN_OR_RETURN(const std::string value, model.String(key, ""));
    if (!value.empty()) return Unsupported(model, key);
  }
  ASSIGN_OR_RETURN(const double dropout, model.Double("dropout", 0.0));
  if (dropout != 0.0) return Unsupported(model, "dropout");
  ASSIGN_OR_RETURN(bpe_.byte_fallback, model.Bool("byte_fallback", false));
  ASSIGN_OR_RETURN(bpe_.fuse_unk, model.Bool("fuse_unk", false));
  ASSIGN_OR_RETURN(bpe_.ignore_merges, model.Bool("ignore_merges", false));
  RETURN_IF_ERROR(ParseVocab(model));
  RETURN_IF_ERROR(ParseMerges(model));
  if (model.Has("unk_token")) {
    ASSIGN_OR_RETURN(const std::string unk, model.String("unk_token"));
    bpe_.unk = ModelId(unk);
    if (!bpe_.unk) return model.Error(StrCat("unk_token: \"", unk, "\" is not in the vocabulary"));
  }
  constexpr std::string_view kHex = "0123456789ABCDEF";
  for (size_t b = 0; b < 256; ++b) {
    const char name[] = {'<', '0', 'x', kHex[b >> 4], kHex[b & 15], '>'};
    bpe_.byte_ids[b] = ModelId(std::string_view(name, sizeof(name))).value_or(-1);
  }
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParseAddedTokens(const JsonView& root) {
  if (!root.Has("added_tokens")) return absl::OkStatus();
  ASSIGN_OR_RETURN(const JsonView list, root.Get("added_tokens"));
  ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
  struct Added {
    std::string text;
    int64_t id = 0;
    bool special = false;
    bool normalized = false;
  };
  std::vector<Added> added;
  int64_t max_id = vocab_size() - 1;
  for (size_t i = 0; i < size; ++i) {
    ASSIGN_OR_RETURN(const JsonView item, list.At(i));
    Added token;
    ASSIGN_OR_RETURN(token.text, item.String("content"));
    ASSIGN_OR_RETURN(token.id, item.Int("id", 0, kMaxTokenId));
    ASSIGN_OR_RETURN(token.special, item.Bool("special", false));
    ASSIGN_OR_RETURN(token.normalized, item.Bool("normalized", !token.special));
    for (const std::string_view flag : {"single_word", "lstrip", "rstrip"}) {
      ASSIGN_OR_RETURN(const bool set, item.Bool(flag, false));
      if (set) return Unsupported(item, StrCat(flag, ": true"));
    }
    if (token.text.size() > kMaxAddedTokenBytes) {
      return item.Error(StrCat("content: longer than ", kMaxAddedTokenBytes, " bytes"));
    }
    if (token.text.empty()) continue;
    max_id = std::max(max_id, token.id);
    added.push_back(std::move(token));
  }
  // Growing moves the texts that ids_ refers to.
  if (max_id >= vocab_size()) {
    tokens_.resize(static_cast<size_t>(max_id + 1));
    ids_.clear();
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (tokens_[id].present) ids_.emplace(tokens_[id].text, static_cast<int32_t>(id));
    }
  }
  for (const Added& token : added) {
    const std::optional<int32_t> known = TokenToId(token.text);
    if (known && *known != token.id) {
      return list.Error(
          StrCat("\"", token.text, "\" has id ", token.id, ", but the vocabulary says ", *known));
    }
    if (!known) RETURN_IF_ERROR(AddToken(list, token.text, token.id, /*in_model=*/false));
    const auto id = static_cast<int32_t>(token.id);
    tokens_[static_cast<size_t>(id)].control = token.special;
    if (token.normalized) {
      normalized_added_.Add(Normalize(token.text, normalizer_), id, token.special);
    } else {
      raw_added_.Add(token.text, id, token.special);
    }
  }
  return absl::OkStatus();
}

absl::Status JsonTokenizer::ParseTemplate(const JsonView& view) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type != "TemplateProcessing") return Unsupported(view, StrCat("the post-processor ", type));
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

std::optional<int32_t> JsonTokenizer::ModelId(std::string_view text) const {
  const auto it = ids_.find(text);
  if (it == ids_.end() || !tokens_[static_cast<size_t>(it->second)].in_model) return std::nullopt;
  return it->second;
}

void JsonTokenizer::EncodePiece(std::string_view text, std::vector<int32_t>& out) const {
  if (bpe_.ignore_merges) {
    if (const std::optional<int32_t> whole = ModelId(text)) {
      out.push_back(*whole);
      return;
    }
  }
  std::vector<Symbol> symbols;
  symbols.reserve(text.size());
  const auto add = [&symbols](int32_t id) {
    const auto i = static_cast<int32_t>(symbols.size());
    if (i > 0) symbols.back().next = i;
    symbols.push_back({.id = id, .previous = i - 1});
  };
  // An unknown character waits: with fuse_unk a run of them is one token. As in the reference, byte
  // tokens do not end the run.
  bool pending_unk = false;
  for (size_t i = 0; i < text.size();) {
    const std::string_view character = text.substr(i, Utf8Length(text[i]));
    i += character.size();
    if (const std::optional<int32_t> id = ModelId(character)) {
      if (pending_unk) add(*bpe_.unk);
      pending_unk = false;
      add(*id);
      continue;
    }
    const auto byte_id = [this](char c) { return bpe_.byte_ids[static_cast<unsigned char>(c)]; };
    if (bpe_.byte_fallback &&
        std::all_of(character.begin(), character.end(), [&](char c) { return byte_id(c) >= 0; })) {
      for (const char c : character) add(byte_id(c));
      continue;
    }
    if (!bpe_.unk) continue;
    if (pending_unk && !bpe_.fuse_unk) add(*bpe_.unk);
    pending_unk = true;
  }
  if (pending_unk) add(*bpe_.unk);
  MergeAll(bpe_, symbols);
  for (const Symbol& symbol : symbols) {
    if (!symbol.removed) out.push_back(symbol.id);
  }
}

absl::StatusOr<std::vector<int32_t>> JsonTokenizer::Encode(std::string_view text,
                                                           const EncodeOptions& options) const {
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("text: not valid UTF-8");
  if (text.size() > kMaxTextBytes)
    return absl::InvalidArgumentError(StrCat("text: longer than ", kMaxTextBytes, " bytes"));
  std::vector<int32_t> ids;
  if (options.add_special_tokens) ids = prefix_;
  const auto push = [&ids](int32_t id) { ids.push_back(id); };

  const auto encode_normalized = [&](std::string_view piece, bool at_start) {
    std::vector<Piece> pieces;
    pieces.push_back({std::string(piece), at_start});
    for (const PreTokenizerStep& step : pre_tokenizer_) {
      std::vector<Piece> next;
      for (Piece& p : pieces) PreTokenize(step, std::move(p), next);
      pieces = std::move(next);
    }
    for (const Piece& p : pieces) EncodePiece(p.text, ids);
  };
  const auto encode_raw = [&](std::string_view raw) {
    const bool first = raw.data() == text.data();
    const std::string normalized = Normalize(raw, normalizer_);
    normalized_added_.Split(
        normalized, !options.allow_special,
        [&](std::string_view piece) {
          encode_normalized(piece, first && piece.data() == normalized.data());
        },
        push);
  };
  raw_added_.Split(text, !options.allow_special, encode_raw, push);
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
