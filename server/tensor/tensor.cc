#include "tensor/tensor.h"

#include "absl/strings/str_join.h"
#include "base/strings.h"

namespace saccade {

size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBf16:
    case DType::kF16:
      return 2;
    case DType::kI64:
    case DType::kF64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kI64:
      return "i64";
    case DType::kI32:
      return "i32";
    case DType::kU8:
      return "u8";
    case DType::kF64:
      return "f64";
  }
  return "?";
}

TensorView TensorView::Dense(void* data, DType dtype, MemKind mem,
                             std::initializer_list<int64_t> dims) {
  assert(dims.size() <= kMaxRank);
  TensorView v;
  v.data = static_cast<std::byte*>(data);
  v.dtype = dtype;
  v.mem = mem;
  for (int64_t d : dims) v.dims[v.rank++] = d;
  int64_t stride = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    v.strides[static_cast<size_t>(i)] = stride;
    stride *= v.dims[static_cast<size_t>(i)];
  }
  return v;
}

int64_t TensorView::numel() const {
  int64_t n = 1;
  for (size_t i = 0; i < rank; ++i) n *= dims[i];
  return n;
}

bool TensorView::dense() const {
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const auto u = static_cast<size_t>(i);
    if (dims[u] != 1 && strides[u] != stride) return false;
    stride *= dims[u];
  }
  return true;
}

TensorView TensorView::Rows(int64_t begin, int64_t end) const {
  assert(rank >= 1 && begin >= 0 && begin <= end && end <= dims[0]);
  TensorView v = *this;
  v.data += static_cast<size_t>(begin * strides[0]) * DTypeSize(dtype);
  v.dims[0] = end - begin;
  return v;
}

TensorView TensorView::Columns(int64_t begin, int64_t end) const {
  assert(rank == 2 && begin >= 0 && begin <= end && end <= dims[1]);
  TensorView v = *this;
  v.data += static_cast<size_t>(begin) * DTypeSize(dtype);
  v.dims[1] = end - begin;
  return v;
}

TensorView TensorView::Reshape(std::initializer_list<int64_t> new_dims) const {
  TensorView v = Dense(data, dtype, mem, new_dims);
  assert(dense() && v.numel() == numel());
  return v;
}

std::string TensorView::DebugString() const {
  constexpr std::array<std::string_view, 3> kMemNames = {"host", "pinned", "device"};
  return StrCat(DTypeName(dtype), "[", absl::StrJoin(dims.begin(), dims.begin() + rank, ", "), "] ",
                kMemNames[static_cast<size_t>(mem)]);
}

}  // namespace saccade
