// Compiled with the flags of avx512_bf16.cc, -mamx-tile and -mamx-bf16.
#include "kernels/cpu/levels.h"
#include "kernels/cpu/simd/avx512.h"
// The shared source below is over the Simd above.
#include "kernels/cpu/impl/bf16_dot.h"
// And over the policy above.
#include "kernels/cpu/impl/amx.h"

namespace saccade::cpu {
namespace {
constexpr Kernels kTable = MakeAmxTable();
}  // namespace

const Kernels* AmxBf16Kernels() { return &kTable; }

}  // namespace saccade::cpu
