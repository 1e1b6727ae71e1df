#pragma once
// The BPE model of a tokenizer.json: characters, or bytes where the vocabulary has no such
// character, merged pair by pair in the order of the rules (models/bpe/{model,word}.rs of the
// reference).
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model/json_util.h"
#include "model/tokenizer_vocab.h"

namespace saccade {

class BpeModel {
 public:
  // Reads `model`; its vocabulary goes into `vocabulary`, which is empty before. INVALID_ARGUMENT:
  // malformed. UNIMPLEMENTED: a part is not supported.
  static absl::StatusOr<BpeModel> Parse(const JsonView& model, Vocabulary& vocabulary);

  // Appends the ids of a piece, valid UTF-8. `vocabulary` is the one of Parse, with tokens added
  // since. With `guard` no guarded token comes of merging; what would be one stays in its parts.
  // O(n log n).
  void Encode(const Vocabulary& vocabulary, std::string_view piece, bool guard,
              std::vector<int32_t>& out) const;

 private:
  struct Rule {
    uint32_t rank = 0;
    int32_t id = 0;
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
  // Tokens as Encode may use them.
  struct Lookup {
    const Vocabulary& vocabulary;
    bool guard;
    bool Allows(int32_t id) const { return !guard || !vocabulary.Find(id)->guarded; }
    std::optional<int32_t> Find(std::string_view text) const {
      const std::optional<int32_t> id = vocabulary.FindInModel(text);
      return id && Allows(*id) ? id : std::nullopt;
    }
  };

  absl::Status ParseMerges(const JsonView& model, const Vocabulary& vocabulary);
  std::vector<Symbol> Symbols(const Lookup& lookup, std::string_view piece) const;
  const Rule* FindRule(const Lookup& lookup, int32_t left, int32_t right) const;
  void MergeAll(const Lookup& lookup, std::vector<Symbol>& symbols) const;

  std::unordered_map<uint64_t, Rule> rules_;  // by the pair of ids
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  bool ignore_merges_ = false;  // a piece that is a token is that token
  std::optional<int32_t> unk_;
  std::array<int32_t, 256> byte_ids_{};  // -1: the vocabulary lacks <0xXX>
};

}  // namespace saccade
