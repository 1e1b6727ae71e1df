#pragma once
// Arithmetic and scoping of arena scratch, so that a layer's workspace bound is the sum it
// allocates.
#include <cstddef>
#include <cstdint>

#include "tensor/arena.h"

namespace saccade {

// Gives everything allocated in its life back to the arena, for reuse in stream order.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.Mark()) {}
  ~ArenaScope() { arena_.Release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

// Upper bound of what one [rows, columns] allocation takes in an arena, alignment included.
inline size_t ArenaBytes(uint64_t rows, uint64_t columns, DType dtype) {
  constexpr size_t kAlignment = 64;
  return static_cast<size_t>(rows * columns) * DTypeSize(dtype) + kAlignment;
}

}  // namespace saccade
