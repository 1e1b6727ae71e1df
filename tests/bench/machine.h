#pragma once
// What one core of this machine can do at most: the yardsticks of the benches.
#include <cstddef>

#include "kernels/cpu/api.h"

namespace saccade::bench {

// GFLOP/s of the widest multiplication of a level on one thread, best of several short runs; 0
// where the machine lacks it.
struct Peaks {
  double f32 = 0;   // FMA of the level's width
  double bf16 = 0;  // vdpbf16ps; tdpbf16ps at kAmxBf16; the F32 peak where BF16 is widened
  const char* bf16_instruction = "";
};
Peaks MeasurePeaks(cpu::Isa isa);

// Reads `bytes` at `data` front to back once, as fast as one thread can: a plain loop, and one that
// prefetches.
void ReadPlain(const void* data, size_t bytes);
void ReadPrefetched(const void* data, size_t bytes);

}  // namespace saccade::bench
