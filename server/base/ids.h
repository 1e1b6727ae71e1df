#pragma once
// Strong ids: an index of one kind is not an index of another.
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace saccade {

template <class Tag, class Rep = int32_t>
class StrongId {
 public:
  using rep = Rep;
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}
  constexpr Rep value() const { return value_; }
  constexpr bool valid() const { return value_ != static_cast<Rep>(-1); }
  // clang-tidy 14 takes the comparison with 0 that the compiler writes here for a null pointer.
  // NOLINTNEXTLINE(modernize-use-nullptr)
  friend constexpr auto operator<=>(StrongId, StrongId) = default;

 private:
  Rep value_ = static_cast<Rep>(-1);
};

using SessionId = StrongId<struct SessionTag, uint64_t>;
using RequestId =
    StrongId<struct RequestTag, uint64_t>;  // unique in this process; not the client's own id
using StepId = StrongId<struct StepTag, uint64_t>;
using WorkerId = StrongId<struct WorkerTag>;
using ModelId = StrongId<struct ModelTag>;          // index into the configured models
using ClassId = StrongId<struct ClassTag>;          // index into the configured latency classes
using BlockId = StrongId<struct BlockTag>;          // physical block of one K/V pool
using EmbeddingId = StrongId<struct EmbeddingTag>;  // physical slot of one vision-embedding pool
using SequenceSlot =
    StrongId<struct SequenceSlotTag>;  // device row that holds a sequence's sampled tokens

}  // namespace saccade

template <class Tag, class Rep>
struct std::hash<saccade::StrongId<Tag, Rep>> {
  size_t operator()(saccade::StrongId<Tag, Rep> id) const noexcept {
    return std::hash<Rep>()(id.value());
  }
};
