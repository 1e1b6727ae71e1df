// What the machine and the operating system offer. Sources: Intel SDM vol. 1 chapters 13 (XSAVE)
// and 18 (AMX), Linux Documentation/arch/x86/xstate.rst.
#include <cstdint>
#include <initializer_list>

#include "kernels/cpu/api.h"
#include "kernels/cpu/levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace saccade::cpu {

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAuto:
      return "auto";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAmxBf16:
      return "amx_bf16";
  }
  return "?";
}

#if defined(__x86_64__)
namespace {

struct Features {
  // vdpbf16ps has half the rate of F32 products on Intel's cores (uops.info; 118 against 240
  // GFLOP/s on Granite Rapids) and the double on AMD's since Zen 4.
  bool slow_bf16_dot = false;
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
};

uint64_t EnabledState() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// The kernel gives a process the tile registers on request; the grant holds for all its threads.
bool RequestTiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Features Detect() {
  Features f;
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return f;
  f.slow_bf16_dot =
      b == signature_INTEL_ebx && d == signature_INTEL_edx && c == signature_INTEL_ecx;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return f;
  const auto bit = [](uint32_t word, int i) { return ((word >> i) & 1u) != 0; };
  const bool fma = bit(c, 12);
  const bool f16c = bit(c, 29);
  if (!bit(c, 27) || !bit(c, 28)) return f;  // OSXSAVE, AVX
  const uint64_t state = EnabledState();
  constexpr uint64_t kYmm = 0x6;
  constexpr uint64_t kZmm = 0xe6;
  constexpr uint64_t kTiles = 0x60000;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return f;
  f.avx2 = (state & kYmm) == kYmm && fma && f16c && bit(b, 5);
  const bool f_dq_bw_vl = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
  f.avx512 = f.avx2 && (state & kZmm) == kZmm && f_dq_bw_vl;
  const bool amx = bit(d, 22) && bit(d, 24);  // AMX-BF16, AMX-TILE
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return f;
  f.avx512_bf16 = f.avx512 && bit(a, 5);
  f.amx_bf16 = f.avx512_bf16 && amx && (state & kTiles) == kTiles && RequestTiles();
  return f;
}

}  // namespace

const Kernels* FindKernels(Isa isa) {
  static const Features features = Detect();
  switch (isa) {
    case Isa::kAuto:
      for (const Isa best : {Isa::kAmxBf16, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2}) {
        if (best == Isa::kAvx512Bf16 && features.slow_bf16_dot) continue;
        if (const Kernels* kernels = FindKernels(best)) return kernels;
      }
      return nullptr;
    case Isa::kAvx2:
      return features.avx2 ? Avx2Kernels() : nullptr;
    case Isa::kAvx512:
      return features.avx512 ? Avx512Kernels() : nullptr;
    case Isa::kAvx512Bf16:
      return features.avx512_bf16 ? Avx512Bf16Kernels() : nullptr;
    case Isa::kAmxBf16:
      return features.amx_bf16 ? AmxBf16Kernels() : nullptr;
  }
  return nullptr;
}

#else

const Kernels* FindKernels(Isa) { return nullptr; }

#endif

bool IsaSupported(Isa isa) { return FindKernels(isa) != nullptr; }

}  // namespace saccade::cpu
