#pragma once
// Bytes of pictures. A new buffer holds whatever its memory held: a picture is written before it is
// read, and clearing a megabyte first costs as much as a pass of the resize.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace saccade {

// std::allocator, but elements made without a value are left as they are.
template <class T>
struct UninitializedAllocator : std::allocator<T> {
  template <class U>
  struct rebind {  // NOLINT(readability-identifier-naming): the standard's name
    using other = UninitializedAllocator<U>;
  };
  template <class U>
  void construct(U* element) noexcept {
    ::new (static_cast<void*>(element)) U;
  }
  template <class U, class... Args>
  void construct(U* element, Args&&... args) {
    ::new (static_cast<void*>(element)) U(std::forward<Args>(args)...);
  }
};

using Pixels = std::vector<uint8_t, UninitializedAllocator<uint8_t>>;

}  // namespace saccade
