#pragma once
// The list of backends that the op tests run on: the reference, the reference with guarded memory,
// and the CPU backend at every instruction level this machine has.
#include <cctype>
#include <chrono>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "kernels/cpu/api.h"
#include "tests/kernels/op_harness.h"

namespace saccade::optest {

inline std::vector<BackendFactory> BackendsUnderTest() {
  std::vector<BackendFactory> list;
  list.push_back({"ref", [](int) { return MakeRefBackend(RefOptions{}); }});
  list.push_back({"ref_guarded", [](int) {
                    RefOptions options;
                    options.guarded = true;
                    options.max_delay = std::chrono::microseconds(20);
                    return MakeRefBackend(options);
                  }});
  for (cpu::Isa isa :
       {cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Bf16, cpu::Isa::kAmxBf16}) {
    if (!cpu::IsaSupported(isa)) continue;
    list.push_back({std::string("cpu_") + cpu::IsaName(isa), [isa](int threads) {
                      CpuOptions options;
                      options.threads = threads;
                      options.isa = isa;
                      return MakeCpuBackend(options);
                    }});
  }
  return list;
}

struct FactoryName {
  template <class Info>
  std::string operator()(const Info& info) const {
    std::string name = info.param.name;
    for (char& c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
    }
    return name;
  }
};

}  // namespace saccade::optest

// Runs the tests of a fixture derived from testing::TestWithParam<BackendFactory> on every backend.
#define INSTANTIATE_FOR_ALL_BACKENDS(fixture)                                         \
  INSTANTIATE_TEST_SUITE_P(Backends, fixture,                                         \
                           testing::ValuesIn(::saccade::optest::BackendsUnderTest()), \
                           ::saccade::optest::FactoryName())
