#include "model/safetensors.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/strings.h"
#include "model/json_util.h"

namespace saccade {

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  SafetensorsFile file;
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, file.Map(path, 8, "safetensors"));
  RETURN_IF_ERROR(file.ParseHeader(bytes));
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(std::span<const uint8_t> bytes,
                                                       std::string_view name) {
  SafetensorsFile file;
  file.path_ = std::string(name);
  RETURN_IF_ERROR(file.ParseHeader(bytes));
  return file;
}

absl::Status SafetensorsFile::ParseHeader(std::span<const uint8_t> bytes) {
  const auto error = [this](auto&&... parts) {
    return absl::InvalidArgumentError(StrCat(path_, ": ", parts...));
  };
  if (bytes.size() < 8) return error(bytes.size(), " bytes are too few for a safetensors file");
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < 8; ++i) header_bytes |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  if (header_bytes > kMaxHeaderBytes) {
    return error("header of ", header_bytes, " bytes, more than the limit of ", kMaxHeaderBytes);
  }
  if (header_bytes > bytes.size() - 8) {
    return error("header of ", header_bytes, " bytes in a file of ", bytes.size());
  }
  header_ = bytes.subspan(8, header_bytes);
  data_ = bytes.subspan(8 + header_bytes);

  // Root, tensor or metadata, array: three levels.
  const std::string_view text(reinterpret_cast<const char*>(header_.data()), header_.size());
  ASSIGN_OR_RETURN(const Json root,
                   ParseJson(text, path_, {.max_bytes = kMaxHeaderBytes, .max_depth = 3}));
  const JsonView view(root, path_);
  if (!root.is_object()) return view.Error("header: expected an object");

  std::vector<std::pair<const std::string*, const Entry*>> order;
  for (const auto& item : root.items()) {
    const std::string& name = item.key();
    ASSIGN_OR_RETURN(const JsonView member, view.Get(name));
    if (name == "__metadata__") {
      if (!member.json().is_object()) return member.Error("expected an object");
      for (const auto& pair : member.json().items()) {
        ASSIGN_OR_RETURN(metadata_[pair.key()], member.String(pair.key()));
      }
      continue;
    }
    Entry entry;
    ASSIGN_OR_RETURN(entry.dtype, member.String("dtype"));
    const StoredType* type = FindStoredType(entry.dtype);
    if (type == nullptr) return member.Error(StrCat("unknown dtype \"", entry.dtype, "\""));
    ASSIGN_OR_RETURN(const JsonView shape, member.Get("shape"));
    ASSIGN_OR_RETURN(entry.dims, shape.AsInts(0, std::numeric_limits<int64_t>::max()));
    ASSIGN_OR_RETURN(const JsonView offsets_view, member.Get("data_offsets"));
    ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                     offsets_view.AsInts(0, std::numeric_limits<int64_t>::max()));
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      return offsets_view.Error("expected [begin, end] with begin <= end");
    }
    const auto end = static_cast<size_t>(offsets[1]);
    if (end > data_.size()) {
      return member.Error(StrCat("ends at byte ", end, " of the data, the file holds ",
                                 data_.size(), " (truncated?)"));
    }
    entry.offset = static_cast<size_t>(offsets[0]);
    entry.bytes = end - entry.offset;
    if (DenseBytes(*type, entry.dims) != entry.bytes) {
      return member.Error(StrCat("shape [", absl::StrJoin(entry.dims, ", "), "] of ", entry.dtype,
                                 " does not take the ", entry.bytes, " bytes of its data_offsets"));
    }
    const auto [it, inserted] = entries_.emplace(name, std::move(entry));
    order.emplace_back(&it->first, &it->second);
  }

  // The data section must be tiled exactly: a byte that belongs to two tensors or to none means
  // that the header and the data do not belong together.
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->offset, a.second->bytes) <
           std::pair(b.second->offset, b.second->bytes);
  });
  size_t expected = 0;
  for (const auto& [name, entry] : order) {
    if (entry->offset != expected) {
      return error(*name, ": data begins at byte ", entry->offset, ", expected ", expected,
                   entry->offset < expected ? " (overlap)" : " (gap)");
    }
    expected += entry->bytes;
  }
  if (expected != data_.size()) {
    return error("the tensors take ", expected, " bytes of data, the file holds ", data_.size());
  }

  Realign();
  return absl::OkStatus();
}

}  // namespace saccade
