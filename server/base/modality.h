#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace saccade {

// The partitions of the K/V cache. A block never mixes two.
enum class Modality : uint8_t { kVision, kText, kState, kAction };
inline constexpr size_t kModalities = 4;
inline constexpr std::array<std::string_view, kModalities> kModalityNames = {"vision", "text",
                                                                             "state", "action"};
inline constexpr std::string_view ModalityName(Modality m) {
  return kModalityNames[static_cast<size_t>(m)];
}

}  // namespace saccade
