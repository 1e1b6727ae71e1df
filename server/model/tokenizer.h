#pragma once
// Text to token ids, equal to the reference. Two formats, one interface:
//   tokenizer.json   Hugging Face `tokenizers` BPE (tokenizer_json.cc), of characters with byte
//                    fallback or of bytes. What normalizers (tokenizer_normalize.h) and
//                    pre-tokenizers (tokenizer_split.h) there are is said there; a part that is
//                    not is UNIMPLEMENTED by its name. Of decoders Replace, ByteFallback, Fuse,
//                    Strip, Metaspace and ByteLevel; with another one text is read and not written.
//   tokenizer.model  SentencePiece BPE (tokenizer_spm.cc), used when the folder has no
//   tokenizer.json.
// Immutable after Load; any thread may encode. Time is O(n log n) in the length of the text.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace saccade {

struct EncodeOptions {
  // Add what the tokenizer's template adds around a text (Llama: BOS in front).
  bool add_special_tokens = true;
  // true, as the reference does for prompts: the text of an added token ("<s>") inside `text`
  // becomes that token. false, for the words of a client: that text is plain text where the token
  // is special or has a name, that is a letter or a digit ("<image>", "<loc0001>"), so no words
  // turn into a token that means something else to the model. Added tokens that are neither
  // (Gemma's runs of newlines) are how such text is written and are matched either way. The default
  // is the reference's; who builds a prompt decides.
  bool allow_special = true;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // From a model folder. NOT_FOUND: neither file exists. INVALID_ARGUMENT: malformed.
  // UNIMPLEMENTED: a part is not supported.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Load(const std::string& dir);
  // From the text of a tokenizer.json.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> FromJson(std::string_view text);

  // INVALID_ARGUMENT: `text` is not UTF-8. The caller bounds its length.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                                      const EncodeOptions& options) const = 0;
  virtual std::optional<int32_t> TokenToId(std::string_view token) const = 0;
  virtual std::optional<std::string_view> IdToToken(int32_t id) const = 0;
  // Largest id + 1, added tokens included.
  virtual int32_t vocab_size() const = 0;
  // A token that is no part of any text, such as BOS and EOS.
  virtual bool IsControl(int32_t id) const = 0;

  // How tokens become text again; see text_decoder.h.
  struct Decoding {
    bool supported = false;
    std::string mark;  // stands for `space` in tokens; empty: nothing does
    std::string space;
    bool bytes = false;       // <0x00> to <0xFF> are bytes
    bool byte_level = false;  // each character is a byte (tokenizer_bytes.h); nothing else applies
    bool bare_start = false;  // no space for the marks of the first token
    uint32_t strip = 0;       // spaces dropped from the front, at most
  };
  const Decoding& decoding() const { return decoding_; }

  // Id of the bare word mark U+2581, the token OpenVLA expects before its actions; NOT_FOUND when
  // there is none.
  absl::StatusOr<int32_t> EmptyTokenId() const;

 protected:
  Decoding decoding_;
};

// Whether an added token has a name; see EncodeOptions::allow_special. `token` is valid UTF-8.
bool IsNamed(std::string_view token);

// True for well-formed UTF-8 (no overlong forms, no surrogates, at most U+10FFFF).
bool IsValidUtf8(std::string_view text);

}  // namespace saccade
