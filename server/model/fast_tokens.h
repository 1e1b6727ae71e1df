#pragma once
// FAST action tokens (Pertsch et al. 2025, "FAST: Efficient Action Tokenization for
// Vision-Language- Action Models"): a chunk of actions is the byte-level BPE of a string whose
// characters are rounded coefficients of its discrete cosine transform over time.
//   characters  code point + min_token = coefficient, [steps, dim] in row order
//   actions     inverse DCT-II (orthonormal) over the steps of coefficient / scale, in F64
// The policy writes them with its own text tokenizer, "Action: " in front and "|" behind, each as
// the id vocabulary - 1 - skipped - fast id.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/tokenizer.h"

namespace saccade {

enum class FastPolicy : uint8_t {
  kStrict,     // what is no whole chunk is an error
  kReference,  // what is missing is zero, what is too much is dropped: to compare recorded answers
};

// Where FAST ids are among the ids of the text tokenizer.
class FastFraming {
 public:
  // `skipped` ids at the end of the vocabulary are not used. INVALID_ARGUMENT: the tokenizer spells
  // "|" in other than one id, or the vocabulary does not hold the ids.
  static absl::StatusOr<FastFraming> Make(const Tokenizer& text, uint32_t vocabulary,
                                          uint32_t skipped, uint32_t fast_vocabulary);

  int32_t stop() const { return stop_; }  // the id of "|"
  // FAST ids of an answer, in order. INTERNAL (kInvalidActionToken), strict only: no stop, or an id
  // that is neither of the prefix, which may only be in front, nor of FAST.
  absl::StatusOr<std::vector<int32_t>> FastIds(std::span<const int32_t> answer,
                                               FastPolicy policy) const;

 private:
  FastFraming() = default;

  std::vector<int32_t> prefix_;
  int32_t stop_ = 0;
  int32_t first_ = 0;  // of the text id of FAST id 0; later ones count down
  int32_t fast_vocabulary_ = 0;
};

class FastTokens {
 public:
  // From a folder with processor_config.json and tokenizer.json, for chunks of `steps` actions of
  // `dim` values (each positive; at most 2^20 values). Errors name file and key: a value out of
  // range, a time_horizon or action_dim that is stated and differs.
  static absl::StatusOr<FastTokens> Load(const std::string& dir, uint32_t steps, uint32_t dim);

  uint32_t steps() const { return steps_; }
  uint32_t dim() const { return dim_; }
  uint32_t vocabulary() const { return vocabulary_; }  // FAST ids
  double coefficient() const { return 1 / scale_; }    // that a step of one character stands for
  const Tokenizer& tokenizer() const { return *tokenizer_; }

  // Normalised actions [steps, dim]. INTERNAL (kInvalidActionToken), strict only: an id without a
  // token, bytes that are no characters, or other than steps * dim of them.
  absl::StatusOr<std::vector<double>> Decode(std::span<const int32_t> ids, FastPolicy policy) const;

 private:
  FastTokens() = default;

  std::unique_ptr<const Tokenizer> tokenizer_;
  uint32_t steps_ = 0;
  uint32_t dim_ = 0;
  uint32_t vocabulary_ = 0;
  double scale_ = 1;
  int64_t min_token_ = 0;
  std::vector<double> basis_;  // [steps, steps]: action n is the sum of basis[n, k] coefficient k
};

}  // namespace saccade
