// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl and the flags of AVX2.
#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/levels.h"
// The shared source below is over the Simd above.
#include "kernels/cpu/impl/table.h"

namespace saccade::cpu {
namespace {
constexpr Kernels kTable = MakeTable<MulWide>(Isa::kAvx512);
}  // namespace

const Kernels* Avx512Kernels() { return &kTable; }

}  // namespace saccade::cpu
