#pragma once
// The recorded inputs of a golden answer, sent through the serving path: preprocessing, prompt
// builder, engine, scheduler, cache and worker, as a request over the network would be.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"
#include "model/checkpoint.h"
#include "model/image_decode.h"
#include "recording_tap.h"

namespace saccade {

struct VerifyInput {
  ModelOptions options;
  // Empty: as LoadModel does. Else a variant of the model that no config asks for.
  std::function<absl::StatusOr<std::unique_ptr<Model>>(Backend& backend)> load;
  // By index and name of the model's cameras. NOT_FOUND: none is recorded, which only an optional
  // camera may do without.
  std::function<absl::StatusOr<Rgb8Image>(uint32_t camera, std::string_view name)> frame_of;
  std::string instruction;
  // Ids of the prompt's text in place of those of the instruction.
  std::optional<std::vector<int32_t>> text_ids;
  std::vector<float> state;  // in the robot's units; empty: none
  std::vector<float> noise;  // of a flow head, [horizon, width]
  // One request each; the first one is tapped. Empty: the model's only set, else an error.
  std::vector<std::string> statistics_keys;
  std::set<std::string, std::less<>> stages;
};

// What came out. Owns the engine: the tap's bytes are its backend's.
struct VerifyOutput {
  std::vector<int32_t> prompt_ids;            // text ids in order, nothing else
  std::shared_ptr<const Timeline> timeline;   // of the prompt
  std::vector<float> normalized_state;        // [state_width]
  std::map<std::string, ActionChunk> chunks;  // by statistics key
  std::string tapped_key;                     // of the tapped request
  // Of a model whose tokens are a value each: of its action ids, from the highest id down.
  std::vector<double> bin_centres;
  std::unique_ptr<Engine> engine;
  std::shared_ptr<RecordingTap> tap;

  const ActionChunk& tapped() const { return chunks.at(tapped_key); }
};

absl::StatusOr<VerifyOutput> RunVerifyInput(const Checkpoint& checkpoint,
                                            const BackendConfig& backend, const VerifyInput& input);

}  // namespace saccade
