// Compiled with -mavx2 -mfma -mf16c.
#include "kernels/cpu/simd/avx2.h"
#include "kernels/cpu/levels.h"
// The shared source below is over the Simd above.
#include "kernels/cpu/impl/table.h"

namespace saccade::cpu {
namespace {
constexpr Kernels kTable = MakeTable<MulWide>(Isa::kAvx2);
}  // namespace

const Kernels* Avx2Kernels() { return &kTable; }

}  // namespace saccade::cpu
