#pragma once
// The recorded inputs of a golden answer, sent through the serving path: preprocessing, prompt
// builder, engine, scheduler, cache and worker, as a request over the network would be.
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"
#include "model/checkpoint.h"
#include "recording_tap.h"

namespace saccade {

struct VerifyInput {
  Rgb8Image image;
  std::string instruction;
  std::vector<std::string> statistics_keys;  // one request each; the first one is tapped
  std::set<std::string, std::less<>> stages;
};

// What came out. Owns the engine: the tap's bytes are its backend's.
struct VerifyOutput {
  std::vector<int32_t> prompt_ids;            // text ids in order, vision left out
  std::map<std::string, ActionChunk> chunks;  // by statistics key
  std::vector<double> bin_centres;            // of action ids, from the highest id down
  std::unique_ptr<Engine> engine;
  std::shared_ptr<RecordingTap> tap;
};

absl::StatusOr<VerifyOutput> RunVerifyInput(const Checkpoint& checkpoint,
                                            const BackendConfig& backend, DType compute,
                                            const VerifyInput& input);

}  // namespace saccade
