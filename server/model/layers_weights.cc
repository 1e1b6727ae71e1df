#include "model/layers_weights.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/strings.h"

namespace saccade {
namespace {

bool IsWeight(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16;
}

float WidenF16(uint16_t half) {
  const auto exponent = static_cast<uint32_t>(half >> 10) & 0x1fu;
  const auto mantissa = static_cast<uint32_t>(half) & 0x3ffu;
  const float sign = (half & 0x8000u) != 0 ? -1.0F : 1.0F;
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24F;
  const uint32_t biased = exponent == 0x1f ? 0xffu : exponent + 112;
  const uint32_t bits = (biased << 23) | (mantissa << 13);
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return sign * value;
}

float WidenBf16(uint16_t narrow) {
  const uint32_t bits = static_cast<uint32_t>(narrow) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void AppendAsF32(const TensorView& view, std::vector<float>& out) {
  const auto count = static_cast<size_t>(view.numel());
  const size_t begin = out.size();
  out.resize(begin + count);
  if (view.dtype == DType::kF32) {
    std::memcpy(out.data() + begin, view.data, count * sizeof(float));
    return;
  }
  const auto* from = view.As<const uint16_t>();
  for (size_t i = 0; i < count; ++i) {
    out[begin + i] = view.dtype == DType::kBf16 ? WidenBf16(from[i]) : WidenF16(from[i]);
  }
}

std::string Dims(std::span<const int64_t> dims) {
  return StrCat("[", absl::StrJoin(dims, ", "), "]");
}

}  // namespace

int64_t TensorSpec::numel() const {
  int64_t n = 1;
  for (const int64_t dim : dims) n *= dim;
  return n;
}

std::vector<std::string> CheckTensors(const TensorSource& checkpoint,
                                      std::span<const TensorSpec> specs) {
  std::vector<std::string> problems;
  for (const TensorSpec& spec : specs) {
    if (!checkpoint.Has(spec.name)) {
      problems.push_back(StrCat(spec.name, ": absent, expected ", Dims(spec.dims)));
      continue;
    }
    const absl::StatusOr<TensorView> tensor = checkpoint.Tensor(spec.name);
    if (!tensor.ok()) {
      problems.push_back(StrCat(spec.name, ": ", FromAbsl(tensor.status().message())));
      continue;
    }
    const std::span<const int64_t> dims(tensor->dims.data(), tensor->rank);
    if (!std::equal(dims.begin(), dims.end(), spec.dims.begin(), spec.dims.end())) {
      problems.push_back(
          StrCat(spec.name, ": has shape ", Dims(dims), ", expected ", Dims(spec.dims)));
    } else if (!IsWeight(tensor->dtype)) {
      problems.push_back(
          StrCat(spec.name, ": is ", DTypeName(tensor->dtype), ", expected f32, bf16 or f16"));
    }
  }
  return problems;
}

size_t TensorBytes(const TensorSource& checkpoint, std::span<const TensorSpec> specs,
                   DType compute) {
  size_t bytes = 0;
  for (const TensorSpec& spec : specs) {
    size_t size = sizeof(float);
    if (spec.use == TensorUse::kMatrix) size = DTypeSize(compute);
    if (spec.use == TensorUse::kTable) {
      const absl::StatusOr<TensorView> tensor = checkpoint.Tensor(spec.name);
      if (tensor.ok() && tensor->dtype == DType::kBf16) size = DTypeSize(DType::kBf16);
    }
    bytes += static_cast<size_t>(spec.numel()) * size;
  }
  return bytes;
}

absl::StatusOr<TensorView> WeightLoader::Matrix(const std::string& name,
                                                std::vector<std::vector<float>>& storage) const {
  ASSIGN_OR_RETURN(const TensorView view, checkpoint_.Tensor(name));
  if (view.rank == 0 || view.numel() == 0 || !IsWeight(view.dtype)) {
    return absl::InvalidArgumentError(
        StrCat(name, ": cannot be a weight matrix: ", view.DebugString()));
  }
  const int64_t rows = view.dim(0);
  const int64_t columns = view.numel() / rows;
  if (view.dtype != DType::kF16) return view.Reshape({rows, columns});
  storage.emplace_back();
  AppendAsF32(view, storage.back());
  return TensorView::Dense(storage.back().data(), DType::kF32, MemKind::kHost, {rows, columns});
}

LinearArgs LinearLayer::Args(const TensorView& x, const TensorView& y) const {
  LinearArgs args;
  args.weight = weight.get();
  args.x = x;
  args.y = y;
  if (bias != nullptr) args.bias = bias->View(DType::kF32, {weight->n()});
  return args;
}

absl::StatusOr<LinearLayer> WeightLoader::WithBias(std::span<const std::string> names,
                                                   std::optional<DType> dtype) {
  std::vector<std::string> weights;
  std::vector<std::string> biases;
  for (const std::string& name : names) {
    weights.push_back(StrCat(name, ".weight"));
    biases.push_back(StrCat(name, ".bias"));
  }
  LinearLayer layer;
  ASSIGN_OR_RETURN(layer.weight, Pack(weights, dtype.value_or(compute_)));
  ASSIGN_OR_RETURN(layer.bias, Values(biases, 0));
  return layer;
}

absl::StatusOr<std::unique_ptr<PackedWeight>> WeightLoader::Linear(
    std::initializer_list<std::string> names, std::optional<DType> dtype) {
  return Pack(std::vector<std::string>(names), dtype.value_or(compute_));
}

absl::StatusOr<std::unique_ptr<PackedWeight>> WeightLoader::Pack(std::span<const std::string> names,
                                                                 DType dtype) {
  std::vector<std::vector<float>> storage;
  std::vector<TensorView> parts;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const TensorView part, Matrix(name, storage));
    parts.push_back(part);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> weight, backend_.PackLinear(parts, dtype));
  device_bytes_ += weight->bytes();
  return weight;
}

absl::StatusOr<std::unique_ptr<PackedWeight>> WeightLoader::Gated(const std::string& gate,
                                                                  const std::string& up) {
  std::vector<std::vector<float>> storage;
  ASSIGN_OR_RETURN(const TensorView gate_view, Matrix(gate, storage));
  ASSIGN_OR_RETURN(const TensorView up_view, Matrix(up, storage));
  ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> weight,
                   backend_.PackGated(gate_view, up_view, compute_));
  device_bytes_ += weight->bytes();
  return weight;
}

absl::StatusOr<std::unique_ptr<Buffer>> WeightLoader::Vector(
    std::initializer_list<std::string> names, float offset) {
  return Values(std::vector<std::string>(names), offset);
}

absl::StatusOr<std::unique_ptr<Buffer>> WeightLoader::Values(std::span<const std::string> names,
                                                             float offset) {
  std::vector<float> values;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const TensorView view, checkpoint_.Tensor(name));
    if (!IsWeight(view.dtype)) {
      return absl::InvalidArgumentError(
          StrCat(name, ": is ", DTypeName(view.dtype), ", expected f32, bf16 or f16"));
    }
    AppendAsF32(view, values);
  }
  if (offset != 0) {
    for (float& value : values) value += offset;
  }
  return UploadValues(values);
}

absl::StatusOr<std::unique_ptr<Buffer>> WeightLoader::Rows(const std::string& name,
                                                           std::span<const uint32_t> rows) {
  std::vector<std::vector<float>> storage;
  ASSIGN_OR_RETURN(const TensorView view, Matrix(name, storage));
  std::vector<float> values;
  for (const uint32_t row : rows) {
    if (row >= view.dim(0)) {
      return absl::InvalidArgumentError(
          StrCat(name, ": is ", view.DebugString(), ", there is no row ", row));
    }
    AppendAsF32(view.Rows(row, row + 1), values);
  }
  return UploadValues(values);
}

absl::StatusOr<std::unique_ptr<Buffer>> WeightLoader::UploadValues(std::vector<float>& values) {
  const TensorView host = TensorView::Dense(values.data(), DType::kF32, MemKind::kHost,
                                            {static_cast<int64_t>(values.size())});
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, Upload(backend_, stream_, host, DType::kF32));
  device_bytes_ += buffer->size();
  return buffer;
}

absl::StatusOr<std::unique_ptr<Buffer>> WeightLoader::TableWithUnscaled(
    const std::string& name, std::span<const int32_t> ids, float scale) {
  ASSIGN_OR_RETURN(const TensorView view, checkpoint_.Tensor(name));
  std::vector<float> values;
  values.reserve(
      static_cast<size_t>(view.numel() + view.dim(1) * static_cast<int64_t>(ids.size())));
  AppendAsF32(view, values);
  const auto width = static_cast<size_t>(view.dim(1));
  for (const int32_t id : ids) {
    if (id < 0 || id >= view.dim(0)) {
      return absl::InvalidArgumentError(StrCat(name, ": has no row ", id));
    }
    for (size_t i = 0; i < width; ++i) {
      values.push_back(values[static_cast<size_t>(id) * width + i] / scale);
    }
  }
  return UploadValues(values);
}

absl::StatusOr<std::unique_ptr<Buffer>> WeightLoader::Table(const std::string& name, DType* dtype) {
  ASSIGN_OR_RETURN(const TensorView view, checkpoint_.Tensor(name));
  *dtype = view.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32;
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, Upload(backend_, stream_, view, *dtype));
  device_bytes_ += buffer->size();
  return buffer;
}

}  // namespace saccade
