#pragma once
// `saccade-server verify`: a checkpoint's answers against recorded ones of the reference.
#include <string>

#include "config/config.h"

namespace saccade {

struct VerifyOptions {
  std::string model_dir;
  std::string golden_path;  // golden.safetensors or golden.json, with the other beside it
  BackendConfig backend;
  bool f32 = true;  // precisions to run; at least one
  bool bf16 = true;
};

// Runs the recorded frames, instruction and state through the serving path and prints one line per
// recorded tensor: max |difference|, tolerance, verdict. 0: all of it was compared and is within
// its tolerance; 1: a miss, something that was not compared, or a file that cannot be used. F32:
// stages within max(2e-5, 4e-6 * max|reference|), pixels 1.5e-5, ids exact.
//
// Models that answer in tokens. What golden.json repeats is compared too: generated_ids, and
// prompt, whose token ids are. F32: actions within 1e-6. BF16: with d = the largest distance of the
// recorded bf16 logits from the recorded f32 ones, logits within 3 d and stages within 3 d *
// max|stage| / max|logits|; actions within 3 times their own recorded distance (and 1e-6). An id
// may differ where its recorded logit margin is below d; what follows it then has another history
// and is left out, and the line says so. Without recorded bf16 logits there is no tolerance: the
// pass is left out, or fails when it is the only one.
//
// Models that answer in one pass: chunk, number of images and platform are the record's where it
// has them; actions.discrete_no_proprio is of the same checkpoint without its heads. F32:
// normalised actions within max(2e-6, 3e-6 * max|reference|). BF16: stages within 1e-2 *
// max|reference|; normalised actions within 3 times their recorded distance, or 2e-2 where none is
// recorded. Actions by the same, as much larger as they are.
int RunVerify(const VerifyOptions& options);

}  // namespace saccade
