#include "model/tokenizer_bpe.h"

#include <algorithm>
#include <queue>
#include <string>
#include <utility>

#include "base/strings.h"
#include "model/tokenizer_parse.h"
#include "model/unicode_class.h"

namespace saccade {
namespace {

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

absl::Status ParseVocab(const JsonView& model, Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const JsonView vocab, model.Get("vocab"));
  if (!vocab.json().is_object()) return vocab.Error("expected an object");
  for (const auto& item : vocab.json().items()) {
    const JsonView value(item.value(), StrCat(vocab.origin(), ": ", vocab.path()));
    ASSIGN_OR_RETURN(const int64_t id, value.AsInt(0, kMaxTokenIds - 1));
    if (!vocabulary.Add(item.key(), static_cast<int32_t>(id), /*in_model=*/true)) {
      return vocab.Error(StrCat("id ", id, " belongs to both \"",
                                vocabulary.Find(static_cast<int32_t>(id))->text, "\" and \"",
                                item.key(), "\""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BpeModel> BpeModel::Parse(const JsonView& model, Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const std::string type, model.String("type", "BPE"));
  if (type != "BPE") return UnsupportedPart(model, StrCat("the model ", type));
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    ASSIGN_OR_RETURN(const std::string value, model.String(key, ""));
    if (!value.empty()) return UnsupportedPart(model, key);
  }
  ASSIGN_OR_RETURN(const double dropout, model.Double("dropout", 0.0));
  if (dropout != 0.0) return UnsupportedPart(model, "dropout");
  BpeModel result;
  ASSIGN_OR_RETURN(result.byte_fallback_, model.Bool("byte_fallback", false));
  ASSIGN_OR_RETURN(result.fuse_unk_, model.Bool("fuse_unk", false));
  ASSIGN_OR_RETURN(result.ignore_merges_, model.Bool("ignore_merges", false));
  RETURN_IF_ERROR(ParseVocab(model, vocabulary));
  RETURN_IF_ERROR(result.ParseMerges(model, vocabulary));
  if (model.Has("unk_token")) {
    ASSIGN_OR_RETURN(const std::string unk, model.String("unk_token"));
    result.unk_ = vocabulary.FindInModel(unk);
    if (!result.unk_) {
      return model.Error(StrCat("unk_token: \"", unk, "\" is not in the vocabulary"));
    }
  }
  constexpr std::string_view kHex = "0123456789ABCDEF";
  for (size_t b = 0; b < 256; ++b) {
    const char name[] = {'<', '0', 'x', kHex[b >> 4], kHex[b & 15], '>'};
    result.byte_ids_[b] = vocabulary.FindInModel(std::string_view(name, sizeof(name))).value_or(-1);
  }
  return result;
}

absl::Status BpeModel::ParseMerges(const JsonView& model, const Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const JsonView merges, model.Get("merges"));
  ASSIGN_OR_RETURN(const size_t size, merges.ArraySize());
  rules_.reserve(size);
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
    const std::optional<int32_t> left_id = vocabulary.FindInModel(left);
    const std::optional<int32_t> right_id = vocabulary.FindInModel(right);
    merged = StrCat(left, right);
    const std::optional<int32_t> id = vocabulary.FindInModel(merged);
    if (!left_id || !right_id || !id) {
      return merges.Error(StrCat("element ", i,
                                 ": expected two tokens of the vocabulary whose concatenation is "
                                 "one, as \"a b\" or [\"a\", \"b\"]"));
    }
    rules_.insert_or_assign(PairKey(*left_id, *right_id), Rule{static_cast<uint32_t>(i), *id});
  }
  return absl::OkStatus();
}

void BpeModel::Encode(const Vocabulary& vocabulary, std::string_view piece, bool guard,
                      std::vector<int32_t>& out) const {
  const Lookup lookup{vocabulary, guard};
  if (ignore_merges_) {
    if (const std::optional<int32_t> whole = lookup.Find(piece)) {
      out.push_back(*whole);
      return;
    }
  }
  std::vector<Symbol> symbols = Symbols(lookup, piece);
  MergeAll(lookup, symbols);
  for (const Symbol& symbol : symbols) {
    if (!symbol.removed) out.push_back(symbol.id);
  }
}

std::vector<BpeModel::Symbol> BpeModel::Symbols(const Lookup& lookup,
                                                std::string_view piece) const {
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  const auto add = [&symbols](int32_t id) {
    const auto i = static_cast<int32_t>(symbols.size());
    if (i > 0) symbols.back().next = i;
    symbols.push_back({.id = id, .previous = i - 1});
  };
  const auto byte_id = [this](char c) { return byte_ids_[static_cast<unsigned char>(c)]; };
  // An unknown character waits: with fuse_unk a run of them is one token. As in the reference, byte
  // tokens do not end the run.
  bool pending_unk = false;
  for (size_t i = 0; i < piece.size();) {
    const std::string_view character = piece.substr(i, CharacterAt(piece, i).size);
    i += character.size();
    if (const std::optional<int32_t> id = lookup.Find(character)) {
      if (pending_unk) add(*unk_);
      pending_unk = false;
      add(*id);
      continue;
    }
    if (byte_fallback_ &&
        std::all_of(character.begin(), character.end(), [&](char c) { return byte_id(c) >= 0; })) {
      for (const char c : character) add(byte_id(c));
      continue;
    }
    if (!unk_) continue;
    if (pending_unk && !fuse_unk_) add(*unk_);
    pending_unk = true;
  }
  if (pending_unk) add(*unk_);
  return symbols;
}

const BpeModel::Rule* BpeModel::FindRule(const Lookup& lookup, int32_t left, int32_t right) const {
  const auto it = rules_.find(PairKey(left, right));
  return it != rules_.end() && lookup.Allows(it->second.id) ? &it->second : nullptr;
}

void BpeModel::MergeAll(const Lookup& lookup, std::vector<Symbol>& symbols) const {
  std::vector<PendingMerge> initial;
  initial.reserve(symbols.size());
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    const Rule* rule = FindRule(lookup, symbols[i].id, symbols[i + 1].id);
    if (rule != nullptr) initial.push_back({rule->rank, static_cast<int32_t>(i), rule->id});
  }
  std::priority_queue<PendingMerge> queue(std::less<PendingMerge>(), std::move(initial));
  const auto at = [&symbols](int32_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  const auto offer = [&](int32_t left) {
    const Rule* rule = FindRule(lookup, at(left).id, at(at(left).next).id);
    if (rule != nullptr) queue.push({rule->rank, left, rule->id});
  };
  while (!queue.empty()) {
    const PendingMerge top = queue.top();
    queue.pop();
    Symbol& left = at(top.position);
    if (left.removed || left.next < 0) continue;
    Symbol& right = at(left.next);
    const Rule* rule = FindRule(lookup, left.id, right.id);
    if (rule == nullptr || rule->id != top.id) continue;  // one of the two has changed meanwhile
    left.id = top.id;
    right.removed = true;
    left.next = right.next;
    if (left.next >= 0) at(left.next).previous = top.position;
    if (left.previous >= 0) offer(left.previous);
    if (left.next >= 0) offer(top.position);
  }
}

}  // namespace saccade
