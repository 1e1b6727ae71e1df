#pragma once
// OpenVLA's action ids: the last ids of the tokenizer stand for bins of a normalised action.
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/model.h"

namespace saccade {

struct ActionBins {
  uint32_t vocab = 0;  // ids of the tokenizer: the last `ids` of these are actions
  uint32_t ids = 0;    // one more than there are bins: the two lowest share the last bin

  bool Has(int32_t id) const;
  // The centre of the id's bin; ids outside count as the nearest one.
  double Centre(int32_t id) const;
  // Centres, one per id. INTERNAL: an id that is no sample (kNonFinite), or, with kFail, outside of
  // the action range (kInvalidActionToken).
  absl::StatusOr<std::vector<double>> Decode(std::span<const int32_t> tokens,
                                             InvalidTokenPolicy policy) const;
};

}  // namespace saccade
