#include "model/tokenizer_spm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/tokenizer_added.h"
#include "model/tokenizer_vocab.h"

namespace saccade {
namespace {

constexpr std::string_view kSpaceMark = "\u2581";
constexpr size_t kMaxPieces = kMaxTokenIds;
constexpr size_t kMaxPieceBytes = 1024;
constexpr size_t kMaxTextBytes = 16 << 20;

// sentencepiece_model.proto: ModelProto.SentencePiece.Type.
enum PieceType : uint64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

absl::Status Malformed(std::string_view what) {
  return absl::InvalidArgumentError(StrCat("tokenizer.model: ", what));
}
absl::Status Unsupported(std::string_view what) {
  return absl::UnimplementedError(StrCat("tokenizer.model: ", what, " is not supported"));
}

// One field of a protobuf message. `bytes` for length-delimited fields, `value` for the others.
struct WireField {
  uint64_t number = 0;
  int type = 0;
  uint64_t value = 0;
  std::string_view bytes{};
};

// The protobuf wire format, bounded by the text it is given.
class WireReader {
 public:
  explicit WireReader(std::string_view text) : text_(text) {}

  // False at the end of the message and on malformed input (then ok() is false).
  bool Next(WireField& field) {
    if (text_.empty() || !ok_) return false;
    const uint64_t tag = Varint();
    field = WireField{.number = tag >> 3, .type = static_cast<int>(tag & 7)};
    switch (field.type) {
      case 0:
        field.value = Varint();
        break;
      case 1:
        field.value = Fixed(8);
        break;
      case 2:
        field.bytes = Take(Varint());
        break;
      case 5:
        field.value = Fixed(4);
        break;
      default:
        ok_ = false;
    }
    ok_ = ok_ && field.number != 0;
    return ok_;
  }
  bool ok() const { return ok_; }

 private:
  std::string_view Take(uint64_t size) {
    if (size > text_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view part = text_.substr(0, size);
    text_.remove_prefix(size);
    return part;
  }
  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::string_view byte = Take(1);
      if (byte.empty()) return 0;
      const auto b = static_cast<unsigned char>(byte[0]);
      value |= static_cast<uint64_t>(b & 0x7F) << shift;
      if (b < 0x80) return value;
    }
    ok_ = false;
    return 0;
  }
  uint64_t Fixed(size_t size) {
    uint64_t value = 0;
    const std::string_view bytes = Take(size);
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return value;
  }

  std::string_view text_;
  bool ok_ = true;
};

struct SpmPiece {
  std::string text;
  float score = 0.0F;
  uint64_t type = kNormal;
};

struct SpmModel {
  std::vector<SpmPiece> pieces;
  uint64_t model_type = 1;  // UNIGRAM
  bool byte_fallback = false;
  bool whitespace_as_suffix = false;
  std::string bos_piece = "<s>";
  std::string eos_piece = "</s>";
  bool has_charsmap = false;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

absl::Status ParsePiece(std::string_view message, SpmModel& model) {
  if (model.pieces.size() >= kMaxPieces) return Malformed("too many pieces");
  SpmPiece piece;
  WireReader reader(message);
  for (WireField f; reader.Next(f);) {
    if (f.number == 1 && f.type == 2) piece.text = std::string(f.bytes);
    if (f.number == 2 && f.type == 5)
      piece.score = std::bit_cast<float>(static_cast<uint32_t>(f.value));
    if (f.number == 3 && f.type == 0) piece.type = f.value;
  }
  const size_t id = model.pieces.size();
  if (!reader.ok()) return Malformed(StrCat("piece ", id, " is damaged"));
  if (piece.text.empty() || piece.text.size() > kMaxPieceBytes || !IsValidUtf8(piece.text)) {
    return Malformed(StrCat("piece ", id, " is empty, too long or not UTF-8"));
  }
  if (piece.score != piece.score) return Malformed(StrCat("piece ", id, " has no score"));
  model.pieces.push_back(std::move(piece));
  return absl::OkStatus();
}

absl::Status ParseTrainer(std::string_view message, SpmModel& model) {
  WireReader reader(message);
  for (WireField f; reader.Next(f);) {
    if (f.number == 3 && f.type == 0) model.model_type = f.value;
    if (f.number == 24 && f.type == 0) model.whitespace_as_suffix = f.value != 0;
    if (f.number == 35 && f.type == 0) model.byte_fallback = f.value != 0;
    if (f.number == 46 && f.type == 2) model.bos_piece = std::string(f.bytes);
    if (f.number == 47 && f.type == 2) model.eos_piece = std::string(f.bytes);
  }
  return reader.ok() ? absl::OkStatus() : Malformed("trainer_spec is damaged");
}

absl::Status ParseNormalizer(std::string_view message, SpmModel& model) {
  WireReader reader(message);
  for (WireField f; reader.Next(f);) {
    if (f.number == 2 && f.type == 2) model.has_charsmap = !f.bytes.empty();
    if (f.number == 3 && f.type == 0) model.add_dummy_prefix = f.value != 0;
    if (f.number == 4 && f.type == 0) model.remove_extra_whitespaces = f.value != 0;
    if (f.number == 5 && f.type == 0) model.escape_whitespaces = f.value != 0;
  }
  return reader.ok() ? absl::OkStatus() : Malformed("normalizer_spec is damaged");
}

absl::StatusOr<SpmModel> ParseModel(std::string_view text) {
  SpmModel model;
  WireReader reader(text);
  for (WireField f; reader.Next(f);) {
    if (f.type != 2) continue;
    if (f.number == 1) RETURN_IF_ERROR(ParsePiece(f.bytes, model));
    if (f.number == 2) RETURN_IF_ERROR(ParseTrainer(f.bytes, model));
    if (f.number == 3) RETURN_IF_ERROR(ParseNormalizer(f.bytes, model));
  }
  if (!reader.ok()) return Malformed("not a SentencePiece model, or truncated");
  if (model.pieces.empty()) return Malformed("no pieces");
  if (model.model_type != 2) return Unsupported("a model type other than BPE");
  if (model.has_charsmap) return Unsupported("a normaliser that maps characters");
  if (model.remove_extra_whitespaces) return Unsupported("remove_extra_whitespaces");
  if (!model.escape_whitespaces) return Unsupported("unescaped white space");
  if (model.whitespace_as_suffix) return Unsupported("treat_whitespace_as_suffix");
  return model;
}

// A run of bytes of the normalised text; begin is fixed, the run grows as it merges.
struct Symbol {
  int32_t begin = 0;
  int32_t size = 0;  // 0: merged into its left neighbour
  int32_t previous = -1;
  int32_t next = -1;
  bool frozen = false;  // a user-defined piece: never merges
};

struct PendingMerge {
  float score = 0.0F;
  int32_t left = 0;
  int32_t right = 0;
  int32_t size = 0;  // bytes of the merged piece; another size means that a side has changed
  // The heap's top is the highest score, then the leftmost.
  friend bool operator<(const PendingMerge& a, const PendingMerge& b) {
    return a.score != b.score ? a.score < b.score : a.left > b.left;
  }
};

class SentencePieceTokenizer : public Tokenizer {
 public:
  absl::Status Init(SpmModel model, const SentencePieceOptions& options);

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override;
  std::optional<int32_t> TokenToId(std::string_view token) const override {
    const auto it = ids_.find(token);
    if (it == ids_.end()) return std::nullopt;
    return it->second;
  }
  std::optional<std::string_view> IdToToken(int32_t id) const override {
    if (id < 0 || id >= vocab_size() || pieces_[static_cast<size_t>(id)].text.empty()) {
      return std::nullopt;
    }
    return pieces_[static_cast<size_t>(id)].text;
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }
  bool IsControl(int32_t id) const override {
    if (id < 0 || id >= vocab_size()) return false;
    const uint64_t type = pieces_[static_cast<size_t>(id)].type;
    return type == kControl || type == kUnknown;
  }

 private:
  void EncodePiece(std::string_view raw, bool guard, std::vector<int32_t>& out) const;
  // Id of a piece that text can become; nullopt for unknown, control and byte pieces, and with
  // `guard` for user-defined ones with a name.
  std::optional<int32_t> TextId(std::string_view text, bool guard) const {
    const std::optional<int32_t> id = TokenToId(text);
    if (!id) return std::nullopt;
    const uint64_t type = pieces_[static_cast<size_t>(*id)].type;
    const bool allowed = type == kNormal || (type == kUserDefined && !(guard && IsNamed(text)));
    return allowed ? id : std::nullopt;
  }

  std::vector<SpmPiece> pieces_;  // by id; an empty text is an id without a token
  std::unordered_map<std::string_view, int32_t> ids_;  // keys point into pieces_
  TokenMatcher special_;
  TokenMatcher user_defined_;
  size_t max_piece_bytes_ = 0;
  int32_t unk_ = 0;
  bool byte_fallback_ = false;
  bool add_dummy_prefix_ = true;
  std::array<int32_t, 256> byte_ids_{};
  std::optional<int32_t> bos_;
  std::optional<int32_t> eos_;
};

absl::Status SentencePieceTokenizer::Init(SpmModel model, const SentencePieceOptions& options) {
  pieces_ = std::move(model.pieces);
  byte_fallback_ = model.byte_fallback;
  add_dummy_prefix_ = model.add_dummy_prefix;
  decoding_ = {.supported = true,
               .mark = std::string(kSpaceMark),
               .space = " ",
               .bytes = true,
               .strip = add_dummy_prefix_ ? 1U : 0U};
  const size_t model_size = pieces_.size();
  bool room = true;  // for patterns
  for (const auto& [text, id] : options.added_tokens) {
    if (text.empty() || text.size() > kMaxPieceBytes) {
      return absl::InvalidArgumentError("added_tokens.json: a token is empty or too long");
    }
    if (static_cast<size_t>(id) >= pieces_.size()) pieces_.resize(static_cast<size_t>(id) + 1);
    SpmPiece& piece = pieces_[static_cast<size_t>(id)];
    if (!piece.text.empty() && piece.text != text) {
      return absl::InvalidArgumentError(StrCat("added_tokens.json: \"", text, "\" has id ", id,
                                               ", which is \"", piece.text, "\""));
    }
    if (piece.text.empty()) piece = {text, 0.0F, kControl};
    room = room && special_.Add(text, id, /*special=*/true);
  }
  constexpr std::string_view kHex = "0123456789ABCDEF";
  byte_ids_.fill(-1);
  bool has_unk = false;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const SpmPiece& piece = pieces_[i];
    if (piece.text.empty()) continue;
    const auto id = static_cast<int32_t>(i);
    if (!ids_.emplace(piece.text, id).second) {
      return Malformed(StrCat("\"", piece.text, "\" appears twice"));
    }
    switch (piece.type) {
      case kNormal:
        break;
      case kUserDefined:
        room = room && user_defined_.Add(piece.text, id, IsNamed(piece.text));
        break;
      case kUnknown:
        if (has_unk) return Malformed("two unknown pieces");
        has_unk = true;
        unk_ = id;
        room = room && special_.Add(piece.text, id, /*special=*/true);
        break;
      case kControl:
        room = room && special_.Add(piece.text, id, /*special=*/true);
        break;
      case kByte: {
        const std::string& t = piece.text;
        const size_t high = t.size() == 6 ? kHex.find(t[3]) : std::string_view::npos;
        const size_t low = t.size() == 6 ? kHex.find(t[4]) : std::string_view::npos;
        if (!t.starts_with("<0x") || t.back() != '>' || high == std::string_view::npos ||
            low == std::string_view::npos) {
          return Malformed(StrCat("\"", t, "\" is not a byte piece"));
        }
        byte_ids_[high * 16 + low] = id;
        break;
      }
      default:
        return Unsupported(StrCat("piece type ", piece.type));
    }
    if (i < model_size) max_piece_bytes_ = std::max(max_piece_bytes_, piece.text.size());
  }
  if (!room) return Malformed("too much text of control, user-defined and added pieces");
  if (!has_unk) return Malformed("no unknown piece");
  if (byte_fallback_ && std::find(byte_ids_.begin(), byte_ids_.end(), -1) != byte_ids_.end()) {
    return Malformed("byte_fallback without all 256 byte pieces");
  }
  const auto find = [this](bool wanted, const std::string& name,
                           std::optional<int32_t>& out) -> absl::Status {
    if (!wanted) return absl::OkStatus();
    out = TokenToId(name);
    return out ? absl::OkStatus() : Malformed(StrCat("no piece \"", name, "\""));
  };
  RETURN_IF_ERROR(find(options.add_bos, model.bos_piece, bos_));
  return find(options.add_eos, model.eos_piece, eos_);
}

void SentencePieceTokenizer::EncodePiece(std::string_view raw, bool guard,
                                         std::vector<int32_t>& out) const {
  std::string text;
  text.reserve(raw.size() + raw.size() / 2 + kSpaceMark.size());
  if (add_dummy_prefix_) text.append(kSpaceMark);
  for (const char c : raw) {
    if (c == ' ') {
      text.append(kSpaceMark);
    } else {
      text.push_back(c);
    }
  }

  std::vector<Symbol> symbols;
  symbols.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const TokenMatcher::Match match = user_defined_.LongestAt(text, i);
    const size_t user_defined = guard && match.special ? 0 : match.size;
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t character = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    const auto index = static_cast<int32_t>(symbols.size());
    if (index > 0) symbols.back().next = index;
    symbols.push_back({.begin = static_cast<int32_t>(i),
                       .size = static_cast<int32_t>(user_defined > 0 ? user_defined : character),
                       .previous = index - 1,
                       .frozen = user_defined > 0});
    i += static_cast<size_t>(symbols.back().size);
  }

  std::priority_queue<PendingMerge> queue;
  const auto at = [&symbols](int32_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  const auto view = [&text](const Symbol& s, int32_t size) {
    return std::string_view(text).substr(static_cast<size_t>(s.begin), static_cast<size_t>(size));
  };
  const auto offer = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0 || at(left).frozen || at(right).frozen) return;
    const int32_t size = at(left).size + at(right).size;
    if (static_cast<size_t>(size) > max_piece_bytes_) return;
    const std::optional<int32_t> id = TextId(view(at(left), size), guard);
    if (id) queue.push({pieces_[static_cast<size_t>(*id)].score, left, right, size});
  };
  for (size_t i = 1; i < symbols.size(); ++i) {
    offer(static_cast<int32_t>(i) - 1, static_cast<int32_t>(i));
  }
  while (!queue.empty()) {
    const PendingMerge top = queue.top();
    queue.pop();
    Symbol& left = at(top.left);
    Symbol& right = at(top.right);
    if (left.size == 0 || right.size == 0 || left.size + right.size != top.size) continue;
    left.size = top.size;
    left.next = right.next;
    if (right.next >= 0) at(right.next).previous = top.left;
    right.size = 0;
    offer(left.previous, top.left);
    offer(top.left, left.next);
  }

  bool after_unknown = false;
  for (int32_t i = symbols.empty() ? -1 : 0; i >= 0; i = at(i).next) {
    const std::string_view piece = view(at(i), at(i).size);
    const std::optional<int32_t> id = TextId(piece, guard);
    if (id) {
      out.push_back(*id);
    } else if (byte_fallback_) {
      for (const char c : piece) out.push_back(byte_ids_[static_cast<unsigned char>(c)]);
    } else if (!after_unknown) {
      out.push_back(unk_);  // a run of unknown characters is one token
    }
    after_unknown = !id && !byte_fallback_;
  }
}

absl::StatusOr<std::vector<int32_t>> SentencePieceTokenizer::Encode(
    std::string_view text, const EncodeOptions& options) const {
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("text: not valid UTF-8");
  if (text.size() > kMaxTextBytes)
    return absl::InvalidArgumentError(StrCat("text: longer than ", kMaxTextBytes, " bytes"));
  const bool guard = !options.allow_special;
  std::vector<int32_t> ids;
  if (options.add_special_tokens && bos_) ids.push_back(*bos_);
  special_.Split(
      text, guard, [&](std::string_view piece) { EncodePiece(piece, guard, ids); },
      [&ids](int32_t id) { ids.push_back(id); });
  if (options.add_special_tokens && eos_) ids.push_back(*eos_);
  return ids;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> MakeSentencePieceTokenizer(
    std::string_view model, const SentencePieceOptions& options) {
  ASSIGN_OR_RETURN(SpmModel parsed, ParseModel(model));
  auto tokenizer = std::make_unique<SentencePieceTokenizer>();
  RETURN_IF_ERROR(tokenizer->Init(std::move(parsed), options));
  return std::unique_ptr<const Tokenizer>(std::move(tokenizer));
}

}  // namespace saccade
