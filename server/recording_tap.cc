#include "recording_tap.h"

#include <utility>

#include "base/strings.h"

namespace saccade {

absl::Status RecordingTap::Record(Stream& stream, std::string_view name, TensorView tensor) {
  if (tensor.dtype != DType::kF32 || tensor.rank != 2 || !tensor.dense()) {
    return absl::InvalidArgumentError(StrCat("tap ", name, ": ", tensor.DebugString()));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> host,
                   backend_.Allocate(tensor.bytes(), MemKind::kPinned));
  RETURN_IF_ERROR(stream.Copy(host->View(DType::kF32, {tensor.dim(0), tensor.dim(1)}), tensor));
  copies_[std::string(name)].push_back({tensor.dim(0), tensor.dim(1), std::move(host)});
  return absl::OkStatus();
}

absl::StatusOr<RecordingTap::Stage> RecordingTap::Rows(std::string_view name) const {
  const auto it = copies_.find(name);
  if (it == copies_.end()) return absl::NotFoundError(StrCat(name, ": not recorded"));
  Stage out;
  out.columns = it->second.front().columns;
  for (const Copy& copy : it->second) {
    if (copy.columns != out.columns) {
      return absl::InternalError(StrCat(name, ": recorded with different widths"));
    }
    const auto* values = reinterpret_cast<const float*>(copy.host->data());
    out.values.insert(out.values.end(), values, values + copy.rows * copy.columns);
    out.rows += copy.rows;
  }
  return out;
}

absl::StatusOr<RecordingTap::Stage> RecordingTap::FirstWithRows(std::string_view name,
                                                                int64_t rows) const {
  const auto it = copies_.find(name);
  if (it == copies_.end()) return absl::NotFoundError(StrCat(name, ": not recorded"));
  for (const Copy& copy : it->second) {
    if (copy.rows < rows) continue;
    const auto* values = reinterpret_cast<const float*>(copy.host->data());
    return Stage{rows, copy.columns, {values, values + rows * copy.columns}};
  }
  return absl::NotFoundError(StrCat(name, ": never had ", rows, " rows"));
}

}  // namespace saccade
