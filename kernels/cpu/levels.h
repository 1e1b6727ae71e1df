#pragma once
// The table of each level. Only isa.cc calls these, after it has seen that the machine has the
// level.
#include "kernels/cpu/api.h"

namespace saccade::cpu {

const Kernels* Avx2Kernels();
const Kernels* Avx512Kernels();
const Kernels* Avx512Bf16Kernels();
const Kernels* AmxBf16Kernels();

}  // namespace saccade::cpu
