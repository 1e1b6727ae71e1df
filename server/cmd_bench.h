#pragma once
// `saccade-server bench`: step times of one checkpoint on one backend, without engine, scheduler or
// network.
#include <cstdint>
#include <string>

#include "config/config.h"

namespace saccade {

struct BenchOptions {
  std::string model_dir;
  BackendConfig backend;
  ComputeType dtype = ComputeType::kF32;
  uint32_t repetitions = 20;
  std::string profile;  // file of step times to add these to (scheduler.cost_file); empty: none
};

// Prints one JSON object: per step shape the minimum and median milliseconds. Returns the exit
// code.
int RunBench(const BenchOptions& options);

}  // namespace saccade
