#pragma once
// A Llama trunk with random weights behind the Model interface: any shape, text prompts only, as
// many action tokens as a statistics key says. The trunk is the serving path's own, and may be cut
// into slices of layers as a family's.
#include <cstdint>
#include <memory>
#include <vector>

#include "model/layers_decoder.h"
#include "model/model.h"

namespace saccade::bench {

struct RandomLlamaOptions {
  DecoderSpec trunk;                       // names are set by MakeRandomLlama
  std::vector<StatisticsSpec> statistics;  // action_dim: tokens to decode
  uint32_t max_positions = 1024;
};

// BF16. Writes its weights to a temporary folder, as the loader reads files only, and removes it.
absl::StatusOr<std::unique_ptr<Model>> MakeRandomLlama(Backend& backend,
                                                       const RandomLlamaOptions& options);

}  // namespace saccade::bench
