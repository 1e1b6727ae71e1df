#include <cstring>

#include "kernels/common/bf16.h"
#include "kernels/cpu/api.h"

namespace saccade::cpu {
namespace {

int64_t PaddedK(const PanelLayout& layout, int64_t k) {
  return (k + layout.k_multiple - 1) / layout.k_multiple * layout.k_multiple;
}

float ElementF32(const WeightColumn& column, int64_t i) {
  return column.type == Type::kF32 ? static_cast<const float*>(column.data)[i]
                                   : Bf16ToF32(static_cast<const uint16_t*>(column.data)[i]);
}

uint16_t ElementBf16(const WeightColumn& column, int64_t i) {
  return column.type == Type::kBf16 ? static_cast<const uint16_t*>(column.data)[i]
                                    : F32ToBf16(static_cast<const float*>(column.data)[i]);
}

}  // namespace

size_t PanelBytes(const PanelLayout& layout, Type type, int64_t k) {
  return static_cast<size_t>(layout.panel * PaddedK(layout, k)) * (type == Type::kF32 ? 4 : 2);
}

void PackPanel(const PanelLayout& layout, Type type, const WeightColumn* columns, int64_t k,
               void* out) {
  std::memset(out, 0, PanelBytes(layout, type, k));
  // Blocks of k, so that the panel's lines stay in cache while the columns, far apart, are read in
  // runs.
  constexpr int64_t kRun = 64;
  for (int64_t k0 = 0; k0 < k; k0 += kRun) {
    const int64_t end = k - k0 < kRun ? k : k0 + kRun;
    for (int64_t j = 0; j < layout.panel; ++j) {
      const WeightColumn& column = columns[j];
      if (column.data == nullptr) continue;
      if (layout.k_multiple == 1) {
        auto* to = static_cast<float*>(out) + j;
        for (int64_t i = k0; i < end; ++i) to[i * layout.panel] = ElementF32(column, i);
      } else {
        auto* to = static_cast<uint16_t*>(out) + 2 * j;
        for (int64_t i = k0; i < end; ++i) {
          to[i / 2 * 2 * layout.panel + i % 2] = ElementBf16(column, i);
        }
      }
    }
  }
}

}  // namespace saccade::cpu
