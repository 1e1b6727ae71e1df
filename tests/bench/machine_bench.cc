// What one core of this machine can do at most: multiplications in BF16 and F32, and reading
// memory. Bounds of the benches in Python are computed from these; times are CPU time of the
// thread. Last line: one JSON object.
#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/bench/machine.h"
#include "tests/bench/timing.h"

namespace saccade::bench {
namespace {

using cpu::Isa;

constexpr std::array<size_t, 5> kReadMib = {64, 128, 256, 512, 1024};
constexpr size_t kMib = size_t{1} << 20;
constexpr int kReads = 7;

// Of the two ways to read the first `bytes` of `data` again and again, the better one.
double ReadGbps(const std::byte* data, size_t bytes) {
  std::vector<double> seconds;
  for (int i = 0; i < kReads; ++i) {
    seconds.push_back(CpuSeconds([&] { ReadPlain(data, bytes); }));
    seconds.push_back(CpuSeconds([&] { ReadPrefetched(data, bytes); }));
  }
  return static_cast<double>(bytes) / Summary(seconds).best / 1e9;
}

int Run() {
  nlohmann::json out = {{"bench", "machine"}};
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmxBf16}) {
    if (!cpu::IsaSupported(isa)) continue;
    const Peaks peaks = MeasurePeaks(isa);
    std::printf("%-12s f32 %7.1f GFLOP/s, bf16 %7.1f GFLOP/s (%s)\n", cpu::IsaName(isa), peaks.f32,
                peaks.bf16, peaks.bf16_instruction);
    out["peaks"][cpu::IsaName(isa)] = {{"f32_gflops", peaks.f32}, {"bf16_gflops", peaks.bf16}};
    out["best"] = cpu::IsaName(isa);
  }
  if (const cpu::Kernels* kernels = cpu::FindKernels(Isa::kAuto)) {
    out["auto"] = cpu::IsaName(kernels->isa);
  }
  // What is read again fits into a large cache on some machines, so a rate belongs to a size.
  const size_t most = kReadMib.back() * kMib;
  void* memory = mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  madvise(memory, most, MADV_HUGEPAGE);
  const auto* data = static_cast<const std::byte*>(std::memset(memory, 1, most));
  for (const size_t mib : kReadMib) {
    const double gbps = ReadGbps(data, mib * kMib);
    std::printf("read %4zu MiB %9.1f GB/s\n", mib, gbps);
    out["read"].push_back({{"mib", mib}, {"gbps", gbps}});
  }
  munmap(memory, most);
  std::cout << out.dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace saccade::bench

int main() { return saccade::bench::Run(); }
