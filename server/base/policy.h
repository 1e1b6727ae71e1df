#pragma once
// Small enums that several rooms name: configuration, scheduler, cache and metrics.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace saccade {

// What becomes of work predicted to miss its deadline: refused; done and marked late; or made
// smaller where a request allows it, so that it is on time, else refused.
enum class OnLate : uint8_t { kReject, kRunLate, kDegrade };

// Whose constants an OpenVLA-OFT model was trained with; auto: of whoever the shapes fit.
enum class OftPlatform : uint8_t { kAuto, kLibero, kAloha, kBridge };
inline constexpr std::array<std::string_view, 4> kOftPlatformNames = {"auto", "libero", "aloha",
                                                                      "bridge"};

// Why a cached K/V block lost its content.
enum class EvictionReason : uint8_t {
  kOwnPartition,    // its own partition needed the block
  kOtherPartition,  // another partition did
  kFlush,           // the cache was emptied on request
};
inline constexpr size_t kEvictionReasons = 3;
inline constexpr std::array<std::string_view, kEvictionReasons> kEvictionReasonNames = {
    "own_partition", "other_partition", "flush"};

// Where the K/V of a prompt's row comes from.
enum class KvSource : uint8_t {
  kComputed,  // computed: it was not in the cache
  kReused,    // taken from the cache
  kEvicted,   // computed again: the cache had it and gave it, or what it depends on, up
};

// A run of the rows of one camera's frame.
struct KvRun {
  uint32_t camera = 0;
  KvSource source = KvSource::kComputed;
  uint32_t rows = 0;
};

}  // namespace saccade
