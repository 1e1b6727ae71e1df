#pragma once
// `saccade-server inspect`: what a checkpoint folder holds, needs and lacks.
#include <string>

namespace saccade {

struct InspectOptions {
  std::string model_dir;
  bool json = false;  // one JSON object instead of the table
};

// 0: the folder can be served; 1: it cannot, and the output says why.
int RunInspect(const InspectOptions& options);

}  // namespace saccade
