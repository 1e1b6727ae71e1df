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

// Runs the recorded image and instruction through the serving path and prints one line per recorded
// tensor: max |difference|, tolerance, verdict. The same for what golden.json repeats, where it
// does: generated_ids, and prompt, whose token ids are compared. 0: all of it was compared and is
// within its tolerance; 1: a miss, something that was not compared, or a file that cannot be used.
//
// F32 pass: stages within max(2e-5, 4e-6 * max|reference|), pixels 1.5e-5, ids exact, actions 1e-6.
// BF16 pass: with d = the largest distance of the recorded bf16 logits from the recorded f32 ones,
// logits within 3 d and stages within 3 d * max|stage| / max|logits|; actions within 3 times their
// own recorded distance (and 1e-6). An id may differ where its recorded logit margin is below d;
// what follows it then has another history and is left out, and the line says so. Without recorded
// bf16 logits there is no tolerance: the pass is left out, or fails when it is the only one.
int RunVerify(const VerifyOptions& options);

}  // namespace saccade
