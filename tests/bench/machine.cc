#include "tests/bench/machine.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/bench/timing.h"

namespace saccade::bench {
namespace {

#define SACCADE_CLOBBERS                                                                   \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory"
#define SACCADE_ZERO(i) "vpxor %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n"
#define SACCADE_TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define SACCADE_FMA_YMM(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
#define SACCADE_FMA_ZMM(i) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" #i "\n"
#define SACCADE_DOT_ZMM(i) "vdpbf16ps %%zmm14, %%zmm15, %%zmm" #i "\n"

// Twelve independent chains of zeros, `rounds` long.
#define SACCADE_CHAINS(NAME, OP)                                               \
  void NAME(int64_t rounds) {                                                  \
    __asm__ volatile(SACCADE_TWELVE(SACCADE_ZERO) SACCADE_ZERO(14)             \
                         SACCADE_ZERO(15) "1:\n" SACCADE_TWELVE(OP)            \
                             SACCADE_TWELVE(OP) "dec %0\njnz 1b\nvzeroupper\n" \
                     : "+r"(rounds)::"cc", SACCADE_CLOBBERS);                  \
  }
SACCADE_CHAINS(FmaYmm, SACCADE_FMA_YMM)
SACCADE_CHAINS(FmaZmm, SACCADE_FMA_ZMM)
SACCADE_CHAINS(DotZmm, SACCADE_DOT_ZMM)

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> row_bytes{64, 64, 64, 64, 64, 64, 64, 64};
  std::array<uint8_t, 16> rows{16, 16, 16, 16, 16, 16, 16, 16};
};

void DotTiles(int64_t rounds) {
  const TileConfig config;
  __asm__ volatile(
      "ldtilecfg %1\ntilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3\n"
      "tilezero %%tmm4\ntilezero %%tmm5\ntilezero %%tmm6\ntilezero %%tmm7\n1:\n"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\ntdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\ntdpbf16ps %%tmm7, %%tmm5, %%tmm3\n"
      "dec %0\njnz 1b\ntilerelease\n"
      : "+r"(rounds)
      : "m"(config)
      : "cc", "memory");
}

double BestRate(double flop_per_round, int64_t rounds, const std::function<void(int64_t)>& run) {
  double best = 0;
  for (int i = 0; i < 7; ++i) {
    const double seconds = CpuSeconds([&] { run(rounds); });
    best = std::max(best, flop_per_round * static_cast<double>(rounds) / seconds / 1e9);
  }
  return best;
}

}  // namespace

Peaks MeasurePeaks(cpu::Isa isa) {
  Peaks peaks;
  if (!cpu::IsaSupported(isa)) return peaks;
  constexpr int64_t kRounds = 400000;
  constexpr double kOps = 24;
  if (isa == cpu::Isa::kAvx2) {
    peaks.f32 = peaks.bf16 = BestRate(kOps * 16, kRounds, FmaYmm);
    peaks.bf16_instruction = "vfmadd231ps ymm";
    return peaks;
  }
  peaks.f32 = peaks.bf16 = BestRate(kOps * 32, kRounds, FmaZmm);
  peaks.bf16_instruction = "vfmadd231ps zmm";
  if (isa == cpu::Isa::kAvx512Bf16) {
    peaks.bf16 = BestRate(kOps * 64, kRounds, DotZmm);
    peaks.bf16_instruction = "vdpbf16ps zmm";
  } else if (isa == cpu::Isa::kAmxBf16) {
    peaks.bf16 = BestRate(4.0 * 16 * 16 * 32 * 2, kRounds, DotTiles);
    peaks.bf16_instruction = "tdpbf16ps";
  }
  return peaks;
}

void ReadPlain(const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  const char* end = p + bytes / 256 * 256;
  __asm__ volatile(
      "1:\nvmovups (%0), %%ymm0\nvmovups 32(%0), %%ymm1\nvmovups 64(%0), %%ymm2\nvmovups 96(%0), "
      "%%ymm3\n"
      "vmovups 128(%0), %%ymm4\nvmovups 160(%0), %%ymm5\nvmovups 192(%0), %%ymm6\nvmovups 224(%0), "
      "%%ymm7\n"
      "add $256, %0\ncmp %1, %0\njb 1b\nvzeroupper\n"
      : "+r"(p)
      : "r"(end)
      : "cc", SACCADE_CLOBBERS);
}

void ReadPrefetched(const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  const char* end = p + bytes / 256 * 256;
  __asm__ volatile(
      "1:\nprefetcht0 2048(%0)\nprefetcht0 2112(%0)\nprefetcht0 2176(%0)\nprefetcht0 2240(%0)\n"
      "vmovups (%0), %%ymm0\nvmovups 32(%0), %%ymm1\nvmovups 64(%0), %%ymm2\nvmovups 96(%0), "
      "%%ymm3\n"
      "vmovups 128(%0), %%ymm4\nvmovups 160(%0), %%ymm5\nvmovups 192(%0), %%ymm6\nvmovups 224(%0), "
      "%%ymm7\n"
      "add $256, %0\ncmp %1, %0\njb 1b\nvzeroupper\n"
      : "+r"(p)
      : "r"(end)
      : "cc", SACCADE_CLOBBERS);
}

}  // namespace saccade::bench
