#pragma once
// TensorView: shape, strides and where the bytes are. It owns nothing. A view of device memory may
// be made and sliced anywhere, but `data` may be dereferenced only by the backend that owns the
// memory.
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace saccade {

enum class DType : uint8_t { kF32, kBf16, kF16, kI64, kI32, kU8, kF64 };
size_t DTypeSize(DType dtype);
std::string_view DTypeName(DType dtype);  // "f32", "bf16", ...

enum class MemKind : uint8_t {
  kHost,    // ordinary memory, the host's alone
  kPinned,  // host memory a device copy may read or write asynchronously
  kDevice,  // only ops and copies of the owning backend may touch it
};

struct TensorView {
  static constexpr size_t kMaxRank = 4;
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  MemKind mem = MemKind::kHost;
  uint8_t rank = 0;
  std::array<int64_t, kMaxRank> dims{};
  std::array<int64_t, kMaxRank> strides{};  // in elements; the last is always 1

  static TensorView Dense(void* data, DType dtype, MemKind mem,
                          std::initializer_list<int64_t> dims);

  int64_t dim(int i) const { return dims[static_cast<size_t>(i)]; }
  int64_t numel() const;
  size_t bytes() const {
    return static_cast<size_t>(numel()) * DTypeSize(dtype);
  }  // of a dense view
  bool dense() const;
  // Rows [begin, end) of the first dimension.
  TensorView Rows(int64_t begin, int64_t end) const;
  // Columns [begin, end) of a rank-2 view.
  TensorView Columns(int64_t begin, int64_t end) const;
  // Same bytes, other shape; needs dense().
  TensorView Reshape(std::initializer_list<int64_t> new_dims) const;
  std::string DebugString() const;  // "bf16[316, 960] device"

  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(data);
  }
};

}  // namespace saccade
