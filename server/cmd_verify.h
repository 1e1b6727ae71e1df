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
// normalised actions within max(2e-6, 3e-6 * max|reference|). BF16: stages within 2e-2 *
// max|reference|; normalised actions within 3 times their recorded distance, or 3e-2 where none is
// recorded. Actions by the same, as much larger as they are.
//
// Policies of lerobot: the recorded noise is an input. Rows that the reference masks (padded text,
// frames of missing cameras) are none of the sequence: they are not compared, and the line says how
// many are; nor is pi0's suffix_out of the state, which nothing reads. image_special.* is of the
// same checkpoint with special tokens around frames, prefix.final_norm_out of a trunk that runs to
// its end; longest.* must be the same as without padding. A frame is the camera's of its name, or
// the first one's that has the words of its name (image.wrist_u8: left_wrist_0_rgb). An instruction
// that a request may not have, because it is too long or spells special tokens, is sent as the ids
// that the reference makes of it: the line "task" says so. F32: actions
// within 2e-6, state and pixels within 1e-6, relative where they are over 1. BF16: stages within
// 1e-2 * max|reference| (keys, values and final states of trunk and expert 2e-2, velocities and
// what is integrated 3e-2), actions within 3 times the recorded distance of bf16.actions, of which
// at most a quarter of the largest action counts; of FAST tokens, none of which are recorded in
// bf16, an id may differ where the recorded margin is below twice the logits' tolerance, and what
// follows it is left out. Behind the end of an answer there may be zeros. fastN.*: the ids of
// fastN.sequence, what they decode to, and what was encoded, within half a coefficient in each.
int RunVerify(const VerifyOptions& options);

}  // namespace saccade
