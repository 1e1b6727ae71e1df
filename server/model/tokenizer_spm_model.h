#pragma once
// tokenizer.model as it is written: a protobuf message, read here; see tokenizer_spm.h.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace saccade {

constexpr size_t kMaxSpmPieceBytes = 1024;

// sentencepiece_model.proto: ModelProto.SentencePiece.Type.
enum SpmPieceType : uint64_t {
  kSpmNormal = 1,
  kSpmUnknown = 2,
  kSpmControl = 3,
  kSpmUserDefined = 4,
  kSpmUnused = 5,
  kSpmByte = 6,
};

struct SpmPiece {
  std::string text;
  float score = 0.0F;
  uint64_t type = kSpmNormal;
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

// INVALID_ARGUMENT and UNIMPLEMENTED errors of the file.
absl::Status MalformedModel(std::string_view what);
absl::Status UnsupportedModel(std::string_view what);

// INVALID_ARGUMENT: malformed. UNIMPLEMENTED: not BPE, a normaliser that changes characters or
// spaces.
absl::StatusOr<SpmModel> ParseSpmModel(std::string_view text);

}  // namespace saccade
