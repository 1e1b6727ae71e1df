#include "model/tokenizer_spm_model.h"

#include <bit>
#include <utility>

#include "base/strings.h"
#include "model/tokenizer.h"
#include "model/tokenizer_vocab.h"

namespace saccade {
namespace {

constexpr size_t kMaxPieces = kMaxTokenIds;

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

absl::Status ParsePiece(std::string_view message, SpmModel& model) {
  if (model.pieces.size() >= kMaxPieces) return MalformedModel("too many pieces");
  SpmPiece piece;
  WireReader reader(message);
  for (WireField f; reader.Next(f);) {
    if (f.number == 1 && f.type == 2) piece.text = std::string(f.bytes);
    if (f.number == 2 && f.type == 5)
      piece.score = std::bit_cast<float>(static_cast<uint32_t>(f.value));
    if (f.number == 3 && f.type == 0) piece.type = f.value;
  }
  const size_t id = model.pieces.size();
  if (!reader.ok()) return MalformedModel(StrCat("piece ", id, " is damaged"));
  if (piece.text.empty() || piece.text.size() > kMaxSpmPieceBytes || !IsValidUtf8(piece.text)) {
    return MalformedModel(StrCat("piece ", id, " is empty, too long or not UTF-8"));
  }
  if (piece.score != piece.score) return MalformedModel(StrCat("piece ", id, " has no score"));
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
  return reader.ok() ? absl::OkStatus() : MalformedModel("trainer_spec is damaged");
}

absl::Status ParseNormalizer(std::string_view message, SpmModel& model) {
  WireReader reader(message);
  for (WireField f; reader.Next(f);) {
    if (f.number == 2 && f.type == 2) model.has_charsmap = !f.bytes.empty();
    if (f.number == 3 && f.type == 0) model.add_dummy_prefix = f.value != 0;
    if (f.number == 4 && f.type == 0) model.remove_extra_whitespaces = f.value != 0;
    if (f.number == 5 && f.type == 0) model.escape_whitespaces = f.value != 0;
  }
  return reader.ok() ? absl::OkStatus() : MalformedModel("normalizer_spec is damaged");
}

}  // namespace

absl::Status MalformedModel(std::string_view what) {
  return absl::InvalidArgumentError(StrCat("tokenizer.model: ", what));
}
absl::Status UnsupportedModel(std::string_view what) {
  return absl::UnimplementedError(StrCat("tokenizer.model: ", what, " is not supported"));
}

absl::StatusOr<SpmModel> ParseSpmModel(std::string_view text) {
  SpmModel model;
  WireReader reader(text);
  for (WireField f; reader.Next(f);) {
    if (f.type != 2) continue;
    if (f.number == 1) RETURN_IF_ERROR(ParsePiece(f.bytes, model));
    if (f.number == 2) RETURN_IF_ERROR(ParseTrainer(f.bytes, model));
    if (f.number == 3) RETURN_IF_ERROR(ParseNormalizer(f.bytes, model));
  }
  if (!reader.ok()) return MalformedModel("not a SentencePiece model, or truncated");
  if (model.pieces.empty()) return MalformedModel("no pieces");
  if (model.model_type != 2) return UnsupportedModel("a model type other than BPE");
  if (model.has_charsmap) return UnsupportedModel("a normaliser that maps characters");
  if (model.remove_extra_whitespaces) return UnsupportedModel("remove_extra_whitespaces");
  if (!model.escape_whitespaces) return UnsupportedModel("unescaped white space");
  if (model.whitespace_as_suffix) return UnsupportedModel("treat_whitespace_as_suffix");
  return model;
}

}  // namespace saccade
