#pragma once
// What a checkpoint folder holds, needs and lacks, without loading its weights. For `inspect`.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/model.h"

namespace saccade {

// Sizes of one step that the workspace is told for.
struct DescribeLimits {
  uint32_t frames = 1;
  uint32_t rows = 1;
  uint32_t logit_rows = 1;
  uint32_t items = 1;  // of a denoise step
};

struct FolderDescription {
  std::string family;                 // empty: no known family
  std::vector<std::string> problems;  // why it cannot be served; empty: it can
  // Of the weights in the file, and of the folder's settings. Without `known_sizes`, reading the
  // settings failed and only the problems say anything.
  bool known_sizes = false;
  ModelSpec spec;  // but for fingerprint, compute and weight_bytes
  struct Tower {
    std::string name;
    uint32_t image_size, patch_size, width, heads, depth;
    uint32_t blocks;  // that run
  };
  std::vector<Tower> towers;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t intermediate = 0;
  uint32_t action_bins = 0;  // 0: its actions are no tokens
  std::string head;          // how actions come about, where that is not token by token
  std::string prompt_style;
  uint32_t prompt_text_tokens = 0;  // of a short instruction; 0: the tokenizer cannot be used
  struct Memory {
    DType compute = DType::kF32;
    size_t weights = 0;    // on a device, without padding
    size_t workspace = 0;  // of one step within the limits
    size_t parking = 0;    // of one pass that is cut into slices
    // Of a model with a flow head: the same of a denoise step.
    size_t denoise_workspace = 0;
    size_t denoise_parking = 0;
  };
  std::vector<Memory> memory;  // per compute dtype
  DescribeLimits limits;       // that the memory is for
};

// A folder that cannot be read at all is an error; everything else is in `problems`.
absl::StatusOr<FolderDescription> DescribeFolder(const std::string& dir,
                                                 const DescribeLimits& limits);
// The same of a folder that is loaded with `options`, and of steps whose size depends on the model.
absl::StatusOr<FolderDescription> DescribeFolder(
    const std::string& dir, const ModelOptions& options,
    const std::function<DescribeLimits(const ModelSpec&)>& limits_of);

}  // namespace saccade
