#include "model/fast_tokens.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/strings.h"
#include "model/json_util.h"
#include "model/text_decoder.h"

namespace saccade {
namespace {

constexpr std::string_view kFileName = "processor_config.json";
constexpr int64_t kMaxIds = 1 << 22;
constexpr int64_t kMaxCodePoint = 0x10FFFF;
constexpr uint64_t kMaxChunk = 1 << 20;
constexpr uint32_t kMaxSteps = 4096;
constexpr int64_t kReplacement = 0xFFFD;  // stands for bytes that are no character

absl::Status Invalid(std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kInvalidActionToken;
  return MakeError(absl::StatusCode::kInternal, message, info);
}

// Of text that is UTF-8.
std::vector<int64_t> CodePoints(std::string_view text) {
  std::vector<int64_t> points;
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t size = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    int64_t point = size == 1 ? lead : lead & (0x7F >> size);
    for (size_t k = 1; k < size; ++k) point = point << 6 | (text[i + k] & 0x3F);
    points.push_back(point);
    i += size;
  }
  return points;
}

}  // namespace

absl::StatusOr<FastFraming> FastFraming::Make(const Tokenizer& text, uint32_t vocabulary,
                                              uint32_t skipped, uint32_t fast_vocabulary) {
  if (vocabulary > kMaxIds || uint64_t{skipped} + fast_vocabulary >= vocabulary) {
    return absl::InvalidArgumentError(StrCat("a vocabulary of ", vocabulary, " ids does not hold ",
                                             fast_vocabulary, " FAST ids before its last ",
                                             skipped));
  }
  EncodeOptions options;
  options.add_special_tokens = false;
  FastFraming out;
  ASSIGN_OR_RETURN(out.prefix_, text.Encode("Action: ", options));
  ASSIGN_OR_RETURN(const std::vector<int32_t> stop, text.Encode("|", options));
  if (stop.size() != 1) {
    return absl::InvalidArgumentError(
        StrCat("the tokenizer spells \"|\", which ends actions, in ", stop.size(), " ids"));
  }
  out.stop_ = stop.front();
  out.first_ = static_cast<int32_t>(vocabulary - 1 - skipped);
  out.fast_vocabulary_ = static_cast<int32_t>(fast_vocabulary);
  return out;
}

absl::StatusOr<std::vector<int32_t>> FastFraming::FastIds(std::span<const int32_t> answer,
                                                          FastPolicy policy) const {
  const bool strict = policy == FastPolicy::kStrict;
  const auto stop = std::find(answer.begin(), answer.end(), stop_);
  if (strict && stop == answer.end()) {
    return Invalid(StrCat("the action has no end after ", answer.size(), " tokens"));
  }
  std::vector<int32_t> ids;
  const auto count = static_cast<size_t>(stop - answer.begin());
  for (size_t i = 0; i < count;) {
    const std::span<const int32_t> rest = answer.subspan(i, count - i);
    if ((i == 0 || !strict) && !prefix_.empty() && rest.size() >= prefix_.size() &&
        std::equal(prefix_.begin(), prefix_.end(), rest.begin())) {
      i += prefix_.size();
      continue;
    }
    const int64_t id = int64_t{first_} - answer[i];
    if (id >= 0 && id < fast_vocabulary_) {
      ids.push_back(static_cast<int32_t>(id));
    } else if (strict) {
      return Invalid(StrCat("action token ", i, ": id ", answer[i],
                            " is outside the action range (", first_ - fast_vocabulary_, ", ",
                            first_, "]"));
    }
    ++i;
  }
  return ids;
}

absl::StatusOr<FastTokens> FastTokens::Load(const std::string& dir, uint32_t steps, uint32_t dim) {
  if (steps == 0 || dim == 0 || steps > kMaxSteps || uint64_t{steps} * dim > kMaxChunk) {
    return absl::InvalidArgumentError(
        StrCat(dir, ": chunks of ", steps, " actions of ", dim, " values are not supported"));
  }
  ASSIGN_OR_RETURN(const Json json, ReadJsonFile(StrCat(dir, "/", kFileName)));
  const JsonView config(json, kFileName);
  FastTokens out;
  out.steps_ = steps;
  out.dim_ = dim;
  ASSIGN_OR_RETURN(out.scale_, config.Double("scale"));
  // The largest coefficient stays finite.
  if (!(out.scale_ >= 1e-9 && out.scale_ <= 1e9)) {
    return config.Error("scale must be in [1e-9, 1e9]");
  }
  ASSIGN_OR_RETURN(out.min_token_, config.Int("min_token", -kMaxCodePoint, kMaxCodePoint));
  ASSIGN_OR_RETURN(const int64_t vocabulary, config.Int("vocab_size", 1, kMaxIds));
  out.vocabulary_ = static_cast<uint32_t>(vocabulary);
  // The universal tokenizer states neither.
  for (const auto& [key, expected] : {std::pair("time_horizon", steps), {"action_dim", dim}}) {
    ASSIGN_OR_RETURN(const int64_t stated, config.Int(key, 1, int64_t{kMaxChunk}, expected));
    if (stated != expected) {
      return config.Error(StrCat(key, " is ", stated, ", but the policy has ", expected));
    }
  }
  ASSIGN_OR_RETURN(out.tokenizer_, Tokenizer::Load(dir));
  if (!out.tokenizer_->decoding().supported) {
    return absl::UnimplementedError(StrCat(dir, ": tokenizer.json: its decoder is not supported"));
  }
  if (out.tokenizer_->vocab_size() > vocabulary) {
    return config.Error(StrCat("vocab_size is ", vocabulary, ", but tokenizer.json has ",
                               out.tokenizer_->vocab_size(), " ids"));
  }
  const auto n = static_cast<double>(steps);
  for (uint32_t t = 0; t < steps; ++t) {
    for (uint32_t k = 0; k < steps; ++k) {
      // (2t + 1) k mod 4N, so that a large angle costs no digits.
      const uint64_t turns = (2 * uint64_t{t} + 1) * k % (4 * uint64_t{steps});
      out.basis_.push_back(std::sqrt((k == 0 ? 1.0 : 2.0) / n) *
                           std::cos(std::numbers::pi * static_cast<double>(turns) / (2 * n)));
    }
  }
  return out;
}

absl::StatusOr<std::vector<double>> FastTokens::Decode(std::span<const int32_t> ids,
                                                       FastPolicy policy) const {
  const bool strict = policy == FastPolicy::kStrict;
  const size_t size = size_t{steps_} * dim_;
  for (size_t i = 0; strict && i < ids.size(); ++i) {
    if (!tokenizer_->IdToToken(ids[i])) {
      return Invalid(StrCat("FAST token ", i, ": id ", ids[i], " has no token"));
    }
  }
  std::vector<int64_t> points = CodePoints(TextDecoder::Decode(*tokenizer_, ids));
  if (strict) {
    if (std::find(points.begin(), points.end(), kReplacement) != points.end()) {
      return Invalid("FAST tokens spell bytes that are no characters");
    }
    if (points.size() != size) {
      return Invalid(StrCat("FAST tokens hold ", points.size(), " coefficients, expected ", size));
    }
  }
  points.resize(size, -min_token_);  // zeros
  std::vector<double> actions(size);
  for (size_t t = 0; t < steps_; ++t) {
    for (size_t k = 0; k < steps_; ++k) {
      const double weight = basis_[t * steps_ + k] / scale_;
      for (size_t a = 0; a < dim_; ++a) {
        actions[t * dim_ + a] += weight * static_cast<double>(points[k * dim_ + a] + min_token_);
      }
    }
  }
  return actions;
}

}  // namespace saccade
