// Compiled with the flags of avx512.cc and -mavx512bf16.
#include "kernels/cpu/levels.h"
#include "kernels/cpu/simd/avx512.h"
// The shared source below is over the Simd above.
#include "kernels/cpu/impl/bf16_dot.h"
#include "kernels/cpu/impl/table.h"

namespace saccade::cpu {
namespace {
constexpr Kernels kTable = MakeTable<MulBf16>(Isa::kAvx512Bf16);
}  // namespace

const Kernels* Avx512Bf16Kernels() { return &kTable; }

}  // namespace saccade::cpu
