#include "model/families/openvla_actions.h"

#include <algorithm>
#include <string>

#include "base/strings.h"

namespace saccade {
namespace {

absl::Status DecodeError(Reason reason, std::string_view message) {
  ErrorInfo info;
  info.reason = reason;
  return MakeError(absl::StatusCode::kInternal, message, info);
}

}  // namespace

bool ActionBins::Has(int32_t id) const {
  const auto end = static_cast<int32_t>(vocab);
  return id < end && id >= end - static_cast<int32_t>(ids);
}

double ActionBins::Centre(int32_t id) const {
  const int64_t centres = int64_t{ids} - 1;
  const double width = 2.0 / static_cast<double>(centres);
  // numpy.linspace(-1, 1, ids)[i]
  const auto edge = [&](int64_t i) {
    return i == centres ? 1.0 : static_cast<double>(i) * width - 1.0;
  };
  const int64_t bin = std::clamp<int64_t>(int64_t{vocab} - id - 1, 0, centres - 1);
  return (edge(bin) + edge(bin + 1)) / 2.0;
}

absl::StatusOr<std::vector<double>> ActionBins::Decode(std::span<const int32_t> tokens,
                                                       InvalidTokenPolicy policy) const {
  std::vector<double> centres;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == kInvalidSample) {
      return DecodeError(Reason::kNonFinite,
                         StrCat("action token ", i, ": the logits held NaN or Inf"));
    }
    if (policy == InvalidTokenPolicy::kFail && !Has(tokens[i])) {
      return DecodeError(Reason::kInvalidActionToken,
                         StrCat("action token ", i, ": id ", tokens[i],
                                " is outside the action range [", vocab - ids, ", ", vocab, ")"));
    }
    centres.push_back(Centre(tokens[i]));
  }
  return centres;
}

}  // namespace saccade
