#include <algorithm>
#include <array>
#include <cstring>

#include "base/strings.h"
#include "kernels/common/bf16.h"
#include "tensor/backend.h"

namespace saccade {
namespace {

constexpr size_t kStagingBytes = size_t{16} << 20;  // bounds the pinned memory a load needs

// IEEE binary16 to binary32; exact.
float F16ToF32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  uint32_t bits = 0;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
T LoadUnaligned(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

float LoadAsF32(const std::byte* from, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return LoadUnaligned<float>(from);
    case DType::kBf16:
      return Bf16ToF32(LoadUnaligned<uint16_t>(from));
    case DType::kF16:
      return F16ToF32(LoadUnaligned<uint16_t>(from));
    case DType::kF64:
      return static_cast<float>(LoadUnaligned<double>(from));
    default:
      return 0;
  }
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16 ||
         dtype == DType::kF64;
}

// `count` elements of a contiguous row.
void ConvertRow(const std::byte* from, DType from_type, std::byte* to, DType to_type,
                int64_t count) {
  const size_t from_size = DTypeSize(from_type);
  const size_t to_size = DTypeSize(to_type);
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(count) * from_size);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float value = LoadAsF32(from, from_type);
    if (to_type == DType::kF32) {
      std::memcpy(to, &value, sizeof(value));
    } else {
      const uint16_t narrow = F32ToBf16(value);
      std::memcpy(to, &narrow, sizeof(narrow));
    }
    from += from_size;
    to += to_size;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Buffer>> Upload(Backend& backend, Stream& stream, TensorView host,
                                               DType dtype) {
  if (host.mem == MemKind::kDevice)
    return absl::InvalidArgumentError("upload: the source is device memory");
  const bool convertible = host.dtype == dtype ||
                           (IsFloat(host.dtype) && (dtype == DType::kF32 || dtype == DType::kBf16));
  if (!convertible) {
    return absl::InvalidArgumentError(
        StrCat("upload: cannot convert ", DTypeName(host.dtype), " to ", DTypeName(dtype)));
  }
  const int64_t count = host.numel();
  if (host.rank == 0 || count <= 0) {
    return absl::InvalidArgumentError(StrCat("upload: empty tensor ", host.DebugString()));
  }
  if (host.strides[host.rank - 1u] != 1)
    return absl::InvalidArgumentError("upload: the last stride must be 1");

  const size_t total = static_cast<size_t>(count) * DTypeSize(dtype);
  const size_t staging_bytes = std::min(total, kStagingBytes);
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> device, backend.Allocate(total, MemKind::kDevice));
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> staging,
                   backend.Allocate(staging_bytes, MemKind::kPinned));

  const int64_t width = host.dims[host.rank - 1u];
  const auto capacity = static_cast<int64_t>(staging_bytes / DTypeSize(dtype));
  std::array<int64_t, TensorView::kMaxRank>
      index{};  // of the current row; the last entry counts columns
  int64_t done = 0;
  while (done < count) {
    int64_t filled = 0;
    while (filled < capacity && done + filled < count) {
      int64_t offset = index[host.rank - 1u];
      const int64_t take = std::min(width - offset, capacity - filled);
      for (size_t d = 0; d + 1 < host.rank; ++d) offset += index[d] * host.strides[d];
      ConvertRow(host.data + static_cast<size_t>(offset) * DTypeSize(host.dtype), host.dtype,
                 staging->data() + static_cast<size_t>(filled) * DTypeSize(dtype), dtype, take);
      filled += take;
      index[host.rank - 1u] += take;
      for (size_t d = host.rank - 1u; d > 0 && index[d] == host.dims[d]; --d) {
        index[d] = 0;
        ++index[d - 1];
      }
    }
    RETURN_IF_ERROR(
        stream.Copy(device->View(dtype, {filled}, static_cast<size_t>(done) * DTypeSize(dtype)),
                    staging->View(dtype, {filled})));
    RETURN_IF_ERROR(stream.Synchronize());
    done += filled;
  }
  return device;
}

}  // namespace saccade
