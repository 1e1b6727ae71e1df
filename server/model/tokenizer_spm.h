#pragma once
// SentencePiece BPE from tokenizer.model. The file is parsed and the merges run here: the ids are
// those of the sentencepiece library, without linking it (its shared object exports an old protobuf
// that must not meet gRPC's).
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model/tokenizer.h"

namespace saccade {

struct SentencePieceOptions {
  bool add_bos = true;   // tokenizer_config.json: add_bos_token
  bool add_eos = false;  // tokenizer_config.json: add_eos_token
  // added_tokens.json: special tokens beyond the model's own pieces.
  std::map<std::string, int32_t, std::less<>> added_tokens{};
};

// `model` is the serialised ModelProto. INVALID_ARGUMENT: malformed. UNIMPLEMENTED: not BPE, a
// normaliser that changes characters or spaces, unused pieces.
absl::StatusOr<std::unique_ptr<const Tokenizer>> MakeSentencePieceTokenizer(
    std::string_view model, const SentencePieceOptions& options);

}  // namespace saccade
